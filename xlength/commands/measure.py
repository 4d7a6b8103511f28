"""Token lengths of a data set, as training would make them: lengths.npy and a side file.

SOURCE is a JSON, JSONL, JSONL.gz or Parquet file, a folder of such files, a folder that the
datasets library saved, or a config (or its name). Rows are mapped, written with the template,
tokenised and left out as process_hf_dataset does it, but no tokens are kept. The result is int32,
one length per sample that is trained on, negative for text in a set with images.

The work is kept after each block: the same command continues where it was killed.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xlength.commands import InputError

if TYPE_CHECKING:
    from xlength.measure.journal import Journal
    from xlength.measure.recipes import Counting
    from xlength.measure.sources import Part

FORMAT = 1
_PIECE = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``xlength measure``."""
    add = parser.add_argument
    add("source", metavar="SOURCE", help="file, folder, config or name of a config")
    add("-o", "--output", default="lengths.npy", metavar="FILE", help="default: lengths.npy")
    add("--tokenizer", metavar="NAME", help="name or folder of a transformers tokenizer")
    add("--template", metavar="NAME", help="prompt template; by default the tokenizer's own")
    add("--map-fn", metavar="NAME", help="map function; by default by the columns of the rows")
    add(
        "--max-length",
        type=int,
        metavar="N",
        help="cut rows at N tokens, as training with max_length=N does; default: no cut",
    )
    add("--split", default="train", help="of a saved DatasetDict; default: train")
    add("--num-proc", type=int, metavar="N", help="processes; by default all cores")
    add("--bad-rows", choices=("error", "skip"), default="error", help="default: error")
    add("--cfg-options", nargs="+", metavar="KEY=VALUE", help="settings that override the config's")
    add("--block-bytes", type=int, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Measure, write, and say what was found."""
    for name in ("max_length", "num_proc", "block_bytes"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise InputError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    out = Path(args.output)
    if out.suffix != ".npy":
        raise InputError(f"-o {out} must end with .npy")
    source = Path(args.source)
    check_side_file(out, source)
    if source.suffix == ".py" or not source.exists():
        from xlength.measure.configs import measure_config

        return measure_config(args, out)
    from xlength.measure.counting import first_row
    from xlength.measure.recipes import from_arguments
    from xlength.measure.sources import open_source

    parts = open_source(source, args.split, args.block_bytes)
    row, problem = first_row(block for part in parts for block in part.blocks(0))
    if row is None:
        why = f" that can be read; the first: {problem}" if problem else ""
        raise InputError(f"{source} has no row{why}")
    if args.max_length is not None and args.map_fn is None and {"length", "input_ids"} & set(row):
        raise InputError(
            f"--max-length: the rows of {source} have their lengths already; xlength report cuts "
            "them by its own --max-length"
        )
    counting = from_arguments(
        row, args.tokenizer, args.template, args.map_fn, args.max_length, args.bad_rows
    )
    return measure_parts(args, out, parts, counting)


def measure_parts(
    args: argparse.Namespace, out: Path, parts: Sequence[Part], counting: Counting
) -> int:
    """Count the parts and write the two files."""
    from xlength.measure.journal import Journal
    from xlength.measure.run import count_all

    request = {
        "format": FORMAT,
        "parts": [part.identity for part in parts],
        "how": counting.how,
        "bad_rows": args.bad_rows,
    }
    if _is_done(out, request):
        print(f"{out} holds this measurement already")
        return 0
    journal = Journal(out, request)
    if journal.resumed:
        print(f"continuing after {journal.num_samples:,} samples of an earlier run")
    try:
        count_all(parts, counting.counter, journal, num_processes(args.num_proc), args.bad_rows)
    except KeyboardInterrupt:
        print("\nstopped; the same command continues", file=sys.stderr)
        return 130
    finally:
        journal.close()
    if not journal.num_samples:
        raise InputError(f"no row of {args.source} is left: {_losses(journal, parts)}")
    lengths = journal.finish()
    named = [(part.name, journal.parts[i]) for i, part in enumerate(parts)]
    rows = {**journal.counts, "first": _first(journal, parts)}
    write_side_file(
        out, lengths, named, {**counting.side, "source": args.source, "rows": rows}, request
    )
    losses = _losses(journal, parts)
    if losses:
        print(f"! {losses}")
    say(out, lengths, assumption(counting.side))
    return 0


def num_processes(given: int | None) -> int:
    """Processes to use: as given, or all cores that this process may use."""
    available = getattr(os, "sched_getaffinity", None)
    return given or (len(available(0)) if available else os.cpu_count() or 1)


def write_side_file(
    out: Path,
    lengths: Any,
    parts: Sequence[tuple[str, int]],
    facts: Mapping[str, Any],
    request: Mapping[str, Any],
) -> None:
    """Write what was measured, and how, beside the lengths."""
    from xlength import __version__
    from xlength.plan.groups import fingerprint

    side = {
        "format": FORMAT,
        "num_samples": len(lengths),
        "num_tokens": sum(length * int(n) for length, n in enumerate(histogram(lengths)) if n),
        "fingerprint": fingerprint(lengths),
        "parts": [{"name": name, "num_samples": count} for name, count in parts],
        "length_property": "length",
        "media": False,
        "two_modalities": False,
        **facts,
        "request": request,
        "command": shlex.join(["xlength", *sys.argv[1:]]),
        "version": __version__,
    }
    path = side_file(out)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(side, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)


def side_file(out: Path) -> Path:
    """The side file of ``lengths.npy``: ``lengths.json``."""
    return out.with_suffix(".json")


def check_side_file(out: Path, source: Path) -> None:
    """Refuse to put the side file over data.

    Raises:
        InputError: it is (a part of) the source, or a file that this command has not written.
    """
    side = side_file(out)
    if not side.exists():
        return
    why = ""
    if source.exists() and side.samefile(source):
        why = "which is SOURCE"
    elif source.is_dir() and source.resolve() in side.resolve().parents:
        why = "which is one of the files of SOURCE"
    elif _read_side_file(side) is None:
        why = "which holds something else"
    if why:
        raise InputError(
            f"-o {out} would write {side}, {why}: the side file has the name of -o with .json, "
            "choose another -o"
        )


def _read_side_file(path: Path) -> dict[str, Any] | None:
    """What a side file says; None if it is none."""
    try:
        with open(path, encoding="utf-8") as file:
            if '"format"' not in file.read(100):  # a file of data may be large
                return None
            file.seek(0)
            side = json.load(file)
    except (OSError, ValueError):
        return None
    return side if isinstance(side, dict) and {"format", "request"} <= set(side) else None


def _is_done(out: Path, request: Mapping[str, Any]) -> bool:
    side = _read_side_file(side_file(out))
    same = side is not None and side["request"] == json.loads(json.dumps(request))
    return same and out.is_file()


def _first(journal: Journal, parts: Sequence[Part]) -> dict[str, str]:
    return {
        kind: f"{parts[part].where(place)}: {why}" if why else parts[part].where(place)
        for kind, (part, place, why) in journal.first.items()
    }


def _losses(journal: Journal, parts: Sequence[Part]) -> str:
    texts = {
        "malformed": "malformed and left out",
        "empty": "without an answer and left out",
        "untrained": "without a trainable label and left out",
        "cut": f"cut, {journal.counts['cut_tokens']:,} tokens lost",
    }
    first = _first(journal, parts)
    return "; ".join(
        f"{journal.counts[kind]:,} rows {text} (the first: {first[kind]})"
        for kind, text in texts.items()
        if journal.counts[kind]
    )


def assumption(side: Mapping[str, Any]) -> str:
    """What the lengths take for granted, from what the side file says of the counting."""
    if "column" in side:
        return f"read from the column {side['column']!r}, nothing is cut"
    if side.get("max_length") is None:
        return (
            "lengths before cutting: training cuts at its max_length and leaves out what has no "
            "label then; --max-length N counts so"
        )
    return f"cut at max_length={side['max_length']}, as training does"


def say(out: Path, lengths: Any, assumed: str) -> None:
    """What was found under which assumption, and what to do with it."""
    import numpy as np

    counts = histogram(lengths)
    total = int((counts * np.arange(len(counts))).sum())
    places = np.searchsorted(np.cumsum(counts), [1, 0.5 * len(lengths), 0.99 * len(lengths)])
    low, median, high = places.tolist()
    print(
        f"{out}: {len(lengths):,} samples, {total:,} tokens; shortest {low:,}, median "
        f"{median:,}, 99 % {high:,}, longest {len(counts) - 1:,}\n"
        f"{assumed}\n"
        f"next: xlength report {out} --world-size 8 --batch-size 16"
    )


def histogram(lengths: Any) -> Any:
    """(longest + 1,) int64: how many samples have each length; read in pieces."""
    import numpy as np

    result = np.zeros(1, dtype=np.int64)
    for start in range(0, len(lengths), _PIECE):
        piece = np.abs(np.asarray(lengths[start : start + _PIECE], dtype=np.int64))
        counts = np.bincount(piece, minlength=len(result))
        counts[: len(result)] += result
        result = counts
    return result
