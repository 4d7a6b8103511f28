"""The one value type of the plan layer: a ragged array of sample indices."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

_PIECE = 1 << 20


@dataclass(frozen=True, eq=False)
class Groups:
    """Groups of samples: batches, packs, or single samples in an order.

    Group ``i`` is ``members[offsets[i]:offsets[i + 1]]``. Both arrays are read, never written.

    Args:
        members: (m,) int64, indices of samples.
        offsets: (g + 1,) int64, non-decreasing, from 0 to m.

    Raises:
        ValueError: the offsets do not start at 0, end at m, or are not in order.
    """

    members: Ints
    offsets: Ints

    def __post_init__(self) -> None:
        members = np.ascontiguousarray(self.members, dtype=np.int64)
        offsets = np.ascontiguousarray(self.offsets, dtype=np.int64)
        if members.ndim != 1 or offsets.ndim != 1 or len(offsets) == 0:
            raise ValueError(
                "members and offsets must be 1-d and offsets not empty, "
                f"got shapes {members.shape} and {offsets.shape}"
            )
        if offsets[0] != 0 or offsets[-1] != len(members) or (np.diff(offsets) < 0).any():
            raise ValueError(f"offsets must rise from 0 to len(members) = {len(members)}")
        object.__setattr__(self, "members", members)
        object.__setattr__(self, "offsets", offsets)

    @classmethod
    def from_sizes(cls, members: Any, sizes: Any) -> Groups:
        """Cut ``members`` into consecutive groups of ``sizes``."""
        sizes = np.asarray(sizes, dtype=np.int64)
        offsets = np.zeros(len(sizes) + 1, dtype=np.int64)
        np.cumsum(sizes, out=offsets[1:])
        return cls(np.asarray(members, dtype=np.int64), offsets)

    @classmethod
    def from_lists(cls, lists: Iterable[Sequence[int]]) -> Groups:
        """One group per list."""
        rows = [np.asarray(row, dtype=np.int64).reshape(-1) for row in lists]
        members = np.concatenate(rows) if rows else np.zeros(0, dtype=np.int64)
        return cls.from_sizes(members, [len(row) for row in rows])

    @classmethod
    def singles(cls, order: Any) -> Groups:
        """An order as groups of one."""
        order = np.asarray(order, dtype=np.int64)
        return cls(order, np.arange(len(order) + 1, dtype=np.int64))

    @classmethod
    def of_size(cls, order: Any, size: int) -> Groups:
        """Cut an order into groups of ``size``; the last may be smaller."""
        if size < 1:
            raise ValueError(f"size must be at least 1, got {size}")
        order = np.asarray(order, dtype=np.int64)
        offsets = np.append(np.arange(0, len(order), size, dtype=np.int64), len(order))
        return cls(order, offsets if len(order) else np.zeros(1, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Ints:
        """The members of one group, (size,) int64, a view."""
        length = len(self)
        if not -length <= index < length:
            raise IndexError(f"group {index} of {length}")
        index = int(index) % length
        return self.members[self.offsets[index] : self.offsets[index + 1]]

    @property
    def sizes(self) -> Ints:
        """(g,) int64, members of each group."""
        return np.diff(self.offsets)

    def sums(self, values: NDArray[Any]) -> NDArray[Any]:
        """(g,) sum of ``values[members]`` over each group, 0 for an empty one."""
        totals = np.zeros(len(self.members) + 1, dtype=np.result_type(values.dtype, np.int64))
        np.cumsum(values[self.members], out=totals[1:])
        result: NDArray[Any] = totals[self.offsets[1:]] - totals[self.offsets[:-1]]
        return result

    def maxima(self, values: NDArray[Any]) -> NDArray[Any]:
        """(g,) largest of ``values[members]`` over each group, 0 for an empty one."""
        result = np.zeros(len(self), dtype=values.dtype)
        filled = np.flatnonzero(self.sizes)
        if len(filled):
            result[filled] = np.maximum.reduceat(values[self.members], self.offsets[filled])
        return result

    def take(self, indices: Any) -> Groups:
        """The groups at ``indices``, in that order (repeats allowed)."""
        indices = np.asarray(indices, dtype=np.int64)
        sizes = self.sizes[indices]
        starts = self.offsets[:-1][indices]
        offsets = np.zeros(len(sizes) + 1, dtype=np.int64)
        np.cumsum(sizes, out=offsets[1:])
        positions = np.arange(offsets[-1], dtype=np.int64) + np.repeat(starts - offsets[:-1], sizes)
        return Groups(self.members[positions], offsets)

    def tolist(self) -> list[list[int]]:
        """A list of lists of int; for small plans and for tests."""
        return [self[i].tolist() for i in range(len(self))]

    def fingerprint(self) -> str:
        """16 hex digits over both arrays: equal for equal groups, on any machine."""
        return fingerprint(self.offsets, self.members)


def fingerprint(*arrays: NDArray[Any]) -> str:
    """16 hex digits of sha256 over the arrays' shapes and values as little-endian int64.

    Other types, such as memory-mapped int32, are converted a piece at a time.
    """
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(repr(array.shape).encode())
        for start in range(0, len(array), _PIECE):
            piece = array[start : start + _PIECE]
            digest.update(np.ascontiguousarray(piece, dtype="<i8").data)
    return digest.hexdigest()[:16]
