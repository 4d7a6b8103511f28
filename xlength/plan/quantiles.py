"""Where quantiles of a stream lie in the long run, beside where they lie in what is held now."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from math import isqrt


class QuantileMeans:
    """Running means of the key at each of some quantiles of a sorted buffer.

    A quantile of a buffer of n samples lies some sqrt(n) / 4 places off that of the data, elsewhere
    on every rank; its mean over pools lies nearer. Half the way to the mean is best: who goes the
    whole way lets the buffer run out of some lengths.

    Args:
        count: quantiles.
        capacity: samples that are held.
    """

    __slots__ = ("means", "reach")

    def __init__(self, count: int, capacity: int) -> None:
        self.means: list[float | None] = [None] * count
        self.reach = isqrt(capacity)

    def correct(self, keys: list[float], place: int, quantile: int, weight: float) -> int:
        """Half-way from a quantile's place to where its mean is, and no farther than to a sample
        ``reach`` places away. The ends stay the ends, so that nothing waits there.

        Args:
            keys: (n,) sorted.
            place: where the quantile is now.
            quantile: its number.
            weight: of the present key in the mean.
        """
        key, mean = keys[place], self.means[quantile]
        if mean is None:
            self.means[quantile] = key
            return place
        self.means[quantile] = mean + (key - mean) * weight
        last = len(keys) - 1
        if mean == key or place == 0 or place == last:
            return place
        if mean > key:
            stop = place + self.reach
            return (place + bisect_left(keys, mean, place, stop if stop < last else last) + 1) // 2
        start = place - self.reach
        return (place + bisect_right(keys, mean, start if start > 0 else 0, place)) // 2
