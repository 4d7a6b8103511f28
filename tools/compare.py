"""Train the quickstart's model with several samplers for one epoch each, and compare.

All see the same samples once, so they stand at the same number of useful tokens when the loss on
held-out text is taken. Every run is `tools/dist_train.sh` with as many processes as asked for.

    python tools/compare.py --processes 2 --json compare.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from quickstart import ROOT, read_scalars, summary

CONFIGS = ("default_sampler", "length_grouped", "fixed_batch", "token_budget", "packing")


def main() -> int:
    """Train, evaluate, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("configs", nargs="*", default=CONFIGS, help="names in configs/quickstart")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--work-dir", type=Path, default=Path("work_dirs/compare"))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for name in args.configs:
        work_dir = args.work_dir / name
        train(name, work_dir, args.processes, args.epochs)
        figures = summary(read_scalars(work_dir))
        rows.append({"config": name, **figures, **evaluate(name, work_dir)})
        print(json.dumps(rows[-1]), flush=True)
    print_table(rows)
    if args.json:
        args.json.write_text(json.dumps({"processes": args.processes, "rows": rows}, indent=1))
    return 0


def train(name: str, work_dir: Path, processes: int, epochs: int) -> None:
    """One run under torchrun, each process with its share of the cores."""
    threads = max(1, (os.cpu_count() or 1) // processes)
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": str(threads)}
    config = work_dir.parent / f"{name}.py"
    config.parent.mkdir(parents=True, exist_ok=True)
    base = os.path.relpath(ROOT / f"configs/quickstart/{name}.py", config.parent)
    config.write_text(
        f"_base_ = [{base!r}]\n"
        f"train_cfg = dict(_delete_=True, type='TrainLoop', max_epochs={epochs})\n"
        "train_dataloader = dict(num_workers=0, persistent_workers=False)\n"
        "param_scheduler = [\n"
        "    dict(type='LinearLR', start_factor=0.01, by_epoch=False, end=20),\n"
        "    dict(type='CosineAnnealingLR', eta_min=2e-4, by_epoch=True, T_max="
        f"{epochs}, convert_to_iter_based=True)]\n"
    )
    command = [ROOT / "tools/dist_train.sh", config, str(processes), "--work-dir", work_dir]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)


def evaluate(name: str, work_dir: Path) -> dict[str, float]:
    """Mean loss per token of the run's last checkpoint on the held-out rows."""
    import torch
    from mmengine.config import Config
    from mmengine.registry import DATASETS, MODELS

    from xlength import default_collate_fn

    config = Config.fromfile(work_dir.parent / f"{name}.py")
    config.train_dataloader.dataset.dataset.part = "validation"
    dataset = DATASETS.build(config.train_dataloader.dataset)
    config.model.llm.config.attn_implementation = "sdpa"
    model = MODELS.build(config.model)
    path = (work_dir / "last_checkpoint").read_text().strip()
    model.load_state_dict(torch.load(path, weights_only=False)["state_dict"])
    model.eval()
    total = tokens = 0.0
    with torch.no_grad():
        for row in dataset:
            losses = model(**default_collate_fn([row]), mode="loss")
            total += float(losses["loss"]) * int(losses["num_tokens"])
            tokens += int(losses["num_tokens"])
    return {"validation_loss": total / tokens, "validation_tokens": tokens}


def print_table(rows: list[dict[str, Any]]) -> None:
    """One row a config, with the gain over the first."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="One epoch each: equal useful tokens")
    table.add_column("config")
    columns = ("steps", "seconds", "padding efficiency", "rank balance", "useful tokens / s / rank")
    for column in (*columns, "gain", "validation loss"):
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
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    sys.exit(main())
