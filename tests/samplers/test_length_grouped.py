"""``LengthGroupedSampler``: XTuner's indices, its log lines, its state, its errors."""

import numpy as np
import pytest
import torch
from mmengine.dataset import DefaultSampler
from torch.utils.data import DataLoader, TensorDataset

from tests.plan.test_order import CASES, digest, lengths_of
from xlength import LengthGroupedSampler


class Sized:
    """A data set that has lengths and nothing else."""

    def __init__(self, lengths, **properties):
        self.length = lengths
        for name, values in properties.items():
            setattr(self, name, values)

    def __len__(self):
        return len(self.length)


def build(lengths, batch=4, rank=0, world=1, **options):
    options.setdefault("seed", 3)
    return LengthGroupedSampler(Sized(lengths), batch, dp_rank=rank, dp_world_size=world, **options)


LENGTHS = [int(x) for x in np.random.RandomState(0).randint(1, 500, 203)]


@pytest.mark.parametrize("case", CASES, ids=lambda c: "{kind}-{n}-{world_size}".format(**c))
def test_every_rank_draws_the_indices_of_the_original(case):
    dataset = Sized(lengths_of(case).tolist())
    for rank, expected in enumerate(case["digest_per_rank"]):
        sampler = LengthGroupedSampler(
            dataset,
            case["per_device_batch_size"],
            "length",
            case["mega_batch_mult"],
            case["seed"],
            case["round_up"],
            dp_rank=rank,
            dp_world_size=case["world_size"],
        )
        sampler.set_epoch(case["epoch"])
        drawn = list(sampler)
        assert len(drawn) == len(sampler)
        if rank == 0:
            assert drawn[:8] == case["first_of_rank0"]
        assert digest(drawn) == expected


def test_the_two_lines_that_users_look_for_are_logged(log_lines):
    LengthGroupedSampler(Sized([3, 4], modality_length=[-3, 4]), 1, "modality_length", seed=0)
    assert log_lines == [
        "LengthGroupedSampler is used.",
        "LengthGroupedSampler construction is complete, "
        "and the selected attribute is modality_length",
    ]


@pytest.mark.parametrize(("samples", "world", "batch"), [(9, 2, 2), (1025, 8, 4), (5, 8, 4)])
@pytest.mark.parametrize("round_up", [True, False])
def test_every_sample_is_drawn_in_every_epoch(samples, world, batch, round_up):
    lengths = np.random.RandomState(1).randint(1, 99, samples)
    for epoch in range(3):
        ranks = []
        for rank in range(world):
            sampler = build(lengths, batch, rank, world, round_up=round_up)
            sampler.set_epoch(epoch)
            ranks.append(list(sampler))
        assert {i for drawn in ranks for i in drawn} == set(range(samples))
        if round_up:
            assert {len(drawn) for drawn in ranks} == {-(-samples // world // batch) * batch}


def test_epochs_differ_and_repeat_when_the_run_is_repeated():
    def epochs():
        sampler = build(LENGTHS)
        for epoch in range(3):
            sampler.set_epoch(epoch)
            yield list(sampler)

    first, second = list(epochs()), list(epochs())
    assert first == second
    assert len({tuple(order) for order in first}) == 3


def test_drawing_from_the_global_random_state_changes_nothing():
    import torch

    expected = list(build(LENGTHS))
    torch.rand(1), np.random.rand(1)
    assert list(build(LENGTHS)) == expected


def test_a_swapped_config_may_keep_shuffle_and_seed():
    assert list(build(LENGTHS, shuffle=True)) == list(build(LENGTHS))
    assert build(LENGTHS, seed=None).seed >= 0


def test_shuffle_false_is_passed_over_with_a_warning(log_lines):
    build(LENGTHS, shuffle=False)
    assert any("ignores shuffle=False" in line for line in log_lines)


def test_a_misspelt_argument_is_refused():
    with pytest.raises(TypeError, match="'round_upp'"):
        build(LENGTHS, round_upp=True)


@pytest.mark.parametrize("value", [0, -1, 2.5, True, "4"])
def test_a_batch_size_that_is_no_positive_whole_number_is_refused_by_name(value):
    with pytest.raises(ValueError, match="per_device_batch_size must be a whole number"):
        build(LENGTHS, batch=value)


def test_ranks_of_one_tensor_parallel_group_draw_the_same_samples():
    assert list(build(LENGTHS, rank=1, world=2)) == list(build(LENGTHS, rank=1, world=2))
    assert list(build(LENGTHS, rank=0, world=2)) != list(build(LENGTHS, rank=1, world=2))


@pytest.mark.parametrize("step", [0, 1, 57, 204])
def test_a_loaded_state_continues_with_the_remainder_however_often_it_is_loaded(step):
    sampler = build(LENGTHS)
    sampler.set_epoch(2)
    whole = list(sampler)
    state = sampler.state_dict(step)
    for _ in range(2):
        other = build(LENGTHS, seed=99)
        other.load_state_dict(state)
        other.set_epoch(2)
        assert list(other) == whole[step:]
        assert len(other) == len(whole)
        other.set_epoch(3)
        sampler.set_epoch(3)
        assert list(other) == list(sampler)


def test_the_state_counts_what_was_drawn():
    sampler = build(LENGTHS)
    iterator = iter(sampler)
    drawn = [next(iterator) for _ in range(10)]
    other = build(LENGTHS)
    other.load_state_dict(sampler.state_dict())
    assert drawn + list(other) == list(build(LENGTHS))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(lengths=LENGTHS[:-1]), "the lengths of the data"),
        (dict(batch=8), "per_device_batch_size was 4 and is 8"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_by_name_or_starts_the_epoch_anew(change, words):
    state = build(LENGTHS).state_dict(20)
    other = build(**{"lengths": LENGTHS, **change})
    with pytest.raises(ValueError, match=words):
        other.load_state_dict(state)
    other.load_state_dict(state, strict=False)
    assert len(list(other)) == len(other)


def test_it_takes_the_place_of_the_default_sampler_in_a_loader():
    from torch.utils.data import DataLoader

    class Items(Sized):
        def __getitem__(self, index):
            return index

    dataset = Items(LENGTHS)
    grouped = DataLoader(dataset, 4, sampler=LengthGroupedSampler(dataset, 4, seed=0))
    default = DataLoader(dataset, 4, sampler=DefaultSampler(dataset, seed=0))
    assert len(grouped) == len(default) == 51

    def padding(loader):
        batches = [np.array(LENGTHS)[batch.numpy()] for batch in loader]
        return sum(b.sum() for b in batches) / sum(b.max() * len(b) for b in batches)

    assert padding(grouped) > 0.9 > padding(default)


def says_that_batches_do_not_fit(lines):
    return [line for line in lines if "per_device_batch_size is 6" in line]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_batch_size_that_does_not_fit_is_warned_about_in_any_loop(num_workers, log_lines):
    dataset = TensorDataset(torch.arange(24))
    dataset.length = list(range(1, 25))
    loader = DataLoader(
        dataset,
        batch_size=4,
        sampler=LengthGroupedSampler(dataset, 6, seed=0),
        num_workers=num_workers,
    )
    for _ in range(2):
        list(loader)
    (line,) = says_that_batches_do_not_fit(log_lines)
    assert "batch_size is 4" in line and "Make per_device_batch_size 4 or a multiple" in line


def test_a_fitting_batch_size_and_what_draws_without_batches_are_not_warned_about(log_lines):
    dataset = TensorDataset(torch.arange(24))
    dataset.length = list(range(1, 25))
    sampler = LengthGroupedSampler(dataset, 6, seed=0)
    assert sorted(sampler) == list(range(24))
    for batch_size in (2, 3, 6):
        list(DataLoader(dataset, batch_size, sampler=sampler))
    assert not says_that_batches_do_not_fit(log_lines)
