"""Cutting sorted windows into batches within a budget of padded tokens."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xlength.plan.groups import Groups, Ints
from xlength.plan.windows import even_cuts, sort_windows, spread_repeats

_LONG_ROWS = 16
"""Samples of which fewer than this many fill a batch are long, see ``sort_windows``."""

_MANY = 32
"""Batches from which on a window may take one more for the sake of a shift."""

_ROUNDS = 10
"""Halvings of the interval in which a window's own budget is sought: to a thousandth of it."""


@dataclass(frozen=True)
class Limits:
    """What a batch may hold.

    Args:
        max_tokens: rows x longest, at most.
        max_rows: rows, at most.
    """

    max_tokens: int
    max_rows: int


@dataclass(frozen=True, eq=False)
class Windows:
    """Random windows, each sorted by falling length, and the batches that they take.

    Args:
        order: (m,) int64, samples, window after window.
        lengths: (m,) int64, their tokens.
        borders: (w + 1,) int64, the windows.
        counts: (w,) int64, the fewest batches within the limits; or one more, for a shift.
        loads: (w,) float64, batches that the last one does not fill counted in part.
        last: how full the last batch of a window may be.
    """

    order: Ints
    lengths: Ints
    borders: Ints
    counts: Ints
    loads: NDArray[np.float64]
    last: float = 1.0


def count_batches(
    members: Ints,
    sizes: NDArray[Any],
    limits: Limits,
    window: int | None,
    shift: float | None,
    rng: np.random.RandomState,
) -> Windows:
    """Sort random windows and count the batches that they take within the limits.

    Args:
        members: (m,) int64, samples.
        sizes: tokens of each sample, indexed by sample; none over ``limits.max_tokens``.
        limits: of a batch.
        window: samples in a window; None sorts all together, which takes the fewest batches that
            any cutting can.
        shift: in [0, 1): where one window holds all samples, its last batch is filled but for this
            part. That makes all batches a little smaller, moves them against those of an epoch with
            another shift, the more the shorter their samples are, and so changes mates. A window of
            few batches is shifted only if it gets more of them than it needs. None fills the last
            batch like all others.
        rng: random state of the epoch.
    """
    order = members[rng.permutation(len(members))]
    num_windows = 1 if window is None else max(1, round(len(order) / window))
    cuts = even_cuts(len(order), num_windows)
    order, borders = sort_windows(order, sizes, cuts, limits.max_tokens // _LONG_ROWS + 1)
    lengths = np.ascontiguousarray(sizes[order], dtype=np.int64)
    shifted = shift is not None and num_windows == 1
    counts = np.zeros(len(borders) - 1, dtype=np.int64)
    loads = np.zeros(len(counts))
    budget = limits.max_tokens
    for w, (begin, end) in enumerate(zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True)):
        starts = _cut(lengths.data, begin, end, limits.max_rows, (budget, budget, end))
        extra = shifted and len(starts) >= _MANY
        counts[w] = min(len(starts) + extra, end - begin)
        loads[w] = len(starts) - 1 + _fill(lengths, starts, end, limits, budget)
    return Windows(order, lengths, borders, counts, loads, 1.0 - (shift or 0.0) * shifted)


def _fill(lengths: Ints, starts: list[int], end: int, limits: Limits, budget: int) -> float:
    """How full the last batch is."""
    rows = min(budget // int(lengths[starts[-1]]), limits.max_rows) or 1
    return min(1.0, (end - starts[-1]) / rows)


def cut_batches(windows: Windows, count: int, limits: Limits, rng: np.random.RandomState) -> Groups:
    """Exactly ``count`` batches within the limits.

    Each window gets its share of the batches and, by bisection, the smallest budget that takes no
    more: batches are equally full, and no small one is left at a window's end. What is still
    missing comes from splitting the fullest batches in two; and where all are single samples, from
    drawing some twice, spread over all lengths but the longest. Where ``count`` is too small for
    all, random batches are left out.

    Cost: some twenty passes over the batches, whatever the number of samples in them.
    """
    borders = windows.borders.tolist()
    starts: list[int] = []
    for w, share in enumerate(_shares(windows, count)):
        load = float(windows.loads[w])
        last = windows.last if share > load + 1 else 1.0
        least = int(0.9 * limits.max_tokens * load / share)
        starts += _fit(windows, borders[w], borders[w + 1], limits, share, least, last)
    firsts = _split_fullest(np.array(starts, dtype=np.int64), windows.lengths, count)
    groups = Groups(windows.order, np.append(firsts, len(windows.order)))
    if len(groups) > count:
        return groups.take(np.sort(rng.permutation(len(groups))[:count]))
    if len(groups) < count:
        repeats = spread_repeats(windows.lengths, count - len(groups), rng)
        return groups.take(np.append(np.arange(len(groups)), repeats))
    return groups


def _cut(
    lengths: memoryview, begin: int, end: int, max_rows: int, budgets: tuple[int, int, int]
) -> list[int]:
    """Starts of batches, each as full as it may be.

    ``budgets``: tokens of a batch that starts before a border, those of the others, the border.
    """
    first, second, border = budgets
    starts = []
    start = begin
    for stop, budget in ((min(border, end), first), (end, second)):
        while start < stop:
            starts.append(start)
            start += min(budget // lengths[start], max_rows) or 1
    return starts


def _fit(
    windows: Windows,
    begin: int,
    end: int,
    limits: Limits,
    count: int,
    least: int,
    last: float,
) -> list[int]:
    """Starts of at most ``count`` batches under the smallest budget from ``least`` on.

    Where equal lengths make the number jump past ``count`` between two neighbouring budgets, the
    longer samples get the smaller one and the others the larger. ``last``: how full the last batch
    may be.
    """

    def cut(first: int, second: int, border: int) -> tuple[list[int], bool]:
        view = windows.lengths.data
        starts = _cut(view, begin, end, limits.max_rows, (first, second, border))
        fits = len(starts) < count
        if len(starts) == count:
            fits = _fill(windows.lengths, starts, end, limits, second) <= last
        return starts, fits

    low, high = least, limits.max_tokens
    best, _ = cut(high, high, end)
    for _ in range(_ROUNDS):
        budget = (low + high) // 2
        if budget <= low:
            break
        trial, fits = cut(budget, budget, end)
        if fits:
            best, high = trial, budget
        else:
            low = budget
    before, beyond, exact = begin, end, len(best) == count
    while not exact and beyond - before > 1:
        border = (before + beyond) // 2
        trial, fits = cut(low, high, border)
        if fits:
            best, before = trial, border
        else:
            beyond = border
    return best


def _shares(windows: Windows, count: int) -> list[int]:
    """Batches of each window: its fewest, and what is beyond goes where batches are fullest."""
    shares: list[int] = windows.counts.tolist()
    loads, room = windows.loads.tolist(), np.diff(windows.borders).tolist()
    fullest = [(-loads[w] / shares[w], w) for w in range(len(shares)) if shares[w] < room[w]]
    heapify(fullest)
    for _ in range(count - sum(shares)):
        if not fullest:
            break
        w = fullest[0][1]
        shares[w] += 1
        if shares[w] < room[w]:
            heapreplace(fullest, (-loads[w] / shares[w], w))
        else:
            heappop(fullest)
    return shares


def _split_fullest(starts: Ints, lengths: Ints, count: int) -> Ints:
    """Split the batches of most padded tokens in two until there are ``count``, or only singles."""
    while len(starts) < count:
        sizes = np.diff(np.append(starts, len(lengths)))
        tokens = np.where(sizes > 1, sizes * lengths[starts], 0)
        chosen = np.argsort(-tokens, kind="stable")[: count - len(starts)]
        chosen = chosen[tokens[chosen] > 0]
        if not len(chosen):
            break
        starts = np.sort(np.append(starts, starts[chosen] + (sizes[chosen] + 1) // 2))
    return starts
