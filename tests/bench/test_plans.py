"""``xlength bench plans``: every strategy by the same measures, every sample accounted for."""

from argparse import Namespace

import numpy as np
import pytest

from xlength.bench import plans
from xlength.bench.plan_peers import of_batches, peers

COLUMNS = {"wall_efficiency_tokens", "rank_balance", "batchmate_repeat", "plan_seconds"}


def test_the_quick_bench_shows_our_plans_ahead_of_all_peers():
    rows = plans.run(Namespace(lengths=None, quick=True, seed=0))
    table = {row["case"]: row for row in rows if "steps" in row}
    budget = table["TokenBudget, window 4096"]
    assert {"DefaultSampler", "transformers BatchRebalanceSampler", "FixedBatch"} <= set(table)
    for case, row in table.items():
        assert set(row) >= COLUMNS | {"ours", "peer", "ratio", "limit", "note"}
        assert row["dropped"] == 0, case
        if "TokenBudget" not in case:
            assert row["ours"] < budget["ours"]
    assert 0.9 < budget["ours"] <= budget["limit"] < 1
    timed = [row for row in rows if "bytes_per_sample" in row]
    assert len(timed) == 4 and all(row["bytes_per_sample"] <= 64 for row in timed)


def test_lengths_of_a_file_are_taken(tmp_path):
    lengths = np.random.RandomState(0).randint(1, 300, 500)
    assert plans._lengths(Namespace(lengths=_saved(tmp_path, -lengths), seed=0)).tolist() == (
        lengths.tolist()
    )


def _saved(folder, lengths):
    np.save(folder / "lengths.npy", lengths)
    return str(folder / "lengths.npy")


def test_peers_are_run_for_every_rank():
    lengths = np.random.RandomState(0).randint(1, 300, 500)
    for strategy in peers(lengths, 4, 8, 2000, seed=0):
        epoch = strategy.build(0, None)
        assert epoch.world_size == 8
        assert set(epoch.groups.members.tolist()) == set(range(500)), strategy.name


def test_only_the_steps_that_all_ranks_take_count():
    epoch = of_batches([([[0], [1], [2]], 5), ([[3], [4]], 5)])
    assert epoch.num_steps == 2 and epoch.dropped == 1
    assert [epoch.groups[g].tolist() for g in epoch.steps[1]] == [[1], [4]]


def test_the_limit_is_what_the_longest_sample_leaves():
    lengths = np.append(np.full(700, 100), 10_000)
    attention = 700 * (100 + 100**2 / 12288)
    giant = 10_000 + 10_000**2 / 12288
    waiting = 7 * (giant - 10_000 / 100 * (100 + 100**2 / 12288))
    expected = (attention + giant) / (attention + giant + waiting)
    assert plans._limit(lengths, 10_000) == pytest.approx(expected)
