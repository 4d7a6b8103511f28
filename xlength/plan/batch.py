"""Cutting sorted windows into batches of a fixed number of samples."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xlength.plan.groups import Groups, Ints
from xlength.plan.windows import even_cuts, sort_windows, spread_repeats


def fixed_batches(
    members: Ints,
    sizes: NDArray[Any],
    count: int,
    batch_size: int,
    window: int | None,
    exact: bool,
    rng: np.random.RandomState,
) -> Groups:
    """``count`` batches of ``batch_size`` samples of like length.

    A random order is cut into windows, each sorted by falling length and cut into batches. Where
    there are too many members, random ones are left out. Where they do not fill the batches, some
    batches, evenly spread over windows and lengths, are a sample smaller; or, if sizes are to be
    ``exact``, such batches overlap their neighbour by a sample: the repeats lengthen no batch and
    are never the longest of their window.

    Args:
        members: (m,) int64, samples.
        sizes: tokens of each sample, indexed by sample.
        count: batches.
        batch_size: samples in a batch.
        window: samples in a window; None sorts all together.
        exact: whether all batches have ``batch_size`` samples.
        rng: random state of the epoch.

    Returns:
        ``count`` groups.
    """
    order = members[rng.permutation(len(members))][: count * batch_size]
    num_windows = 1
    if window is not None and 4 * len(order) > 3 * count * batch_size:
        # At least four batches a window, so that they have samples to overlap by.
        num_windows = max(1, round(count / max(4, window / batch_size)))
    batches = even_cuts(count, num_windows)
    cuts = batches * len(order) // count
    order, _ = sort_windows(order, sizes, cuts)
    if exact and len(order) < count * batch_size:
        return _overlapping(order, count, batch_size, batches, cuts, rng)
    if len(order) < count:
        repeats = spread_repeats(sizes[order], count - len(order), rng)
        return Groups.singles(np.append(order, order[repeats]))
    return Groups(order, even_cuts(len(order), count))


def _overlapping(
    order: Ints,
    count: int,
    batch_size: int,
    batches: Ints,
    cuts: Ints,
    rng: np.random.RandomState,
) -> Groups:
    """Batches of exactly ``batch_size``, which repeat what they lack from their next neighbour."""
    if len(order) <= batch_size:
        return Groups.of_size(order[_cycle(len(order), count * batch_size)], batch_size)
    windows = zip(cuts[:-1], np.diff(cuts), np.diff(batches), strict=True)
    starts = [
        begin + _spread(size, number, batch_size, rng.random_sample())
        for begin, size, number in windows
    ]
    places = np.concatenate(starts)[:, None] + np.arange(batch_size)
    return Groups.of_size(order[places.ravel()], batch_size)


def _spread(size: int, number: int, width: int, shift: float) -> Ints:
    """(number,) starts of slices of ``width`` that cover ``range(size)``; only one begins at 0."""
    stride = (size - width) / max(1, number - 1)
    starts = np.floor(np.arange(number) * stride + shift).astype(np.int64)
    starts[1:] = np.maximum(starts[1:], min(1, size - width))
    result: Ints = np.minimum(starts, size - width)
    return result


def _cycle(size: int, total: int) -> Ints:
    """(total,) positions: each of ``range(size)`` once, then again and again all but the first."""
    places = np.arange(total, dtype=np.int64)
    places[size:] = 1 + (places[size:] - size) % (size - 1) if size > 1 else 0
    return places
