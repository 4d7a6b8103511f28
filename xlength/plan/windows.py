"""Random windows sorted by length: the randomness, and its price, of every plan."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xlength.plan.groups import Ints


def even_cuts(total: int, parts: int) -> Ints:
    """(parts + 1,) int64: borders of parts of ``range(total)`` of equal size, give or take one."""
    return np.arange(parts + 1, dtype=np.int64) * total // parts


def sort_windows(
    order: Ints,
    sizes: NDArray[Any],
    cuts: Ints,
    long_from: int | None = None,
    long_windows: int = 8,
) -> tuple[Ints, Ints]:
    """Sort each window of an order by falling length, ties in the order.

    Samples of at least ``long_from`` tokens may be taken out of ``long_windows`` neighbouring
    windows each and sorted together as a window of their own: they are rare, so that one window
    alone holds too few of like length; and few of them fill a batch, so that a batch-mate is met
    again no more often than in the small windows of short samples.

    Cost: one sort of n integers; 32 bytes a sample.

    Args:
        order: (m,) int64, samples in random order.
        sizes: tokens of each sample, positive, indexed by sample.
        cuts: (w + 1,) int64, borders of the windows in ``order``, from 0 to m.
        long_from: tokens; None for none.
        long_windows: windows that share one window of long samples.

    Returns:
        (m,) int64, the samples, window after window; and (w' + 1,) int64, the windows' borders.
    """
    lengths = sizes[order]
    window = np.repeat(np.arange(len(cuts) - 1, dtype=np.int64), np.diff(cuts))
    num_windows = len(cuts) - 1
    if long_from is not None and num_windows > 1:
        is_long = np.flatnonzero(lengths >= long_from)
        window[is_long] = num_windows + window[is_long] // long_windows
        num_windows += -(-num_windows // long_windows)
    counts = np.bincount(window, minlength=num_windows)
    borders = np.append(0, np.cumsum(counts[counts > 0]))
    return order[_by_window_and_length(window, lengths)], borders


def _by_window_and_length(window: Ints, lengths: NDArray[Any]) -> Ints:
    """Positions sorted by window, then falling length, then position: one sort of integer keys."""
    count = len(window)
    if count == 0:
        return np.zeros(0, dtype=np.int64)
    highest = int(lengths.max())
    place_bits = (count - 1).bit_length()
    length_bits = (highest - int(lengths.min())).bit_length()
    if int(window.max()).bit_length() + length_bits + place_bits > 62:
        order: Ints = np.lexsort((-lengths.astype(np.int64), window))
        return order
    keys: Ints = window << np.int64(length_bits)
    keys |= highest - lengths
    keys <<= np.int64(place_bits)
    keys |= np.arange(count, dtype=np.int64)
    keys.sort()
    keys &= np.int64((1 << place_bits) - 1)
    return keys


def spread_repeats(lengths: NDArray[Any], number: int, rng: np.random.RandomState) -> Ints:
    """(number,) places of samples to draw again: evenly spread, and none of the longest."""
    places = np.flatnonzero(lengths < lengths.max())
    places = places if len(places) else np.arange(len(lengths))
    stride = max(1.0, len(places) / number)
    spread = ((np.arange(number) + rng.random_sample()) * stride).astype(np.int64)
    result: Ints = places[spread % len(places)]
    return result
