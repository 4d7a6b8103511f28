"""The report on a terminal: one table, the warnings, the choice and the lines to paste."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from xlength.report.measures import Row

if TYPE_CHECKING:
    from xlength.report.result import Report

_Column = tuple[str, Callable[[Row], str]]

COLUMNS: tuple[_Column, ...] = (
    ("steps", lambda row: f"{row.steps:,}"),
    ("padding\neff.", lambda row: f"{row.padding_efficiency:.3f}"),
    ("rank\nbalance", lambda row: f"{row.rank_balance:.3f}"),
    ("wall eff.\ntokens", lambda row: f"{row.wall_efficiency_tokens:.3f}"),
    ("wall eff.\nattention", lambda row: f"{row.wall_efficiency_attention:.3f}"),
    ("mates\nagain", lambda row: percent(row.batchmate_repeat)),
)
EXTRA: tuple[_Column, ...] = (
    ("step\ncorr.", lambda row: f"{row.step_correlation:+.2f}"),
    ("rows\nper batch", lambda row: rows_per_batch(row)),
    ("largest\nbatch", lambda row: f"{row.max_batch_tokens:,}"),
    ("repeated", lambda row: f"{row.repeated:,}"),
    ("dropped", lambda row: f"{row.dropped:,}"),
    ("plan\nseconds", lambda row: f"{row.plan_seconds:.2f}"),
)
_NARROW, _WIDE = 104, 130


def percent(share: float) -> str:
    """A share as shown in tables; a dash where it is not known."""
    return "-" if math.isnan(share) else f"{share:.1%}"


def rows_per_batch(row: Row) -> str:
    """Samples of a batch: one number, or fewest and most."""
    least, _, most = row.rows_per_batch
    return f"{least}" if least == most else f"{least}-{most}"


def print_report(report: Report) -> None:
    """Print it to the terminal, as wide as that is; where there is none, in all columns."""
    from rich.console import Console

    # Names of files may look like markup.
    console = Console(width=terminal_width(_WIDE), highlight=False, markup=False, emoji=False)
    console.print(report.headline(), style="bold")
    console.print(_table(report, console.width))
    notes = {row.strategy.name: row.strategy.note for row in report.rows if row.strategy.note}
    for name, note in notes.items():
        console.print(f"{name}: {note}", style="dim")
    if report.curve:
        console.print(
            "TokenBudget by window: "
            + ", ".join(
                f"{'all' if window is None else f'{window:,}'} {wall:.3f} / {percent(mates)}"
                for window, wall, mates in report.curve_points()
            )
            + " (wall efficiency / mates met again)",
            style="dim",
        )
    for note in report.notes:
        console.print(f"! {note}", style="yellow")
    console.print()
    console.print(report.verdict, style="green")
    if report.lines:
        console.print("\nAt the end of the config:\n", style="bold")
        # Plain, so that it can be copied whole.
        print(report.lines)


def terminal_width(otherwise: int) -> int | None:
    """None for the terminal's own width or that of ``COLUMNS``; else a given one, as in a pipe."""
    return None if sys.stdout.isatty() or "COLUMNS" in os.environ else otherwise


def _table(report: Report, width: int) -> Any:
    from rich import box
    from rich.table import Table

    columns: Sequence[_Column] = COLUMNS if width < _NARROW else (*COLUMNS, *EXTRA[:3])
    if width >= _WIDE:
        columns = (*COLUMNS, *EXTRA)
    columns = [column for column in columns if _says_something(column, report.rows)]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for title, _ in columns:
        table.add_column(title, justify="right", no_wrap=True)
    for row in report.rows:
        best = row is report.best and bool(report.lines)
        name = f"* {label(row)}" if best else f"  {label(row)}"
        table.add_row(
            name, *(cell(row) for _, cell in columns), style="bold green" if best else None
        )
    return table


def label(row: Row) -> str:
    """Name of a row, with what distinguishes it."""
    strategy = row.strategy
    name = strategy.name if strategy.kind != "config" else f"now: {strategy.name}"
    name = name.replace("LengthPoolSortDataset", "LengthPoolSort")  # as wide as the others
    for key, text in (("max_tokens", "{:,}"), ("max_length", "{:,}"), ("pool_size", "{:,}")):
        if key in strategy.options:
            name += f" {text.format(strategy.options[key])}"
    return name


def _says_something(column: _Column, rows: Sequence[Row]) -> bool:
    title, cell = column
    return title not in ("repeated", "dropped") or any(cell(row) != "0" for row in rows)
