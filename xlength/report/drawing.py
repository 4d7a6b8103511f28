"""Drawing by matplotlib (which mmengine brings): one look, for a page or as a PNG file."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

COLOURS = {
    "ink": "#1d2430",
    "muted": "#667085",
    "grid": "#e3e7ee",
    "surface": "#ffffff",
    "c1": "#2563c9",
    "c2": "#d9720c",
    "c3": "#0d8f77",
    "c4": "#8a4fc4",
    "c5": "#b0285f",
    "c6": "#7c8798",
}
"""On paper and in light mode; in a page each is a CSS variable of the same name."""


_RC: Any = {
    "font.size": 9.5,
    "font.family": "DejaVu Sans",
    "text.color": COLOURS["ink"],
    "axes.edgecolor": COLOURS["grid"],
    "xtick.color": COLOURS["muted"],
    "ytick.color": COLOURS["muted"],
    "axes.titlepad": 5,
}


def render_svg(name: str, size: tuple[float, float], draw: Callable[[Figure], None]) -> str:
    """A figure as SVG to stand in a page: colours are the page's, and names its own."""
    buffer = io.StringIO()
    with rc_context(_RC | {"svg.fonttype": "none", "svg.hashsalt": name}):
        figure = Figure(size, layout="constrained")
        draw(figure)
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    for colour, value in COLOURS.items():
        text = text.replace(value, f"var(--{colour})")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(url\(|href=")#', rf"\g<1>#{name}-", text)
    text = re.sub(r"(font[^;\"]*?)'?DejaVu Sans'?[^;\"]*", r"\1sans-serif", text)
    return re.sub(
        r'<svg ([^>]*?)width="[^"]*"', r"<svg \1", re.sub(r' height="[\d.]+pt"', "", text)
    )


def render_png(path: Path, size: tuple[float, float], draw: Callable[[Figure], None]) -> None:
    """A figure as a PNG file, on white."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context(_RC):
        figure = Figure(size, layout="constrained")
        draw(figure)
        figure.savefig(path, dpi=140, facecolor=COLOURS["surface"])


def style(axes: Any, grid: str = "y") -> None:
    """A light grid, and no frame."""
    axes.grid(axis=grid, color=COLOURS["grid"], linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def titles(axes: Any, x: str, y: str) -> None:
    """Names of the axes."""
    axes.set_xlabel(x, color=COLOURS["muted"])
    axes.set_ylabel(y, color=COLOURS["muted"])


def short(value: float, _: Any) -> str:
    """1,500,000 -> 1.5M; 2,048 -> 2,048; 20,000 -> 20k."""
    if value >= 1e6:
        return f"{value / 1e6:g}M"
    if value >= 1e4:
        return f"{value / 1e3:.3g}k"
    return f"{value:,.0f}"
