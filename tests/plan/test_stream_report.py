"""The report on streams: its figures are those of the sorters, and its choice has a reason."""

import numpy as np
import pytest

from xlength.plan.cost import ATTENTION, TOKENS
from xlength.plan.stream_report import ENOUGH, stream_report

LENGTHS = np.clip(np.random.RandomState(0).lognormal(5, 1, 5000), 1, 2048).astype(int)
GRID = dict(world_size=4, batch_size=4, num_workers=(1, 4), pool_sizes=(0, 2, 32, 128, 512))


@pytest.fixture(scope="module")
def report():
    return stream_report(LENGTHS, **GRID)


def rows_of(report, **wanted):
    return [row for row in report["rows"] if all(row[k] == v for k, v in wanted.items())]


def test_there_is_a_row_for_every_setting_that_makes_sense(report):
    settings = {
        (r["mode"], r["pool_size"], r["micro_batch_size"], r["num_workers"]) for r in report["rows"]
    }
    expected = {("off", 0, 0, workers) for workers in (1, 4)}
    for mode in ("pool", "sliding"):
        for workers in (1, 4):
            expected |= {(mode, pool, 1, workers) for pool in (2, 32, 128, 512)}
            expected |= {(mode, pool, 4, workers) for pool in (32, 128, 512)}
    assert settings == expected
    assert len(report["rows"]) == len(expected)


def test_larger_pools_wait_less_and_micro_batches_save_padding(report):
    for mode in ("pool", "sliding"):
        waits = [
            r["waiting"] for r in rows_of(report, mode=mode, micro_batch_size=4, num_workers=1)
        ]
        assert waits == sorted(waits, reverse=True)
    [off] = rows_of(report, mode="off", num_workers=1)
    [ones] = rows_of(report, mode="pool", pool_size=512, micro_batch_size=1, num_workers=1)
    [fours] = rows_of(report, mode="pool", pool_size=512, micro_batch_size=4, num_workers=1)
    assert off["padding_efficiency"] < 0.5
    assert ones["padding_efficiency"] < 0.5
    assert fours["padding_efficiency"] > 0.95
    assert fours["waiting"] < 1.15 < off["waiting"]


def test_workers_cost_memory_and_change_nothing_else(report):
    for one, four in zip(
        rows_of(report, num_workers=1), rows_of(report, num_workers=4), strict=True
    ):
        assert four["memory_samples"] == 4 * one["memory_samples"] == 4 * one["pool_size"]
        same = ("mode", "pool_size", "micro_batch_size", "waiting", "wall_efficiency")
        assert [one[k] for k in same] == [four[k] for k in same]
    largest = rows_of(report, mode="pool", pool_size=512, micro_batch_size=4, num_workers=4)[0]
    assert largest["memory_bytes"] == pytest.approx(512 * 4 * LENGTHS.mean() * 16, rel=1e-6)
    assert largest["warmup_samples"] == 512


def test_the_recommended_setting_is_the_smallest_pool_that_is_nearly_the_best(report):
    chosen = report["recommended"]
    best = max(row["wall_efficiency"] for row in report["rows"])
    assert chosen in report["rows"]
    assert chosen["wall_efficiency"] >= (1 - ENOUGH) * best
    smaller = [row for row in report["rows"] if row["pool_size"] < chosen["pool_size"]]
    assert all(row["wall_efficiency"] < (1 - ENOUGH) * best for row in smaller)
    assert chosen["num_workers"] == 1
    assert f"pool_size={chosen['pool_size']}" in report["reason"]
    assert f"{chosen['wall_efficiency']:.3f}, up from" in report["reason"]


def test_the_curve_is_the_recommended_setting_over_pool_sizes_and_modes(report):
    assert [(row["mode"], row["pool_size"]) for row in report["curve"]] == [
        ("off", 0),
        *[(mode, pool) for mode in ("pool", "sliding") for pool in (32, 128, 512)],
    ]


def test_equal_lengths_need_no_pool():
    report = stream_report(np.full(100, 64), **{**GRID, "pool_sizes": (0, 16)})
    assert report["recommended"]["pool_size"] == 0
    assert report["reason"].startswith("no pool: the best setting would raise")


def test_attention_costs_weigh_long_samples_more_and_seconds_follow_from_the_speed():
    grid = {**GRID, "pool_sizes": (0, 64), "modes": ("pool",)}
    tokens, attention = (
        stream_report(LENGTHS * 8, **grid, samples_per_second=32, cost=cost)["rows"][0]
        for cost in (TOKENS, ATTENTION)
    )
    assert attention["waiting"] > tokens["waiting"]
    report = stream_report(LENGTHS, **grid, samples_per_second=32)
    assert rows_of(report, pool_size=64)[0]["warmup_seconds"] == 2.0


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([], {}, "lengths must be"),
        ([3, 0, 4], {}, "1 zeros"),
        ([3, 4], dict(world_size=0), "world_size must be at least 1, got 0"),
        ([3, 4], dict(batch_size=0), "batch_size must be at least 1, got 0"),
        ([3, 4], dict(num_workers=[0]), r"num_workers must be at least 1 each, got \[0\]"),
        (
            [3, 4],
            dict(pool_sizes=[1]),
            r"pool_sizes must be 0 .* at least 2 each, got \[1\]",
        ),
        ([3, 4], dict(pool_sizes=[]), "pool_sizes must be"),
    ],
)
def test_bad_input_is_refused_by_name(lengths, options, message):
    with pytest.raises(ValueError, match=message):
        stream_report(np.array(lengths, dtype=int), **options)


@pytest.mark.parametrize("mode", ["pool", "sliding"])
def test_pools_larger_than_the_usual_number_of_samples_are_simulated_too(mode):
    options = dict(pool_sizes=(8192,), modes=(mode,), num_workers=(1,), micro_batch_sizes=(4,))
    (row,) = stream_report(LENGTHS, world_size=2, batch_size=4, **options)["rows"]
    assert 1 <= row["waiting"] < 1.2 and 0.9 < row["padding_efficiency"] <= 1
