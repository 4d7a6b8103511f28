"""``xlength bench streams`` runs, and its figures of waiting and padding are in their bounds."""

from argparse import Namespace

from xlength.bench.streams import LIMIT, run


def test_the_rows_have_the_figures_and_the_pool_saves_time():
    rows = run(Namespace(lengths=None, quick=True, seed=0))
    overhead = [row for row in rows if row["case"].startswith("a sample")]
    assert len(overhead) == 4
    assert all(row["limit"] == LIMIT and row["ours"] > 0 for row in overhead)
    ranks = {row["case"].split(": ")[1]: row for row in rows if row["case"].startswith("8 ranks")}
    assert ranks["pool of 1,000"]["waiting"] < 1.15 < ranks["as it comes"]["waiting"]
    assert ranks["pool of 1,000"]["padding_efficiency"] > 0.95
    assert ranks["sliding buffer of 1,000"]["wall_time"] < ranks["as it comes"]["wall_time"] / 3
