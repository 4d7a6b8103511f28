"""Orders of samples: the length-grouped order of XTuner (which took it from LLaVA and Hugging Face)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from xlength.plan.groups import Ints

Permute = Callable[[int], NDArray[np.int64]]


def default_mega_batch_mult(num_samples: int, total_batch_size: int) -> int:
    """Global batches in a mega-batch where none is given: 50, or as many as leave four mega-batches; at least 1."""
    return max(1, min(num_samples // (total_batch_size * 4), 50))


def length_grouped_order(lengths: Ints, window: int, permute: Permute) -> Ints:
    """Samples grouped by length, as XTuner 0.2 orders them.

    A random order is cut into windows (XTuner's mega-batches) and each is sorted by falling length, ties in the
    random order. Where lengths have both signs, images (> 0) and text (< 0) are ordered apart, the two last
    windows are merged into one sorted by size at the very end, and the other windows are shuffled. Then the first
    sample trades places with the longest one, so that a lack of memory shows at the first step.

    Price: within a window the order is fixed by length, so a sample meets mates of like length in every epoch;
    successive batches fall in length through a window, a saw-tooth with the window's period.
    Cost: one permutation and one sort of n keys inside windows; at most 32 bytes a sample besides the lengths.

    Args:
        lengths: (n,) int64, non-zero; the sign is the modality.
        window: samples in a window, at least 1.
        permute: gives a random permutation of ``range(k)`` as (k,) int64. Called for the whole set, or, with both
            signs, for images, then for text, then for the windows.

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
    kinds = []
    for mask in (is_image, ~is_image):
        members = np.flatnonzero(mask)
        sizes = np.abs(lengths[members])
        kinds.append(members[_sort_windows(permute(len(members)), sizes, window)])
        del members, sizes
    # The last window of each kind, whole or not, goes to the end.
    cuts = [(len(order) - 1) // window * window for order in kinds]
    tail = np.concatenate([order[cut:] for order, cut in zip(kinds, cuts, strict=True)])
    tail = tail[_descending(np.abs(lengths[tail])[None])[0]]
    num_windows = sum(cuts) // window
    shuffled = permute(num_windows)
    result = np.empty(len(lengths), dtype=np.int64)
    head = result[: num_windows * window].reshape(num_windows, window)
    num_images = cuts[0] // window
    for order, cut, chosen, shift in (
        (kinds[0], cuts[0], shuffled < num_images, 0),
        (kinds[1], cuts[1], shuffled >= num_images, num_images),
    ):
        head[chosen] = order[:cut].reshape(-1, window)[shuffled[chosen] - shift]
    result[num_windows * window :] = tail
    return result


def _sort_windows(order: Ints, lengths: Ints, window: int) -> Ints:
    """Sort each window of ``order`` by falling length, in place where it can; returns it."""
    whole = len(order) // window * window
    for part in (order[:whole].reshape(-1, min(window, max(whole, 1))), order[whole:][None]):
        if part.size:
            part[:] = np.take_along_axis(part, _descending(lengths[part]), axis=1)
    return order


def _descending(rows: Ints) -> Ints:
    """Positions that sort each row by falling value, ties in place: (r, k) -> (r, k) int64.

    The value and the position share one integer key, so that a plain sort of integers, which numpy does with
    vector instructions, is stable.
    """
    width = rows.shape[1]
    bits = int(width - 1).bit_length()
    highest, lowest = int(rows.max()), int(rows.min())
    span = (highest - lowest).bit_length() + bits
    if span > 62:
        return np.argsort(-rows, axis=1, kind="stable")
    if span <= 31:
        keys = np.subtract(highest, rows).astype(np.int32)
    else:
        keys = np.subtract(highest, rows)
    keys <<= bits
    keys |= np.arange(width, dtype=keys.dtype)
    keys.sort(axis=1)
    keys &= (1 << bits) - 1
    return keys.astype(np.int64, copy=False)


def _longest_first(order: Ints, lengths: Ints, window: int) -> Ints:
    """Swap the first sample with the first of the window whose first sample is the longest."""
    firsts = order[::window]
    position = int(np.argmax(np.abs(lengths[firsts]))) * window
    order[0], order[position] = order[position], order[0]
    return order
