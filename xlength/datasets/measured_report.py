"""What a measurement found: refused, or said in the log."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np
from mmengine.logging import print_log

from xlength.datasets.json_rows import JsonRows
from xlength.datasets.measured import BROKEN, CUT, IMAGE, OVERLONG, UNTRAINED, Measured


def refused(measured: Measured, policies: Mapping[str, str]) -> list[str]:
    """Kinds of rows that are there and must not be."""
    return [
        kind for kind, policy in policies.items() if policy == "error" and kind in measured.counts
    ]


def refuse(rows: JsonRows, measured: Measured, policies: Mapping[str, str]) -> None:
    """One error for all rows that a policy refuses."""
    problems = refused(measured, policies)
    if problems:
        lines = []
        for kind in problems:
            row, text = measured.examples[kind][0]
            count = measured.counts[kind]
            others = f" (and {count - 1} more like it)" if count > 1 else ""
            lines.append(f"{rows.where(row)}: {text}{others}")
        raise ValueError("; ".join(lines))
    if len(measured.rows) == 0:
        found = ", ".join(f"{count} {kind}" for kind, count in measured.counts.items())
        raise ValueError(f"{rows.path or 'data'}: none of {len(rows)} rows makes a sample: {found}")


def report(rows: JsonRows, measured: Measured) -> None:
    images = int((measured.lengths > 0).sum())
    message = (
        f"LLaVADataset: {len(rows)} rows, {len(measured.rows)} samples: {images} with images, "
        f"{len(measured.rows) - images} text only, {int(np.abs(measured.lengths).sum())} tokens"
    )
    print_log(message, "current")
    said = {
        BROKEN: "rows were left out because they are broken",
        IMAGE: "rows were left out because of an image",
        UNTRAINED: "rows were left out because no label is left to train",
        OVERLONG: "rows were left out because they are too long",
        CUT: "samples were cut to max_length",
    }
    for kind, count in measured.counts.items():
        row, text = measured.examples[kind][0]
        message = f"{count} {said[kind]}; the first: {rows.where(row)}: {text}"
        print_log(message, "current", level=logging.WARNING)
