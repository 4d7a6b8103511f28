"""The report's figures are those of the real samplers, drawn rank by rank."""

from pathlib import Path

import numpy as np
import pytest
from mmengine.dataset import DefaultSampler
from torch.utils.data import BatchSampler

from xlength.plan.cost import ATTENTION, TOKENS
from xlength.plan.shapes import shape_lengths
from xlength.report.choice import WORTH, recommend
from xlength.report.measures import measure
from xlength.report.samplers import strategy_of
from xlength.report.strategies import (
    Setting,
    best_window,
    measure_all,
    score,
    strategies,
    window_curve,
)
from xlength.samplers.length_grouped import LengthGroupedSampler
from xlength.samplers.plan import PlanBatchSampler, PlanSampler

SHARED = Path(__file__).resolve().parents[3] / "shared/lengths"
SETTING = Setting(world_size=4, batch_size=8)


def tool_chats(num_samples=3641, seed=0):
    """Lengths like those of tool calls: a few schemas, each with a spike, and a heavy tail."""
    rng = np.random.RandomState(seed)
    schemas = rng.choice([380, 400, 620, 1150], num_samples, p=[0.4, 0.3, 0.2, 0.1])
    return np.clip(schemas + np.exp(rng.normal(3.5, 1.3, num_samples)), 48, 5668).astype(np.int64)


def real_batches(name, options, lengths, setting, epoch):
    """[rank][step] -> samples, from the sampler objects that a loader would ask."""
    result = []
    for rank in range(setting.world_size):
        where = dict(dp_rank=rank, dp_world_size=setting.world_size, seed=setting.seed)
        if name == "DefaultSampler":
            sampler = DefaultSampler(lengths, shuffle=True, seed=setting.seed)
            sampler.rank, sampler.world_size = rank, setting.world_size
            sampler.num_samples = -(-len(lengths) // setting.world_size)
            sampler.total_size = sampler.num_samples * setting.world_size
        elif name == "LengthGroupedSampler":
            sampler = LengthGroupedSampler(lengths, **options, **where)
        else:
            sampler = PlanSampler(lengths, dict(type=name, **options), **where)
        sampler.set_epoch(epoch)
        if isinstance(sampler, PlanSampler):
            batches = PlanBatchSampler(sampler)
        else:
            batches = BatchSampler(sampler, setting.batch_size, drop_last=False)
        result.append(list(batches))
    return result


def figures(ranks, lengths, cost, packed):
    """The measures by their definitions, in loops."""
    sizes = np.abs(lengths)
    slowest = real = padded = 0
    balances = []
    for step in zip(*ranks, strict=True):
        costs = []
        for batch in step:
            longest = max(sizes[i] for i in batch)
            rows = [sizes[i] if packed else longest for i in batch]
            costs.append(sum(float(cost.of(np.array([row]))[0]) for row in rows))
            real += sum(int(sizes[i]) for i in batch)
            padded += int(sum(rows))
        slowest += max(costs)
        balances.append(np.mean(costs) / max(costs))
    drawn = sorted({i for rank in ranks for batch in rank for i in batch})
    useful = sum(float(cost.of(sizes[[i]])[0]) for i in drawn)
    return {
        "steps": len(ranks[0]),
        "padding_efficiency": real / padded,
        "rank_balance": float(np.mean(balances)),
        "wall_efficiency": useful / (len(ranks) * slowest),
        "repeated": sum(len(batch) for rank in ranks for batch in rank) - len(drawn),
        "dropped": len(lengths) - len(drawn),
    }


def mates(ranks):
    return {
        frozenset(pair)
        for rank in ranks
        for batch in rank
        for pair in ((a, b) for a in batch for b in batch if a < b)
    }


def check_rows(lengths, setting):
    for strategy in strategies(lengths, setting):
        row = measure(strategy, lengths, setting.cost, setting.attention)
        name = strategy.name
        now = real_batches(name, strategy.options, lengths, setting, 0)
        for cost, wall in (
            (TOKENS, row.wall_efficiency_tokens),
            (ATTENTION, row.wall_efficiency_attention),
        ):
            found = figures(now, lengths, cost, name == "Packing")
            assert wall == pytest.approx(found["wall_efficiency"], rel=1e-9), name
        assert row.steps == found["steps"] and row.repeated == found["repeated"], name
        assert row.dropped == found["dropped"], name
        assert row.padding_efficiency == pytest.approx(found["padding_efficiency"], rel=1e-9), name
        assert row.rank_balance == pytest.approx(found["rank_balance"], rel=1e-9), name
        # A sample that is drawn twice has two batches; of many samples there are too many pairs.
        if not found["repeated"] and len(lengths) <= 2000:
            pairs = mates(now)
            again = mates(real_batches(name, strategy.options, lengths, setting, 1))
            share = len(pairs & again) / len(pairs)
            assert row.batchmate_repeat == pytest.approx(share, rel=1e-9), name


def test_the_figures_of_every_strategy_are_those_of_the_real_samplers():
    check_rows(tool_chats(700), SETTING)


def test_the_figures_of_two_modalities_are_those_of_the_real_samplers():
    lengths = tool_chats(600)
    lengths[np.random.RandomState(1).random_sample(600) < 0.7] *= -1
    assert [s.name for s in strategies(lengths, SETTING)][-1] == "TokenBudget"  # no packs
    check_rows(lengths, SETTING)


def test_another_seed_and_accumulation_are_simulated_too():
    check_rows(tool_chats(500), Setting(world_size=2, batch_size=4, accumulate=3, seed=7))


def test_figures_hold_for_fewer_samples_than_a_step_takes():
    check_rows(np.array([5, 9, 4, 7, 3], dtype=np.int64), Setting(world_size=8, batch_size=4))


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared length files are not here")
@pytest.mark.parametrize(
    "name", ["bfcl_tools", "chat_misc", "gsm8k", "sroie_receipts_vlm", "openchat_2k"]
)
def test_the_figures_on_real_lengths_are_those_of_the_real_samplers(name):
    lengths = np.load(SHARED / f"{name}.npy").astype(np.int64)
    check_rows(lengths[:1500], Setting(world_size=8, batch_size=16))
    check_rows(lengths, Setting(world_size=8, batch_size=16))


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared length files are not here")
@pytest.mark.parametrize("name", ["gpteacher", "sgd_dialogues", "mixture", "mixture_modality"])
def test_the_figures_on_large_real_sets_are_those_of_the_real_samplers(name):
    lengths = np.load(SHARED / f"{name}.npy").astype(np.int64)
    check_rows(lengths, Setting(world_size=8, batch_size=16))


def test_a_sampler_object_gives_the_strategy_of_the_same_options():
    lengths = tool_chats(400)
    for strategy in strategies(lengths, SETTING):
        where = dict(dp_rank=1, dp_world_size=4, seed=0)
        if strategy.name == "DefaultSampler":
            sampler = DefaultSampler(lengths, seed=0)
        elif strategy.name == "LengthGroupedSampler":
            sampler = LengthGroupedSampler(lengths, **strategy.options, **where)
        else:
            plan = dict(type=strategy.name, **strategy.options)
            sampler = PlanSampler(lengths, plan, **where)
        found = strategy_of(sampler, 8, len(lengths), 4, packed=strategy.packed)
        for epoch in (0, 1):
            first, second = strategy.build(epoch, None), found.build(epoch, None)
            assert first.fingerprint() == second.fingerprint()


def test_a_sampler_of_unknown_kind_has_no_strategy():
    class Mine(DefaultSampler):
        pass

    assert strategy_of(Mine([1, 2], seed=0), 1, 2, 1) is None


def test_the_recommended_strategy_is_the_simplest_that_is_nearly_best():
    lengths = tool_chats()
    rows = measure_all(strategies(lengths, SETTING), lengths, SETTING)
    best = recommend(rows, SETTING)
    top = max(score(row, SETTING.cost) for row in rows)
    assert score(best, SETTING.cost) >= top - WORTH
    simpler = rows[: [row.strategy.name for row in rows].index("FixedBatch")]
    assert all(score(row, SETTING.cost) < top - WORTH for row in simpler)


def test_meeting_batch_mates_again_costs_something_above_a_tenth():
    lengths = tool_chats(600)
    rows = measure_all(strategies(lengths, SETTING), lengths, SETTING)
    often = [row for row in rows if row.batchmate_repeat > 0.1]
    assert 0 < len(often) < len(rows)
    for row in rows:
        price = 0.25 * (row.batchmate_repeat - 0.1) if row in often else 0
        assert score(row, TOKENS) == pytest.approx(row.wall_efficiency_tokens * (1 - price))


def test_equal_lengths_keep_the_default_sampler():
    lengths = np.full(640, 100, dtype=np.int64)
    rows = measure_all(strategies(lengths, SETTING), lengths, SETTING)
    assert recommend(rows, SETTING).strategy.name == "DefaultSampler"


def test_the_recommended_window_is_the_smallest_that_is_nearly_best_and_mixes_enough():
    lengths = shape_lengths("lognormal:5.5,1.2:8,8192", 20_000)
    curve = measure_all(window_curve(lengths, SETTING), lengths, SETTING)
    walls = [row.wall_efficiency_attention for row in curve]
    assert len(curve) >= 7 and walls[0] < walls[-1]
    chosen = best_window(curve, SETTING.cost)
    top = max(score(row, SETTING.cost) for row in curve)
    assert score(chosen, SETTING.cost) >= top - 0.01
    smaller = curve[: curve.index(chosen)]
    assert smaller and all(score(row, SETTING.cost) < top - 0.01 for row in smaller)
