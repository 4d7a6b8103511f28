"""A report as one value, and its JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from xlength.plan.cost import TOKENS
from xlength.plan.groups import Ints, fingerprint
from xlength.report.measures import Row
from xlength.report.strategies import Setting


@dataclass(frozen=True)
class Report:
    """All that table, JSON, figures and page show.

    Args:
        name: of the lengths: a file, a config or a shape.
        lengths: (n,) int64 tokens, of either sign, as compared.
        parts: (name, first sample, number of samples) of each source, one at least.
        setting: what was compared.
        rows: this config first, if one was given.
        base: what is compared with: this config, or the default sampler.
        best: the recommended one of the rows.
        curve: ``TokenBudget`` by window, from small to all; may be empty.
        notes: warnings.
        verdict: gain and price.
        lines: Python for the config; empty where nothing is to be changed.
        command: repeats the report.
    """

    name: str
    lengths: Ints
    parts: Sequence[tuple[str, int, int]]
    setting: Setting
    rows: Sequence[Row]
    base: Row
    best: Row
    curve: Sequence[Row]
    notes: Sequence[str]
    verdict: str
    lines: str
    command: str

    def headline(self) -> str:
        """What was compared, in a line."""
        sizes, setting = np.abs(self.lengths), self.setting
        cost = "tokens" if setting.cost == TOKENS else str(setting.cost)
        accumulate = f" x {setting.accumulate}" if setting.accumulate > 1 else ""
        return (
            f"{self.name}: {len(sizes):,} samples, {int(sizes.sum()):,} tokens, median "
            f"{int(np.median(sizes)):,}, longest {int(sizes.max()):,}; {setting.world_size} ranks, "
            f"batch size {setting.batch_size}{accumulate}, cost {cost}"
        )

    def curve_points(self) -> list[tuple[int | None, float, float]]:
        """(window, wall efficiency under the chosen cost, batch-mate repeat) of the curve."""
        return [
            (
                row.strategy.options.get("window"),
                row.wall_efficiency(self.setting.cost),
                row.batchmate_repeat,
            )
            for row in self.curve
        ]

    def as_dict(self) -> dict[str, Any]:
        """The report's JSON."""
        from xlength import __version__

        sizes = np.abs(self.lengths)
        setting = self.setting
        return {
            "num_samples": len(sizes),
            "world_size": setting.world_size,
            "batch_size": setting.batch_size,
            "cost": setting.cost_name,
            "crossover": setting.attention.crossover,
            "accumulate": setting.accumulate,
            "seed": setting.seed,
            "strategies": [row.as_dict() for row in self.rows],
            "recommended": self.best.strategy.name,
            "base": self.base.strategy.name,
            "verdict": self.verdict,
            "config_lines": self.lines,
            "warnings": list(self.notes),
            "window_curve": [
                {"window": window, "wall_efficiency": wall, "batchmate_repeat": mates}
                for window, wall, mates in self.curve_points()
            ],
            "lengths": {
                "name": self.name,
                "fingerprint": fingerprint(self.lengths),
                "num_tokens": int(sizes.sum()),
                "min": int(sizes.min()),
                "median": int(np.median(sizes)),
                "p90": int(np.quantile(sizes, 0.9)),
                "p99": int(np.quantile(sizes, 0.99)),
                "max": int(sizes.max()),
            },
            "command": self.command,
            "version": __version__,
        }
