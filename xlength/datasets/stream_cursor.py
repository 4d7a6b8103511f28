"""One reader's way through one epoch of a stream: reads, sorts, gives, and knows where it is."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from xlength.datasets.pool_key import SampleCost
from xlength.datasets.stream_source import StreamSource
from xlength.plan.pool_options import Entry

_END = object()
_FRESH = {"given": 0, "skip": 0, "source": {"pass": 0, "count": 0, "parent": None}}
_NOTE_EVERY = 1000
"""Samples between two notes for the main process, at least."""


class StreamCursor:
    """Drives a sorter over a source.

    The state holds the source's state where the oldest sample that is held was read, and the serial
    numbers of those that are held; to continue, what lies between is read again and the samples
    that are no longer held are passed over.

    Args:
        source: of this reader.
        sorter: fresh, of this epoch; None gives the samples as they come.
        cost: of a sample.
        separate: whether the sorter keeps packed samples apart.
        mark_every: samples between two states of the source that are kept.
        note: gets (samples given, a state, whether it has ended) now and then.
    """

    def __init__(
        self,
        source: StreamSource,
        sorter: Any,
        cost: SampleCost,
        separate: bool,
        mark_every: int,
        note: Callable[[int, dict[str, Any], bool], None],
    ) -> None:
        self.given = 0
        self.ended = False
        self._source = source
        self._sorter = sorter
        self._cost = cost
        self._separate = separate
        self._mark_every = mark_every
        self._note = note
        self._marks: list[tuple[int, dict[str, Any]]] = []  # samples read, source's state
        self._state: Mapping[str, Any] | None = None
        self._skip = 0

    def restore(self, state: Mapping[str, Any] | None, skip: int = 0) -> None:
        """Continue from a state, or from the beginning (None), and pass over ``skip`` samples."""
        self._state = state
        self._skip = skip + (0 if state is None else state["skip"])

    def state(self) -> dict[str, Any]:
        """A copy of where the reader is, right after the last sample that it gave."""
        if self._state is not None or self._skip:  # nothing is read yet
            return {**(self._state or _FRESH), "skip": self._skip}
        state = {"given": self.given, "skip": 0, "source": self._source.state()}
        if self._sorter is None:
            return state
        sorter = self._sorter.state()
        held = sorter["ready"] + sorter["rest"]
        if held:
            self._drop_marks(min(held))
            start, source = self._marks[0]
        else:
            start, source = self._sorter.reads, self._source.state()
        checksum = _checksum(self._sorter.held())
        return {
            **state,
            "source": source,
            "first": start,
            "sorter": sorter,
            "checksum": checksum,
            "closed": self._sorter.closed,
        }

    def samples(self) -> Iterator[Any]:
        """The rest of the epoch."""
        seeds, rest = self._source.seeds, self._rest()
        return rest if seeds is None else seeds.in_batches(rest, lambda: self.given)

    def _rest(self) -> Iterator[Any]:
        state, self._state = self._state, None
        skip, self._skip = self._skip, 0
        if state is not None:
            self.given = state["given"]
            self._source.restore(state["source"])
        stream = iter(self._source)
        if state is not None and self._sorter is not None:
            self._reread(stream, state)
        samples = stream if self._sorter is None else self._sorted(stream)
        next_note = self.given + max(self._mark_every, _NOTE_EVERY)
        for sample in samples:
            self.given += 1
            if skip:
                skip -= 1
                continue
            if self.given >= next_note:
                next_note = self.given + max(self._mark_every, _NOTE_EVERY)
                self._note(self.given, self.state(), False)
            yield sample
        if skip:
            raise ValueError(
                f"the saved state is {skip} samples behind the end of the stream of "
                f"{self._source.reader}, which has {self.given}: the data have changed"
            )
        self.ended = True
        self._note(self.given, self.state(), True)

    def _sorted(self, stream: Iterator[Any]) -> Iterator[Any]:
        sorter, cost, separate = self._sorter, self._cost.of, self._separate
        wants, push, pop = sorter.wants, sorter.push, sorter.pop
        is_packed = self._cost.is_packed
        next_mark = self._marks[-1][0] + self._mark_every if self._marks else 0
        while True:
            for _ in range(wants()):
                serial = sorter.reads
                if serial >= next_mark:
                    next_mark = serial + self._mark_every
                    self._mark()
                sample = next(stream, _END)
                if sample is _END:
                    sorter.close()
                    break
                if separate:
                    push(cost(sample, serial), sample, is_packed(sample))
                else:
                    push(cost(sample, serial), sample)
            if not len(sorter):
                return
            yield pop()

    def _mark(self) -> None:
        """Keep the source's state, and drop those before the oldest sample that is held."""
        sorter = self._sorter
        if len(self._marks) > 2:
            self._drop_marks(min((entry[1] for entry in sorter.held()), default=sorter.reads))
        self._marks.append((sorter.reads, self._source.state()))

    def _drop_marks(self, oldest: int) -> None:
        while len(self._marks) > 1 and self._marks[1][0] <= oldest:
            del self._marks[0]

    def _reread(self, stream: Iterator[Any], state: Mapping[str, Any]) -> None:
        """Read again what is held, and put the sorter into its state."""
        if "sorter" not in state:
            return
        sorter = state["sorter"]
        needed = {*sorter["ready"], *sorter["rest"]}
        entries: dict[int, Entry] = {}
        self._marks = [(state["first"], state["source"])]
        for serial in range(state["first"], sorter["reads"]):
            if serial >= self._marks[-1][0] + self._mark_every:
                self._marks.append((serial, self._source.state()))
            sample = next(stream, _END)
            if sample is _END:
                raise ValueError(
                    f"the stream of {self._source.reader} has {serial} samples where the saved "
                    f"state had read {sorter['reads']}: the data have changed"
                )
            if serial in needed:
                packed = self._separate and self._cost.is_packed(sample)
                entries[serial] = (self._cost.of(sample, serial), serial, packed, sample)
        self._sorter.restore(sorter, entries)
        if state["closed"]:  # some streams begin anew when they are read on behind their end
            self._sorter.close()
        if _checksum(self._sorter.held()) != state["checksum"]:
            raise ValueError(
                f"the samples that {self._source.reader} held have other lengths than when the "
                "state was saved: the data or the key have changed"
            )


def _checksum(entries: list[Entry]) -> int:
    """Of the keys of held samples: tells whether the same data are read again."""
    return zlib.crc32(array("d", [entry[0] for entry in entries]).tobytes())
