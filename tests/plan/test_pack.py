from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xlength.plan.outlook import packing_outlook
from xlength.plan.pack import _best_fit_runs, best_fit, concat, next_fit, pack_samples
from xlength.plan.pieces import cut_overlong

CASES = st.tuples(
    st.lists(st.integers(1, 40), max_size=120), st.integers(40, 100), st.integers(0, 3)
)


def item_level_best_fit(lengths, max_length):
    """Best-fit-decreasing one sample at a time; ties to the pack that changed last."""
    packs, rooms = [], []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, room in enumerate(rooms) if room >= length]
        if fitting:
            smallest = min(rooms[i] for i in fitting)
            at = max(i for i in fitting if rooms[i] == smallest)
            packs.append(packs.pop(at) + [length])
            rooms.append(rooms.pop(at) - length)
        else:
            packs.append([length])
            rooms.append(max_length - length)
    return packs


def contents(groups, lengths):
    return Counter(
        tuple(lengths[members].tolist()) for members in map(groups.__getitem__, range(len(groups)))
    )


def tokens_of(packs, lengths):
    """Every (sample, position) that the packs hold, in order."""
    result = []
    for i in range(len(packs)):
        samples, starts, stops = packs[i]
        if starts is None:
            starts, stops = np.zeros_like(samples), lengths[samples]
        for sample, start, stop in zip(samples, starts, stops, strict=True):
            result += [(int(sample), position) for position in range(start, stop)]
    return result


def lognormal(mu, sigma, n, generator):
    return np.clip(generator.lognormal(mu, sigma, n).astype(np.int64), 8, 8192)


@given(CASES)
@settings(max_examples=200, deadline=None)
def test_the_packs_of_best_fit_are_those_of_best_fit_sample_by_sample(case):
    values, max_length, seed = case
    lengths = np.array(values, dtype=np.int64)
    groups = best_fit(lengths, max_length, np.random.default_rng(seed))
    assert contents(groups, lengths) == Counter(map(tuple, item_level_best_fit(values, max_length)))


@pytest.mark.parametrize(
    "lengths, max_length",
    [
        ([1] * 7, 3),
        ([3] * 5, 7),
        ([5, 5, 2, 2, 2, 1], 9),
        ([7], 7),
        ([1], 10**9),
        ([6, 4, 3, 3, 2, 2], 10),
    ],
)
def test_bulk_moves_stop_where_sample_by_sample_placement_would(lengths, max_length):
    lengths = np.array(lengths)
    expected = Counter(map(tuple, item_level_best_fit(lengths.tolist(), max_length)))
    assert contents(best_fit(lengths, max_length), lengths) == expected


@pytest.mark.parametrize("strategy", ["best_fit", "next_fit", "concat"])
@given(CASES)
@settings(max_examples=100, deadline=None)
def test_every_token_is_packed_once_and_no_pack_is_too_long(strategy, case):
    values, max_length, seed = case
    lengths = np.array(values, dtype=np.int64)
    rng = np.random.default_rng(seed) if seed else None
    packs, _ = pack_samples(lengths, max_length, strategy, rng=rng)
    assert sorted(tokens_of(packs, lengths)) == [
        (sample, position) for sample, length in enumerate(values) for position in range(length)
    ]
    fills = packs.fills(lengths)
    assert (fills <= max_length).all() and (fills >= 1).all() and fills.sum() == sum(values)
    if packs.pieces is None:
        assert sorted(packs.groups.members.tolist()) == list(range(len(values)))


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=60),
    st.integers(1, 20),
    st.sampled_from(["best_fit", "next_fit"]),
)
@settings(max_examples=100, deadline=None)
def test_splitting_loses_no_token_and_truncating_loses_only_the_excess(
    values, max_length, strategy
):
    lengths = np.array(values)
    whole = [(sample, position) for sample, n in enumerate(values) for position in range(n)]
    packs, report = pack_samples(lengths, max_length, strategy, "split", np.random.default_rng(0))
    assert sorted(tokens_of(packs, lengths)) == whole and report.tokens == 0
    assert packs.fills(lengths).max() <= max_length
    packs, report = pack_samples(lengths, max_length, strategy, "truncate")
    assert sorted(tokens_of(packs, lengths)) == [t for t in whole if t[1] < max_length]
    assert report.tokens == sum(max(0, n - max_length) for n in values)
    packs, report = pack_samples(lengths, max_length, strategy, "drop")
    assert sorted(tokens_of(packs, lengths)) == [t for t in whole if values[t[0]] <= max_length]
    assert report.count == sum(n > max_length for n in values)


@given(CASES)
@settings(max_examples=100, deadline=None)
def test_next_fit_keeps_the_order_and_opens_a_pack_only_when_it_must(case):
    values, max_length, seed = case
    lengths = np.array(values, dtype=np.int64)
    order = np.random.default_rng(seed).permutation(len(values))
    groups = next_fit(lengths, max_length, order)
    assert groups.members.tolist() == order.tolist()
    fills = groups.sums(lengths)
    for i in range(1, len(groups)):
        assert fills[i - 1] + lengths[groups[i][0]] > max_length


@given(CASES)
@settings(max_examples=100, deadline=None)
def test_concat_fills_every_pack_but_the_last_and_keeps_the_order(case):
    values, max_length, seed = case
    lengths = np.array(values, dtype=np.int64)
    order = np.random.default_rng(seed).permutation(len(values))
    packs = concat(lengths, max_length, order)
    assert tokens_of(packs, lengths) == [
        (int(sample), position) for sample in order for position in range(lengths[sample])
    ]
    assert (packs.fills(lengths)[:-1] == max_length).all()
    assert (packs.pieces.lengths >= 1).all() if len(packs) else True


def test_the_seed_decides_which_of_equal_samples_go_together_and_nothing_else():
    lengths = np.random.RandomState(5).randint(1, 300, 2000)
    first, again, other = (
        best_fit(lengths, 8192, np.random.RandomState(seed)) for seed in (0, 0, 1)
    )
    assert first.fingerprint() == again.fingerprint() != other.fingerprint()
    assert contents(first, lengths) == contents(other, lengths)
    assert first.fingerprint() == "a2e7bbd133932878"


@pytest.mark.parametrize("long", [70_000, 5_000_000_000])
def test_lengths_of_more_than_16_and_32_bits_are_sorted_and_summed_rightly(long):
    lengths = np.array([3, long, 70_000 - 65_536, 65_536, 65_535, 9], dtype=np.int64)
    groups = best_fit(lengths, long + 12)
    expected = Counter(map(tuple, item_level_best_fit(lengths.tolist(), long + 12)))
    assert contents(groups, lengths) == expected
    int32 = np.full(3, 2**31 - 1, dtype=np.int32)
    assert next_fit(int32, 2**33).tolist() == [[0, 1, 2]]
    assert len(concat(int32, 2**31 - 1)) == 3


def test_ten_billion_samples_do_not_overflow_the_bookkeeping():
    values, counts = np.array([2, 3]), np.array([5 * 10**9, 5 * 10**9])
    runs, sizes = _best_fit_runs(values, counts, 10**10)
    assert sum(used * each for _, used, each, _ in runs) == sizes.sum() == 10**10
    assert len(sizes) == 3


def test_a_million_lognormal_samples_take_as_few_packs_as_the_best_known():
    lengths = lognormal(5.5, 1.0, 1_000_000, np.random.default_rng(0))
    groups = best_fit(lengths, 8192, np.random.default_rng(1))
    assert len(groups) <= 49_184 == -(-lengths.sum() // 8192)
    assert groups.sums(lengths).max() <= 8192
    assert (np.bincount(groups.members, minlength=len(lengths)) == 1).all()


def test_a_million_long_samples_take_few_more_packs_than_the_bound():
    lengths = lognormal(7.5, 0.8, 1_000_000, np.random.default_rng(0))
    assert -(-lengths.sum() // 8192) == 291_622
    assert len(best_fit(lengths, 8192)) <= 291_800


def test_best_fit_needs_no_more_packs_than_next_fit_on_real_shapes():
    rng = np.random.default_rng(3)
    spike = np.where(rng.random(3000) < 0.3, 2048, rng.integers(1, 2048, 3000))
    for lengths in (spike, np.sort(spike), rng.integers(1, 9, 3000), np.full(3000, 700)):
        assert len(best_fit(lengths, 2048)) <= len(next_fit(lengths, 2048))


class TestOverlong:
    def test_a_sample_of_10_at_max_length_5_is_refused_with_row_and_numbers(self):
        with pytest.raises(ValueError, match=r"1 samples.*max_length=5.*row 0.*10 tokens"):
            pack_samples(np.array([10]), 5)
        with pytest.raises(ValueError, match=r"2 samples.*max_length=5.*row 1.*7 tokens"):
            best_fit(np.array([5, 7, 1, 9]), 5)

    @pytest.mark.parametrize(
        "policy, expected, tokens",
        [
            ("truncate", [[(0, 0, 5)]], 5),
            ("split", [[(0, 0, 5)], [(0, 5, 10)]], 0),
            ("drop", [], 10),
        ],
    )
    @pytest.mark.parametrize("strategy", ["best_fit", "next_fit"])
    def test_a_sample_of_10_at_max_length_5_follows_the_policy(
        self, policy, expected, tokens, strategy
    ):
        packs, report = pack_samples(np.array([10]), 5, strategy, policy)
        got = [
            [tuple(map(int, piece)) for piece in zip(*packs[i], strict=True)]
            for i in range(len(packs))
        ]
        assert got == expected
        assert (report.count, report.tokens, report.first_row, report.first_length) == (
            1,
            tokens,
            0,
            10,
        )
        assert "row 0 with 10 tokens" in str(report)

    def test_nothing_is_reported_or_cut_where_all_samples_fit(self):
        pieces, report = cut_overlong(np.array([5, 1]), 5, "split")
        assert pieces is None and report.count == 0 and "no sample" in str(report)

    def test_the_sign_of_a_modality_length_is_ignored(self):
        packs, _ = pack_samples(np.array([-4, 3, -3, 2]), 6)
        assert sorted(packs.fills(np.array([-4, 3, -3, 2])).tolist()) == [6, 6]


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: pack_samples(np.array([1]), 0), "max_length must be .* at least 1 token, got 0"),
        (lambda: pack_samples(np.array([1]), 2.5), "max_length .* got 2.5"),
        (lambda: pack_samples(np.array([3, 0, 0]), 4), "at least 1 token, got 0 at row 1"),
        (lambda: pack_samples(np.array([1.5]), 4), "one whole number a sample"),
        (
            lambda: pack_samples(np.array([1]), 4, "worst_fit"),
            "strategy must be one of .*'worst_fit'",
        ),
        (
            lambda: pack_samples(np.array([1]), 4, overlong="keep"),
            "overlong must be one of .*'keep'",
        ),
    ],
)
def test_bad_input_is_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_outlook_says_when_packing_can_win_little():
    near = np.random.default_rng(0).integers(1500, 2049, 500)
    assert "no two of them share a pack" in packing_outlook(near, 2048)
    same = np.append(np.full(900, 600), np.arange(1, 101))
    assert "90% of the samples have 600 tokens" in packing_outlook(same, 2048)
    assert "a max_length of 1800" in packing_outlook(same, 2048)
    assert packing_outlook(lognormal(5, 1, 500, np.random.default_rng(0)), 8192) is None
    assert packing_outlook(np.zeros(0, dtype=int), 8192) is None
