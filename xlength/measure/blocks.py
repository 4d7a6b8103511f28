"""A source in blocks that are read where they are counted, so that memory stays bounded."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from xlength.datasets.json_rows import JsonRows, json_problem, text_problem

BLOCK_ROWS = 2048
_LEAST_BYTES, _MOST_BYTES = 256 << 10, 4 << 20
_BLOCKS = 64
_HEAD = 4096
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Row:
    """A row of a block, or why there is none.

    Args:
        place: line (from 1) or row (from 0) of this row within the block.
        value: as parsed.
        problem: what is wrong with it, if it cannot be parsed.
    """

    place: int
    value: dict[str, Any] | None
    problem: str = ""


class Block(Protocol):
    """Some consecutive rows of a source."""

    @property
    def size(self) -> int:
        """Bytes or rows, for the progress bar."""
        ...

    def rows(self) -> tuple[list[Row], int]:
        """The rows, and how many lines or rows the next block is further on."""
        ...


def parse(data: bytes, place: int) -> Row:
    """A row from its JSON."""
    try:
        value = json.loads(data)
    except UnicodeDecodeError as error:
        return Row(place, None, f"no UTF-8 at byte {error.start}")
    except json.JSONDecodeError as error:
        return Row(place, None, f"broken JSON: {json_problem(error)}")
    if not isinstance(value, dict):
        return Row(place, None, f"a row must be an object, got {type(value).__name__}")
    problem = text_problem(value, data)
    return Row(place, None if problem else value, problem)


def parse_lines(lines: Sequence[bytes], first: bool) -> list[Row]:
    """The rows of lines that are not blank; ``first``: they begin a file."""
    if first and lines:
        lines = [lines[0].removeprefix(_BOM), *lines[1:]]
    return [parse(line, i) for i, line in enumerate(lines, 1) if line.strip()]


@dataclass(frozen=True)
class LineBlock:
    """The lines of a JSONL file that begin in a range of bytes."""

    path: str
    start: int
    size: int

    def rows(self) -> tuple[list[Row], int]:
        """See ``Block``."""
        lines = []
        stop = self.start + self.size
        with open(self.path, "rb") as file:
            if self.start:
                file.seek(self.start - 1)
                file.readline()  # the rest of a line that began before
            while file.tell() < stop:
                line = file.readline()
                if not line:
                    break
                lines.append(line)
        return parse_lines(lines, self.start == 0), len(lines)


@dataclass(frozen=True)
class TextBlock:
    """Lines that were read already, of a compressed file."""

    lines: list[bytes]
    size: int
    first: bool

    def rows(self) -> tuple[list[Row], int]:
        """See ``Block``."""
        return parse_lines(self.lines, self.first), len(self.lines)


@dataclass(frozen=True)
class ArrayBlock:
    """Elements of a JSON array, by their places in the file."""

    path: str
    spans: list[tuple[int, int]]
    size: int

    def rows(self) -> tuple[list[Row], int]:
        """See ``Block``."""
        begin = self.spans[0][0]
        with open(self.path, "rb") as file:
            file.seek(begin)
            data = file.read(self.spans[-1][1] - begin)
        parts = [data[start - begin : stop - begin] for start, stop in self.spans]
        return [parse(part, i) for i, part in enumerate(parts)], len(parts)


tables: list[Any] = []
"""The data sets that are being measured; worker processes have them too, so that a block that is
sent to them needs only a number."""


@dataclass(frozen=True)
class TableBlock:
    """Rows of one of ``tables``, each a ``datasets.Dataset``, which memory-maps its files."""

    table: int
    start: int
    size: int

    def rows(self) -> tuple[list[Row], int]:
        """See ``Block``."""
        columns = tables[self.table][self.start : self.start + self.size]
        rows = [
            Row(i, {name: values[i] for name, values in columns.items()}) for i in range(self.size)
        ]
        return rows, self.size


def block_bytes_of(path: Path) -> int:
    """Bytes of a block, by the file's size alone: enough blocks for all cores, none too large."""
    return min(_MOST_BYTES, max(_LEAST_BYTES, path.stat().st_size // _BLOCKS))


def file_blocks(path: Path, block_bytes: int, skip: int = 0) -> Iterator[Block]:
    """The blocks of a JSON or JSONL file (JSONL also ``.gz``), from block ``skip`` on.

    Raises:
        ValueError: the file cannot be read.
    """
    if path.suffix == ".gz":
        yield from _compressed(path, block_bytes, skip)
    elif _is_array(path):
        spans = JsonRows(path).spans
        # Cut where the bytes say, so that blocks of long rows are no larger than others.
        blocks = (spans[:, 0] - spans[0, 0]) // block_bytes
        starts = [0, *(np.flatnonzero(np.diff(blocks)) + 1).tolist(), len(spans)]
        for i in range(skip, len(starts) - 1):
            part = [(int(a), int(b)) for a, b in spans[starts[i] : starts[i + 1]]]
            yield ArrayBlock(str(path), part, part[-1][1] - part[0][0])
    else:
        size = path.stat().st_size
        for start in range(skip * block_bytes, size, block_bytes):
            yield LineBlock(str(path), start, min(block_bytes, size - start))


def _compressed(path: Path, block_bytes: int, skip: int) -> Iterator[Block]:
    lines: list[bytes] = []
    held = number = 0
    with gzip.open(path, "rb") as file:
        if _begins_array(file.peek(_HEAD)):
            raise ValueError("it holds a JSON array, which is read unpacked only: gunzip it first")
        for line in file:
            lines.append(line)
            held += len(line)
            if held >= block_bytes:
                if number >= skip:
                    yield TextBlock(lines, held, number == 0)
                number, lines, held = number + 1, [], 0
    if lines and number >= skip:
        yield TextBlock(lines, held, number == 0)


def table_blocks(table: int, block_rows: int = BLOCK_ROWS, skip: int = 0) -> Iterator[Block]:
    """The blocks of one of ``tables``, from block ``skip`` on."""
    total = len(tables[table])
    for start in range(skip * block_rows, total, block_rows):
        yield TableBlock(table, start, min(block_rows, total - start))


def _is_array(path: Path) -> bool:
    with open(path, "rb") as file:
        return _begins_array(file.read(_HEAD))


def _begins_array(head: bytes) -> bool:
    return head.removeprefix(_BOM).lstrip().startswith(b"[")


def counts_lines(path: Path) -> bool:
    """Whether places in this file are lines, not rows."""
    return path.suffix == ".gz" or not _is_array(path)
