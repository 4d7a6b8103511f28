"""What each way of batching buys on given lengths, and which one to take.

SOURCE is a file of lengths (.npy, from xlength measure), a config, or the name of one; instead,
--shape makes lengths. Every strategy is simulated with the very plans that training uses, for the
given number of ranks. The figures:

  padding efficiency  real tokens / padded tokens
  rank balance        mean over steps of mean cost / largest cost of the ranks
  wall efficiency     share of all machines' time that is useful, under both costs; the headline
  mates again         share of pairs in a batch that share one again in the next epoch: the price
                      in randomness
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from xlength.commands import InputError

_MANY_SAMPLES = 200_000
DEFAULT_WORLD_SIZE, DEFAULT_BATCH_SIZE = 8, 16
STREAM_SAMPLES = 4096
"""Samples of a config's stream that are read for their lengths."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``xlength report``."""
    add = parser.add_argument
    add("source", nargs="?", metavar="SOURCE", help="lengths.npy, or a config or its name")
    add("--world-size", type=_positive, default=DEFAULT_WORLD_SIZE, metavar="W")
    add("--batch-size", type=_positive, metavar="B", help="by default the config's, or 16")
    add("--accumulate", type=_positive, metavar="K", help="micro-steps of an optimiser step")
    add(
        "--cost",
        default="attention",
        metavar="COST",
        help="tokens, attention, attention:CROSSOVER in tokens, or attention:MODEL, the folder or "
        "config.json of a transformers model",
    )
    add("--max-length", type=_positive, metavar="N", help="cut samples to this many tokens")
    add("--max-tokens", type=_positive, metavar="N", help="of a TokenBudget batch and of a pack")
    add("--window", type=_positive, metavar="N", help="of TokenBudget; by default it is chosen")
    add("--seed", type=_seed, default=0)
    add("--shape", metavar="SHAPE", help="lognormal:5.5,1.0:8,8192, capped, wikipedia, ...")
    add("--num-samples", type=_positive, default=100_000, metavar="N", help="of a shape")
    add("--json", metavar="FILE", help="write all figures to FILE")
    add("--html", metavar="FILE", help="write one page with figures to FILE")
    add("--png", metavar="DIR", help="write the figures to DIR")
    add("--stream", action="store_true", help="which pool a stream of such lengths needs")
    add(
        "--num-workers",
        type=_positive,
        nargs="+",
        default=[1, 2, 4, 8],
        metavar="N",
        help="of each rank, for --stream; default: 1 2 4 8",
    )
    add(
        "--samples-per-second",
        type=float,
        metavar="R",
        help="that a worker reads and encodes, for --stream: then the warm-up is in seconds too",
    )
    add("--cfg-options", nargs="+", metavar="KEY=VALUE", help="settings that override the config's")


def _seed(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {value}")
    return value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def run(args: argparse.Namespace) -> int:
    """Write JSON, page and figures where asked; print the table."""
    if args.stream:
        return _run_stream(args)
    from xlength.report.table import print_report

    report = make_report(args)
    if args.json:
        _write(Path(args.json), json.dumps(report.as_dict(), indent=1) + "\n")
    if args.html:
        from xlength.report.page import page

        _write(Path(args.html), page(report))
    if args.png:
        from xlength.report.figures import write_png

        write_png(report, Path(args.png))
    print_report(report)
    return 0


def _run_stream(args: argparse.Namespace) -> int:
    from xlength.report import pools

    report = make_pool_report(args)
    if args.json:
        _write(Path(args.json), json.dumps(report.as_dict(), indent=1) + "\n")
    if args.html:
        _write(Path(args.html), pools.page(report))
    if args.png:
        from xlength.report.drawing import render_png

        path = Path(args.png) / "pools.png"
        render_png(path, pools.SIZE, lambda figure: pools.pools_figure(report, figure))
    pools.print_pools(report)
    return 0


def make_pool_report(args: argparse.Namespace) -> Any:
    """The report of ``--stream``, but for the output."""
    from xlength.plan.stream_report import stream_report
    from xlength.report import notes
    from xlength.report.pools import PoolReport
    from xlength.report.sources import named_parts

    source = _source(args)
    lengths, warnings = _prepared(source.lengths, args.max_length)
    setting = _setting(args, source)
    warnings += [note for note in notes.stream_peculiarities(lengths) if note]
    try:
        found = stream_report(
            lengths,
            setting.world_size,
            setting.batch_size,
            num_workers=args.num_workers,
            cost=setting.cost,
            samples_per_second=args.samples_per_second,
            seed=args.seed,
        )
    except ValueError as error:
        raise InputError(str(error)) from error
    command = shlex.join(["xlength", *sys.argv[1:]])
    parts = named_parts(source, lengths)
    return PoolReport(source.name, lengths, parts, setting, found, warnings, command, source.pool)


def _setting(args: argparse.Namespace, source: Any) -> Any:
    from xlength.report.strategies import Setting

    cost = _cost(args.cost)
    return Setting(
        world_size=args.world_size,
        batch_size=args.batch_size or source.batch_size or DEFAULT_BATCH_SIZE,
        cost=cost,
        attention=cost if cost.crossover is not None else Setting.attention,
        accumulate=args.accumulate or source.accumulate,
        seed=args.seed,
        max_tokens=args.max_tokens or source.max_tokens,
        window=args.window,
        media=source.media,
    )


def make_report(args: argparse.Namespace) -> Any:
    """Everything but the output."""
    from xlength.report import choice, notes
    from xlength.report.measures import measure
    from xlength.report.result import Report
    from xlength.report.sources import named_parts
    from xlength.report.strategies import (
        best_window,
        measure_all,
        strategies,
        window_curve,
    )
    from xlength.report.streams import pool_row

    source = _source(args)
    lengths, warnings = _prepared(source.lengths, args.max_length)
    setting = _setting(args, source)
    warnings += notes.peculiarities(lengths, setting, source.two_modalities)
    try:
        rows = measure_all(strategies(lengths, setting), lengths, setting)
        rows.append(pool_row(lengths, setting))
        wanted = args.html or args.png or len(lengths) <= _MANY_SAMPLES
        curve = measure_all(window_curve(lengths, setting), lengths, setting) if wanted else []
    except ValueError as error:
        raise InputError(str(error)) from error
    if curve and args.window is None:
        chosen = best_window(curve, setting.cost)
        rows = [chosen if row.strategy.name == "TokenBudget" else row for row in rows]
    base = rows[0]
    if source.strategy is not None and len(lengths) == len(source.lengths):
        base = measure(_as_config(source.strategy), lengths, setting.cost, setting.attention)
        rows = [base, *(row for row in rows if not _same(row, base))]
    best = choice.recommend(rows, setting)
    text = choice.verdict(best, base, setting)
    lines = choice.config_lines(best, setting, source.length_property, source.merge)
    return Report(
        name=source.name,
        lengths=lengths,
        parts=named_parts(source, lengths),
        setting=setting,
        rows=rows,
        base=base,
        best=best,
        curve=curve,
        notes=[*source.notes, *warnings],
        verdict=text,
        lines="" if text.startswith("Keep") or source.packs else lines,
        command=shlex.join(["xlength", *sys.argv[1:]]),
    )


def _same(row: Any, base: Any) -> bool:
    return (row.strategy.name, row.steps, row.max_batch_tokens, row.wall_efficiency_tokens) == (
        base.strategy.name,
        base.steps,
        base.max_batch_tokens,
        base.wall_efficiency_tokens,
    )


def _as_config(strategy: Any) -> Any:
    from dataclasses import replace

    return replace(strategy, kind="config")


def _cost(text: str) -> Any:
    from xlength.plan.cost import make_cost

    kind, _, rest = text.partition(":")
    spec: dict[str, Any] = {"type": kind}
    if rest:
        number = rest.replace(".", "", 1).isdigit()
        spec |= {"crossover": float(rest)} if number else {"config": rest}
    if kind == "multimodal":
        raise InputError("--cost must be tokens or attention: lengths have one column here")
    try:
        return make_cost(spec)
    except (ValueError, OSError) as error:
        raise InputError(f"--cost {text}: {error}") from None


def _prepared(lengths: Any, max_length: int | None) -> tuple[Any, list[str]]:
    from xlength.report import notes

    try:
        return notes.prepare(lengths, max_length)
    except ValueError as error:
        raise InputError(str(error)) from error


def _source(args: argparse.Namespace) -> Any:
    from xlength.report import configs, sources

    if (args.source is None) == (args.shape is None):
        raise InputError("give either SOURCE (lengths.npy or a config) or --shape")
    if args.shape is not None:
        return sources.from_shape(args.shape, args.num_samples, args.seed)
    path = Path(args.source)
    if path.suffix == ".npy":
        if not path.is_file():
            raise InputError(f"there is no file {path}; xlength measure SOURCE -o {path} makes it")
        return sources.from_file(path)
    if path.exists() and path.suffix != ".py":
        raise InputError(
            f"{path} is neither lengths (.npy) nor a config (.py); measure it first: "
            f"xlength measure {path} -o lengths.npy"
        )
    options = configs.parse_options(args.cfg_options)
    samples = STREAM_SAMPLES if args.stream else None
    return configs.from_config(args.source, options, args.world_size, args.seed, samples)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
