"""Train the same model twice on real text, with mmengine's sampler and with xlength's, and compare.

Run by ``make quickstart``. The data are the documentation of Python's standard library, the model
has random weights: nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ("default_sampler", "length_grouped", "packing")


def main() -> int:
    """Train with each config, then print what the other sampler bought."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("configs", nargs="*", default=CONFIGS, help="names in configs/quickstart")
    parser.add_argument("--work-dir", type=Path, default=Path("work_dirs/quickstart"))
    parser.add_argument("--cfg-options", nargs="*", default=[], help="passed to every run")
    args = parser.parse_args()
    rows = []
    for name in args.configs:
        config, work_dir = ROOT / f"configs/quickstart/{name}.py", args.work_dir / name
        print(f"\n$ xlength train {config.relative_to(ROOT)}", flush=True)
        command = [sys.executable, "-m", "xlength.cli", "train", str(config)]
        command += ["--work-dir", str(work_dir)]
        command += ["--cfg-options", *args.cfg_options] if args.cfg_options else []
        subprocess.run(command, check=True)
        rows.append({"config": name, **summary(read_scalars(work_dir))})
    print_table(rows)
    return 0


def read_scalars(work_dir: Path) -> list[dict[str, Any]]:
    """The training lines of the newest run's JSON log, in the order of their iterations."""
    logs = sorted(work_dir.glob("*/vis_data/scalars.json"))
    if not logs:
        raise FileNotFoundError(f"no JSON log under {work_dir}")
    lines = [json.loads(line) for line in logs[-1].read_text().splitlines()]
    return [line for line in lines if "loss" in line and "padding_efficiency" in line]


def summary(lines: list[dict[str, Any]]) -> dict[str, float]:
    """Totals of a run, its start included: seconds, efficiencies, the loss before and after."""
    tokens = seconds = padded = balance = 0.0
    done = 0
    for line in lines:
        num_steps, done = line["step"] - done, line["step"]
        spent = line["time"] * num_steps
        seconds += spent
        tokens += line["tokens_per_second"] * spent
        balance += line.get("rank_balance", 1.0) * num_steps
        padded += line["tokens_per_second"] * spent / line["padding_efficiency"]
    return {
        "steps": done,
        "seconds": seconds,
        "padding_efficiency": tokens / padded,
        "rank_balance": balance / done,
        "tokens_per_second": tokens / seconds,
        "first_loss": lines[0]["loss"],
        "last_loss": sum(line["loss"] for line in lines[-5:]) / len(lines[-5:]),
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    """One row a config, and the gain over the first of them in a sentence."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="\nWhat the sampler bought: the same data and model, as many samples")
    table.add_column("config")
    for column in ("steps", "seconds", "padding efficiency", "useful tokens / s", "loss"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row["config"],
            f"{row['steps']}",
            f"{row['seconds']:.0f}",
            f"{row['padding_efficiency']:.3f}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['first_loss']:.2f} -> {row['last_loss']:.2f}",
        )
    Console(width=100).print(table)
    first = rows[0]
    for row in rows[1:]:
        gain = row["tokens_per_second"] / first["tokens_per_second"]
        print(
            f"{row['config']}: {gain:.2f} times the useful tokens per second of {first['config']}."
        )


if __name__ == "__main__":
    sys.exit(main())
