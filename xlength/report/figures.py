"""The report's figures."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, NullLocator
from numpy.typing import NDArray

from xlength.report.drawing import COLOURS, render_png, render_svg, short, style, titles
from xlength.report.measures import Row
from xlength.report.table import label, percent

if TYPE_CHECKING:
    from xlength.report.pools import PoolReport
    from xlength.report.result import Report

_SERIES = ("c1", "c2", "c3", "c4", "c5", "c6")
_SIZE = (4.3, 3.4)
_MOST_STEPS = 240

Draw = Callable[["Report", Figure], None]


def lengths_figure(report: Report | PoolReport, figure: Figure) -> None:
    """How many samples have which length, on a logarithmic axis, by modality or source."""
    axes = _axes(figure)
    sizes = np.abs(report.lengths)
    low, high = max(1, int(sizes.min())), int(sizes.max())
    edges = np.unique(np.geomspace(low, high + 1, 48).astype(np.int64))
    if len(edges) < 3:
        edges = np.array([low, low + 1, low + 2])
    bottom = np.zeros(len(edges) - 1)
    for colour, (name, values) in zip(_SERIES, _kinds(report), strict=False):
        counts = np.histogram(values, edges)[0]
        axes.bar(
            edges[:-1],
            counts,
            np.diff(edges),
            bottom,
            align="edge",
            color=COLOURS[colour],
            edgecolor=COLOURS["surface"],
            linewidth=0.4,
            label=name,
        )
        bottom += counts
    axes.set_xscale("log")
    axes.set_xlim(low * 0.9, (high + 1) * 1.1)
    axes.set_ylim(0, bottom.max() * 1.22)
    axes.xaxis.set_major_formatter(FuncFormatter(short))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(short))
    for value, text in ((int(np.median(sizes)), "median"), (high, "longest")):
        axes.axvline(value, color=COLOURS["muted"], linewidth=0.8, linestyle=(0, (3, 2)))
        right = np.log(value / low) > 0.55 * np.log((high + 1) / low + 1e-9)
        axes.annotate(
            f"{text} {value:,}",
            (value, 1),
            (-3 if right else 3, -4),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="right" if right else "left",
            va="top",
            color=COLOURS["muted"],
        )
    titles(axes, "tokens of a sample", "samples")
    if len(_kinds(report)) > 1:
        axes.legend(
            loc="upper left", bbox_to_anchor=(0, 0.9), frameon=False, labelcolor=COLOURS["ink"]
        )


def _kinds(report: Report | PoolReport) -> list[tuple[str, NDArray[np.int64]]]:
    """Lengths by modality, else by source: five at most, and the others."""
    lengths = report.lengths
    if lengths.min() < 0 < lengths.max():
        return [("text", -lengths[lengths < 0]), ("with images", lengths[lengths > 0])]
    sizes = np.abs(lengths)
    parts = [(name, sizes[start : start + count]) for name, start, count in report.parts]
    parts = sorted((part for part in parts if len(part[1])), key=lambda part: -len(part[1]))
    if len(parts) > len(_SERIES):
        others = np.concatenate([values for _, values in parts[len(_SERIES) - 1 :]])
        parts = [*parts[: len(_SERIES) - 1], ("others", others)]
    return parts


def strategies_figure(report: Report, figure: Figure) -> None:
    """Wall efficiency of every strategy under both costs."""
    axes = _axes(figure, grid="x")
    rows = list(report.rows)[::-1]
    for place, row in enumerate(rows):
        strong = row is report.best or row is report.base
        for shift, value, colour in (
            (0.19, row.wall_efficiency_tokens, "c3"),
            (-0.19, row.wall_efficiency_attention, "c1"),
        ):
            axes.barh(place + shift, value, 0.34, color=COLOURS["surface"])  # hides the grid
            axes.barh(place + shift, value, 0.34, color=COLOURS[colour], alpha=1 if strong else 0.5)
            axes.annotate(
                f"{value:.2f}",
                (value, place + shift),
                (3, 0),
                textcoords="offset points",
                va="center",
                color=COLOURS["ink"],
                fontsize=8.5,
            )
    axes.set_yticks(range(len(rows)), [_mark(row, report) for row in rows])
    axes.set_xlim(0, 1.12)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1])
    axes.tick_params(axis="y", labelcolor=COLOURS["ink"])
    titles(axes, "wall efficiency", "")
    for colour, name in (("c3", "tokens"), ("c1", "attention")):
        axes.barh(0, 0, color=COLOURS[colour], label=f"{name} cost")
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=2,
        frameon=False,
        labelcolor=COLOURS["ink"],
        borderaxespad=0.2,
    )


def _mark(row: Row, report: Report) -> str:
    name = label(row).replace("now: ", "now:\n").replace("LengthGrouped", "LengthGrouped-\n")
    name = name.replace("LengthPoolSort", "LengthPoolSort\n")
    return f"{name} *" if row is report.best and report.lines else name


def epoch_figure(report: Report, figure: Figure) -> None:
    """What every step of an epoch costs, between the fastest and the slowest rank."""
    wide = figure.get_size_inches()[0] > 8
    middle = [r for r in report.rows if wide and r.strategy.name == "LengthGroupedSampler"]
    shown = list({id(row): row for row in (report.base, *middle, report.best)}.values())
    shape = (1, len(shown)) if wide else (len(shown), 1)
    panels = np.ravel(figure.subplots(*shape, sharey=True, squeeze=False))
    tops = []
    colours = ("c2", "c4", "c1") if len(shown) == 3 else ("c2", "c1")
    for panel, row, colour in zip(panels, shown, colours, strict=False):
        style(panel)
        share, fastest, slowest = band(row, report)
        panel.fill_between(share, 0, 1, color=COLOURS["grid"], linewidth=0, alpha=0.7)
        panel.fill_between(
            share, fastest, slowest, color=COLOURS[colour], alpha=0.35, linewidth=0, step="mid"
        )
        panel.step(share, slowest, color=COLOURS[colour], linewidth=0.9, where="mid")
        panel.axhline(1, color=COLOURS["muted"], linewidth=0.8, linestyle=(0, (3, 2)))
        tops.append(float(np.quantile(slowest, 0.99)))
        wall = row.wall_efficiency(report.setting.cost)
        name = row.strategy.name if wide else label(row)
        panel.set_title(
            f"{name}: {wall:.2f}" if wide else f"{name}: wall efficiency {wall:.2f}",
            loc="left",
            color=COLOURS["ink"],
            fontsize=9.5,
        )
        panel.set_xlim(0, 100)
        panel.set_xticks(range(0, 101, 50 if len(shown) == 3 else 20))
        panel.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0f} %"))
        panel.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    panels[0].set_ylim(0, 1.1 * max(*tops, 2.0))
    for panel in panels:
        titles(panel, "", "cost / useful cost" if panel is panels[0] or not wide else "")
    for panel in panels if wide else panels[-1:]:
        panel.set_xlabel("of the epoch's steps", color=COLOURS["muted"])
    if wide:
        figure.suptitle(
            f"What each step of an epoch costs, and the wall efficiency: {len(report.lengths):,} "
            f"samples on {report.setting.world_size} ranks",
            x=0.01,
            ha="left",
            fontsize=11.5,
            fontweight="bold",
        )
        figure.supxlabel(
            "Band: from the fastest to the slowest rank, for whom all wait. 1: the useful work of "
            "an average step.",
            x=0.01,
            ha="left",
            fontsize=9.5,
            color=COLOURS["muted"],
        )


def band(row: Row, report: Report) -> tuple[Any, Any, Any]:
    """Place in the epoch in %, and the cost of the fastest and the slowest rank there.

    A cost of 1 is the useful work that a rank has to do in a step on average. Where there are more
    steps than can be drawn, neighbours are averaged.
    """
    costs = row.costs
    wall = row.wall_efficiency(report.setting.cost)
    useful = costs.max(axis=1).mean() * wall
    bins = min(_MOST_STEPS, len(costs))
    edges = np.arange(bins + 1) * len(costs) // bins
    fastest, slowest = (
        np.add.reduceat(values, edges[:-1]) / np.diff(edges) / useful
        for values in (costs.min(axis=1), costs.max(axis=1))
    )
    return (np.arange(bins) + 0.5) / bins * 100, fastest, slowest


def window_figure(report: Report, figure: Figure) -> None:
    """Wall efficiency and its price against the window of ``TokenBudget``."""
    upper, lower = figure.subplots(2, 1, sharex=True)
    total = len(report.lengths)
    points = [(window or total, wall, mates) for window, wall, mates in report.curve_points()]
    windows = [point[0] for point in points]
    chosen = next(
        (r for r in report.rows if r.strategy.name == "TokenBudget" and r.costs.size), None
    )
    mark = chosen.strategy.options.get("window") or total if chosen is not None else None
    for axes, index, colour, title in (
        (upper, 1, "c1", "wall efficiency"),
        (lower, 2, "c2", "mates met again"),
    ):
        style(axes)
        values = [point[index] for point in points]
        axes.plot(windows, values, color=COLOURS[colour], marker="o", markersize=3, linewidth=1.4)
        if mark in windows:
            value = values[windows.index(mark)]
            axes.plot([mark], [value], "o", color=COLOURS[colour], markersize=7)
            axes.axvline(mark, color=COLOURS["muted"], linewidth=0.8, linestyle=(0, (3, 2)))
            text = f"{value:.3f}" if index == 1 else percent(value)
            axes.annotate(
                text,
                (mark, value),
                (6, -13) if index == 1 else (-6, 7),
                textcoords="offset points",
                ha="left" if index == 1 else "right",
            )
        titles(axes, "", title)
    upper.set_title(
        f"recommended window: {mark:,}" if mark else "",
        loc="left",
        color=COLOURS["ink"],
        fontsize=9.5,
    )
    lower.set_xscale("log", base=2)
    lower.set_ylim(bottom=0)
    lower.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:.0%}"))
    for axes in (upper, lower):
        axes.yaxis.set_major_locator(MaxNLocator(4))
    lower.set_xticks(windows, [short(window, None) for window in windows])
    lower.xaxis.set_minor_locator(NullLocator())
    lower.set_xlabel("window: samples that are sorted together", color=COLOURS["muted"])


FIGURES: dict[str, tuple[Draw, tuple[float, float]]] = {
    "lengths": (lengths_figure, _SIZE),
    "strategies": (strategies_figure, _SIZE),
    "epoch": (epoch_figure, (4.3, 3.7)),
    "window": (window_figure, (4.3, 3.7)),
}

_WIDE = {"epoch": (9.6, 4.4)}
"""Sizes in inches where a figure stands alone."""


def figures_of(report: Report) -> list[str]:
    """Names of the figures that the report has something for."""
    return [name for name in FIGURES if name != "window" or report.curve]


def svg(report: Report, name: str) -> str:
    """One of the report's figures as SVG, see ``render_svg``."""
    draw, size = FIGURES[name]
    return render_svg(name, size, lambda figure: draw(report, figure))


def write_png(report: Report, folder: Path) -> list[Path]:
    """Write the figures as PNG files, on white; returns their paths."""
    paths = []
    for name in figures_of(report):
        draw, size = FIGURES[name]
        paths.append(folder / f"{name}.png")
        render_png(paths[-1], _WIDE.get(name, size), partial(draw, report))
    return paths


def _axes(figure: Figure, grid: str = "y") -> Any:
    axes = figure.subplots()
    style(axes, grid)
    return axes
