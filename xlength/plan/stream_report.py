"""What pools and sliding buffers buy on given lengths, and which setting to take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xlength.plan.cost import TOKENS, Cost
from xlength.plan.pool_options import MODES, PoolOptions
from xlength.plan.stream_ranks import orders_of_ranks, steps_of, waiting

POOL_SIZES = (0, 64, 128, 256, 512, 1024, 2048)
BYTES_PER_TOKEN = 16
"""Token id and label as 64-bit integers; images come on top."""

ENOUGH = 0.02
"""Share of the best wall efficiency that is given up for a smaller pool."""

_SAMPLES = 4_000, 16_000  # of each rank: at least, at most

Row = dict[str, Any]


def stream_report(
    lengths: NDArray[Any],
    world_size: int = 8,
    batch_size: int = 8,
    num_workers: Sequence[int] = (1, 2, 4, 8),
    pool_sizes: Sequence[int] = POOL_SIZES,
    micro_batch_sizes: Sequence[int] | None = None,
    modes: Sequence[str] = MODES,
    cost: Cost = TOKENS,
    bytes_per_token: float = BYTES_PER_TOKEN,
    samples_per_second: float | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Simulate every setting with the sorters that training uses, and recommend one.

    The ranks' streams are drawn from the lengths with replacement: a stream is taken to be
    shuffled, as a pool cannot help where shards differ in what they hold. Workers hold a pool each
    and are read in turn, so their number changes memory and warm-up, and not waiting or padding.

    Cost: 2 to 4 microseconds a simulated sample; some 10 seconds for the default grid.

    Args:
        lengths: (n,) tokens, of either sign; those of a sample of the stream are enough, some
            thousand.
        world_size: data-parallel ranks.
        batch_size: of each rank's loader.
        num_workers: of each rank, to tabulate.
        pool_sizes: to tabulate; 0 is without. Those smaller than a batch are left out.
        micro_batch_sizes: neighbours that are kept together; by default 1 and ``batch_size``.
        modes: ``'pool'``, ``'sliding'``.
        cost: what ranks wait for, see ``Cost``.
        bytes_per_token: of an encoded sample in memory.
        samples_per_second: that a worker reads and encodes; then the warm-up is in seconds, too.
        seed: of the draw.

    Returns:
        ``rows``: a dict for each setting, with ``mode``, ``pool_size``, ``num_workers``,
        ``micro_batch_size``, ``waiting`` (mean cost of the slowest rank / mean cost; 1 is none),
        ``padding_efficiency`` (of the loader's batches), ``wall_efficiency`` (useful cost / cost of
        the slowest ranks' padded batches), ``memory_samples`` and ``memory_bytes`` (a rank's
        pools), ``warmup_samples`` (read by each worker before its first batch) and
        ``warmup_seconds``, and ``reread_samples`` (to continue a run); ``recommended``: one of the
        rows; ``reason``: why, as a sentence; ``curve``: of each mode the rows with the recommended
        micro-batch and workers, by pool size.

    Raises:
        ValueError: no lengths, or a number out of its range.
    """
    sizes = np.abs(np.asarray(lengths))
    if sizes.ndim != 1 or not len(sizes) or not sizes.all():
        raise ValueError(
            f"lengths must be (n,) and not zero, got shape {sizes.shape} with "
            f"{int((sizes == 0).sum())} zeros"
        )
    for name, value in (("world_size", world_size), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if not num_workers or min(num_workers) < 1:
        raise ValueError(f"num_workers must be at least 1 each, got {list(num_workers)}")
    if not pool_sizes or min(pool_sizes) < 0 or 1 in pool_sizes:
        raise ValueError(f"pool_sizes must be 0 (off) or at least 2 each, got {list(pool_sizes)}")
    micro_batch_sizes = sorted({*(micro_batch_sizes or (1, batch_size))})
    rng = np.random.default_rng(seed)
    drawn = rng.choice(sizes, size=(world_size, _simulated(max(pool_sizes))))
    rows: list[Row] = []
    for pool_size, mode, micro in _settings(pool_sizes, modes, micro_batch_sizes):
        figures = _simulate(drawn, pool_size, mode, micro, batch_size, cost)
        rows += [
            _row(
                figures, pool_size, mode, micro, workers, sizes, bytes_per_token, samples_per_second
            )
            for workers in sorted(set(num_workers))
        ]
    best, reason = _choose(rows, batch_size)
    curve = [
        row
        for row in rows
        if row["micro_batch_size"] in (0, best["micro_batch_size"])
        and row["num_workers"] == best["num_workers"]
    ]
    return {"rows": rows, "recommended": best, "reason": reason, "curve": curve}


def _settings(
    pool_sizes: Sequence[int], modes: Sequence[str], micro_batch_sizes: Sequence[int]
) -> list[tuple[int, str, int]]:
    settings = [(0, "off", 0)] if 0 in pool_sizes else []
    return settings + [
        (pool_size, mode, micro)
        for micro in micro_batch_sizes
        for mode in modes
        for pool_size in sorted(set(pool_sizes))
        if pool_size >= micro and pool_size > 1
    ]


def _simulated(pool_size: int) -> int:
    """Samples of each rank to look at: eight pools, at least four where they are large."""
    return max(int(np.clip(8 * pool_size, *_SAMPLES)), 4 * pool_size)


def _simulate(
    drawn: NDArray[Any], pool_size: int, mode: str, micro: int, batch_size: int, cost: Cost
) -> Row:
    """Waiting, padding and wall efficiency of one setting."""
    if pool_size == 0:
        batches = steps_of(drawn, batch_size)
    else:
        options = PoolOptions(pool_size, micro_batch_size=micro, mode=mode)
        count = _simulated(pool_size)
        orders = orders_of_ranks(options, [cost.of(own[:count]) for own in drawn])
        given = np.take_along_axis(drawn[:, :count], np.array(orders), axis=1)
        start = 2 * pool_size if mode == "sliding" else 0  # the first fill is not yet mixed
        batches = steps_of(given[:, start : count - pool_size], batch_size)
    useful = cost.of(batches.ravel()).sum()
    padded = batch_size * cost.of(batches.max(axis=2).ravel()).reshape(batches.shape[:2])
    return {
        "waiting": waiting(padded),
        "padding_efficiency": float(batches.sum() / (batches.max(axis=2).sum() * batch_size)),
        "wall_efficiency": float(useful / (padded.max(axis=0).sum() * len(drawn))),
    }


def _row(
    figures: Mapping[str, float],
    pool_size: int,
    mode: str,
    micro: int,
    workers: int,
    sizes: NDArray[Any],
    bytes_per_token: float,
    samples_per_second: float | None,
) -> Row:
    seconds = None if samples_per_second is None else pool_size / samples_per_second
    reread = {"off": 0, "pool": 2 * pool_size, "sliding": 8 * pool_size}[mode]
    return {
        "mode": mode,
        "pool_size": pool_size,
        "num_workers": workers,
        "micro_batch_size": micro,
        **figures,
        "memory_samples": pool_size * workers,
        "memory_bytes": int(pool_size * workers * sizes.mean() * bytes_per_token),
        "warmup_samples": pool_size,
        "warmup_seconds": seconds,
        "reread_samples": reread,
    }


def _choose(rows: Sequence[Row], batch_size: int) -> tuple[Row, str]:
    """The smallest pool that is nearly as good as the best, with the fewest workers."""
    fewest = min(row["num_workers"] for row in rows)
    candidates = [row for row in rows if row["num_workers"] == fewest]
    best = max(candidates, key=lambda row: float(row["wall_efficiency"]))
    good = [
        row
        for row in candidates
        if row["wall_efficiency"] >= (1 - ENOUGH) * best["wall_efficiency"]
    ]
    chosen = min(good, key=lambda row: (row["pool_size"], -row["wall_efficiency"]))
    without = [row["wall_efficiency"] for row in candidates if row["pool_size"] == 0]
    if chosen["pool_size"] == 0:
        return chosen, (
            f"no pool: the best setting would raise the wall efficiency only from "
            f"{chosen['wall_efficiency']:.3f} to {best['wall_efficiency']:.3f}"
        )
    gain = f", up from {without[0]:.3f} without" if without else ""
    batches = chosen["pool_size"] / batch_size
    reason = (
        f"mode={chosen['mode']!r}, pool_size={chosen['pool_size']} ({batches:g} batches; the rule "
        f"of thumb is 10 to 100), micro_batch_size={chosen['micro_batch_size']}: wall efficiency "
        f"{chosen['wall_efficiency']:.3f}{gain}; "
    )
    if chosen is best:
        reason += "the best of all settings"
    else:
        reason += (
            f"the smallest pool within {ENOUGH:.0%} of the best ({best['wall_efficiency']:.3f}, "
            f"mode={best['mode']!r}, pool_size={best['pool_size']})"
        )
    return chosen, (
        f"{reason}. Every worker holds a pool of its own, so take as few as keep up with the model"
    )
