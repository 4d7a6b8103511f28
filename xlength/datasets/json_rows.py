"""Rows of a JSON or JSONL file, found once and parsed when they are used.

A list of dicts in a loader's workers is copied page by page as soon as reference counts are
touched; bytes and offsets are not. So a file stays a memory map, and a row is parsed at each access
(some 20 microseconds a kilobyte).
"""

from __future__ import annotations

import hashlib
import json
import mmap
import re
from collections.abc import Iterable, Mapping
from json import JSONDecodeError
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_BOM = b"\xef\xbb\xbf"
_SPACE = b" \t\r\n"
_BLOCK = 1 << 26
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")


class RowError(ValueError):
    """A row that cannot be used; the message says what is wrong with it, the caller adds where it
    is."""


class JsonRows:
    """The rows of one file, or of a list of dicts; row i is parsed when it is asked for.

    A file may be JSON (one array of objects) or JSONL (one object a line; blank lines are passed
    over), with or without a byte-order mark, with either kind of line end. Which of the two is seen
    from its first character.

    Cost: JSONL is scanned for line ends (about 1 GB/s). A JSON array has to be parsed once to find
        its rows;
    ``spans`` of an earlier call saves that. Nothing is held but 16 bytes a row; a file's bytes stay
    in the file.

    Args:
        source: path of a file, or rows as dicts.
        spans: (n, 2) int64, first byte of each row and the byte behind it, as this class found them
            before.

    Raises:
        ValueError: the file is missing, empty, neither JSON nor JSONL, or its array is broken.
    """

    def __init__(
        self,
        source: str | Path | Iterable[Mapping[str, Any]],
        spans: NDArray[np.int64] | None = None,
    ) -> None:
        self._buffer: Any
        self.path: str | None = None
        if not isinstance(source, str | Path):
            self._buffer, self.spans = _serialised(source)
        else:
            self.path = str(source)
            self._buffer = _mapped(self.path)
            self.spans = self._find() if spans is None else np.asarray(spans, dtype=np.int64)
        if len(self.spans) == 0:
            raise ValueError(f"{self.path or 'data'}: no rows")

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Row ``index`` as a dict.

        Raises:
            RowError: the row is no JSON object, or holds text that cannot be encoded.
        """
        start, stop = self.spans[index]
        data = self._buffer[start:stop]
        try:
            row = json.loads(data)
        except (JSONDecodeError, UnicodeDecodeError) as error:
            raise RowError(f"broken JSON: {error}") from error
        if not isinstance(row, dict):
            raise RowError(f"a row must be an object, got {type(row).__name__}")
        problem = text_problem(row, data)
        if problem:
            raise RowError(problem)
        return row

    def where(self, index: int) -> str:
        """Where row ``index`` stands, for messages: file and line, or file and number of the
        row."""
        if self.path is None:
            return f"data, row {index}"
        if self._is_array():
            return f"{self.path}, row {index}"
        line = self._buffer[: int(self.spans[index, 0])].count(b"\n") + 1
        return f"{self.path}, line {line}"

    def fingerprint(self) -> str:
        """16 hex digits of the contents (about 1 GB/s); of a file those of ``file_fingerprint``."""
        if self.path is not None:
            return file_fingerprint(self.path)
        digest = hashlib.blake2b(np.ascontiguousarray(self.spans, dtype="<i8").data, digest_size=8)
        digest.update(self._buffer)
        return digest.hexdigest()

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        if self.path is not None:
            state["_buffer"] = len(self._buffer)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.path is not None:
            self._buffer = _mapped(self.path)
            if len(self._buffer) != state["_buffer"]:
                raise ValueError(
                    f"{self.path}: the file had {state['_buffer']} bytes, "
                    f"now it has {len(self._buffer)}"
                )

    def _is_array(self) -> bool:
        head = self._buffer[:4096].removeprefix(_BOM).lstrip(_SPACE)
        return bool(head.startswith(b"["))

    def _find(self) -> NDArray[np.int64]:
        if self._is_array():
            return _array_spans(self.path, bytes(self._buffer[:]))
        return _line_spans(self._buffer)


def json_problem(error: JSONDecodeError) -> str:
    """What is wrong with a row, and where; some of json's own messages end with "at" already."""
    return f"{error.msg.removesuffix(' at')} at character {error.pos}"


def text_problem(row: Any, data: bytes) -> str:
    """What is wrong with the text of a parsed row; empty if nothing.

    JSON can hold half of a pair of surrogates, such as an emoji that was cut in two; it parses, but
    no tokenizer takes it. Cost: a search of the bytes, and where they hold surrogates an encoding
    of the row.
    """
    if (b"\\u" not in data and b"\xed" not in data) or not _SURROGATE.search(data):
        return ""
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        return f"half a surrogate pair in its text: {ascii(error.object[error.start])}"
    return ""


def file_fingerprint(path: str) -> str:
    """16 hex digits of a file's contents.

    Raises:
        ValueError: the file is missing or empty.
    """
    buffer, digest = _mapped(path), hashlib.blake2b(digest_size=8)
    for start in range(0, len(buffer), _BLOCK):
        digest.update(buffer[start : start + _BLOCK])
    return digest.hexdigest()


def _mapped(path: str) -> mmap.mmap | bytes:
    try:
        with open(path, "rb") as file:
            if not file.read(1):
                raise ValueError(f"{path}: the file is empty")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from error


def _serialised(rows: Iterable[Mapping[str, Any]]) -> tuple[bytes, NDArray[np.int64]]:
    parts = []
    for index, row in enumerate(rows):
        try:
            parts.append(json.dumps(dict(row)).encode())
        except (TypeError, ValueError) as error:
            raise ValueError(f"data, row {index}: {error}") from error
    stops = np.cumsum([len(part) for part in parts], dtype=np.int64)
    starts = np.concatenate([np.zeros(1, dtype=np.int64), stops])[: len(stops)]
    return b"".join(parts), np.stack([starts, stops], axis=1)


def _line_spans(buffer: Any) -> NDArray[np.int64]:
    """(n, 2) int64: the lines that are not blank, without their ends."""
    size = len(buffer)
    found = [np.array([-1], dtype=np.int64)]
    for start in range(0, size, _BLOCK):
        block = np.frombuffer(buffer[start : start + _BLOCK], dtype=np.uint8)
        found.append(np.flatnonzero(block == 10) + start)
    if buffer[size - 1] != 10:
        found.append(np.array([size], dtype=np.int64))
    ends = np.concatenate(found)
    spans = np.stack([ends[:-1] + 1, ends[1:]], axis=1)
    if buffer[:3] == _BOM and len(spans):
        spans[0, 0] = 3
    short = (
        spans[:, 1] - spans[:, 0] < 64
    )  # only a short line can be blank in practice; long ones fail by name
    blank = [i for i in np.flatnonzero(short) if not buffer[spans[i, 0] : spans[i, 1]].strip()]
    return np.delete(spans, blank, axis=0)


def _array_spans(path: str | None, content: bytes) -> NDArray[np.int64]:
    """(n, 2) int64: the elements of one JSON array."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8: {error}") from error
    spans: list[tuple[int, int]] = []
    try:
        _walk(text, spans)
    except JSONDecodeError as error:
        raise ValueError(
            f"{path}, line {error.lineno}: broken JSON in row {len(spans)}: {error}"
        ) from error
    result = np.array(spans, dtype=np.int64).reshape(-1, 2)
    return result if text.isascii() else _to_bytes(text, result)


def _walk(text: str, spans: list[tuple[int, int]]) -> None:
    decode, space = json.JSONDecoder().raw_decode, " \t\r\n"

    def skip(position: int) -> int:
        while position < len(text) and text[position] in space:
            position += 1
        return position

    place = skip(skip(1 if text.startswith("\ufeff") else 0) + 1)
    if text[place : place + 1] == "]":
        return
    while True:
        end = decode(text, place)[1]
        spans.append((place, end))
        place = skip(end)
        mark = text[place : place + 1]
        if mark == "]":
            return
        if mark != ",":
            raise JSONDecodeError("expected ',' or ']' behind a row", text, place)
        place = skip(place + 1)


def _to_bytes(text: str, spans: NDArray[np.int64]) -> NDArray[np.int64]:
    """Positions of characters -> positions of bytes in UTF-8."""
    result, position, size = np.empty_like(spans), 0, 0
    for i, (start, stop) in enumerate(spans.tolist()):
        size += len(text[position:start].encode())
        width = len(text[start:stop].encode())
        result[i] = size, size + width
        position, size = stop, size + width
    return result
