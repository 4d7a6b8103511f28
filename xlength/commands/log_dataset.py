"""Show what a config trains on: the first samples as text, what of it is trained, and the first
steps of every rank.

On a terminal trained text is green and the rest dim; elsewhere trained text stands in [[ ]].
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from xlength.commands import InputError

SHOW = ("text", "masked_text", "input_ids", "labels", "all")
_MOST_RANKS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``xlength log-dataset``."""
    add = parser.add_argument
    add("config", metavar="CONFIG", help="file or name of a config")
    add("--show", choices=SHOW, default="text", help="masked_text hides what is not trained")
    add("--num-samples", type=int, default=2, metavar="N", help="samples to show")
    add("--world-size", type=int, default=2, metavar="W", help="ranks to show the steps of")
    add("--steps", type=int, default=3, metavar="N", help="steps to show")
    add("--cfg-options", nargs="+", metavar="KEY=VALUE", help="settings that override the config's")


def run(args: argparse.Namespace) -> int:
    """Print samples, then steps."""
    from rich.console import Console

    from xlength.report.configs import open_config, parse_options, strategy_of_config
    from xlength.report.preview import first_samples, summary
    from xlength.report.table import terminal_width
    from xlength.runtime.config_file import read_config

    if min(args.num_samples, args.world_size, args.steps) < 1:
        raise InputError("--num-samples, --world-size and --steps must be at least 1")
    cfg = read_config(args.config, parse_options(args.cfg_options))
    loader, dataset = open_config(cfg, args.config)
    decode = _decoder(cfg, loader, dataset)
    console = Console(highlight=False, width=terminal_width(120))
    for i, sample in enumerate(first_samples(dataset, args.num_samples)):
        console.print(f"\nsample {i}: {summary(sample)}", style="bold", markup=False)
        _print_sample(console, sample, args.show, decode)
    strategy = strategy_of_config(loader, dataset, args.world_size, 0)
    if strategy is None:
        console.print("\nThe order is not known beforehand: the data are a stream, or the sampler")
        console.print("is none of DefaultSampler, LengthGroupedSampler and PlanSampler.")
        return 0
    _print_steps(console, strategy, loader, dataset, args)
    return 0


def _decoder(cfg: Any, loader: Mapping[str, Any], dataset: Any) -> Callable[[list[int]], str]:
    from xlength.report.preview import tokenizer_of

    tokenizer = tokenizer_of(cfg, loader, dataset)
    if tokenizer is None:
        return lambda ids: "".join(f"<{i}>" for i in ids)
    return lambda ids: str(tokenizer.decode(ids))


def _print_sample(console: Any, sample: Any, show: str, decode: Callable[..., str]) -> None:
    from rich.text import Text

    from xlength.report.preview import spans_of

    if show in ("text", "masked_text", "all"):
        text = Text()  # which is not read as markup
        for span in spans_of(sample, decode):
            if console.is_terminal:
                hidden = "..." if show == "masked_text" and not span.trained else span.text
                text.append(hidden, style="green" if span.trained else "dim")
            elif span.trained:
                text.append(f"[[{span.text}]]")
            else:
                text.append("..." if show == "masked_text" else span.text)
        console.print(text, soft_wrap=True)
    for key in ("input_ids", "labels"):
        if show in (key, "all"):
            console.print(f"{key}: {list(map(int, sample[key]))}", markup=False, soft_wrap=True)


def _print_steps(console: Any, strategy: Any, loader: Any, dataset: Any, args: Any) -> None:
    from rich import box
    from rich.table import Table

    from xlength.lengths import get_lengths
    from xlength.report.configs import length_property_of
    from xlength.report.preview import steps_of

    plan = strategy.build(0, None)
    lengths = get_lengths(dataset, length_property_of(loader, dataset))
    ranks = min(args.world_size, _MOST_RANKS)
    console.print(
        f"\n{strategy.name}{f' ({strategy.note})' if strategy.note else ''}: the first of "
        f"{plan.num_steps:,} steps on {args.world_size} ranks, as rows x longest, and samples",
        style="bold",
        markup=False,
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("step", justify="right")
    for rank in range(ranks):
        table.add_column(f"rank {rank}")
    for step, cells in enumerate(steps_of(plan, lengths, args.steps)):
        table.add_row(str(step), *cells[:ranks])
    console.print(table)
