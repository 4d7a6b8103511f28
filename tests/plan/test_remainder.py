"""An epoch that several numbers of ranks take turns at draws every sample once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xlength.plan.packing import Packing
from xlength.plan.remainder import continued_plan, samples_left
from xlength.plan.specs import FixedBatch, TokenBudget

PLANS = {
    "FixedBatch": FixedBatch(batch_size=3),
    "TokenBudget": TokenBudget(max_tokens=120, window=32),
    "Packing": Packing(max_length=120, window=32),
    "accumulate": FixedBatch(batch_size=2, accumulate=2),
}


def play(plan, lengths, turns, seed=3, epoch=2):
    """Samples drawn when each (ranks, share of the rest) takes its turn, the last to the end."""
    history, drawn = [], []
    for turn, (ranks, share) in enumerate(turns):
        num_steps = plan.build(lengths, seed=0, epoch=0, world_size=ranks).num_steps
        now = continued_plan(
            plan, lengths, history, seed=seed, epoch=epoch, world_size=ranks, num_steps=num_steps
        )
        steps = now.num_steps if turn == len(turns) - 1 else int(share * now.num_steps)
        members = now.groups.take(now.steps[:steps].ravel()).members
        assert not set(members) & {i for before in drawn for i in before}, "drawn in two turns"
        num_left = len(samples_left(now, 0))
        slots = ranks * getattr(plan, "accumulate", 1)
        assert now.repeated == 0 or num_left < slots, "repeated without need"
        drawn.append(members)
        history.append((ranks, steps))
    return np.concatenate(drawn)


@pytest.mark.parametrize("name", PLANS)
@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=20, max_size=120),
    turns=st.lists(st.tuples(st.sampled_from([1, 2, 4]), st.floats(0, 1)), min_size=1, max_size=5),
    seed=st.integers(0, 5),
)
def test_every_sample_is_drawn_however_often_the_number_of_ranks_changes(
    name, lengths, turns, seed
):
    drawn = play(PLANS[name], np.array(lengths), turns, seed)
    assert set(drawn.tolist()) == set(range(len(lengths)))


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("ranks", [4, 16])
def test_half_an_epoch_of_8_ranks_is_continued_exactly_by_4_and_by_16(name, ranks):
    lengths = np.clip(np.random.default_rng(0).lognormal(3, 0.8, 4000), 1, 120).astype(np.int64)
    drawn = play(PLANS[name], lengths, [(8, 0.5), (ranks, 1)])
    assert sorted(drawn.tolist()) == list(range(4000))


def test_an_epoch_that_was_finished_leaves_nothing():
    lengths = np.arange(1, 41)
    plan = PLANS["FixedBatch"]
    whole = plan.build(lengths, seed=3, epoch=0, world_size=2)
    assert len(samples_left(whole, whole.num_steps)) == 0
    rest = continued_plan(plan, lengths, [(2, whole.num_steps)], seed=3, epoch=0, world_size=4)
    assert rest.num_steps == 0 and rest.world_size == 4


def test_without_a_history_it_is_the_plan_itself():
    lengths = np.arange(1, 41)
    plan = PLANS["TokenBudget"]
    whole = plan.build(lengths, seed=3, epoch=1, world_size=2, num_steps=9)
    same = continued_plan(plan, lengths, [], seed=3, epoch=1, world_size=2, num_steps=9)
    assert same.fingerprint() == whole.fingerprint()


@pytest.mark.parametrize(
    "plan",
    [
        FixedBatch(16, drop_last=True),
        TokenBudget(1500, drop_last=True, accumulate=4),
        Packing(1500, drop_last=True, accumulate=4),
    ],
    ids=lambda plan: type(plan).__name__,
)
def test_what_is_left_of_an_epoch_that_drops_is_drawn_by_other_ranks_without_dropping_more(plan):
    lengths = np.clip(np.random.default_rng(0).lognormal(4, 0.8, 3000), 1, 1000).astype(np.int64)
    num_steps = plan.build(lengths, seed=0, epoch=0, world_size=8).num_steps
    begun = plan.build(lengths, seed=1, epoch=0, world_size=8, num_steps=num_steps)
    history = [(8, num_steps // 2)]
    rest = continued_plan(plan, lengths, history, seed=1, epoch=0, world_size=12)
    left = samples_left(begun, num_steps // 2)
    assert np.array_equal(np.unique(rest.groups.take(rest.steps.ravel()).members), left)
    assert len(left) > 500
