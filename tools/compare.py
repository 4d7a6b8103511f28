"""Train the quickstart's model with several samplers for one epoch each, and compare.

All see the same samples once, so they stand at the same number of useful tokens when the loss on
held-out text is taken. Every run is `tools/dist_train.sh` with as many processes as asked for.

    python tools/compare.py --processes 2 --json compare.json

Plans that fill batches take fewer optimiser steps for the same tokens; `default_sampler:20`, which
has batches of 20 in place of 8, takes as many as they do, and shows what that alone costs.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from quickstart import ROOT, read_scalars, summary

CONFIGS = (
    "default_sampler",
    "length_grouped",
    "fixed_batch",
    "default_sampler:20",
    "token_budget",
    "packing",
)


def main() -> int:
    """Train, evaluate, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "configs", nargs="*", default=CONFIGS, help="NAME[:BATCH_SIZE] in configs/quickstart"
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--work-dir", type=Path, default=Path("work_dirs/compare"))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for name in args.configs:
        work_dir = args.work_dir / name.replace(":", "_")
        config = write_config(name, work_dir.with_suffix(".py"), args.epochs)
        train(config, work_dir, args.processes)
        figures = summary(read_scalars(work_dir))
        rows.append({"config": name, **figures, **evaluate(config, work_dir)})
        print(json.dumps(rows[-1]), flush=True)
    print_table(rows)
    if args.json:
        args.json.write_text(json.dumps({"processes": args.processes, "rows": rows}, indent=1))
    return 0


def write_config(name: str, path: Path, epochs: int) -> Path:
    """The quickstart's config ``NAME[:BATCH_SIZE]`` for so many epochs, without workers."""
    name, _, batch_size = name.partition(":")
    path.parent.mkdir(parents=True, exist_ok=True)
    base = os.path.relpath(ROOT / f"configs/quickstart/{name}.py", path.parent)
    rows = f"batch_size={batch_size}, " if batch_size else ""
    path.write_text(
        f"_base_ = [{base!r}]\n"
        f"train_cfg = dict(_delete_=True, type='TrainLoop', max_epochs={epochs})\n"
        f"train_dataloader = dict({rows}num_workers=0, persistent_workers=False)\n"
        "param_scheduler = [\n"
        "    dict(type='LinearLR', start_factor=0.01, by_epoch=False, end=20),\n"
        "    dict(type='CosineAnnealingLR', eta_min=2e-4, by_epoch=True, T_max="
        f"{epochs}, convert_to_iter_based=True)]\n"
    )
    return path


def train(config: Path, work_dir: Path, processes: int) -> None:
    """One run under torchrun, each process with its share of the cores."""
    threads = max(1, (os.cpu_count() or 1) // processes)
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": str(threads)}
    command = [str(ROOT / "tools/dist_train.sh"), str(config), str(processes)]
    command += ["--work-dir", str(work_dir)]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)


def evaluate(path: Path, work_dir: Path) -> dict[str, float]:
    """Loss of the run's last checkpoint on the held-out rows: mean per token, and mean per row."""
    import torch
    from mmengine.config import Config
    from mmengine.registry import DATASETS, MODELS

    from xlength import default_collate_fn

    config = Config.fromfile(path)
    config.train_dataloader.dataset.dataset.part = "validation"
    dataset = DATASETS.build(config.train_dataloader.dataset)
    config.model.llm.config.attn_implementation = "sdpa"
    model = MODELS.build(config.model)
    checkpoint = (work_dir / "last_checkpoint").read_text().strip()
    model.load_state_dict(torch.load(checkpoint, weights_only=False)["state_dict"])
    model.eval()
    losses, sizes = [], []
    with torch.no_grad():
        for row in dataset:
            result = model(**default_collate_fn([row]), mode="loss")
            losses.append(float(result["loss"]))
            sizes.append(int(result["num_tokens"]))
    per_token = sum(map(operator.mul, losses, sizes)) / sum(sizes)
    return {
        "validation_loss": per_token,
        "validation_loss_per_row": sum(losses) / len(losses),
        "validation_rows": len(losses),
        "validation_tokens": sum(sizes),
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    """One row a config, with the gain over the first."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="One epoch each: equal useful tokens")
    table.add_column("config")
    columns = ("steps", "seconds", "padding efficiency", "rank balance", "useful tokens / s / rank")
    for column in (*columns, "gain", "held-out loss per token", "per text"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row["config"],
            f"{row['steps']}",
            f"{row['seconds']:.0f}",
            f"{row['padding_efficiency']:.3f}",
            f"{row['rank_balance']:.3f}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['tokens_per_second'] / rows[0]['tokens_per_second']:.2f}",
            f"{row['validation_loss']:.3f}",
            f"{row['validation_loss_per_row']:.3f}",
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    sys.exit(main())
