"""Components that the configs of test_cli_train.py import by name."""

import json
import os
from pathlib import Path

from mmengine.dist import get_rank
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

import tests.tiny  # noqa: F401  registers the data


@HOOKS.register_module(force=True)
class Diary(Hook):
    """Writes each rank's losses and samples into the work dir."""

    def __init__(self):
        self.entries = []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        samples = data_batch["data"]["input_ids"][:, 0].tolist()
        self.entries.append({"samples": samples, "loss": float(outputs["loss"])})

    def after_train(self, runner):
        wrapper = type(runner.model).__name__
        diary = {"entries": self.entries, "wrapper": wrapper, "seed": runner.seed}
        Path(runner.work_dir, f"diary{get_rank()}.json").write_text(json.dumps(diary))


@HOOKS.register_module(force=True)
class Crash(Hook):
    """Fails on one rank in the middle of training."""

    def __init__(self, rank, at):
        self.rank, self.at = rank, at

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if get_rank() == self.rank and batch_idx == self.at:
            raise RuntimeError(f"a failure on rank {os.environ.get('RANK', 0)}")
