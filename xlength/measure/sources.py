"""What can be measured: JSON and JSONL, Parquet, folders of these, saved ``datasets`` folders."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xlength.commands import InputError
from xlength.measure.blocks import (
    BLOCK_ROWS,
    Block,
    block_bytes_of,
    counts_lines,
    file_blocks,
    table_blocks,
    tables,
)

_JSON = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".ndjson")
_TABLES = (".parquet",)


@dataclass
class Part:
    """One file, or one data set.

    Args:
        name: for the side file and the report's histogram.
        blocks: number of blocks to skip -> the others.
        size: of all blocks, in bytes or rows; for a compressed file what it is on disk.
        unit: of one block but the last.
        identity: other when the content is another one.
        where: place in the part -> how to name it.
        columns: of a table, None where rows may differ.
    """

    name: str
    blocks: Callable[[int], Iterator[Block]]
    size: int
    unit: int
    identity: list[Any]
    where: Callable[[int], str]
    columns: list[str] | None = None


def open_source(path: Path, split: str = "train", block_bytes: int | None = None) -> list[Part]:
    """The parts of a file or folder, in the order in which they are measured.

    Args:
        path: a file or folder.
        split: of a saved ``DatasetDict``.
        block_bytes: of a JSON file's blocks; None goes by its size.

    Raises:
        InputError: there is nothing that can be measured, or it cannot be opened.
    """
    if path.is_dir():
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            return [table_part(path.name, _from_disk(path, split))]
        files = [file for file in sorted(path.rglob("*")) if _suffix(file) and file.is_file()]
        if not files:
            raise InputError(
                f"{path} is no saved datasets folder and holds no {', '.join(_JSON + _TABLES)} file"
            )
        return [_file_part(file, str(file.relative_to(path)), block_bytes) for file in files]
    if not path.is_file():
        raise InputError(f"{path}: no such file, folder or config")
    if not _suffix(path):
        raise InputError(f"{path} must end with one of {', '.join(_JSON + _TABLES)}, or .py")
    return [_file_part(path, path.name, block_bytes)]


def _suffix(path: Path) -> str:
    return next((s for s in _JSON + _TABLES if path.name.lower().endswith(s)), "")


def _file_part(path: Path, name: str, given_bytes: int | None) -> Part:
    stat = path.stat()
    identity = [name, stat.st_size, stat.st_mtime_ns]
    if _suffix(path) in _TABLES:
        import datasets

        try:
            table = datasets.load_dataset("parquet", data_files=str(path), split="train")
        except Exception as error:
            raise InputError(f"{path}: {error}") from error
        part = table_part(name, table)
        part.identity = identity
        part.where = lambda place: f"{path}, row {place}"
        return part
    if not stat.st_size:
        raise InputError(f"{path} is empty")
    unit = "line" if counts_lines(path) else "row"
    block_bytes = given_bytes or block_bytes_of(path)

    def blocks(skip: int) -> Iterator[Block]:
        try:
            yield from file_blocks(path, block_bytes, skip)
        except (ValueError, OSError, EOFError) as error:
            raise InputError(f"{path}: {error}") from error

    return Part(
        name,
        blocks,
        stat.st_size,
        block_bytes,
        [*identity, block_bytes],
        lambda place: f"{path}, {unit} {place}",
    )


def table_part(name: str, table: Any) -> Part:
    """A ``datasets.Dataset`` as a part."""
    tables.append(table)
    number = len(tables) - 1
    return Part(
        name,
        lambda skip: table_blocks(number, BLOCK_ROWS, skip),
        len(table),
        BLOCK_ROWS,
        [name, len(table), str(table._fingerprint), BLOCK_ROWS],
        lambda place: f"{name}, row {place}",
        list(table.column_names),
    )


def _from_disk(path: Path, split: str) -> Any:
    import datasets

    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:
        raise InputError(f"{path}: {error}") from error
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise InputError(f"--split {split}: {path} has the splits {', '.join(loaded)}")
        loaded = loaded[split]
    with contextlib.suppress(AttributeError):
        loaded.reset_format()
    return loaded
