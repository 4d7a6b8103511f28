"""Batches of a fixed number of samples, and batches within a budget of tokens."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xlength.plan import epoch_rng
from xlength.plan.batch import fixed_batches
from xlength.plan.budget import Limits, count_batches, cut_batches
from xlength.plan.windows import even_cuts, sort_windows

LENGTHS = np.clip(np.exp(np.random.RandomState(0).normal(5, 1, 3000)), 8, 4096).astype(np.int64)
ALL = np.arange(3000)


def fixed(count, batch_size, window=None, exact=False, lengths=LENGTHS, seed=0):
    members = np.arange(len(lengths))
    return fixed_batches(members, lengths, count, batch_size, window, exact, epoch_rng(seed, 0))


def budget(count=None, max_tokens=8192, max_rows=9999, window=None, lengths=LENGTHS, shift=None):
    limits, rng = Limits(max_tokens, max_rows), epoch_rng(0, 0)
    windows = count_batches(np.arange(len(lengths)), lengths, limits, window, shift, rng)
    need = int(windows.counts.sum())
    return need, cut_batches(windows, need if count is None else count, limits, rng)


def test_windows_are_sorted_by_falling_length_ties_in_the_order():
    sizes = np.array([3, 5, 5, 1, 9])
    order, borders = sort_windows(np.array([4, 2, 1, 0, 3]), sizes, np.array([0, 3, 5]))
    assert order.tolist() == [4, 2, 1, 0, 3]
    assert borders.tolist() == [0, 3, 5]
    order, _ = sort_windows(np.array([0, 1, 2, 3, 4]), sizes, np.array([0, 5]))
    assert order.tolist() == [4, 1, 2, 0, 3]


def test_long_samples_of_neighbouring_windows_are_sorted_together():
    sizes = np.array([1, 50, 2, 40, 3, 60, 4, 70])
    order, borders = sort_windows(np.arange(8), sizes, even_cuts(8, 4), 40, long_windows=2)
    assert order.tolist() == [0, 2, 4, 6, 1, 3, 7, 5]
    assert borders.tolist() == [0, 1, 2, 3, 4, 6, 8]


def test_lengths_too_large_for_one_key_are_still_sorted():
    sizes = np.array([2**60, 3, 2**60, 1])
    order, _ = sort_windows(np.arange(4), sizes, even_cuts(4, 1))
    assert order.tolist() == [0, 2, 1, 3]


@pytest.mark.parametrize("window", [None, 256])
def test_batches_that_are_not_full_are_one_smaller_and_spread_over_all_lengths(window):
    batches = fixed(200, 16, window)
    assert sorted(batches.members.tolist()) == ALL.tolist()
    assert set(batches.sizes.tolist()) == {15}
    batches = fixed(190, 16, window)
    assert set(batches.sizes.tolist()) == {15, 16}
    smaller = np.flatnonzero(batches.sizes == 15)
    assert np.diff(smaller).max() <= 5  # 40 of 190


@pytest.mark.parametrize("window", [None, 256])
def test_exact_batches_repeat_evenly_and_never_the_longest(window):
    batches = fixed(190, 16, window, exact=True)
    counts = np.bincount(batches.members, minlength=3000)
    assert set(batches.sizes.tolist()) == {16}
    assert counts.min() == 1 and counts.max() == 2 and counts.sum() == 3040
    assert counts[LENGTHS.argmax()] == 1
    again = LENGTHS[counts == 2]
    quartiles = np.searchsorted(np.quantile(LENGTHS, [0.25, 0.5, 0.75]), again)
    assert np.bincount(quartiles, minlength=4).min() >= 6  # of 40
    assert all(len(set(batch)) == 16 for batch in batches.tolist())


def test_repeats_do_not_lengthen_a_batch():
    without, exact = fixed(190, 16), fixed(190, 16, exact=True)
    assert exact.maxima(LENGTHS).sum() <= without.maxima(LENGTHS).sum() * 1.001


def test_too_many_samples_lose_others_in_every_epoch():
    first, other = (set(fixed(180, 16, seed=seed).members.tolist()) for seed in (0, 1))
    assert len(first) == len(other) == 2880
    assert len(first & other) < 2800


def test_a_window_keeps_only_its_own_samples_together():
    sorted_all, windows = fixed(188, 16), fixed(188, 16, 256)
    spread = [(b.maxima(LENGTHS) - -b.maxima(-LENGTHS)).mean() for b in (sorted_all, windows)]
    assert spread[0] < spread[1] / 3


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=40), st.integers(1, 12), st.booleans())
def test_the_fewest_batches_are_no_more_than_any_cutting_takes(lengths, max_rows, one_more):
    lengths = np.array(lengths)
    max_tokens = int(lengths.max()) * (3 if one_more else 1)
    need, batches = budget(max_tokens=max_tokens, max_rows=max_rows, lengths=lengths)
    falling = np.sort(lengths)[::-1]
    fewest = [0] + [len(lengths)] * len(lengths)  # by dynamic programming over sorted samples
    for end in range(1, len(lengths) + 1):
        fewest[end] = min(
            fewest[start] + 1
            for start in range(end)
            if end - start <= max_rows and falling[start] * (end - start) <= max_tokens
        )
    assert need == fewest[-1] == len(batches)
    assert sorted(batches.members.tolist()) == list(range(len(lengths)))


@pytest.mark.parametrize("window", [None, 256, 1024])
@pytest.mark.parametrize("beyond", [0, 1, 7, 60, 1500])
def test_any_number_of_batches_within_the_limits_is_reached_exactly(window, beyond):
    need, _ = budget(window=window, max_rows=64)
    _, batches = budget(need + beyond, window=window, max_rows=64)
    assert len(batches) == need + beyond
    assert sorted(batches.members.tolist()) == ALL.tolist()
    assert (batches.maxima(LENGTHS) * batches.sizes).max() <= 8192
    assert batches.sizes.max() <= 64


def test_batches_of_a_given_number_are_equally_full():
    need, _ = budget()
    _, batches = budget(need + 12)
    tokens = batches.sizes * batches.maxima(LENGTHS)
    few_rows = batches.sizes < 8  # where a row more or less is much
    assert tokens[~few_rows].min() > 0.85 * tokens.max()


def test_equal_lengths_are_cut_evenly_though_a_row_is_a_jump():
    lengths = np.full(600, 100)
    _, batches = budget(41, max_tokens=1600, lengths=lengths)
    assert set(batches.sizes.tolist()) == {14, 15} and len(batches) == 41


def test_singles_are_repeated_where_samples_are_too_few_but_not_the_longest():
    lengths = np.array([3, 9, 4, 5])
    _, batches = budget(10, max_tokens=9, lengths=lengths)
    counts = np.bincount(batches.members, minlength=4)
    assert len(batches) == 10 and counts[1] == 1 and counts.min() == 1 and counts.max() == 3


def test_too_few_batches_leave_random_ones_out():
    need, _ = budget()
    _, batches = budget(need - 5)
    assert len(batches) == need - 5
    assert len(set(batches.members.tolist())) == len(batches.members) < 3000


def test_a_shift_changes_mates_where_one_window_holds_all():
    lengths = np.arange(1, 3001)  # no ties, so that nothing else is random

    def mates(shift):
        limits, rng = Limits(30000, 9999), epoch_rng(0, 0)
        windows = count_batches(ALL, lengths, limits, None, shift, rng)
        number = int(windows.counts.sum())
        return {tuple(batch) for batch in cut_batches(windows, number, limits, rng).tolist()}

    assert mates(0.1) == mates(0.1)
    assert len(mates(0.1)) == len(mates(0.7)) == len(mates(None)) + 1
    assert len(mates(0.1) & mates(0.7)) < len(mates(0.1)) / 10
