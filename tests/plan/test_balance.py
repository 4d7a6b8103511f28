"""Dealing batches to steps: like costs, costliest first, one kind a step, equal sums."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xlength.plan import deal, epoch_rng
from xlength.plan.balance import share_steps

COSTS = np.exp(np.random.RandomState(0).normal(0, 1, 640))


def balance(costs):
    return (costs.mean(axis=1) / costs.max(axis=1)).mean()


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 17), st.integers(1, 12), st.integers(1, 4), st.integers(0, 99))
def test_every_group_is_dealt_exactly_once(world, steps, accumulate, seed):
    random = np.random.RandomState(seed)
    costs, kinds = random.rand(world * steps), random.randint(0, 2, world * steps)
    dealt = deal(
        costs, world, epoch_rng(seed, 0), accumulate=accumulate, kinds=kinds, second=-costs
    )
    assert dealt.shape == (steps, world)
    assert sorted(dealt.ravel().tolist()) == list(range(world * steps))
    assert costs[dealt[0]].max() == costs.max()
    mixed = (kinds[dealt] != kinds[dealt][:, :1]).any(axis=1)
    assert mixed.sum() <= 1


def test_steps_are_of_like_cost_and_the_costliest_comes_first():
    costs = COSTS[deal(COSTS, 8, epoch_rng(0, 0))]
    assert balance(costs) > 0.96
    assert balance(COSTS.reshape(-1, 8)) < 0.5
    assert sorted(costs[0]) == sorted(COSTS)[-8:]


def test_all_steps_but_the_first_are_shuffled_and_so_are_the_ranks():
    costs = COSTS[deal(COSTS, 8, epoch_rng(0, 0))]
    means = costs.mean(axis=1)[1:]
    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 3 / 79**0.5
    wins = np.bincount(costs.argmax(axis=1), minlength=8)
    assert wins.max() < 25  # of 80


def test_another_epoch_is_dealt_otherwise_and_the_same_one_again():
    first, again, other = (deal(COSTS, 8, epoch_rng(0, epoch)) for epoch in (0, 0, 1))
    assert np.array_equal(first, again) and not np.array_equal(first, other)


def test_the_second_measure_is_balanced_at_hardly_any_cost():
    random = np.random.RandomState(1)
    tokens = random.uniform(0.8, 1, 640)
    costs = tokens * np.sort(random.uniform(1, 1.4, 640))
    by_cost, by_both = (deal(costs, 8, epoch_rng(0, 0), second=second) for second in (None, tokens))
    assert balance(tokens[by_both]) > balance(tokens[by_cost]) + 0.02
    assert balance(costs[by_both]) > balance(costs[by_cost]) - 0.01


@pytest.mark.parametrize("accumulate", [2, 4, 7])
def test_sums_over_the_micro_steps_of_an_optimiser_step_are_equal(accumulate):
    heavy = np.exp(np.random.RandomState(2).normal(0, 0.5, 8 * 20 * accumulate))

    def sums(steps):
        return heavy[steps].reshape(20, accumulate, 8).sum(axis=1)

    together = balance(sums(deal(heavy, 8, epoch_rng(0, 0), accumulate=accumulate)))
    apart = balance(sums(deal(heavy, 8, epoch_rng(0, 0))))
    assert 1 - together < (1 - apart) * 0.7
    assert together > 0.97


def test_kinds_share_one_step_of_like_cost_where_they_are_no_multiples():
    kinds = np.repeat([0, 1], [21, 19])
    costs = np.append(np.linspace(2, 3, 21), np.linspace(1, 4, 19))
    steps = deal(costs, 8, epoch_rng(0, 0), kinds=kinds)
    mixed = [row for row in steps if len(set(kinds[row])) > 1]
    assert len(mixed) == 1
    assert np.ptp(costs[mixed[0]]) < 0.7


def test_a_number_of_groups_that_is_no_multiple_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match="a multiple of world_size 3, got 7"):
        deal(np.ones(7), 3, epoch_rng(0, 0))
    with pytest.raises(ValueError, match="at least 1, got 0 and 1"):
        deal(np.ones(7), 0, epoch_rng(0, 0))


@pytest.mark.parametrize(
    ("needs", "rooms", "options", "expected"),
    [
        ([10], [99], {}, [16]),
        ([10], [99], dict(accumulate=3), [24]),
        ([10], [99], dict(drop_last=True), [8]),
        ([5], [5], dict(drop_last=True), [8]),
        ([10, 3], [99, 30], {}, [16, 8]),
        ([10, 3], [99, 5], {}, [21, 3]),
        ([10, 3], [99, 5], dict(mixed="repeat"), [16, 8]),
        ([10], [99], dict(num_steps=4), [32]),
        ([10, 10], [20, 11], dict(num_steps=4), [21, 11]),
        ([200, 200], [999, 999], dict(drop_last=True, accumulate=32), [128, 128]),
        ([210, 190], [999, 999], dict(drop_last=True, accumulate=32), [136, 120]),
        ([400, 60], [999, 999], dict(drop_last=True, accumulate=32), [224, 32]),
        ([400, 9], [999, 999], dict(drop_last=True, num_steps=25), [192, 8]),
    ],
)
def test_batches_of_each_kind_make_whole_steps(needs, rooms, options, expected):
    assert share_steps(needs, rooms, 8, **options) == expected


def test_too_few_steps_are_said_to_be_so():
    assert share_steps([17], [99], 8, num_steps=2) is None
