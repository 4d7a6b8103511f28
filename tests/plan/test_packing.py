from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xlength.plan.cost import ATTENTION, TOKENS
from xlength.plan.epoch import epoch_rng
from xlength.plan.groups import Groups
from xlength.plan.packing import Packing, pack_windows, set_count
from xlength.plan.report import batchmate_repeat, rank_balance

LENGTHS = Path(__file__).parents[3] / "shared/lengths"


def epochs(plan, lengths, world_size, count=3, seed=0):
    """The first epochs as a sampler builds them: the first fixes the number of steps."""
    first = plan.build(lengths, seed=seed, epoch=0, world_size=world_size)
    more = [
        plan.build(lengths, seed=seed, epoch=e, world_size=world_size, num_steps=first.num_steps)
        for e in range(1, count)
    ]
    return [first, *more]


def wall_efficiency(plan, epoch, lengths, cost):
    slowest = plan.padded_costs(lengths, epoch.groups, cost)[epoch.steps].max(axis=1)
    return cost.of(lengths).sum() / (epoch.world_size * slowest.sum())


def heavy_tailed(n=6000, seed=0, high=4096):
    rng = np.random.RandomState(seed)
    return np.clip(np.exp(rng.normal(5.0, 1.1, n)).astype(np.int64), 1, high)


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=150),
    st.integers(1, 9),
    st.sampled_from(["best_fit", "next_fit"]),
    st.sampled_from([None, 1, 7, 40]),
    st.integers(1, 3),
)
@settings(max_examples=150, deadline=None)
def test_every_sample_is_drawn_and_all_ranks_take_as_many_steps_in_every_epoch(
    values, world_size, strategy, window, accumulate
):
    lengths = np.array(values)
    plan = Packing(60, strategy, window, accumulate=accumulate)
    for epoch in epochs(plan, lengths, world_size):
        assert epoch.steps.shape[1] == world_size and epoch.num_steps % accumulate == 0
        assert sorted(epoch.steps.ravel()) == list(range(len(epoch.groups)))
        assert set(epoch.groups.members.tolist()) == set(range(len(values)))
        assert epoch.groups.sums(lengths).max() <= 60
        assert epoch.dropped == 0
        assert epoch.repeated == max(0, epoch.num_steps * world_size - len(values))


def test_nothing_is_repeated_where_packs_can_be_split():
    lengths = heavy_tailed(100)
    (epoch,) = epochs(Packing(4096), lengths, 16, count=1)
    assert epoch.repeated == epoch.dropped == 0 and epoch.groups.sizes.min() >= 1
    assert len(pack_windows(np.arange(100), lengths, 4096, None, epoch_rng(0, 0))) < 16


def test_only_single_samples_are_repeated_and_never_the_costliest():
    lengths = np.array([9, 8, 7, 6, 10])
    (epoch,) = epochs(Packing(10), lengths, 4, count=1)
    assert epoch.repeated == 3 and (epoch.groups.sizes == 1).all()
    assert epoch.groups.members.tolist().count(4) == 1


def test_packs_change_from_epoch_to_epoch_and_not_from_run_to_run():
    lengths = heavy_tailed()
    one, two = (epochs(Packing(4096, window=512), lengths, 4) for _ in range(2))
    assert [e.fingerprint() for e in one] == [e.fingerprint() for e in two]
    assert len({e.groups.fingerprint() for e in one}) == 3
    golden = Packing(500, window=64).build(
        np.random.RandomState(0).randint(1, 200, 300), seed=0, epoch=0, world_size=2
    )
    assert golden.fingerprint() == "d4a91834d28d410c"
    other = epochs(Packing(4096, window=512), lengths, 4, seed=1)
    assert other[0].fingerprint() != one[0].fingerprint()


def test_the_costliest_step_comes_first_and_costs_do_not_trend():
    lengths = heavy_tailed()
    plan = Packing(4096, window=512)
    for epoch in epochs(plan, lengths, 4):
        costs = epoch.groups.sums(ATTENTION.of(lengths))[epoch.steps].max(axis=1)
        assert costs.argmax() == 0
        assert abs(np.corrcoef(costs[1:], np.arange(len(costs) - 1))[0, 1]) < 0.3


def test_dealing_by_attention_cost_beats_dealing_at_random():
    lengths = heavy_tailed()
    (epoch,) = epochs(Packing(4096, window=512), lengths, 8, count=1)
    costs = epoch.groups.sums(ATTENTION.of(lengths))
    shuffled = np.random.RandomState(0).permutation(costs).reshape(-1, 8)
    assert rank_balance(costs[epoch.steps]) > 0.99 > rank_balance(shuffled)


def test_joining_part_empty_packs_fills_windows_as_well_as_no_windows():
    lengths = heavy_tailed()
    order = np.random.RandomState(1).permutation(len(lengths))
    windowed = pack_windows(order, lengths, 4096, 500, epoch_rng(0, 0))
    assert sorted(windowed.members) == list(range(len(lengths)))
    whole = pack_windows(order, lengths, 4096, None, epoch_rng(0, 0))
    assert len(windowed) <= 1.01 * len(whole)


def test_a_later_epoch_that_needs_more_packs_widens_its_windows():
    lengths = heavy_tailed(2000)
    plan = Packing(4096, window=50)
    fewest = len(pack_windows(np.arange(2000), lengths, 4096, None, epoch_rng(0, 0)))
    usual = len(pack_windows(np.arange(2000), lengths, 4096, 50, epoch_rng(0, 0)))
    assert fewest < usual
    epoch = plan.build(lengths, seed=0, epoch=3, world_size=1, num_steps=fewest)
    assert epoch.num_steps == fewest and epoch.dropped == 0
    with pytest.raises(ValueError, match=f"num_steps={fewest - 1} is too few"):
        plan.build(lengths, seed=0, epoch=3, world_size=1, num_steps=fewest - 1)


@pytest.mark.parametrize("rows", [2, 3])
def test_several_packs_to_a_batch_are_alike_in_cost(rows):
    lengths = heavy_tailed()
    plan = Packing(4096, packs_per_batch=rows, window=None)
    (epoch,) = epochs(plan, lengths, 2, count=1)
    assert sorted(epoch.groups.members) == list(range(len(lengths)))
    assert epoch.groups.sums(lengths).max() <= rows * 4096
    assert rank_balance(epoch.groups.sums(ATTENTION.of(lengths))[epoch.steps]) > 0.99


def test_drop_last_leaves_out_other_packs_in_every_epoch():
    lengths = heavy_tailed(1500)
    first, second, third = epochs(Packing(4096, drop_last=True), lengths, 8)
    assert first.dropped > 0 and first.repeated == 0
    missing = [set(range(1500)) - set(e.groups.members.tolist()) for e in (first, second, third)]
    assert missing[0] != missing[1]


@pytest.mark.parametrize(
    "policy, drawn, fill", [("truncate", [0, 1, 2, 3], 17), ("drop", [0, 2, 3], 12)]
)
def test_overlong_samples_follow_the_policy(policy, drawn, fill):
    lengths = np.array([4, 9, 5, 3])
    with pytest.raises(ValueError, match="row 1 with 9 tokens"):
        Packing(5).build(lengths, seed=0, epoch=0, world_size=1)
    plan = Packing(5, overlong=policy)
    epoch = plan.build(lengths, seed=0, epoch=0, world_size=1)
    assert sorted(epoch.groups.members) == drawn and epoch.dropped == 4 - len(drawn)
    assert epoch.groups.sums(np.minimum(lengths, 5)).sum() == fill
    (note,) = [n for n in plan.notes(lengths) if "longer than max_length=5" in n]
    assert "1 samples" in note and "row 1 with 9 tokens" in note


def test_text_only_lengths_may_be_negative():
    lengths = heavy_tailed(300)
    a, b = (Packing(4096).build(x, seed=0, epoch=0, world_size=2) for x in (lengths, -lengths))
    assert a.fingerprint() == b.fingerprint()


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Packing(0), "max_length must be .* got 0"),
        (lambda: Packing(8, "concat"), "'concat'; a PackedDataset can"),
        (lambda: Packing(8, overlong="split"), "'split'; a PackedDataset can"),
        (lambda: Packing(8, window=0), "window must be"),
        (lambda: Packing(8, cost="toknes"), "did you mean 'tokens'"),
        (
            lambda: Packing(8).build(np.array([3, -2]), seed=0, epoch=0, world_size=1),
            "one column and one sign",
        ),
        (lambda: Packing(8).build(np.array([[3, 2]]), seed=0, epoch=0, world_size=1), "one column"),
        (lambda: Packing(8).build(np.array([], int), seed=0, epoch=0, world_size=1), "empty"),
        (
            lambda: Packing(8, overlong="drop").build(np.array([9]), seed=0, epoch=0, world_size=1),
            "no sample is left",
        ),
    ],
)
def test_bad_options_and_lengths_are_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_set_count_splits_the_fullest_first():
    packs = Groups.from_lists([[0, 1, 2, 3], [4, 5], [6]])
    sizes = np.array([3, 3, 2, 1, 1, 1, 20])
    rng = np.random.RandomState(0)
    assert set_count(packs, sizes, 4, rng).tolist() == [[0, 1], [2, 3], [4, 5], [6]]
    assert len(set_count(packs, sizes, 7, rng)) == 7
    assert len(set_count(packs, sizes, 2, rng)) == 2


def test_the_figures_on_the_real_mixture_are_reached():
    if not LENGTHS.exists():
        pytest.skip("the shared lengths are not here")
    lengths = np.load(LENGTHS / "mixture.npy").astype(np.int64)
    plan = Packing(11546)
    first, second = epochs(plan, lengths, 8, count=2)
    packs = pack_windows(
        epoch_rng(0, 0).permutation(len(lengths)), lengths, 11546, 2048, epoch_rng(0, 0)
    )
    assert lengths.sum() / (len(packs) * 11546) >= 0.990
    assert wall_efficiency(plan, first, lengths, TOKENS) >= 0.985
    assert wall_efficiency(plan, first, lengths, ATTENTION) >= 0.980
    assert batchmate_repeat(first.groups, second.groups) <= 0.03
    assert first.repeated == first.dropped == 0
    whole = pack_windows(np.arange(len(lengths)), lengths, 11546, None, epoch_rng(0, 0))
    assert lengths.sum() / (len(whole) * 11546) >= 0.999
