"""Orders of samples: the length-grouped order of XTuner, after LLaVA's and Hugging Face's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xlength.plan.groups import Ints

_CHUNK = 1 << 16

Permute = Callable[[int], NDArray[np.int64]]


def default_mega_batch_mult(num_samples: int, total_batch_size: int) -> int:
    """Global batches in a mega-batch: 50, or as many as leave four mega-batches; at least 1."""
    return max(1, min(num_samples // (total_batch_size * 4), 50))


def length_grouped_order(lengths: Ints, window: int, permute: Permute) -> Ints:
    """Samples grouped by length, as XTuner 0.2 orders them.

    A random order is cut into windows (XTuner's mega-batches) and each is sorted by falling length,
    ties in the random order. Where lengths have both signs, images (> 0) and text (< 0) are ordered
    apart, the two last windows are merged into one sorted by size at the very end, and the other
    windows are shuffled. Then the first sample trades places with the longest one, so that a lack
    of memory shows at the first step.

    Price: within a window the order is fixed by length, so a sample meets mates of like length in
    every epoch; successive batches fall in length through a window, a saw-tooth with the window's
    period.
    Cost: one permutation and one sort of n keys inside windows; at most 32 bytes a sample besides
    the lengths.

    Args:
        lengths: (n,) int64, non-zero; the sign is the modality.
        window: samples in a window, at least 1.
        permute: gives a random permutation of ``range(k)`` as (k,) int64. Called for the whole set,
            or, with both signs, for images, then for text, then for the windows.

    Returns:
        (n,) int64, a permutation of ``range(n)``.
    """
    if window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    if len(lengths) == 0:
        raise ValueError("lengths is empty: there is nothing to order")
    is_image = lengths > 0
    if is_image.all() or not is_image.any():
        # XTuner sorts text-only lengths as they are, negative: shortest text first.
        order = _sort_windows(permute(len(lengths)), lengths, window)
    else:
        order = _mixed_order(lengths, is_image, window, permute)
    return _longest_first(order, lengths, window)


def _mixed_order(lengths: Ints, is_image: NDArray[np.bool_], window: int, permute: Permute) -> Ints:
    num_images = int(np.count_nonzero(is_image))
    images = _one_kind(is_image, lengths, window, permute)
    texts = _one_kind(~is_image, lengths, window, permute)
    # The last window of each kind, whole or not, goes to the end.
    image_windows = (num_images - 1) // window
    text_windows = (len(lengths) - num_images - 1) // window
    shuffled = permute(image_windows + text_windows)
    result = np.empty(len(lengths), dtype=np.int64)
    whole = len(shuffled) * window
    head = result[:whole].reshape(-1, window)
    for order, count, shift in ((images, image_windows, 0), (texts, text_windows, image_windows)):
        rows = shuffled - shift
        chosen = np.flatnonzero((rows >= 0) & (rows < count))
        windows = order[: count * window].reshape(count, window)
        for target, source in zip(chosen.tolist(), rows[chosen].tolist(), strict=True):
            head[target] = windows[source]
    tail = np.concatenate([images[image_windows * window :], texts[text_windows * window :]])
    result[whole:] = tail[_descending(np.abs(lengths[tail])[None])]
    return result


def _one_kind(mask: NDArray[np.bool_], lengths: Ints, window: int, permute: Permute) -> Ints:
    members = np.flatnonzero(mask)
    members = members.take(permute(len(members)))
    return _sort_windows(members, lengths, window, by_size=True)


def _sort_windows(order: Ints, lengths: Ints, window: int, by_size: bool = False) -> Ints:
    """Sort each window of ``order`` by falling length, or by falling size, in place; returns it."""
    whole = len(order) // window * window
    stride = max(1, _CHUNK // window) * window  # whole windows that fit a processor's cache
    for start in range(0, len(order), stride):
        for first, stop in ((start, min(start + stride, whole)), (max(start, whole), len(order))):
            if stop > first:
                part = order[first:stop]
                values = lengths.take(part)
                if by_size:
                    np.abs(values, out=values)
                rows = values.reshape(-1, window if stop <= whole else stop - first)
                part[:] = part.take(_descending(rows))
    return order


def _descending(rows: Ints) -> NDArray[Any]:
    """Places that sort each row by falling value, ties in place; may overwrite ``rows``.

    The value and the position share one integer key, so that a plain sort of integers, which numpy
    does with vector instructions, is stable.

    Args:
        rows: (r, k) int64.

    Returns:
        (r * k,) integers: flat places in ``rows``, one row after the other.
    """
    count, width = rows.shape
    bits = int(width - 1).bit_length()
    highest, lowest = int(rows.max()), int(rows.min())
    starts = np.arange(0, count * width, width)
    span = (highest - lowest).bit_length() + bits
    if span > 62:
        wide: Ints = np.argsort(-rows, axis=1, kind="stable") + starts[:, None]
        return wide.reshape(-1)
    keys = np.subtract(highest, rows, out=rows)
    if span <= 31 and rows.size < 2**31:
        keys = keys.astype(np.int32)
    keys <<= bits
    keys |= np.arange(width, dtype=keys.dtype)
    keys.sort(axis=1)
    keys &= (1 << bits) - 1
    keys += starts[:, None].astype(keys.dtype)
    return keys.reshape(-1)


def _longest_first(order: Ints, lengths: Ints, window: int) -> Ints:
    """Swap the first sample with the first of the window whose first sample is the longest."""
    firsts = order[::window]
    position = int(np.argmax(np.abs(lengths[firsts]))) * window
    order[0], order[position] = order[position], order[0]
    return order
