"""Where the rows come from: a data set, splits, or a config; and where a row stands in a file."""

from __future__ import annotations

import glob
import gzip
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import IO, Any

from datasets import Dataset, DatasetDict, IterableDataset, concatenate_datasets

from xlength.datasets.build import build
from xlength.datasets.json_rows import json_problem, text_problem


def load_source(dataset: Any, split: str | None) -> Dataset:
    """The rows of a ``Dataset``, a ``DatasetDict`` or a config dict.

    Args:
        dataset: see ``process_hf_dataset``.
        split: one of a ``DatasetDict``; None takes all of them, one after the other.

    Raises:
        ValueError: it cannot be loaded (a broken line of a JSONL file is named), is empty, a
            stream, no data set of ``datasets``, or has no such split.
    """
    loaded = dataset
    if not isinstance(dataset, DatasetDict):
        refuse_empty_files(dataset)
        try:
            loaded = build(dataset, "dataset")
        except ValueError as error:
            refuse_broken_line(dataset, error)
            empty = [path for path in all_data_files(dataset) if not _has_row(path)]
            if empty:
                raise ValueError(f"dataset: {empty[0]} is empty: leave it out") from error
            raise
    if isinstance(loaded, IterableDataset):
        raise ValueError("dataset is a stream: process_hf_dataset needs a Dataset")
    if isinstance(loaded, DatasetDict):
        loaded = _of_split(loaded, split)
    if not isinstance(loaded, Dataset):
        raise ValueError(
            "dataset must be a datasets.Dataset, a DatasetDict or a config dict of one, got "
            f"{type(loaded).__name__}"
        )
    if not len(loaded):
        raise ValueError(f"dataset is empty: it has columns {loaded.column_names} and no rows")
    return loaded


def _of_split(splits: DatasetDict, split: str | None) -> Dataset:
    if split is None:
        return concatenate_datasets(list(splits.values()))
    if split not in splits:
        raise ValueError(f"split={split!r} is none of the data set's splits {list(splits)}")
    return splits[split]


def data_files(dataset: Any, split: str | None) -> list[str]:
    """The local JSON files of a config dict, in the order in which the rows of a split are read.

    Args:
        dataset: the config dict; of anything else there are none.
        split: as ``load_source`` takes it; one that the config has comes first.

    Returns:
        empty where a row's number would not say its line: ``train[5:]``, ``train+test``.
    """
    files = _files_of_splits(dataset)
    if not files:
        return []
    own = dataset.get("split")
    wanted = split if own is None else str(own)
    if wanted is None or wanted == "all":
        return [path for paths in files.values() for path in paths]
    return files.get(wanted, [])


def all_data_files(dataset: Any) -> list[str]:
    """The local JSON files of a config dict, of all its splits."""
    return [path for paths in _files_of_splits(dataset).values() for path in paths]


def _files_of_splits(dataset: Any) -> dict[str, list[str]]:
    is_config = isinstance(dataset, Mapping) and not isinstance(dataset, DatasetDict)
    if not is_config or dataset.get("path") != "json":
        return {}
    files = dataset.get("data_files")
    if isinstance(files, Mapping) and "type" in files:  # built when the data set is
        return {}
    splits = files if isinstance(files, Mapping) else {"train": files}
    folder = dataset.get("data_dir") or ""
    return {str(split): _existing(names, folder) for split, names in splits.items()}


def _existing(files: Any, folder: str) -> list[str]:
    names = [files] if isinstance(files, str) else list(files or ())
    found: list[str] = []
    for name in names:
        path = os.path.join(folder, str(name))
        found += [path] if os.path.isfile(path) else sorted(glob.glob(path, recursive=True))
    return found


def line_of_row(files: Iterable[str], row: int) -> str:
    """'(FILE, line N)' of a row of JSONL files; empty where it cannot be said."""
    try:
        for path in files:
            for number, line in lines_of(path):
                if line.startswith(b"["):
                    return ""
                if row == 0:
                    return f" ({path}, line {number})"
                row -= 1
    except OSError:
        pass
    return ""


def refuse_empty_files(config: Any) -> None:
    """Raise ValueError if a config, or one within it, names JSON files and none of them has a row.

    Cost: the first lines of the first file that has one.
    """
    if isinstance(config, Mapping) and not isinstance(config, DatasetDict):
        files = all_data_files(config)
        if files and not any(_has_row(path) for path in files):
            more = f", as are the {len(files) - 1} other files of it" if len(files) > 1 else ""
            raise ValueError(f"dataset: {files[0]} is empty: it has no row{more}")
        for key in config:
            refuse_empty_files(config[key])
    elif isinstance(config, (list, tuple)):
        for part in config:
            refuse_empty_files(part)


def _has_row(path: str) -> bool:
    """False for a file that is blank or an array without elements."""
    try:
        head = b"".join(line for _, line in islice(lines_of(path), 2))
    except OSError:
        return True  # whoever reads it says what is wrong
    return bool(head) and re.fullmatch(rb"\[\s*\]", head) is None


def refuse_broken_line(dataset: Any, error: Exception) -> None:
    """Raise ValueError from ``error`` if a JSONL file of a config dict has a broken line."""
    broken = broken_line(all_data_files(dataset))
    if broken is not None:
        raise ValueError(f"dataset: {broken}") from error


def broken_line(files: Iterable[str]) -> str | None:
    """Says which line of which JSONL file is broken, or None."""
    for path in files:
        try:
            for number, line in lines_of(path):
                if number == 1 and line.startswith(b"["):
                    break
                problem = _problem(line)
                if problem:
                    return f"{path}, line {number}, is broken: {problem}: {_excerpt(line)}"
            else:
                continue
        except OSError as error:
            return f"{path} cannot be read: {error}"
    return None


def lines_of(path: str) -> Iterator[tuple[int, bytes]]:
    """(number from 1, line) of the lines that are not blank, without a byte order mark."""
    opener: Any = gzip.open if path.endswith(".gz") else open
    file: IO[bytes]
    with opener(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip():
                yield number, line.strip()


def _problem(line: bytes) -> str:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return f"no UTF-8 at byte {error.start}"
    except json.JSONDecodeError as error:
        return json_problem(error)
    if not isinstance(row, dict):
        return f"a row must be an object, got {type(row).__name__}"
    return text_problem(row, line)


def _excerpt(line: bytes) -> str:
    text = line[:60].decode("utf-8", "replace")
    return repr(text + ("..." if len(line) > 60 else ""))
