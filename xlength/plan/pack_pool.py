"""Packing a stream: a pool of samples from which one full pack after the other is taken."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from xlength.plan.options import positive
from xlength.plan.pack import best_fit
from xlength.plan.pieces import OVERLONG_POLICIES


class Held(NamedTuple):
    """A piece of a sample that is held: its tokens, the sample's serial number in the reader's
    stream, the piece's first token, the sample."""

    length: int
    serial: int
    start: int
    sample: Any


@dataclass(frozen=True)
class PackOptions:
    """How a stream is packed.

    Args:
        max_length: tokens of a pack.
        pool_size: samples that are held; some ten times those in a pack are enough.
        overlong: for samples of more than ``max_length`` tokens: ``'error'``, ``'truncate'``,
            ``'split'`` or ``'drop'``, see ``cut_overlong``.
        on_overlong: called with (serial number, tokens) of every sample that is cut or dropped.

    Raises:
        ValueError: a value out of its range.
    """

    max_length: int
    pool_size: int = 1000
    overlong: str = "error"
    on_overlong: Callable[[int, int], None] | None = None

    def __post_init__(self) -> None:
        positive("max_length", self.max_length)
        positive("pool_size", self.pool_size)
        if self.overlong not in OVERLONG_POLICIES:
            raise ValueError(
                f"overlong must be one of {', '.join(OVERLONG_POLICIES)}, got {self.overlong!r}"
            )

    @property
    def separate_packed(self) -> bool:
        """Whether packed and other samples are kept apart: there are no packed ones."""
        return False

    @property
    def capacity(self) -> int:
        """Samples that are held at most."""
        return self.pool_size

    def as_dict(self) -> dict[str, Any]:
        """The options as plain values, for a saved state."""
        return {
            "max_length": self.max_length,
            "pool_size": self.pool_size,
            "overlong": self.overlong,
        }


class PackPool:
    """Push samples in, pop packs.

    Every pack begins with the sample that has waited longest and is filled by best fit: again and
    again with the longest sample that still fits. So no sample waits for more than ``pool_size``
    packs. When the stream has ended, what is left is packed by best-fit-decreasing.

    Driven as ``PoolSorter`` is. Cost: two binary searches a sample.

    Args:
        options: see ``PackOptions``.
    """

    def __init__(self, options: PackOptions) -> None:
        self.options = options
        self.reads = 0
        self.closed = False
        self._all_overlong = True
        self._ready: list[list[Held]] = []  # whole packs, first one first
        self._waiting: dict[int, Held] = {}  # by serial, in the order they were read
        self._by_length: list[tuple[int, int]] = []  # (tokens, -serial), sorted

    def __len__(self) -> int:
        """Pieces that are held."""
        return sum(map(len, self._ready)) + len(self._waiting)

    def wants(self) -> int:
        """How many samples to push before the next pack is popped; may be negative."""
        if self.closed or self._ready:
            return 0
        return self.options.pool_size - len(self._waiting)

    def push(self, key: float, sample: Any, packed: bool = False) -> None:
        """Take in the next sample of the stream; ``key``: its tokens.

        Raises:
            ValueError: it is too long and the policy is 'error'; or the policy is 'drop' and all
                that were read are too long.
        """
        length, serial, limit = int(key), self.reads, self.options.max_length
        self.reads += 1
        start = self._cut(length, serial, sample) if length > limit else 0
        if start is not None:
            self._all_overlong = False
            length = min(length - start, limit)
            self._waiting[serial] = Held(length, serial, start, sample)
            insort(self._by_length, (length, -serial))

    def _cut(self, length: int, serial: int, sample: Any) -> int | None:
        """The first token of what remains to be packed of a sample that is too long; None: none."""
        limit, policy = self.options.max_length, self.options.overlong
        if policy == "error":
            raise ValueError(
                f"sample {serial} of the stream has {length} tokens, more than "
                f"max_length={limit}; set overlong to 'truncate', 'split' or 'drop', or raise "
                "max_length"
            )
        if self.options.on_overlong is not None:
            self.options.on_overlong(serial, length)
        if policy == "split":
            starts = range(0, length - limit, limit)
            self._ready += [[Held(limit, serial, start, sample)] for start in starts]
            return len(starts) * limit
        if policy == "truncate":
            return 0
        if self._all_overlong and self.reads >= self.options.pool_size:
            raise ValueError(
                f"the first {self.reads} samples of the stream are all longer than "
                f"max_length={limit}: nothing is left with overlong='drop'"
            )
        return None

    def close(self) -> None:
        """The stream has ended."""
        self.closed = True

    def pop(self) -> list[Held]:
        """The pieces of the next pack.

        Raises:
            IndexError: nothing is held.
        """
        if not self._ready:
            if not self._waiting:
                raise IndexError("no sample is held")
            self._ready = self._pack_rest() if self.closed else [self._fill()]
        return self._ready.pop(0)

    def _fill(self) -> list[Held]:
        """One pack, beginning with the oldest."""
        keys = self._by_length
        oldest = next(iter(self._waiting.values()))
        del keys[bisect_left(keys, (oldest.length, -oldest.serial))]
        pack = [self._waiting.pop(oldest.serial)]
        room = self.options.max_length - oldest.length
        while keys and keys[0][0] <= room:
            length, serial = keys.pop(bisect_right(keys, (room, 1)) - 1)
            pack.append(self._waiting.pop(-serial))
            room -= length
        return pack

    def _pack_rest(self) -> list[list[Held]]:
        rest = list(self._waiting.values())
        self._waiting, self._by_length = {}, []
        groups = best_fit(np.array([held.length for held in rest]), self.options.max_length)
        return [[rest[i] for i in group] for group in groups.tolist()]

    def held(self) -> list[Held]:
        """What is held: first the packs that are made, then the rest as it was read."""
        return [held for pack in self._ready for held in pack] + list(self._waiting.values())

    def state(self) -> dict[str, Any]:
        """Plain numbers from which, with the held samples, ``restore`` makes the same pool."""
        ready = [held for pack in self._ready for held in pack]
        return {
            "reads": self.reads,
            "ready": [held.serial for held in ready],
            "ready_spans": [[held.start, held.length] for held in ready],
            "ready_sizes": [len(pack) for pack in self._ready],
            "rest": list(self._waiting),
            "rest_spans": [[held.start, held.length] for held in self._waiting.values()],
        }

    def restore(self, state: Mapping[str, Any], entries: Mapping[int, Any]) -> None:
        """Continue from a state.

        Args:
            state: from ``state()``.
            entries: (tokens, ..., sample) by serial number.

        Raises:
            ValueError: a sample has another length than when the state was saved.
        """
        self.reads = state["reads"]
        self._all_overlong = False
        ready, rest = (
            [
                self._found(serial, start, length, entries[serial])
                for serial, (start, length) in zip(state[kind], state[f"{kind}_spans"], strict=True)
            ]
            for kind in ("ready", "rest")
        )
        pieces = iter(ready)
        self._ready = [[next(pieces) for _ in range(size)] for size in state["ready_sizes"]]
        self._waiting = {held.serial: held for held in rest}
        self._by_length = sorted((held.length, -held.serial) for held in rest)

    def _found(self, serial: int, start: int, length: int, entry: Any) -> Held:
        tokens, limit = int(entry[0]), self.options.max_length
        if length != min(tokens - start, limit):
            raise ValueError(
                f"sample {serial} of the stream has {tokens} tokens, and had others when the state "
                "was saved: the data or the key have changed"
            )
        return Held(length, serial, start, entry[-1])
