"""``xlength report --stream``: which pool a stream needs, as a table, JSON, a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from xlength.plan.groups import Ints, fingerprint
from xlength.report.choice import source
from xlength.report.strategies import Setting, cost_option
from xlength.report.table import terminal_width

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZE = (4.3, 3.7)
_TITLES = ("waiting", "padding eff.", "wall eff.", "held", "warm-up", "re-read")


@dataclass(frozen=True)
class PoolReport:
    """What pools buy on given lengths.

    Args:
        name: of the lengths.
        lengths: (n,) int64 tokens, those of a sample of the stream or of all of it.
        parts: (name, first sample, number of samples) of each source, one at least.
        setting: what was compared.
        found: see ``xlength.plan.stream_report.stream_report``.
        notes: warnings.
        command: repeats the report.
        update: a pool is there already, and gets other options.
    """

    name: str
    lengths: Ints
    parts: Sequence[tuple[str, int, int]]
    setting: Setting
    found: dict[str, Any]
    notes: Sequence[str]
    command: str
    update: bool = False

    @property
    def lines(self) -> str:
        """Python to paste at the end of a config; empty where no pool is needed."""
        best = self.found["recommended"]
        options: dict[str, Any] = {
            "pool_size": best["pool_size"],
            "micro_batch_size": max(1, best["micro_batch_size"]),
            "mode": best["mode"],
            "cost": cost_option(self.setting.cost),
        }
        if best["pool_size"] == 0:
            options = {"pool_size": 0}
        if self.update:
            return f'train_dataloader["dataset"].update{source(options)[4:]}\n'
        if best["pool_size"] == 0:
            return ""
        options = {
            "type": "xlength.LengthPoolSortDataset",
            "dataset": _Code('train_dataloader["dataset"]'),
            **options,
        }
        loader = {"batch_size": self.setting.batch_size, "dataset": options, "sampler": None}
        return f"train_dataloader.update{source(loader)[4:]}\n"

    def headline(self) -> str:
        """What was compared, in a line."""
        sizes, setting = np.abs(self.lengths), self.setting
        return (
            f"{self.name} as a stream: {len(sizes):,} lengths, median {int(np.median(sizes)):,}, "
            f"longest {int(sizes.max()):,}; {setting.world_size} ranks, batch size "
            f"{setting.batch_size}, cost {setting.cost}"
        )

    def as_dict(self) -> dict[str, Any]:
        """The report's JSON."""
        from xlength import __version__

        return {
            "num_samples": len(self.lengths),
            "world_size": self.setting.world_size,
            "batch_size": self.setting.batch_size,
            "cost": self.setting.cost_name,
            **self.found,
            "config_lines": self.lines,
            "warnings": list(self.notes),
            "lengths": {"name": self.name, "fingerprint": fingerprint(self.lengths)},
            "command": self.command,
            "version": __version__,
        }

    def shown(self) -> list[dict[str, Any]]:
        """Rows of the fewest workers: more change nothing but what is held and read."""
        fewest = min(row["num_workers"] for row in self.found["rows"])
        return [row for row in self.found["rows"] if row["num_workers"] == fewest]


class _Code(str):
    """Python that is written as it is, not as a string."""

    def __repr__(self) -> str:
        return str(self)


def name_of(row: dict[str, Any]) -> str:
    """A setting in a few words."""
    if row["pool_size"] == 0:
        return "no pool"
    return f"{row['mode']} {row['pool_size']:,}, micro-batch {row['micro_batch_size']}"


def cells_of(row: dict[str, Any]) -> list[str]:
    """What a setting does, in the order of the titles."""
    seconds = row["warmup_seconds"]
    return [
        f"{row['waiting']:.3f}",
        f"{row['padding_efficiency']:.3f}",
        f"{row['wall_efficiency']:.3f}",
        f"{row['memory_bytes'] / 1e6:,.1f} MB",
        f"{row['warmup_samples']:,}" + ("" if seconds is None else f" ({seconds:.1f} s)"),
        f"{row['reread_samples']:,}",
    ]


def print_pools(report: PoolReport) -> None:
    """The table, the choice and the lines, on the terminal."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(width=terminal_width(110), highlight=False)
    console.print(report.headline(), style="bold", markup=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for title in _TITLES:
        table.add_column(title, justify="right", no_wrap=True)
    best = report.found["recommended"]
    for row in report.shown():
        mark = "*" if row is best else " "
        style = "bold green" if row is best else None
        table.add_row(f"{mark} {name_of(row)}", *cells_of(row), style=style)
    console.print(table)
    console.print(
        "held: by one worker of a rank, n workers hold n times as much; warm-up: samples that a "
        "worker reads before its first batch; re-read: samples that are read again to resume",
        style="dim",
    )
    for note in report.notes:
        console.print(f"! {note}", style="yellow", markup=False)
    console.print(f"\n{report.found['reason']}.", style="green", markup=False)
    if report.lines:
        console.print("\nAt the end of the config:\n", style="bold")
        print(report.lines)


def page(report: PoolReport) -> str:
    """The same as an HTML page, with the curves."""
    from html import escape

    from xlength.report import page as pages
    from xlength.report.drawing import render_svg
    from xlength.report.figures import lengths_figure

    best = report.found["recommended"]
    rows = [(name_of(row), cells_of(row), row is best) for row in report.shown()]
    curve = render_svg("pools", SIZE, lambda figure: pools_figure(report, figure))
    lengths = render_svg("lengths", SIZE, lambda figure: lengths_figure(report, figure))
    lines = f"<pre><code>{escape(report.lines)}</code></pre>" if report.lines else ""
    return pages.document(
        report.name,
        [
            f"<header><h1>{escape(report.name)}</h1><p>{escape(report.headline())}</p></header>",
            f'<section class="choice"><h2>Take {escape(name_of(best))}</h2>'
            f'<p class="verdict">{escape(report.found["reason"])}.</p>{lines}</section>',
            pages.warnings(report.notes),
            f"<section><h2>Settings</h2>{pages.table([(t, '') for t in _TITLES], rows)}</section>",
            '<div class="figures">'
            + pages.figure(
                "How large a pool",
                "Wall efficiency and waiting against the number of samples that a worker holds.",
                curve,
            )
            + pages.figure("Lengths", "How many samples have which number of tokens.", lengths)
            + "</div>",
            pages.words(_WORDS),
            pages.made_by(report.command),
        ],
    )


def pools_figure(report: PoolReport, figure: Figure) -> None:
    """Wall efficiency and waiting by pool size, a line for each mode."""
    from matplotlib.ticker import MaxNLocator, NullLocator

    from xlength.report.drawing import COLOURS, short, style, titles

    upper, lower = figure.subplots(2, 1, sharex=True)
    best = report.found["recommended"]
    curve = report.found["curve"]
    without = [row for row in curve if row["pool_size"] == 0]
    modes = sorted({row["mode"] for row in curve if row["pool_size"]})
    ticks: set[int] = set()
    for axes, key, title in (
        (upper, "wall_efficiency", "wall efficiency"),
        (lower, "waiting", "slowest / mean"),
    ):
        style(axes)
        for mode, colour in zip(modes, ("c1", "c3"), strict=False):
            rows = [row for row in curve if row["mode"] == mode]
            sizes = [row["pool_size"] for row in rows]
            ticks.update(sizes)
            values = [row[key] for row in rows]
            axes.plot(sizes, values, "o-", color=COLOURS[colour], markersize=3, label=mode)
        for row in without:
            axes.axhline(row[key], color=COLOURS["c2"], linewidth=1, label="no pool")
        if best["pool_size"]:
            axes.axvline(best["pool_size"], color=COLOURS["muted"], linewidth=0.8, linestyle=":")
        axes.yaxis.set_major_locator(MaxNLocator(4))
        titles(axes, "", title)
    upper.legend(
        frameon=False,
        labelcolor=COLOURS["ink"],
        ncols=3,
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        borderaxespad=0.2,
    )
    lower.set_xscale("log", base=2)
    lower.set_xticks(sorted(ticks), [short(tick, None) for tick in sorted(ticks)])
    lower.xaxis.set_minor_locator(NullLocator())
    lower.set_xlabel("samples that a worker holds", color=COLOURS["muted"])


_WORDS = (
    ("waiting", "mean cost of the slowest rank / mean cost of all; 1 is none"),
    ("padding eff.", "real tokens / padded tokens of the batches"),
    ("wall eff.", "useful cost / (ranks x cost of the slowest rank's padded batches)"),
    ("held", "memory of the samples that one worker of a rank holds; n workers hold n times it"),
    ("warm-up", "samples that a worker reads before its first batch"),
    ("re-read", "samples that are read again when a run is resumed"),
)
