"""Runs that are cut off and resumed end like undisturbed ones, bit for bit: samples, augmentation,
dropout, learning rates and weights."""

import pytest
from mmengine.runner import Runner

import tests.tiny as tiny
from tests.resume.runs import (
    LENGTHS,
    assert_same_end,
    loader,
    log_of,
    resume,
    stream,
    train,
    weights,
)

ITERS = dict(type="TrainLoop", max_iters=15)
LONG = pytest.mark.long
SAMPLERS = ["LengthGroupedSampler", "TokenBudget", "DefaultSampler"]
EPOCHS = dict(type="TrainLoop", max_epochs=3)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=LONG)])
def test_a_resumed_run_ends_like_an_undisturbed_one(sampler, workers, tmp_path):
    """From the middle of epoch 0, its end, and the middle of epoch 1."""
    data = loader(sampler, num_workers=workers)
    whole = train(tmp_path, ITERS, data)
    for stop in (4, 6, 9):
        assert_same_end(resume(tmp_path, stop, ITERS, data), whole, stop)


def test_without_the_hook_the_same_comparison_fails(tmp_path):
    """So the comparison sees augmentation and dropout."""
    whole = train(tmp_path, ITERS, state=None)
    rest = resume(tmp_path, 9, ITERS, state=None)
    assert rest[0].batches == whole[0].batches[9:]
    assert rest[0].tokens != whole[0].tokens[9:]


def test_weights_that_are_loaded_only_begin_a_new_run(tmp_path):
    train(tmp_path / "first", ITERS)
    weights_of = str(tmp_path / "first/iter_8.pth")
    trained, _ = train(tmp_path / "first", ITERS, load_from=weights_of)
    assert trained.epochs[0] == (0, 0) and len(trained.batches) == 15


def test_a_flexible_runner_resumes_exactly(tmp_path):
    """It reads the checkpoint before its hooks run."""
    options = dict(
        strategy=dict(type="SingleDeviceStrategy"),
        env_cfg=dict(dist_cfg=dict(backend="gloo")),
    )
    whole = train(tmp_path, ITERS, accumulate=2, **options)
    assert_same_end(resume(tmp_path, 9, ITERS, accumulate=2, **options), whole, 8)


@LONG
def test_workers_augment_differently_in_every_epoch_and_the_same_for_any_number_of_them(tmp_path):
    runs = [
        train(tmp_path / str(n), EPOCHS, loader(num_workers=n, persistent_workers=keep))[0]
        for n, keep in [(1, False), (2, False), (2, True)]
    ]
    assert runs[0].tokens == runs[1].tokens == runs[2].tokens
    of_epochs = [
        dict(
            zip(
                map(tuple, map(sorted, runs[0].batches[i : i + 6])),
                runs[0].tokens[i:],
                strict=False,
            )
        )
        for i in (0, 6, 12)
    ]
    assert sum(of_epochs[0].values()) != sum(of_epochs[1].values()) != sum(of_epochs[2].values())


def test_persistent_workers_resume_exactly(tmp_path):
    data = loader(num_workers=2, persistent_workers=True)
    whole = train(tmp_path, EPOCHS, data)
    assert_same_end(resume(tmp_path, 8, EPOCHS, data), whole, 8)


@pytest.mark.parametrize("sampler", ["LengthGroupedSampler", "DefaultSampler"])
def test_micro_steps_of_an_optimiser_step_that_was_not_finished_are_done_again(sampler, tmp_path):
    """Accumulation over 4 micro-steps in epochs of 6: also across the end of an epoch."""
    whole = train(tmp_path, EPOCHS, loader(sampler), accumulate=4)
    for stop, done in [(4, 4), (5, 4), (7, 4), (11, 8)]:
        rest = resume(tmp_path, stop, EPOCHS, loader(sampler), accumulate=4)
        assert_same_end(rest, whole, done)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_checkpoint_by_epochs_is_continued_exactly(accumulate, tmp_path):
    options = dict(accumulate=accumulate, by_epoch=True)
    whole = train(tmp_path, EPOCHS, **options)
    rest = resume(tmp_path, "epoch_2", EPOCHS, **options)
    assert_same_end(rest, whole, 12)
    rest = resume(tmp_path, "epoch_1", EPOCHS, **options)
    assert_same_end(rest, whole, 6 if accumulate == 1 else 4)


def test_hard_input_26_a_kill_in_epoch_1_continues_in_its_order_and_epoch_2_is_whole(tmp_path):
    lengths = [3 + (7 * i) % 23 for i in range(500)]
    data = loader(lengths=lengths, dataset="TinyText")
    cfg = dict(type="TrainLoop", max_iters=260)
    options = dict(interval=20)
    whole = train(tmp_path, cfg, data, **options)
    rest = resume(tmp_path, 200, cfg, data, **options)
    assert rest[0].epochs == [(1, 200), (2, 250)]
    assert_same_end(rest, whole, 200)


@pytest.mark.parametrize("sampler", ["LengthGroupedSampler", "DefaultSampler"])
def test_hard_input_27_resuming_twice_continues_where_the_second_run_stopped(sampler, tmp_path):
    cfg, data = dict(type="TrainLoop", max_iters=50), loader(sampler)
    whole = train(tmp_path / "whole", cfg, data, interval=50)
    train(tmp_path / "cut", cfg, data, stop_after=31, interval=10)
    resume(tmp_path / "cut", 30, cfg, data, stop_after=41, interval=10)
    rest = resume(tmp_path / "cut", 40, cfg, data, interval=10)
    assert_same_end(rest, whole, 40)


@pytest.mark.parametrize("sampler", ["LengthGroupedSampler", "TokenBudget", "DefaultSampler"])
def test_hard_input_28_after_the_exact_end_of_an_epoch_the_next_is_whole(sampler, tmp_path):
    data = loader(sampler)
    whole = train(tmp_path, EPOCHS, data)
    length = len(whole[1].train_dataloader)
    rest = resume(tmp_path, 2 * length, EPOCHS, data)
    assert_same_end(rest, whole, 2 * length)
    assert len(rest[0].batches) == length


@pytest.mark.parametrize("sampler", ["LengthGroupedSampler", "DefaultSampler"])
@pytest.mark.parametrize("loop", ["TrainLoop", "IterBasedTrainLoop"])
def test_hard_input_29_a_seed_that_was_drawn_is_that_of_the_resumed_run(
    sampler, loop, tmp_path, monkeypatch
):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    cfg, data = dict(type=loop, max_iters=15), loader(sampler)
    whole = train(tmp_path, cfg, data, seed=None)
    assert_same_end(resume(tmp_path, 8, cfg, data, seed=None), whole, 8)


CHANGES = {
    "data": (dict(lengths=LENGTHS[:-1] + [9]), "the lengths of the data .fingerprint. was"),
    "number": (dict(lengths=LENGTHS[:-1]), "the number of samples was 22 and is 21"),
    "batch size": (dict(batch_size=2), "the data loader's batch_size was 4 and is 2"),
    "sampler": (dict(sampler="DefaultSampler"), "the sampler was LengthGroupedSampler and is Def"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_hard_input_30_what_changed_is_named_or_the_epoch_begins_anew(change, tmp_path):
    options, message = CHANGES[change]
    train(tmp_path, ITERS, stop_after=9)
    data = loader(**options)
    with pytest.raises(ValueError, match=message):
        resume(tmp_path, 8, ITERS, data)
    rest, runner = resume(tmp_path, 8, ITERS, data, state=dict(type="DataStateHook", strict=False))
    assert "starts anew" in log_of(runner)
    assert rest.epochs[0] == (1, 8)
    drawn = [i for batch in rest.batches for i in batch]
    num_samples = len(data["dataset"]["length"])
    if num_samples <= 4 * 7 and options.get("batch_size") != 2:
        assert sorted(drawn[:num_samples]) == list(range(num_samples))
    assert runner.iter == 15


def test_other_packs_are_refused_by_name(tmp_path):
    def packed(max_length):
        rows = [tiny.sample(i, length) for i, length in enumerate(LENGTHS)]
        rows = [{**row, "length": len(row["input_ids"])} for row in rows]
        dataset = dict(type="PackedDataset", dataset=Rows(rows), max_length=max_length)
        collate = dict(type="packed_collate_fn")
        sampler = dict(type="DefaultSampler", shuffle=True)
        return dict(batch_size=1, dataset=dataset, sampler=sampler, collate_fn=collate)

    class Rows(list):
        length = LENGTHS

    state = Runner.build_dataloader(packed(64)).dataset.state_dict()
    same = Runner.build_dataloader(packed(64)).dataset
    same.load_state_dict(state)
    other = Runner.build_dataloader(packed(65)).dataset
    with pytest.raises(ValueError, match="max_length was 64 and is 65"):
        other.load_state_dict(state)


def test_hard_input_31_a_state_loaded_twice_gives_the_same_remainder(tmp_path):
    train(tmp_path, ITERS, stop_after=9)
    first = resume(tmp_path, 8, ITERS)
    assert_same_end(resume(tmp_path, 8, ITERS), first, 0)


def test_a_checkpoint_from_before_the_first_step_begins_at_the_first_sample(tmp_path):
    whole = train(tmp_path, ITERS, hooks=[dict(type="EarlySave")])
    assert_same_end(resume(tmp_path, "early", ITERS), whole, 0)


@pytest.mark.parametrize("mode", ["pool", "sliding"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_continues_at_the_next_sample_with_its_augmentation(workers, mode, tmp_path):
    """What the pool holds is read, and augmented, again."""
    data = stream(num_workers=workers)
    data["dataset"]["mode"] = mode
    whole = train(tmp_path, ITERS, data)
    for stop in (3, 7, 13):
        assert_same_end(resume(tmp_path, stop, ITERS, data), whole, stop)


def test_a_stream_with_another_number_of_workers_is_refused_by_name(tmp_path):
    train(tmp_path, ITERS, stream(num_workers=1), stop_after=5)
    with pytest.raises(ValueError, match="by 1 workers of every rank and now is by 2"):
        resume(tmp_path, 4, ITERS, stream(num_workers=2))


def test_validation_does_not_change_what_training_draws(tmp_path):
    val = dict(val_dataloader=loader(lengths=LENGTHS[:4]), val_cfg=dict(), val_evaluator=[])
    cfg = dict(type="TrainLoop", max_iters=9, val_begin=1, val_interval=4)
    whole = train(tmp_path, cfg, **val)
    assert_same_end(resume(tmp_path, 4, cfg, **val), whole, 4)


MMENGINE = {
    "IterBasedTrainLoop": dict(type="IterBasedTrainLoop", max_iters=15),
    "EpochBasedTrainLoop": dict(type="EpochBasedTrainLoop", max_epochs=3),
}


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=LONG)])
@pytest.mark.parametrize("loop", MMENGINE)
def test_mmengines_loops_continue_at_the_next_batch(loop, sampler, workers, tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    data = loader(sampler, num_workers=workers, dataset="TinyText")
    whole = train(tmp_path, MMENGINE[loop], data)
    for stop in (4, 6, 9):
        rest = resume(tmp_path, stop, MMENGINE[loop], data)
        lines = log_of(rest[1]).splitlines()
        warnings = [line for line in lines if "use xlength.TrainLoop" in line]
        if loop == "EpochBasedTrainLoop" and sampler == "DefaultSampler":
            assert all("which repeats" in line for line in warnings)
            assert len(warnings) == 1 if stop == 4 else warnings  # two runs may share a log file
            continue
        assert not warnings
        assert rest[0].batches == whole[0].batches[stop:]
        if not workers:
            loaded = rest[1].train_dataloader.dataset.loaded
            assert len(loaded) == sum(map(len, rest[0].batches)), "it loaded what was passed"


def test_mmengines_loop_continues_at_the_next_batch_in_the_middle_of_accumulation(
    tmp_path, monkeypatch
):
    """Micro-steps 5 to 8 of one optimiser step: the last batch of an epoch, of 2 samples, is among
    them."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    cfg = MMENGINE["IterBasedTrainLoop"]
    whole = train(tmp_path, cfg, accumulate=4)
    for stop in (7, 6, 5):
        rest = resume(tmp_path, stop, cfg, accumulate=4)
        assert rest[0].batches == whole[0].batches[stop:]


def test_a_stream_continues_in_mmengines_loop(tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    data = stream()
    cfg = MMENGINE["IterBasedTrainLoop"]
    whole = train(tmp_path, cfg, data, param_scheduler=None)
    assert_same_end(resume(tmp_path, 7, cfg, data, param_scheduler=None), whole, 7)


def test_more_epochs_than_before_are_trained_and_the_schedule_is_told_about(tmp_path):
    train(tmp_path, dict(type="TrainLoop", max_epochs=2))
    more, runner = resume(tmp_path, 12, EPOCHS)
    assert len(more.batches) == 6 and runner.iter == 18
    told = [line for line in log_of(runner).splitlines() if "schedules are not extended" in line]
    assert len(told) == 1 and "now has 18 iterations, not 12" in told[0]


def test_the_part_of_an_epoch_that_ended_a_run_is_not_taken_for_the_whole(tmp_path):
    """A run of 9 iterations ends in the middle of epoch 1; raised to 15 it finishes that epoch."""
    for by_epoch in (False, True):
        folder = tmp_path / str(by_epoch)
        whole = train(tmp_path / f"whole{by_epoch}", ITERS)
        train(folder, dict(type="TrainLoop", max_iters=9), by_epoch=by_epoch)
        rest = resume(folder, "epoch_2" if by_epoch else 9, ITERS, by_epoch=by_epoch)
        assert rest[0].batches == whole[0].batches[9:]


@pytest.mark.parametrize("sampler", ["LengthGroupedSampler", "TokenBudget", "Packing"])
def test_another_number_of_ranks_draws_what_is_left_and_the_run_ends_after_its_epochs(
    sampler, tmp_path
):
    """Rank 0 of 2 stands for both: what it and its twin draw is known from the sampler."""
    data = loader(sampler)
    data["sampler"] = dict(data["sampler"], dp_rank=0, dp_world_size=2)
    _, runner = train(tmp_path, EPOCHS, data, stop_after=3)
    drawn = set()
    for rank in (0, 1):
        other = loader(sampler)
        other["sampler"] = dict(other["sampler"], dp_rank=rank, dp_world_size=2)
        twin = train(tmp_path / str(rank), EPOCHS, other, stop_after=2)[0]
        drawn |= {i for batch in twin.batches[:2] for i in batch}
    rest, runner = resume(tmp_path, 2, EPOCHS, loader(sampler))
    length = len(runner.train_dataloader)
    later = rest.batches[len(rest.batches) - 2 * length :]
    first = rest.batches[: len(rest.batches) - 2 * length]
    assert sorted(i for batch in first for i in batch) == sorted(set(range(22)) - drawn)
    fresh = train(tmp_path / "fresh", EPOCHS, loader(sampler))[0]
    assert later == fresh.batches[length:]


def test_a_sampler_without_a_state_on_another_number_of_ranks_is_refused_by_name(tmp_path):
    data = loader("DefaultSampler")
    _, runner = train(tmp_path, ITERS, data, stop_after=3)
    from mmengine.dataset import DefaultSampler

    def of_two(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self.world_size = 2

    original = DefaultSampler.__init__
    DefaultSampler.__init__ = of_two
    try:
        with pytest.raises(ValueError, match="data-parallel size .* was 1 and is 2"):
            resume(tmp_path, 2, ITERS, data)
    finally:
        DefaultSampler.__init__ = original


def test_the_state_is_plain_and_small(tmp_path):
    _, runner = train(tmp_path, ITERS)
    state = runner.message_hub.get_info("data_state")
    assert (state["epoch"], state["step"], state["iter"]) == (2, 3, 15)
    assert state["sampler"]["step"] == 12
    assert "ranks" not in state or sum(map(len, state["ranks"])) < 20_000
    assert weights(runner).isfinite().all()


def test_no_checkpoint_is_written_when_a_rank_is_gone_that_has_a_part_of_the_position():
    from xlength.runtime.host_group import HostGroup
    from xlength.runtime.position import gather_to_first

    group = HostGroup("the position of every rank")
    assert len(gather_to_first(group, {"random": 1})) == 1
    group.world_size, group.alive = 2, False  # as after a rank did not answer
    with pytest.raises(RuntimeError, match="another rank has ended or does not answer"):
        gather_to_first(group, {"random": 1})
