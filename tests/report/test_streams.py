"""The row of a stream is that of real LengthPoolSortDatasets, one a rank."""

import numpy as np
import pytest

from tests.report.test_measures import figures, tool_chats
from xlength.datasets.pool_sort import LengthPoolSortDataset
from xlength.plan.cost import ATTENTION, TOKENS
from xlength.report.measures import measure
from xlength.report.strategies import Setting
from xlength.report.streams import pool_strategy, stream_order


@pytest.mark.parametrize("cost", [TOKENS, ATTENTION], ids=["tokens", "attention"])
def test_the_figures_of_a_pool_are_those_of_the_real_data_set_on_every_rank(cost):
    lengths = tool_chats(1500)
    setting = Setting(world_size=3, batch_size=4, cost=cost)
    strategy = pool_strategy(lengths, setting)
    order = stream_order(len(lengths), 0)
    ranks = []
    for rank in range(3):
        stream = [{"length": int(lengths[i]), "index": int(i)} for i in order]
        options = dict(strategy.options)
        data = LengthPoolSortDataset(
            stream, shard="rank", dp_rank=rank, dp_world_size=3, repeat=False, **options
        )
        drawn = [sample["index"] for sample in data]
        steps = 1500 // 3 // 4
        ranks.append([drawn[4 * step : 4 * step + 4] for step in range(steps)])
    row = measure(strategy, lengths, cost, ATTENTION)
    found = figures(ranks, lengths, cost, packed=False)
    assert row.steps == found["steps"]
    assert row.padding_efficiency == pytest.approx(found["padding_efficiency"], rel=1e-9)
    assert row.rank_balance == pytest.approx(found["rank_balance"], rel=1e-9)
    assert row.wall_efficiency(cost) == pytest.approx(found["wall_efficiency"], rel=1e-9)
    assert 0.7 < row.wall_efficiency_tokens < 1


def test_a_long_stream_is_judged_by_its_beginning_and_a_tiny_one_works():
    lengths = np.tile(tool_chats(700), 100)
    row = measure(pool_strategy(lengths, Setting(8, 16)), lengths[:65_536], TOKENS, ATTENTION)
    assert "its first 65,536 samples" in row.strategy.note
    assert row.steps == 65_536 // 8 // 16
    few = np.array([5, 9, 4, 7], dtype=np.int64)
    assert measure(pool_strategy(few, Setting(2, 16)), few, TOKENS, ATTENTION).steps == 1
