"""``PlanSampler`` and ``PlanBatchSampler``: whole batches, their state, their errors."""

import numpy as np
import pytest
import torch
from mmengine.runner import Runner
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from xlength import FixedBatch, Packing, PlanBatchSampler, PlanSampler, TokenBudget
from xlength.samplers.plans import build_plan


class Sized(Dataset):
    """A data set that has lengths and its indices, nothing else."""

    def __init__(self, lengths, **properties):
        self.length = np.asarray(lengths)
        for name, values in properties.items():
            setattr(self, name, values)

    def __len__(self):
        return len(self.length)

    def __getitem__(self, index):
        return index


LENGTHS = np.random.RandomState(0).randint(1, 500, 203)
BUDGET = dict(type="TokenBudget", max_tokens=2000, window=64)


def build(plan=BUDGET, rank=0, world=1, lengths=LENGTHS, **options):
    options.setdefault("seed", 3)
    return PlanSampler(Sized(lengths), plan, dp_rank=rank, dp_world_size=world, **options)


def batches(sampler):
    return list(PlanBatchSampler(sampler))


PLANS = [
    BUDGET,
    dict(type="FixedBatch", batch_size=4),
    dict(type="xlength.FixedBatch", batch_size=4, window=32, exact=True),
    dict(type="Packing", max_length=1000, window=64),
]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan["type"])
@pytest.mark.parametrize("world", [1, 3, 8])
def test_all_ranks_together_draw_every_sample_in_equally_many_batches(plan, world):
    samplers = [build(plan, rank, world) for rank in range(world)]
    lengths = {len(sampler) for sampler in samplers}
    for epoch in range(3):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        drawn = [batches(sampler) for sampler in samplers]
        assert {len(of_rank) for of_rank in drawn} == lengths
        seen = [i for of_rank in drawn for batch in of_rank for i in batch]
        assert set(seen) == set(range(203))
        assert len(seen) - 203 == samplers[0].epoch_plan().repeated
        planned = samplers[-1].epoch_plan(epoch)
        assert drawn[-1] == [planned.groups[g].tolist() for g in planned.steps[:, -1]]


def test_the_length_is_the_same_for_all_epochs_and_seeds():
    for plan in PLANS:
        samplers = [build(plan, 0, 3, seed=seed) for seed in range(6)]
        assert len({len(sampler) for sampler in samplers}) == 1
        assert {s.epoch_plan(9).num_steps for s in samplers} == {len(samplers[0])}


def test_a_loader_serves_the_batches_of_the_plan_with_and_without_workers():
    sampler = build(rank=1, world=3)
    dataset = Sized(LENGTHS)
    for workers in (0, 2):
        loader = DataLoader(dataset, batch_sampler=PlanBatchSampler(sampler), num_workers=workers)
        assert [batch.tolist() for batch in loader] == batches(sampler)
        assert len(loader) == len(sampler)


def test_drawing_from_the_global_random_states_changes_nothing():
    expected = batches(build())
    torch.rand(1), np.random.rand(1)
    assert batches(build()) == expected


def test_epochs_differ_and_repeat_when_the_run_is_repeated():
    def epochs():
        sampler = build()
        for epoch in range(3):
            sampler.set_epoch(epoch)
            yield batches(sampler)

    first, again = list(epochs()), list(epochs())
    assert first == again
    assert first[0] != first[1] != first[2]


def test_ranks_of_one_sequence_parallel_group_draw_the_same_samples():
    assert batches(build(rank=1, world=2)) == batches(build(rank=1, world=2))
    assert batches(build(rank=0, world=2)) != batches(build(rank=1, world=2))
    by_mesh = PlanSampler(Sized(LENGTHS), BUDGET, seed=3, device_mesh=dict(dp=1, sp=1))
    assert batches(by_mesh) == batches(build())


def test_seed_none_draws_one_and_a_swapped_config_may_keep_its_keywords():
    assert build(seed=None).seed >= 0
    assert batches(build(shuffle=True, round_up=True)) == batches(build())


@pytest.mark.parametrize("step", [0, 1, 17, "all"])
def test_a_loaded_state_continues_with_the_remainder_however_often_it_is_loaded(step):
    sampler = build(rank=1, world=2)
    sampler.set_epoch(2)
    whole = batches(sampler)
    step = len(whole) if step == "all" else step
    state = sampler.state_dict(step)
    for _ in range(2):
        other = build(rank=1, world=2, seed=99)
        other.load_state_dict(state)
        other.set_epoch(2)
        assert batches(other) == whole[step:]
        assert len(other) == len(whole)
        assert batches(other) == whole  # the position is used up
        other.set_epoch(3)
        sampler.set_epoch(3)
        assert batches(other) == batches(sampler)


def test_the_state_counts_what_was_drawn_and_is_plain():
    sampler = build(length_property="length")
    iterator = iter(PlanBatchSampler(sampler))
    drawn = [next(iterator) for _ in range(5)]
    state = PlanBatchSampler(sampler).state_dict()
    assert state["step"] == 5
    assert all(isinstance(value, (int, str, dict)) for value in state.values())
    other = PlanBatchSampler(build())
    other.load_state_dict(state)
    assert drawn + list(other) == batches(build())


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (dict(lengths=LENGTHS + 1), "lengths of the data"),
        (dict(plan={**BUDGET, "max_tokens": 1999}), "option plan was .*2000.* is .*1999"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_with_what_was_and_what_is(other, message, log_lines):
    state = build().state_dict(5)
    sampler = build(**other)
    with pytest.raises(ValueError, match=message):
        sampler.load_state_dict(state)
    state["epoch"] = 1
    sampler.load_state_dict(state, strict=False)
    sampler.set_epoch(1)
    assert len(batches(sampler)) == len(sampler)
    assert any("starts anew" in line for line in log_lines)


def test_what_is_planned_is_logged_once(log_lines):
    sampler = build(dict(type="FixedBatch", batch_size=4, exact=True), 0, 2)
    batches(sampler), batches(sampler)
    lines = [line for line in log_lines if line.startswith("PlanSampler: FixedBatch(")]
    assert len(lines) == 1
    assert "203 samples: 26 steps an epoch on each of 2 ranks; 5 samples repeated" in lines[0]


def test_the_loaders_batch_size_must_be_that_of_the_plan():
    sampler = build(dict(type="FixedBatch", batch_size=4))
    for batch_size in (None, 1, 4):
        assert len(PlanBatchSampler(sampler, batch_size)) == 51
    with pytest.raises(ValueError, match="batch_size is 16, but the plan has batches of 4 rows"):
        PlanBatchSampler(sampler, 16)
    with pytest.raises(ValueError, match="batch_size is 16, but the plan has batches of 1 rows"):
        PlanBatchSampler(build(dict(type="FixedBatch", batch_size=1)), 16)


def test_a_batch_size_of_the_loader_that_the_plan_overrules_is_warned_about_once(log_lines):
    def warnings_of(plan, batch_size):
        log_lines.clear()
        loader = Runner.build_dataloader(
            dict(
                dataset=Sized(LENGTHS),
                sampler=dict(type="xlength.PlanSampler", plan=plan),
                batch_sampler=dict(type="xlength.PlanBatchSampler"),
                batch_size=batch_size,
            )
        )
        assert len(list(loader)) == len(list(loader)) == len(loader)
        return [line for line in log_lines if "batch_size=" in line and "has no effect" in line]

    [warning] = warnings_of(BUDGET, 16)
    assert "batch_size=16 has no effect: the plan (TokenBudget) decides" in warning
    assert warnings_of(BUDGET, 1) == []
    assert warnings_of(dict(type="FixedBatch", batch_size=16), 16) == []


def test_dropping_is_the_plans_to_decide():
    with pytest.raises(ValueError, match="drop_last=True belongs into the plan"):
        PlanBatchSampler(build(), drop_last=True)
    PlanBatchSampler(build({**BUDGET, "drop_last": True}), drop_last=True)


def test_a_forgotten_batch_sampler_is_told_with_the_line_to_add():
    loader = DataLoader(Sized(LENGTHS), batch_size=4, sampler=build())
    with pytest.raises(ValueError, match=r"add batch_sampler=dict\(type='xlength.PlanBatchSampler"):
        next(iter(loader))


def test_a_sampler_without_a_plan_is_refused_by_its_name():
    with pytest.raises(ValueError, match="reads a PlanSampler, got RandomSampler"):
        PlanBatchSampler(torch.utils.data.RandomSampler(Sized(LENGTHS)))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (dict(type="TokenBudge"), "unknown plan type: 'TokenBudge'; did you mean 'TokenBudget'"),
        (dict(type="TokenBudget", max_token=9), "'max_token'; did you mean 'max_tokens'"),
        (dict(type="TokenBudget"), "plan TokenBudget: .*max_tokens"),
        (dict(max_tokens=9), "unknown plan type: 'None'"),
        ("TokenBudget", "plan must be a plan or its dict"),
        (TokenBudget, "plan must be a plan or its dict"),
    ],
)
def test_a_bad_plan_is_refused_and_the_misspelt_word_named(plan, message):
    with pytest.raises(ValueError, match=message):
        build_plan(plan)


def test_a_plan_is_named_by_string_by_class_or_given():
    expected = TokenBudget(2000, window=64)
    assert build_plan(BUDGET) == build_plan({**BUDGET, "type": TokenBudget}) == expected
    assert build_plan(expected) is expected
    assert isinstance(build_plan(dict(type="xlength.Packing", max_length=9)), Packing)
    assert isinstance(build_plan(dict(type="FixedBatch", batch_size=9)), FixedBatch)


def test_an_overlong_sample_is_refused_at_build():
    with pytest.raises(ValueError, match=r"max_tokens=100 is less than the \d+ tokens of sample"):
        build(dict(type="TokenBudget", max_tokens=100))


COLUMNS = dict(type="TokenBudget", max_tokens=900, cost=dict(type="multimodal", weights=(1, 0.5)))


def test_lengths_of_two_columns_come_from_an_array_or_from_two_names():
    patches = np.random.RandomState(1).choice([0, 576], 203)
    table = np.stack([LENGTHS, patches], axis=1)
    dataset = Sized(LENGTHS, table=table, patches=patches)
    one = PlanSampler(dataset, COLUMNS, "table", seed=3)
    two = PlanSampler(dataset, COLUMNS, ("length", "patches"), seed=3)
    assert batches(one) == batches(two)
    assert one.state_dict(0)["fingerprint"] == two.state_dict(0)["fingerprint"]
    nested = ConcatDataset([Subset(dataset, range(100)), Subset(dataset, range(100, 203))])
    assert batches(PlanSampler(nested, COLUMNS, "table", seed=3)) == batches(one)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("length", r"must be an \(n, k\) array of whole numbers, got shape \(203,\)"),
        ("three", r"has shape \(203, 3\); the cost needs \(203, 2\)"),
        ("zero", r"the first column must not be zero, got \[0, 5\] at row 0 \(203 such rows"),
        ("minus", r"columns after the first must not be negative, got \[5, -1\] at row 0"),
        ("nothing", "Sized has no such attribute"),
    ],
)
def test_columns_that_do_not_fit_are_refused_by_name_and_row(name, message):
    dataset = Sized(
        LENGTHS,
        three=np.ones((203, 3), dtype=int),
        zero=np.tile([0, 5], (203, 1)),
        minus=np.tile([5, -1], (203, 1)),
    )
    with pytest.raises(ValueError, match=message):
        PlanSampler(dataset, COLUMNS, name, seed=3)


def test_two_names_need_a_cost_with_weights():
    with pytest.raises(ValueError, match="names several columns, but the cost attention"):
        build(length_property=["length", "patches"])
