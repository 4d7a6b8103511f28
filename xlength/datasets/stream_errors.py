"""Rows of a stream that cannot be read or used: in which file and line they stand."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from datasets import IterableDataset

from xlength.datasets.source import broken_line, lines_of

_MOST_BYTES = 1 << 30
"""Read in search of a row."""


def name_broken_lines(stream: IterableDataset) -> list[str]:
    """Have the stream's own errors say which line of which file is broken.

    Returns:
        the local JSON files that it reads, as far as they are known.
    """
    found: dict[str, None] = {}
    waiting: list[Any] = [getattr(stream, "_ex_iterable", None)]
    while waiting:
        part = waiting.pop()
        inner = [getattr(part, "ex_iterable", None), *(getattr(part, "ex_iterables", None) or ())]
        waiting += [one for one in inner if one is not None]
        files = _json_files(getattr(part, "kwargs", None))
        found |= dict.fromkeys(files)
        read = getattr(part, "generate_tables_fn", None)
        if files and read is not None and not isinstance(read, _Reading):
            part.generate_tables_fn = _Reading(read)
    return list(found)


class _Reading:
    """What makes the tables of JSON files, with errors that name file and line."""

    def __init__(self, read: Callable[..., Iterator[Any]]) -> None:
        self.read = read

    def __call__(self, **kwargs: Any) -> Iterator[Any]:
        try:
            yield from self.read(**kwargs)
        except Exception as error:
            files = _json_files(kwargs)
            problem = broken_line(files)
            if problem is None:
                raise
            raise ValueError(
                f"dataset: {problem} (a stream cannot leave out broken JSON, bad_rows='skip' is "
                "for rows that can be read)"
            ) from error


def _json_files(kwargs: Any) -> list[str]:
    """The local files among the arguments of a function of ``datasets`` that reads JSON."""
    if not isinstance(kwargs, Mapping):
        return []
    names = next((kwargs[key] for key in ("base_files", "files") if kwargs.get(key)), ())
    if not isinstance(names, Sequence):
        return []
    kinds = (".json", ".jsonl", ".ndjson", ".json.gz", ".jsonl.gz")
    return [
        name
        for name in names
        if isinstance(name, str) and name.endswith(kinds) and os.path.isfile(name)
    ]


def place_of(row: Mapping[str, Any], files: Sequence[str]) -> str:
    """' (FILE, line N)' of the first row of JSONL files that is like this; their names where there
    is none, or none in the first gigabyte; empty without files."""
    if not files:
        return ""
    wanted, read = _without_nulls(row), 0
    for path in files:
        try:
            for number, line in lines_of(path):
                read += len(line)
                if read > _MOST_BYTES:
                    break
                try:
                    same = _without_nulls(json.loads(line)) == wanted
                except ValueError:
                    continue
                if same:
                    return f" ({path}, line {number})"
        except OSError:
            continue
    more = f" and {len(files) - 1} more files" if len(files) > 1 else ""
    return f" (of {files[0]}{more})"


def _without_nulls(value: Any) -> Any:
    """Without what Arrow adds to rows in which a key is missing."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value
