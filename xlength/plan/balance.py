"""Steps of equal cost: which batches are computed at the same time, and by which rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xlength.plan.groups import Ints

_MOST_RUN = 4
"""Steps of like cost, at most, among which batches are sorted by the second measure."""

_UNEVEN = 0.01
"""Share of waiting from which a micro-step is paired with one of like cost, see ``_updates``."""


def deal(
    costs: NDArray[Any],
    world_size: int,
    rng: np.random.RandomState,
    *,
    accumulate: int = 1,
    kinds: NDArray[Any] | None = None,
    second: NDArray[Any] | None = None,
    run: int | None = None,
) -> Ints:
    """Deal groups to steps so that no rank waits: in each, ``world_size`` groups of like cost.

    All groups are sorted by cost and cut into steps; the costliest step comes first, so that a lack
    of memory shows at once, and all others are shuffled, so that costs do not rise or fall over the
    epoch. Which rank gets which group of a step is random. With gradient accumulation the groups of
    each micro-step are dealt to the ranks so that their sums over the optimiser step are equal too,
    and micro-steps in which ranks would wait share an optimiser step with such of like cost.

    Cost: a sort of the groups; independent of the world size.

    Args:
        costs: (g,) padded cost of each group; g is a multiple of ``world_size``.
        world_size: data-parallel ranks.
        rng: random state of the epoch.
        accumulate: micro-steps of an optimiser step.
        kinds: (g,) modality of each group. Each step gets one kind; what is left of the kinds when
            they are no multiples of ``world_size`` shares steps, of two kinds at most one.
        second: (g,) a second measure of each group, such as its padded tokens where the cost is
            attention: groups of nearly equal cost are sorted by it. Costs about a thousandth of the
            balance by cost and gives a hundredth of the balance by tokens.
        run: steps of nearly equal cost that are sorted by it; by default one in twenty, at most 4,
            so that the cost stays first. The root of the number of steps serves both alike.

    Returns:
        (g / world_size, world_size) int64: a permutation of ``range(g)``.

    Raises:
        ValueError: the number of groups is no multiple of the world size.
    """
    costs = np.asarray(costs, dtype=np.float64)
    if world_size < 1 or accumulate < 1:
        raise ValueError(
            f"world_size and accumulate must be at least 1, got {world_size} and {accumulate}"
        )
    if len(costs) % world_size:
        raise ValueError(
            f"the number of groups must be a multiple of world_size {world_size}, got {len(costs)}"
        )
    if len(costs) == 0:
        return np.zeros((0, world_size), dtype=np.int64)
    parts = _whole_steps(costs, kinds, world_size)
    rows = [_by_second(part, second, world_size, run).reshape(-1, world_size) for part in parts]
    steps = np.concatenate(rows)
    return _to_ranks(_in_turn(steps, costs, accumulate, rng), costs, accumulate, rng)


def _in_turn(steps: Ints, costs: NDArray[Any], accumulate: int, rng: np.random.RandomState) -> Ints:
    """The costliest step, or optimiser step, first, all others shuffled."""
    slowest = costs[steps].max(axis=1)
    first = int(np.argmax(slowest))
    if accumulate == 1:
        others = rng.permutation(np.delete(np.arange(len(steps)), first))
        shuffled: Ints = steps[np.append(first, others)]
        return shuffled
    # Those in which ranks would wait come by falling cost, then all others, shuffled.
    waiting = 1 - costs[steps].mean(axis=1) / np.maximum(slowest, 1e-300)
    place = np.where(waiting > _UNEVEN, -slowest, 1 + rng.random_sample(len(steps)))
    place[first] = -np.inf
    steps = steps[np.argsort(place, kind="stable")]
    # Steps that do not fill an optimiser step stay at the end.
    updates, whole = -(-len(steps) // accumulate), len(steps) // accumulate
    turns = np.arange(updates)
    turns[1:whole] = rng.permutation(turns[1:whole])
    order = (turns[:, None] * accumulate + np.arange(accumulate)).ravel()
    result: Ints = steps[order[order < len(steps)]]
    return result


def _whole_steps(costs: NDArray[Any], kinds: NDArray[Any] | None, world_size: int) -> list[Ints]:
    """Groups by falling cost, one array per kind and one for what is left, each of whole steps."""
    order = np.argsort(-costs, kind="stable")
    if kinds is None:
        return [order]
    kinds = np.asarray(kinds)[order]
    parts = [order[kinds == kind] for kind in np.unique(kinds)]
    rest = [len(part) % world_size for part in parts]
    if not any(rest):
        return parts
    # Leave out of each kind groups of like cost: that of the dearest among the kinds' cheapest.
    cheapest = [part[len(part) - count :] for part, count in zip(parts, rest, strict=True)]
    target = max(costs[part].mean() for part in cheapest if len(part))
    shared: list[Ints] = []
    for i, (part, count) in enumerate(zip(parts, rest, strict=True)):
        start = int(np.searchsorted(-costs[part], -target)) - count // 2
        start = max(0, min(start, len(part) - count))
        shared.append(part[start : start + count])
        parts[i] = np.delete(part, np.s_[start : start + count])
    left = np.concatenate(shared)
    parts.append(left[np.argsort(-costs[left], kind="stable")])
    return parts


def _by_second(order: Ints, second: NDArray[Any] | None, world_size: int, run: int | None) -> Ints:
    """Sort runs of a few steps, after the costliest step, by the second measure."""
    if second is None or len(order) <= 2 * world_size:
        return order
    rest = order[world_size:]
    run = run or min(_MOST_RUN, 1 + len(order) // (20 * world_size))
    runs = np.arange(len(rest)) // (run * world_size)
    rest = rest[np.lexsort((-np.asarray(second)[rest], runs))]
    return np.concatenate([order[:world_size], rest])


def _to_ranks(
    steps: Ints, costs: NDArray[Any], accumulate: int, rng: np.random.RandomState
) -> Ints:
    """Deal each step's groups to ranks: at random, or so that sums over micro-steps are equal."""
    num_steps, world_size = steps.shape
    if accumulate == 1:
        places = rng.random_sample(steps.shape).argsort(axis=1)
        return np.take_along_axis(steps, places, axis=1)
    num_updates = -(-num_steps // accumulate)
    shuffled = rng.random_sample((num_updates, world_size)).argsort(axis=1)
    sums = np.zeros((num_updates, world_size))
    result = np.empty_like(steps)
    for micro in range(accumulate):
        rows = steps[micro::accumulate]
        if not len(rows):
            break
        falling = np.take_along_axis(rows, (-costs[rows]).argsort(axis=1, kind="stable"), axis=1)
        rising = sums[: len(rows)].argsort(axis=1, kind="stable")
        dealt = np.empty_like(rows)
        np.put_along_axis(dealt, rising, falling, axis=1)
        sums[: len(rows)] += costs[dealt]
        result[micro::accumulate] = np.take_along_axis(dealt, shuffled[: len(rows)], axis=1)
    return result


def share_steps(
    needs: Sequence[int],
    rooms: Sequence[int],
    world_size: int,
    *,
    accumulate: int = 1,
    mixed: str = "once",
    drop_last: bool = False,
    num_steps: int | None = None,
) -> list[int] | None:
    """How many batches each kind of samples gets, so that steps are whole.

    Args:
        needs: batches that each kind takes at least (with ``drop_last``: that it has).
        rooms: batches that each kind can be cut into without drawing a sample twice.
        world_size: data-parallel ranks.
        accumulate: micro-steps of an optimiser step; an epoch has whole optimiser steps.
        mixed: ``'once'``: kinds that cannot fill their last step without repeats share one;
            ``'repeat'``: every kind fills its own steps.
        drop_last: round down instead of up, but never to nothing; each kind loses its share.
        num_steps: steps of the epoch, where they are given.

    Returns:
        Batches of each kind, together a multiple of ``world_size * accumulate``; None if they take
        more steps than ``num_steps``.
    """
    counts = []
    for need, room in zip(needs, rooms, strict=True):
        rows = max(1, need // world_size) if drop_last else -(-need // world_size)
        whole = len(needs) == 1 or mixed == "repeat" or room >= rows * world_size
        counts.append(rows * world_size if whole else need)
    total = sum(counts)
    if drop_last:
        steps = max(1, total // (world_size * accumulate)) * accumulate
    else:
        steps = -(-total // (world_size * accumulate)) * accumulate
    if num_steps is not None:
        if steps > num_steps and not drop_last:
            return None
        steps = num_steps
    extra = steps * world_size - total
    if extra < 0:
        return _less(counts, -extra, world_size)
    # Where there is room: first whole steps, then, if kinds may share a step, single batches.
    by_room = sorted(range(len(counts)), key=lambda kind: counts[kind] - rooms[kind])
    for unit in (world_size, 1) if mixed == "once" and len(counts) > 1 else (world_size,):
        for kind in by_room:
            fitting = max(0, min(extra, rooms[kind] - counts[kind])) // unit * unit
            counts[kind] += fitting
            extra -= fitting
    counts[by_room[0]] += extra
    return counts


def _less(counts: list[int], surplus: int, unit: int) -> list[int]:
    """The counts less a surplus, of which each bears its share, in whole units as far as it goes,
    and keeps one."""
    result = list(counts)
    for _ in range(surplus // unit):
        # What has most left of its share gives next, but the last unit of a kind only if all do.
        kind = max(
            range(len(counts)),
            key=lambda kind: (result[kind] > unit, result[kind] / max(counts[kind], 1)),
        )
        result[kind] -= unit
    result[result.index(max(result))] -= surplus % unit
    return result
