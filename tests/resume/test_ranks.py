"""Positions that another rank, or another number of ranks, has saved, and workers after that."""

from tests.resume.runs import LENGTHS, loader, resume, train

EPOCHS = dict(type="TrainLoop", max_epochs=3)


def test_a_rank_with_a_sample_less_than_rank_0_goes_on_after_the_end_of_an_epoch(tmp_path):
    """Rank 0 of 2 draws 11 of 21 samples, rank 1 draws 10; both make 3 batches of them."""

    def of_rank(rank):
        data = loader(lengths=LENGTHS[:21])
        data["sampler"] = dict(data["sampler"], dp_rank=rank, dp_world_size=2)
        return data

    train(tmp_path / "cut", EPOCHS, of_rank(0), stop_after=4)  # writes the checkpoint
    whole = train(tmp_path / "whole", EPOCHS, of_rank(1))
    for at in (3, 2):  # resumed ranks write their own
        rest, _ = resume(tmp_path / "cut", at, EPOCHS, of_rank(1))
        assert rest.batches == whole[0].batches[at:]


def test_persistent_workers_go_on_to_the_next_epoch_where_the_rest_of_one_was_shorter(tmp_path):
    """After 2 of the 3 steps of 2 ranks, one rank has 2 steps to do of the 6 of an epoch."""
    data = loader("LengthGroupedSampler")
    data["sampler"] = dict(data["sampler"], dp_rank=0, dp_world_size=2)
    train(tmp_path, EPOCHS, data, stop_after=3)
    runs = [
        resume(tmp_path, 2, EPOCHS, loader(num_workers=2, persistent_workers=keep), interval=1000)[
            0
        ]
        for keep in (False, True)
    ]
    assert len(runs[0].batches) == 2 + 6 + 6
    assert runs[0].batches == runs[1].batches
    assert runs[0].tokens == runs[1].tokens, "other augmentation"


def test_ranks_that_share_their_samples_augment_them_alike(tmp_path, monkeypatch):
    """Of one sequence-parallel group; workers are seeded by the sampler's rank."""
    data = loader("TokenBudget", num_workers=1)
    data["sampler"] = dict(data["sampler"], dp_rank=0, dp_world_size=1)
    tokens = []
    for rank in (0, 1):
        monkeypatch.setattr("xlength.loops.get_rank", lambda rank=rank: rank)
        tokens.append(train(tmp_path / str(rank), EPOCHS, data)[0].tokens)
    assert tokens[0] == tokens[1]
