from argparse import Namespace

import numpy as np
import pytest

from xlength.bench import pack_peers
from xlength.bench.packing import run
from xlength.plan.pack import best_fit, next_fit


@pytest.mark.parametrize("seed", range(3))
def test_the_loops_pack_as_ours_do(seed):
    lengths = np.random.RandomState(seed).randint(1, 100, 400)
    assert pack_peers.next_fit_in_loops(lengths, 128) == len(next_fit(lengths, 128))
    ours = len(best_fit(lengths, 128))
    assert -(-lengths.sum() // 128) <= ours <= pack_peers.first_fit_in_loops(lengths, 128)


def test_every_row_says_what_was_measured_against_what(tmp_path, monkeypatch):
    # Peers that are installed need seconds even for few samples; they are run by hand.
    monkeypatch.setattr("xlength.bench.packing.find_spec", lambda name: None)
    np.save(tmp_path / "lengths.npy", np.random.RandomState(0).randint(1, 500, 3000))
    options = Namespace(lengths=str(tmp_path / "lengths.npy"), quick=True, seed=0)
    rows = run(options)
    assert len(rows) == 5
    for row in rows:
        assert row["ours"] > 0 and row["note"]
        if "peer" in row:
            assert row["ratio"] == pytest.approx(row["peer"] / row["ours"])
    packs = [row for row in rows if "peer_packs" in row]
    assert all(row["bound"] <= row["packs"] <= row["peer_packs"] for row in packs)
    (plan,) = [row for row in rows if "fill" in row]
    assert plan["fill"] > 0.98 and plan["repeated"] == plan["dropped"] == 0


@pytest.mark.long
def test_installed_peers_run():
    lengths = np.random.RandomState(0).randint(1, 500, 300)
    ours = len(best_fit(lengths, 512))
    for package, call in (
        ("binpacking", pack_peers.by_binpacking),
        ("numba", pack_peers.first_fit_by_numba),
        ("trl", pack_peers.TrlBestFit(lengths)),
    ):
        pytest.importorskip(package)
        assert call(lengths, 512) >= ours
