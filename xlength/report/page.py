"""The report as one self-contained HTML page: no script, nothing from the network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from xlength.report.drawing import COLOURS
from xlength.report.figures import figures_of, svg
from xlength.report.table import COLUMNS, EXTRA, label

if TYPE_CHECKING:
    from xlength.report.result import Report

_DARK = {
    "ink": "#e6e9ef",
    "muted": "#98a2b3",
    "grid": "#2b3240",
    "surface": "#171b23",
    "c1": "#6ea3f7",
    "c2": "#f2a154",
    "c3": "#4cc3a8",
    "c4": "#b692f0",
    "c5": "#ef7fae",
    "c6": "#a4adbb",
}
_CAPTIONS = {
    "lengths": (
        "Lengths",
        "How many samples have which number of tokens, on a logarithmic axis.",
    ),
    "strategies": (
        "Wall efficiency",
        "The share of all machines' time that is useful. Pale bars are neither what is compared "
        "with nor what is recommended.",
    ),
    "epoch": (
        "One epoch, step by step",
        "The cost of the fastest and the slowest rank at every step; 1 is the useful work of an "
        "average step. What lies above it is padding and waiting.",
    ),
    "window": (
        "How large a window",
        "A larger window of TokenBudget pads less, and lets more samples meet their batch-mates "
        "again in the next epoch.",
    ),
}
_WORDS = (
    ("padding eff.", "real tokens / padded tokens"),
    ("rank balance", "mean over steps of mean cost / largest cost of the ranks"),
    (
        "wall eff.",
        "cost of the real samples / (ranks x sum over steps of the slowest rank's cost), by tokens "
        "and by attention, l + l&sup2; / crossover",
    ),
    ("mates again", "share of pairs in a batch that share one again in the next epoch"),
    ("step corr.", "correlation of the mean lengths of successive steps; 0 is no saw-tooth"),
    ("largest batch", "padded tokens: what the memory must hold"),
)


def page(report: Report) -> str:
    """The page, complete.

    Light and dark follow the reader's system; on a narrow screen the table becomes cards.
    """
    body = [
        f"<header><h1>{escape(report.name)}</h1><p>{escape(_subtitle(report))}</p></header>",
        _choice(report),
        warnings(report.notes),
        f"<section><h2>Strategies</h2>{_table(report)}</section>",
        f'<div class="figures">{"".join(_figure(report, n) for n in figures_of(report))}</div>',
        words(_WORDS),
        made_by(report.command),
    ]
    return document(report.name, body)


def document(title: str, body: Sequence[str]) -> str:
    """A page of these parts."""
    style = _STYLE.replace("/*light*/", _variables(COLOURS)).replace("/*dark*/", _variables(_DARK))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}: xlength report</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n<main>\n{chr(10).join(part for part in body if part)}\n</main>\n</body>\n"
        "</html>\n"
    )


def _variables(colours: dict[str, str]) -> str:
    return "".join(f"--{name}: {value};" for name, value in colours.items())


def _subtitle(report: Report) -> str:
    sizes, setting = np.abs(report.lengths), report.setting
    accumulate = f" x {setting.accumulate}" if setting.accumulate > 1 else ""
    return (
        f"{len(sizes):,} samples, {int(sizes.sum()):,} tokens, median {int(np.median(sizes)):,}, "
        f"longest {int(sizes.max()):,}; {setting.world_size} ranks, batch size "
        f"{setting.batch_size}{accumulate}, cost {setting.cost}"
    )


def _choice(report: Report) -> str:
    then = report.base.wall_efficiency(report.setting.cost)
    if not report.lines:
        return f'<section class="choice"><p class="verdict">{escape(report.verdict)}</p></section>'
    now = report.best.wall_efficiency(report.setting.cost)
    numbers = (
        (f"{then:.2f} &rarr; {now:.2f}", "wall efficiency"),
        (f"{now / then:.1f} &times;", "shorter epochs where computing takes the time"),
        (f"{report.best.batchmate_repeat:.1%}", "of batch-mates met again: the price"),
    )
    tiles = "".join(f"<div><b>{value}</b><span>{text}</span></div>" for value, text in numbers)
    return (
        f'<section class="choice"><h2>Take {escape(label(report.best))}</h2>'
        f'<div class="tiles">{tiles}</div><p class="verdict">{escape(report.verdict)}</p>'
        f"<p>At the end of the config:</p><pre><code>{escape(report.lines)}</code></pre></section>"
    )


def warnings(notes: Sequence[str]) -> str:
    """What is peculiar about the lengths."""
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f'<section class="warnings"><h2>Mind</h2><ul>{items}</ul></section>' if items else ""


def _table(report: Report) -> str:
    columns = [(title.replace("\n", " "), cell, "") for title, cell in COLUMNS]
    columns += [(title.replace("\n", " "), cell, ' class="extra"') for title, cell in EXTRA]
    rows = [
        (
            label(row),
            [cell(row) for _, cell, _ in columns],
            row is report.best and bool(report.lines),
        )
        for row in report.rows
    ]
    return table([(title, kind) for title, _, kind in columns], rows)


def table(
    columns: Sequence[tuple[str, str]], rows: Sequence[tuple[str, Sequence[str], bool]]
) -> str:
    """A table that becomes cards on a narrow screen.

    Args:
        columns: (title, attributes) of each column but the first.
        rows: (name, cells, whether it is the recommended one).
    """
    head = "".join(f"<th>{escape(title)}</th>" for title, _ in columns)
    lines = []
    for name, cells, best in rows:
        inner = "".join(
            f'<td data-label="{escape(title)}"{kind}>{escape(cell)}</td>'
            for (title, kind), cell in zip(columns, cells, strict=True)
        )
        mark = ' class="best"' if best else ""
        lines.append(f'<tr{mark}><th scope="row">{escape(name)}</th>{inner}</tr>')
    return (
        f'<div class="scroll"><table><thead><tr><th></th>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _figure(report: Report, name: str) -> str:
    title, text = _CAPTIONS[name]
    return figure(title, text, svg(report, name))


def figure(title: str, text: str, image: str) -> str:
    """An SVG image with its title and caption."""
    return (
        f'<figure><h2>{escape(title)}</h2><div role="img" aria-label="{escape(text)}">'
        f"{image}</div><figcaption>{escape(text)}</figcaption></figure>"
    )


def words(entries: Sequence[tuple[str, str]]) -> str:
    """Names of columns and what they mean, as HTML."""
    items = "".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in entries)
    return f"<section><h2>Words</h2><dl>{items}</dl></section>"


def made_by(command: str) -> str:
    """The command that repeats the page."""
    return f"<footer><p>Made by</p><pre><code>{escape(command)}</code></pre></footer>"


_STYLE = """\
:root { color-scheme: light dark; --page: #f5f7fa; --good: #0d8f77; --warn: #b25e09; /*light*/ }
@media (prefers-color-scheme: dark) {
  :root { --page: #0f1218; --good: #4cc3a8; --warn: #f2a154; /*dark*/ }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
}
main { max-width: 1080px; margin: 0 auto; padding: 24px 16px 48px; }
h1 { font-size: 24px; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 16px; margin: 0 0 12px; }
header p { margin: 0 0 20px; color: var(--muted); }
section, figure {
  background: var(--surface); border: 1px solid var(--grid); border-radius: 10px;
  padding: 16px; margin: 0 0 16px; min-width: 0;
}
.choice { border-left: 4px solid var(--good); }
.warnings { border-left: 4px solid var(--warn); }
.warnings ul { margin: 0; padding-left: 20px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(160px, 1fr)); gap: 12px; }
.tiles b { display: block; font-size: 24px; line-height: 1.3; color: var(--good); }
.tiles span { color: var(--muted); font-size: 13px; }
.verdict { margin: 14px 0 12px; }
.choice p { margin-bottom: 8px; }
pre {
  margin: 0; padding: 12px; overflow-x: auto; border-radius: 8px; background: var(--page);
  border: 1px solid var(--grid); font: 13px/1.45 ui-monospace, Menlo, Consolas, monospace;
}
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 7px 8px; text-align: right; border-bottom: 1px solid var(--grid); }
td { white-space: nowrap; }
thead th { color: var(--muted); font-weight: 500; font-size: 12px; vertical-align: bottom; }
tbody th { text-align: left; font-weight: 500; white-space: nowrap; }
tbody tr:last-child > * { border-bottom: 0; }
.best > * { color: var(--good); font-weight: 600; }
.figures {
  display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 420px), 1fr)); gap: 16px;
  margin-bottom: 16px;
}
figure { margin: 0; }
figure svg { display: block; width: 100%; height: auto; }
figure svg text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
figcaption { color: var(--muted); font-size: 13px; margin-top: 8px; }
dl { margin: 0; display: grid; grid-template-columns: max-content 1fr; gap: 6px 16px; }
dt { font-weight: 500; }
dd { margin: 0; color: var(--muted); }
footer p { margin: 0 0 6px; color: var(--muted); font-size: 13px; }
@media (max-width: 760px) {
  thead { display: none; }
  table, tbody, tr { display: block; }
  tr { padding: 8px 0; border-bottom: 1px solid var(--grid); }
  tbody tr:last-child { border-bottom: 0; }
  tbody th, td { display: flex; justify-content: space-between; border: 0; padding: 2px 0; }
  tbody th { font-weight: 600; white-space: normal; }
  td.extra { display: none; }
  td::before { content: attr(data-label); color: var(--muted); font-weight: 400; }
  dl { grid-template-columns: 1fr; gap: 2px; }
  dd { margin-bottom: 8px; }
}
"""
