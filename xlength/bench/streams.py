"""What a pool costs a stream's reader, and what it saves the ranks, beside lhotse's bucketing."""

from __future__ import annotations

import time
import warnings
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xlength.datasets.pool_sort import LengthPoolSortDataset
from xlength.plan.pool_options import PoolOptions
from xlength.plan.stream_ranks import orders_of_ranks, steps_of, waiting

POOL_SIZE, BATCH_SIZE, WORLD_SIZE = 1000, 8, 8
LIMIT = 5e-6
"""Seconds a sample that the wrapper may add."""

Row = dict[str, Any]


def run(options: Namespace) -> list[Row]:
    """Rows for the time that a pool adds to a sample, and for what 8 simulated ranks wait and pad.

    Peers: a plain generator that collects, sorts, shuffles and gives, without states or checks; and
    lhotse's ``DynamicBucketingSampler`` with a buffer of the same size, where it is installed
    (extra ``bench``), every rank with its own shards and the same choice of buckets
    (``sync_buckets``). ``ours`` and ``peer`` are seconds of the processor a sample, without reading
    it; ``limit`` is 5 microseconds.
    """
    return [*_overhead_rows(options), *_rank_rows(options)]


def _overhead_rows(options: Namespace) -> Iterator[Row]:
    count = 20_000 if options.quick else 200_000
    rows = [{"length": length} for length in _lengths(options, count).tolist()]
    read = _seconds(lambda: _exhaust(iter(rows)))
    peer = (_seconds(lambda: _exhaust(_plain_pool(rows))) - read) / count
    lhotse = _lhotse_seconds(rows[:20_000])
    for case, more in (
        ("pool", {}),
        ("pool, micro-batches of 8", {"micro_batch_size": BATCH_SIZE}),
        ("sliding", {"mode": "sliding"}),
        ("sliding, micro-batches of 8", {"mode": "sliding", "micro_batch_size": BATCH_SIZE}),
    ):

        def through(more: dict[str, Any] = more) -> None:
            _exhaust(LengthPoolSortDataset(lambda: iter(rows), POOL_SIZE, **more))

        ours = (_seconds(through) - read) / count
        row = {
            "case": f"a sample through {case}, pool {POOL_SIZE:,}",
            "ours": ours,
            "peer": peer,
            "ratio": peer / ours,
            "limit": LIMIT,
            "within_limit": ours <= LIMIT,
            "note": "peer: a generator that sorts and shuffles pools, without state; limit: 5 us",
        }
        if lhotse is not None:
            row["lhotse"] = lhotse
        yield row


def _rank_rows(options: Namespace) -> Iterator[Row]:
    """Waiting and padding of 8 ranks; ``ratio`` is the time of all ranks of the peer to ours."""
    count = 4_000 if options.quick else 16_000
    drawn = _lengths(options, count * WORLD_SIZE).reshape(WORLD_SIZE, count)
    cases: list[tuple[str, Callable[[], NDArray[Any]]]] = [
        ("as it comes", lambda: steps_of(drawn, BATCH_SIZE)),
        ("pool of 1,000", lambda: _ours(drawn, "pool")),
        ("sliding buffer of 1,000", lambda: _ours(drawn, "sliding")),
    ]
    if find_spec("lhotse") is not None:
        cases.append(("lhotse DynamicBucketingSampler", lambda: _lhotse_batches(drawn)))
    figures = {case: _figures(batches()) for case, batches in cases}
    time_of = {case: wall for case, (wall, _, _) in figures.items()}
    peer = time_of.get("lhotse DynamicBucketingSampler", time_of["as it comes"])
    for case, (wall, wait, padding) in figures.items():
        yield {
            "case": f"8 ranks, batch {BATCH_SIZE}: {case}",
            "wall_time": wall,
            "waiting": wait,
            "padding_efficiency": padding,
            "ratio": peer / wall,
            "note": "ratio: time of the slowest ranks per token with lhotse (without a pool, "
            "where it is not installed) / with this one",
        }


def _figures(batches: NDArray[Any]) -> tuple[float, float, float]:
    """Time of the slowest ranks per useful token, waiting, padding efficiency."""
    padded = batches.max(axis=2) * BATCH_SIZE
    wall = padded.max(axis=0).sum() * len(batches) / batches.sum()
    return float(wall), waiting(padded), float(batches.sum() / padded.sum())


def _ours(drawn: NDArray[Any], mode: str) -> NDArray[Any]:
    options = PoolOptions(POOL_SIZE, micro_batch_size=BATCH_SIZE, mode=mode)
    orders = np.array(orders_of_ranks(options, list(drawn)))
    return steps_of(np.take_along_axis(drawn, orders, axis=1), BATCH_SIZE)


def _lengths(options: Namespace, count: int) -> NDArray[np.int64]:
    rng = np.random.default_rng(options.seed)
    if options.lengths:
        given = np.abs(np.load(options.lengths)).astype(np.int64)
        return rng.choice(given, count)
    return np.clip(rng.lognormal(5, 1, count), 1, 2048).astype(np.int64)


def _seconds(call: Callable[[], Any], repeats: int = 3) -> float:
    """The processor's time of the fastest of some calls: they only compute, in one thread."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return min(times)


def _exhaust(samples: Iterable[Any]) -> None:
    deque(samples, maxlen=0)


def _plain_pool(samples: Iterable[Row]) -> Iterator[Row]:
    pool: list[Row] = []
    for index, sample in enumerate(samples):
        pool.append(sample)
        if len(pool) == POOL_SIZE:
            pool.sort(key=lambda row: row["length"])
            Random(index).shuffle(pool)
            yield from pool
            pool = []
    yield from pool


def _lhotse_sampler(lengths: Iterable[int]) -> Any:
    from lhotse import CutSet
    from lhotse.dataset import DynamicBucketingSampler
    from lhotse.testing.dummies import dummy_cut

    cuts = CutSet.from_cuts(dummy_cut(i, duration=float(n)) for i, n in enumerate(lengths))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return DynamicBucketingSampler(
            cuts,
            max_cuts=BATCH_SIZE,
            num_buckets=30,
            buffer_size=POOL_SIZE,
            shuffle=True,
            drop_last=True,
            sync_buckets=True,
            world_size=1,
            rank=0,
        )


def _lhotse_seconds(rows: list[Row]) -> float | None:
    if find_spec("lhotse") is None:
        return None
    sampler = _lhotse_sampler([row["length"] for row in rows])
    read = _seconds(lambda: _exhaust(iter(rows)))
    return (_seconds(lambda: _exhaust(sampler)) - read) / len(rows)


def _lhotse_batches(drawn: NDArray[Any]) -> NDArray[Any]:
    ranks = []
    for own in drawn:
        sampler = _lhotse_sampler(own.tolist())
        ranks.append([[int(cut.duration) for cut in batch] for batch in sampler])
    steps = min(map(len, ranks))
    return np.array([[b for b in own[:steps] if len(b) == BATCH_SIZE] for own in ranks])
