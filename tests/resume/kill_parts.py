"""What the configs of ``kill.py`` name: data, and a hook that writes down what is trained on."""

import json
import os
import time
from pathlib import Path

from mmengine.dist import get_rank
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

import tests.resume.runs  # noqa: F401  registers NoisyText and Seen


@HOOKS.register_module(force=True)
class ConsumedLog(Hook):
    """One line a batch, as soon as it is trained on."""

    priority = "VERY_HIGH"

    def before_train(self, runner):
        self.file = Path(runner.work_dir, f"consumed{get_rank()}.jsonl")
        if self.file.exists():
            self.write("\n")  # the last line may be torn

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        ids = data_batch["data"]["input_ids"]
        # The augmented tokens too.
        entry = {"iter": runner.iter, "samples": [ids[:, 0].tolist(), int(ids.sum())]}
        self.write(json.dumps(entry) + "\n")
        place = dict(attempt=int(os.environ["ATTEMPT"]), epoch=runner.epoch, iter=runner.iter)
        line = json.dumps({**place, "samples": ids[:, 0].tolist()})
        with Path(runner.work_dir, "steps.jsonl").open("a") as file:
            file.write(line + "\n")

    def write(self, text):
        with self.file.open("a") as file:
            file.write(text)


@HOOKS.register_module(force=True)
class Slow(Hook):
    """Makes every step take ``s`` seconds longer."""

    def __init__(self, s):
        self.s = s

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        time.sleep(self.s)


@HOOKS.register_module(force=True)
class SlowSave(Hook):
    """Makes every checkpoint take a second and a half longer."""

    def before_save_checkpoint(self, runner, checkpoint):
        time.sleep(1.5)


@HOOKS.register_module(force=True)
class ValidationLog(Hook):
    """One line for every step of a validation that begins, which takes ``s`` seconds longer, and
    for every validation that ends, with what it has seen."""

    def __init__(self, s=0.0):
        self.s = s

    def before_val_iter(self, runner, batch_idx, data_batch=None):
        self.write(runner, f"step {batch_idx}")
        time.sleep(self.s)

    def after_val_epoch(self, runner, metrics=None):
        self.write(runner, f"saw {metrics['seen']}")

    def write(self, runner, text):
        with Path(runner.work_dir, f"validation{get_rank()}.txt").open("a") as file:
            file.write(f"{runner.iter}: {text}\n")


@HOOKS.register_module(force=True)
class CrashOnce(Hook):
    """Fails on one rank at one iteration, but not when it is restarted."""

    def __init__(self, rank, at):
        self.rank, self.at = rank, at

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        mark = Path(runner.work_dir, "crashed")
        if get_rank() == self.rank and runner.iter == self.at and not mark.exists():
            mark.write_text(json.dumps({"iter": runner.iter, "rank": self.rank}))
            raise RuntimeError("a failure")
