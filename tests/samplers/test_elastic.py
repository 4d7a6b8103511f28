"""Samplers that go on with a state of another number of ranks, and onedl-mmengine's ``skip``."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xlength import LengthGroupedSampler, PlanBatchSampler, PlanSampler


class Sized:
    def __init__(self, lengths):
        self.length = lengths

    def __len__(self):
        return len(self.length)


def grouped(lengths, rank, world, round_up=True):
    return LengthGroupedSampler(
        Sized(lengths), 2, seed=3, round_up=round_up, dp_rank=rank, dp_world_size=world
    )


def planned(lengths, rank, world, round_up=True):
    plan = dict(type="TokenBudget", max_tokens=64)
    return PlanSampler(Sized(lengths), plan, seed=3, dp_rank=rank, dp_world_size=world)


def draw(sampler):
    """What is left of the epoch, step by step."""
    if isinstance(sampler, PlanSampler):
        return list(PlanBatchSampler(sampler))
    return [[index] for index in sampler]


def play(make, lengths, turns):
    """Samples drawn in epoch 1 when numbers of ranks take turns, and the last ranks' samplers."""
    state, drawn = None, []
    for turn, (world, share) in enumerate(turns):
        ranks = [make(lengths, rank, world) for rank in range(world)]
        rest = []
        for sampler in ranks:
            if state is not None:
                sampler.load_state_dict(state)
            sampler.set_epoch(1)
            start, left = sampler.state_dict()["step"], sampler.left()
            rest.append(draw(sampler))
            assert len(rest[-1]) == left
            sampler.set_epoch(1)
        whole = min(map(len, rest))
        take = max(map(len, rest)) if turn == len(turns) - 1 else math.floor(share * whole)
        for own in rest:
            drawn += [i for step in own[:take] for i in step]
        state = ranks[0].state_dict(start + min(take, whole))
    return drawn, ranks


@pytest.mark.parametrize("make", [grouped, planned])
@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=16, max_size=90),
    turns=st.lists(st.tuples(st.sampled_from([1, 2, 4]), st.floats(0, 1)), min_size=2, max_size=4),
)
def test_every_sample_is_drawn_and_later_epochs_are_those_of_the_new_size(make, lengths, turns):
    drawn, ranks = play(make, lengths, turns)
    assert set(drawn) == set(range(len(lengths)))
    world, most = turns[-1][0], max(ranks for ranks, _ in turns)
    # Rounded up to whole batches of all ranks, as XTuner does; plans repeat fewer than ranks.
    assert len(drawn) - len(lengths) < (2 * most if make is grouped else most)
    for rank, sampler in enumerate(ranks):
        sampler.set_epoch(2)
        fresh = make(lengths, rank, world)
        fresh.set_epoch(2)
        assert draw(sampler) == draw(fresh)
        assert len(sampler) == len(fresh)


def test_without_rounding_up_nothing_is_drawn_twice():
    lengths = [1 + i % 37 for i in range(101)]
    turns = [(4, 0.3), (2, 0.5), (1, 1)]
    drawn, _ = play(lambda *args: grouped(*args, round_up=False), lengths, turns)
    assert sorted(drawn) == list(range(101))


# What onedl-mmengine's IterBasedTrainLoop does: DistSamplerSeedHook sets epoch 0, the loop skips
# once, and counts further epochs from 1.
@pytest.mark.parametrize("batches", [0, 1, 5, 6, 7, 17, 18])
def test_skip_counts_over_epochs_and_the_loop_may_count_them_from_0_again(batches):
    lengths = [1 + i % 37 for i in range(24)]
    undisturbed = []
    for epoch in range(5):
        sampler = grouped(lengths, 0, 2)
        sampler.set_epoch(epoch)
        undisturbed.append(list(sampler))
    sampler = grouped(lengths, 0, 2)
    sampler.set_epoch(0)
    sampler.skip(batches * 2)
    epoch, step = divmod(batches * 2, 12)
    assert list(sampler) == undisturbed[epoch][step:]
    assert len(sampler) == 12
    sampler.set_epoch(1)
    assert list(sampler) == undisturbed[epoch + 1]
    sampler.load_state_dict(sampler.state_dict(4))
    sampler.set_epoch(0)  # a state counts real epochs again
    assert list(sampler) == undisturbed[0]


def test_skip_over_an_epoch_of_no_whole_number_of_batches_warns(log_lines):
    sampler = grouped([1 + i % 37 for i in range(25)], 0, 2, round_up=False)
    sampler.skip(16)
    assert any("not exact" in line for line in log_lines)
