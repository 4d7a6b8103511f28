"""Speed of the planning and of the data path, each figure a ratio against a named peer or limit
measured in the same run."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from xlength.bench import TOPICS
from xlength.commands import InputError

PACKAGES = ("torch", "numpy", "mmengine", "datasets", "transformers", "tokenizers", "pyarrow")
PEERS = ("trl", "lhotse", "binpacking", "numba")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``xlength bench``."""
    parser.add_argument("topics", nargs="*", metavar="TOPIC", help=f"{', '.join(TOPICS)} or all")
    parser.add_argument("--lengths", help="your own lengths (.npy) instead of made ones")
    parser.add_argument("--data", help="your own chat rows (.jsonl[.gz]) for tokenize")
    parser.add_argument("--json", help="write the rows, versions and the command to this file")
    parser.add_argument("--quick", action="store_true", help="smaller inputs, to see that it runs")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> int:
    """Run the asked topics one after the other, print a table each, and write the JSON."""
    topics = [topic for topic in TOPICS if topic in args.topics or args.topics in ([], ["all"])]
    for topic in args.topics:
        if topic not in (*TOPICS, "all"):
            raise InputError(f"unknown topic {topic!r}; known are {', '.join(TOPICS)} and all")
    if args.lengths and not Path(args.lengths).is_file():
        raise InputError(f"--lengths {args.lengths}: no such file")
    result = {"environment": environment(), "topics": {}}
    print(_one_line(result["environment"]))
    for topic in topics:
        if find_spec(f"xlength.bench.{topic}") is None:
            raise InputError(f"the topic {topic!r} is not part of this installation of xlength")
        rows = import_module(f"xlength.bench.{topic}").run(args)
        result["topics"][topic] = rows
        _print_table(topic, rows)
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    return 0


def environment() -> dict[str, Any]:
    """Versions, cores, and the command that repeats the run."""
    versions = {name: _version(name) for name in PACKAGES + PEERS}
    return {
        "command": shlex.join(["xlength", *sys.argv[1:]]),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "versions": {name: version for name, version in versions.items() if version},
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _one_line(facts: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    return f"Python {facts['python']}, {facts['cores']} cores, {versions}\n$ {facts['command']}"


def _print_table(topic: str, rows: list[dict[str, Any]]) -> None:
    """One table for each kind of rows: those with the same columns."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    kinds: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        columns = tuple(key for key, value in row.items() if key != "note" and value is not None)
        kinds.setdefault(columns, []).append(row)
    for columns, alike in kinds.items():
        table = Table(title=f"xlength bench {topic}", title_justify="left", box=box.SIMPLE_HEAD)
        for column in columns:
            number = all(isinstance(row[column], (int, float)) for row in alike)
            words = column.replace("_", " ")
            widest = max(map(len, (*words.split(), *(_cell(row[column]) for row in alike))))
            table.add_column(
                words, justify="right" if number else "left", min_width=min(widest, 48)
            )
        for row in alike:
            table.add_row(*(_cell(row[column]) for column in columns))
        needed = console.measure(table).minimum
        Console(width=max(console.width, needed)).print(table, crop=False)
    for note in dict.fromkeys(row["note"] for row in rows if row.get("note")):
        console.print(note, style="dim")


def _cell(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "" if value is None else str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
