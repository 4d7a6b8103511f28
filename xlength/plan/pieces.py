"""Pieces of samples: what a pack is made of where a sample is too long for one pack."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xlength.plan.groups import Groups, Ints

OVERLONG_POLICIES = ("error", "truncate", "split", "drop")


@dataclass(frozen=True, eq=False)
class Pieces:
    """Spans of samples: piece ``i`` is tokens ``starts[i]`` to ``stops[i]`` of sample
    ``samples[i]``.

    Args:
        samples, starts, stops: (p,) int64.
    """

    samples: Ints
    starts: Ints
    stops: Ints

    @classmethod
    def whole(cls, lengths: NDArray[Any]) -> Pieces:
        """Every sample as one piece."""
        stops = np.ascontiguousarray(lengths, dtype=np.int64)
        return cls(
            np.arange(len(stops), dtype=np.int64), np.zeros(len(stops), dtype=np.int64), stops
        )

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def lengths(self) -> Ints:
        """(p,) int64, tokens of each piece."""
        return self.stops - self.starts


@dataclass(frozen=True, eq=False)
class Packs:
    """Packs of pieces: pack ``i`` lays the pieces ``groups[i]`` end to end.

    Args:
        groups: of indices into ``pieces``, or, where ``pieces`` is None, of whole samples.
        pieces: None where no sample is cut, which saves 24 bytes a sample.
    """

    groups: Groups
    pieces: Pieces | None = None

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, index: int) -> tuple[Ints, Ints | None, Ints | None]:
        """(samples, starts, stops) of one pack, each (k,) int64; starts and stops are None for
        whole samples."""
        members = self.groups[index]
        if self.pieces is None:
            return members, None, None
        pieces = self.pieces
        return pieces.samples[members], pieces.starts[members], pieces.stops[members]

    def take(self, indices: Any) -> Packs:
        """The packs at ``indices``, in that order."""
        return Packs(self.groups.take(indices), self.pieces)

    def fills(self, lengths: NDArray[Any]) -> Ints:
        """(packs,) int64, tokens in each pack; ``lengths``: (n,) of the samples."""
        sizes = np.abs(np.asarray(lengths)) if self.pieces is None else self.pieces.lengths
        return self.groups.sums(sizes)


@dataclass(frozen=True)
class Overlong:
    """What a policy did to the samples of more than ``max_length`` tokens.

    Args:
        policy: 'error', 'truncate', 'split' or 'drop'.
        max_length: tokens.
        count: samples that were too long.
        tokens: tokens of those samples that are in no piece.
        first_row, first_length: the first of them; -1 and 0 where there is none.
    """

    policy: str
    max_length: int
    count: int = 0
    tokens: int = 0
    first_row: int = -1
    first_length: int = 0

    def __str__(self) -> str:
        if not self.count:
            return f"no sample is longer than max_length={self.max_length}"
        done = {"truncate": "cut to it", "split": "cut into several pieces", "drop": "left out"}
        return (
            f"{self.count} samples are longer than max_length={self.max_length} (the first is row "
            f"{self.first_row} with {self.first_length} tokens) and were {done[self.policy]}; "
            f"{self.tokens} tokens are lost"
        )


def check_lengths(lengths: NDArray[Any], max_length: int) -> Ints:
    """(n,) lengths of either sign, in tokens -> (n,) int64 sizes of at least 1.

    Raises:
        ValueError: a length is 0 or no integer, or ``max_length`` is less than 1.
    """
    if isinstance(max_length, bool) or int(max_length) != max_length or max_length < 1:
        raise ValueError(
            f"max_length must be a whole number of at least 1 token, got {max_length!r}"
        )
    sizes = np.asarray(lengths)
    if sizes.ndim != 1 or (sizes.size and sizes.dtype.kind not in "iu"):
        raise ValueError(
            f"lengths must be one whole number a sample, got shape {sizes.shape} and dtype "
            f"{sizes.dtype}"
        )
    sizes = sizes.astype(np.int64, copy=False)
    if sizes.size and int(sizes.min()) < 1:
        sizes = np.abs(sizes)
        if not sizes.all():
            row = int(np.argmin(sizes))
            raise ValueError(f"lengths must be at least 1 token, got 0 at row {row}")
    return sizes


def cut_overlong(
    lengths: NDArray[Any], max_length: int, policy: str = "error"
) -> tuple[Pieces | None, Overlong]:
    """Deal with the samples of more than ``max_length`` tokens.

    Args:
        lengths: (n,) integers, tokens of each sample; the sign is ignored.
        max_length: tokens of a pack.
        policy: 'error' refuses them; 'truncate' keeps the first ``max_length`` tokens; 'split'
            keeps all, in pieces of ``max_length`` and a rest, which will not see each other; 'drop'
            leaves the samples out.

    Returns:
        The pieces, in the order of the samples, or None where all samples are whole; and what was
        done.

    Raises:
        ValueError: the policy is 'error' and a sample is too long (names the row and both numbers);
            the policy is unknown; a length is less than 1.
    """
    if policy not in OVERLONG_POLICIES:
        raise ValueError(f"overlong must be one of {', '.join(OVERLONG_POLICIES)}, got {policy!r}")
    sizes = check_lengths(lengths, max_length)
    rows = np.flatnonzero(sizes > max_length)
    if not len(rows):
        return None, Overlong(policy, max_length)
    first, excess = int(rows[0]), int((sizes[rows] - max_length).sum())
    facts = (len(rows), excess, first, int(sizes[first]))
    if policy == "error":
        raise ValueError(
            f"{len(rows)} samples are longer than max_length={max_length}, the first is row "
            f"{first} with {facts[3]} tokens; set overlong to 'truncate', 'split' or 'drop', or "
            "raise max_length"
        )
    if policy == "truncate":
        whole = Pieces.whole(np.minimum(sizes, max_length))
        return whole, Overlong(policy, max_length, *facts)
    if policy == "drop":
        kept = np.flatnonzero(sizes <= max_length)
        lost = int(sizes[rows].sum())
        pieces = Pieces(kept, np.zeros(len(kept), dtype=np.int64), sizes[kept])
        return pieces, Overlong(policy, max_length, facts[0], lost, *facts[2:])
    return _split(sizes, max_length), Overlong(policy, max_length, facts[0], 0, *facts[2:])


def _split(sizes: Ints, max_length: int) -> Pieces:
    counts = -(-sizes // max_length)
    samples = np.repeat(np.arange(len(sizes), dtype=np.int64), counts)
    firsts = np.cumsum(counts) - counts
    starts = (np.arange(len(samples), dtype=np.int64) - firsts[samples]) * max_length
    return Pieces(samples, starts, np.minimum(starts + max_length, sizes[samples]))
