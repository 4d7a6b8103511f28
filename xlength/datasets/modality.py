"""How long samples are, by modality: what ``xlength measure`` prints of a set with images."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xlength.lengths import get_lengths

QUANTILES = (1, 10, 50, 90, 99)
"""Per cent."""


def measure(dataset: Any, length_property: str = "modality_length") -> dict[str, dict[str, float]]:
    """The distribution of lengths by modality.

    Building a ``LLaVADataset`` measures it, or reads what was measured before; this sums it up.

    Args:
        dataset: a data set with modality lengths, or wrappers around some (see ``get_lengths``).
        length_property: > 0 with images, < 0 text only.

    Returns:
        Of ``'images'``, ``'text'`` and ``'all'``: ``samples``, ``tokens``, and where there are
        samples ``mean``, ``min``, ``p1``, ``p10``, ``p50``, ``p90``, ``p99``, ``max``, in tokens.
    """
    lengths = get_lengths(dataset, length_property)
    size = np.abs(lengths)
    parts = {"images": size[lengths > 0], "text": size[lengths < 0], "all": size}
    return {name: _summary(part) for name, part in parts.items()}


def format_measure(summary: dict[str, dict[str, float]]) -> str:
    """The summary as a table of plain text, one line a modality."""
    names = ["samples", "tokens", "mean", "min", *(f"p{q}" for q in QUANTILES), "max"]
    lines = [f"{'':8}" + "".join(f"{name:>12}" for name in names)]
    for part, values in summary.items():
        cells = (f"{values[name]:>12,.0f}" if name in values else f"{'-':>12}" for name in names)
        lines.append(f"{part:8}" + "".join(cells))
    return "\n".join(lines)


def _summary(lengths: NDArray[np.int64]) -> dict[str, float]:
    result: dict[str, float] = {"samples": len(lengths), "tokens": int(lengths.sum())}
    if len(lengths):
        result |= {"mean": float(lengths.mean()), "min": int(lengths.min())}
        values = np.percentile(lengths, QUANTILES, method="inverted_cdf")
        result |= {f"p{q}": int(v) for q, v in zip(QUANTILES, values, strict=True)}
        result["max"] = int(lengths.max())
    return result
