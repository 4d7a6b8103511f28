"""Lengths as they are found, kept after each block, and written as one file at the end."""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xlength.measure.counting import Counted

_CHUNK = 1 << 22


class Journal:
    """What is measured so far, on disk: beside ``lengths.npy`` the lengths and a line a block.

    Each block's lengths are written before its line, so whatever the process is killed at, the
    lines that are whole say how many lengths count.

    Args:
        out: the file that is to be made.
        request: what is measured and how; a journal of another request is not continued.

    Attributes:
        done: (part, block) of the last block that is kept, (0, -1) for none.
        num_samples: lengths that are kept.
        counts: of rows, see ``Counted``.
        first: the first rows of each kind that is no good: (part, place, what is wrong).
        parts: lengths of each part so far.
        place: lines or rows of the present part so far.
        resumed: whether blocks of an earlier run were found.
    """

    def __init__(self, out: Path, request: Mapping[str, Any]) -> None:
        self.out = out
        self.request = json.loads(json.dumps(request))
        self.data_path = out.with_name(f"{out.name}.partial")
        self.log_path = out.with_name(f"{out.name}.partial.jsonl")
        self.done = (0, -1)
        self.num_samples = 0
        self.counts: Counter[str] = Counter()
        self.first: dict[str, tuple[int, int, str]] = {}
        self.parts: Counter[int] = Counter()
        self.place = 0
        entries = list(self._entries())
        self.resumed = bool(entries)
        for entry in entries:
            self._take(entry)
        out.parent.mkdir(parents=True, exist_ok=True)
        self._open()

    def _entries(self) -> Iterator[dict[str, Any]]:
        """The whole lines of an earlier run with the same request, as far as lengths are there."""
        held = self.data_path.stat().st_size // 4 if self.data_path.exists() else -1
        if held < 0 or not self.log_path.exists():
            return
        lines = self.log_path.read_bytes().split(b"\n")[:-1]
        total = 0
        for i, line in enumerate(lines):
            try:
                entry = json.loads(line)
            except ValueError:
                return
            if i == 0:
                if entry != self.request:
                    return
                continue
            total += entry["kept"]
            if total > held:
                return
            yield entry

    def _open(self) -> None:
        """Cut both files to what counts, and append from there."""
        entries = list(self._entries()) if self.resumed else []
        header = [self.request, *entries]
        log = self.log_path.with_name(f"{self.log_path.name}.new")
        log.write_text("".join(f"{json.dumps(entry)}\n" for entry in header), encoding="utf-8")
        os.replace(log, self.log_path)
        with open(self.data_path, "ab") as file:
            file.truncate(self.num_samples * 4)
        self._data = open(self.data_path, "ab")  # noqa: SIM115  closed by finish and close
        self._log = open(self.log_path, "a", encoding="utf-8")  # noqa: SIM115

    def _take(self, entry: Mapping[str, Any]) -> None:
        part, block = entry["part"], entry["block"]
        if part != self.done[0]:
            self.place = 0
        self.done = (part, block)
        self.num_samples += entry["kept"]
        self.parts[part] += entry["kept"]
        self.counts.update(entry["counts"])
        for kind, (place, why) in entry["first"].items():
            self.first.setdefault(kind, (part, self.place + place, why))
        self.place += entry["step"]

    def add(self, part: int, block: int, counted: Counted) -> None:
        """Keep the lengths of one block."""
        self._data.write(counted.lengths.astype("<i4").tobytes())
        self._data.flush()
        entry = {
            "part": part,
            "block": block,
            "kept": len(counted.lengths),
            "step": counted.step,
            "counts": dict(counted.counts),
            "first": counted.first,
        }
        self._log.write(json.dumps(entry) + "\n")
        self._log.flush()
        self._take(entry)

    def close(self) -> None:
        """Stop, to be continued."""
        self._data.close()
        self._log.close()

    def finish(self) -> NDArray[np.int32]:
        """Write ``lengths.npy`` at once, or not at all; returns it memory-mapped."""
        self.close()
        partial = np.memmap(self.data_path, "<i4", "r") if self.num_samples else None
        write_lengths(self.out, partial, self.num_samples)
        with contextlib.suppress(OSError):
            self.data_path.unlink()
            self.log_path.unlink()
        return np.load(self.out, mmap_mode="r")  # type: ignore[no-any-return]


def write_lengths(out: Path, values: Any, count: int) -> None:
    """Write (n,) int32 lengths, in pieces, and put the file in place when it is whole."""
    partial = out.with_name(f".{out.name}.{os.getpid()}.npy")
    try:
        file = np.lib.format.open_memmap(partial, "w+", np.int32, (count,))
        for start in range(0, count, _CHUNK):
            file[start : start + _CHUNK] = values[start : start + _CHUNK]
        file.flush()
        del file
        os.replace(partial, out)
    finally:
        partial.unlink(missing_ok=True)
