"""Packing against what others do: time, packs, and the start of training."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np

from xlength.bench import pack_peers as peers
from xlength.bench.timing import peak_bytes, seconds
from xlength.plan.cost import ATTENTION, TOKENS
from xlength.plan.groups import Groups, Ints
from xlength.plan.pack import best_fit, next_fit
from xlength.plan.packing import Packing, pack_windows
from xlength.plan.report import batchmate_repeat

MAX_LENGTH, WORLD_SIZE = 8192, 8

Row = dict[str, Any]


def run(options: Namespace) -> list[Row]:
    """Rows for ``best_fit`` and ``next_fit`` beside their peers, the plan ``Packing``, and the time
    to the first batch.

    Peers: plain Python loops of first-fit-decreasing and next-fit; and where they are installed
    (extra ``bench``) ``binpacking``, first-fit-decreasing under ``numba`` in groups of 100,000, and
    TRL's best-fit-decreasing, which copies the tokens too. Those whose time grows with the square
    of the samples get fewer of them, as do we in the same row. ``packs`` and ``peer_packs`` are
    their results, ``bound`` the number that no packing can go below.
    """
    rows = []
    for case, lengths in _cases(options):
        rows += list(_best_fit_rows(case, lengths, options))
    if not options.lengths and not options.quick:
        rows.append(_ten_million(options.seed))
    rows.append(_plan_row(options))
    rows += list(_start_rows(options))
    return rows


def _cases(options: Namespace) -> Iterator[tuple[str, Ints]]:
    if options.lengths:
        given: Ints = np.abs(np.load(options.lengths)).astype(np.int64)
        yield f"{len(given):,} lengths of yours", given
        return
    count = 50_000 if options.quick else 1_000_000
    for mean, spread in ((5.5, 1.0), (7.5, 0.8)):
        yield f"lognormal({mean}, {spread}) x {count:,}", _lognormal(mean, spread, count, options)


def _lognormal(mean: float, spread: float, count: int, options: Namespace) -> Ints:
    drawn = np.random.default_rng(options.seed).lognormal(mean, spread, count)
    return np.clip(drawn, 8, MAX_LENGTH).astype(np.int64)


def _best_fit_rows(case: str, lengths: Ints, options: Namespace) -> Iterator[Row]:
    size = max(MAX_LENGTH, int(lengths.max()))
    few = lengths[: 2_000 if options.quick else 10_000]
    limits = {5.5: 0.15, 7.5: 0.3}
    limit = next((v for k, v in limits.items() if f"({k}," in case and len(lengths) == 10**6), None)

    def ours(given: Ints) -> Groups:
        return best_fit(given, size, np.random.RandomState(options.seed))

    def row(peer: str, call: Callable[[Ints, int], int], given: Ints, repeats: int = 1) -> Row:
        packs: list[int] = []
        mine = seconds(lambda: ours(given))
        theirs = seconds(lambda: packs.append(call(given, size)), repeats)
        name = case if given is lengths else f"{case}, the first {len(given):,}"
        return {
            "case": f"best_fit, {name}",
            "ours": mine,
            "peer": theirs,
            "ratio": theirs / mine,
            "limit": limit if given is lengths else None,
            "packs": len(ours(given)),
            "peer_packs": packs[0],
            "bound": -(-int(given.sum()) // size),
            "note": f"peer: {peer}",
        }

    first = row("next-fit in Python loops", peers.next_fit_in_loops, lengths, 3)
    yield {**first, "bytes_per_sample": peak_bytes(lambda: ours(lengths)) / len(lengths)}
    yield row("first-fit-decreasing in Python loops", peers.first_fit_in_loops, few)
    if find_spec("binpacking"):
        yield row("binpacking.to_constant_volume", peers.by_binpacking, few)
    if find_spec("numba"):
        peers.first_fit_by_numba(few, size)  # compiles
        yield row("first-fit-decreasing under numba", peers.first_fit_by_numba, lengths)
    if find_spec("trl"):
        some = lengths[: int(np.searchsorted(np.cumsum(lengths), 2**30))]  # its offsets are int32
        some = lengths if len(some) == len(lengths) else some
        yield row("trl best-fit-decreasing", peers.TrlBestFit(some), some)
    order = np.random.RandomState(options.seed).permutation(len(lengths))
    mine = seconds(lambda: next_fit(lengths, size, order))
    yield {
        "case": f"next_fit, {case}",
        "ours": mine,
        "peer": first["peer"],
        "ratio": first["peer"] / mine,
        "packs": len(next_fit(lengths, size, order)),
        "note": "peer: next-fit in Python loops",
    }


def _ten_million(seed: int) -> Row:
    lengths = _lognormal(5.5, 1.0, 10_000_000, Namespace(seed=seed))
    packs: list[int] = []
    mine = seconds(
        lambda: packs.append(len(best_fit(lengths, MAX_LENGTH, np.random.RandomState(seed))))
    )
    return {
        "case": "best_fit, lognormal(5.5, 1.0) x 10,000,000",
        "ours": mine,
        "limit": 1.2,
        "ratio": 1.2 / mine,
        "packs": packs[0],
        "bound": -(-int(lengths.sum()) // MAX_LENGTH),
        "note": "ratio: limit / ours",
    }


def _plan_row(options: Namespace) -> Row:
    """Fill, wall efficiency and repeats of the plan, for 8 ranks."""
    if options.lengths:
        lengths: Ints = np.abs(np.load(options.lengths)).astype(np.int64)
    else:
        lengths = _lognormal(5.0, 1.1, 10_000 if options.quick else 45_000, options)
    size = int(lengths.max())
    plan = Packing(size)
    build = dict(seed=options.seed, world_size=WORLD_SIZE)
    first = plan.build(lengths, epoch=0, **build)
    second = plan.build(lengths, epoch=1, num_steps=first.num_steps, **build)
    rng = np.random.RandomState(options.seed)
    packs = pack_windows(rng.permutation(len(lengths)), lengths, size, plan.window, rng)
    row: Row = {
        "case": f"Packing(max_length={size}), {len(lengths):,} samples, {WORLD_SIZE} ranks",
        "ours": seconds(lambda: plan.build(lengths, epoch=0, **build)),
        "fill": float(lengths.sum() / (len(packs) * size)),
        "batchmate_repeat": batchmate_repeat(first.groups, second.groups),
        "repeated": first.repeated,
        "dropped": first.dropped,
        "note": "wall efficiency counts every pack as max_length tokens",
    }
    for name, cost in (("tokens", TOKENS), ("attention", ATTENTION)):
        slowest = plan.padded_costs(lengths, first.groups, cost)[first.steps].max(axis=1).sum()
        row[f"wall_efficiency_{name}"] = float(cost.of(lengths).sum() / (WORLD_SIZE * slowest))
    return row


def _start_rows(options: Namespace) -> Iterator[Row]:
    """From a tokenised data set on disk to the first batch."""
    count = 20_000 if options.quick else 1_000_000
    with peers.short_rows(count, options.seed) as dataset:
        mine = seconds(lambda: peers.first_batch_of_ours(dataset, 2048))
        calls: dict[str, Callable[[Any, int], Any]] = {
            "a packer under datasets.map": peers.first_batch_of_map
        }
        if find_spec("trl"):
            calls["trl.pack_dataset"] = peers.first_batch_of_trl
        for name, call in calls.items():
            theirs = seconds(lambda call=call: call(dataset, 2048), 1)  # type: ignore[misc]
            yield {
                "case": f"time to the first batch, {count:,} short rows",
                "ours": mine,
                "peer": theirs,
                "ratio": theirs / mine,
                "limit": theirs / 10,
                "note": f"peer: {name}; limit: a tenth of it",
            }
