"""From the start of a run to its first batch: fresh, and resumed at step k in two loops."""

from __future__ import annotations

import io
import itertools
import logging
import tempfile
import time
import warnings
from argparse import Namespace
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.runner import Runner
from torch.utils.data import Dataset

from xlength.runtime.atomic import write_atomically
from xlength.runtime.checkpoint import trust_checkpoints

STEPS, QUICK_STEPS = (10, 150, 3000), (10, 150)
ITEM_SECONDS = 0.005
REPEATS = 5

_numbers = itertools.count()


def run(options: Namespace) -> list[dict[str, Any]]:
    """Rows for each step k and for 0 and 2 workers, in seconds.

    ``ours``: resuming with ``TrainLoop`` and ``DataStateHook``, median of five; ``fresh``: the same
    run from its beginning; ``slowdown``: their ratio, which must not grow with k; ``peer``:
    mmengine's ``IterBasedTrainLoop`` with ``DefaultSampler``, resumed once. Batches of one sample
    that takes 5 ms to load; the clock runs from the building of the runner to the first batch,
    reading the checkpoint included.
    """
    steps = QUICK_STEPS if options.quick else STEPS
    rows = []
    write_atomically()
    with (
        tempfile.TemporaryDirectory() as folder,
        warnings.catch_warnings(),
        redirect_stdout(io.StringIO()),  # mmengine prints a line a checkpoint
    ):
        warnings.simplefilter("ignore")
        trust_checkpoints([folder])
        for name in ("ours", "peer"):
            _start(Path(folder, name), name, 0, options.seed, train=max(steps))
        for workers in (0, 2):
            rows += list(_rows(Path(folder), steps, workers, options.seed))
    return rows


def _rows(
    folder: Path, steps: tuple[int, ...], workers: int, seed: int
) -> Iterator[dict[str, Any]]:
    _start(folder / "ours", "ours", workers, seed)  # everything is imported and in the disk cache
    times: dict[int, list[float]] = {step: [] for step in (0, *steps)}
    for _ in range(REPEATS):
        for step in times:  # in turn, so that a slow moment of the machine meets all
            times[step].append(_start(folder / "ours", "ours", workers, seed, resume=step))
    fresh = median(times[0])
    for step in steps:
        ours = median(times[step])
        peer = _start(folder / "peer", "peer", workers, seed, resume=step)
        yield {
            "case": f"step {step:,}, {workers} workers",
            "ours": ours,
            "peer": peer,
            "ratio": peer / ours,
            "fresh": fresh,
            "slowdown": ours / fresh,
            "limit": 1.2,
            "note": "peer: IterBasedTrainLoop, DefaultSampler; limit: of the slowdown",
        }


class FirstBatch(Exception):
    """It is there."""


class Clock(Hook):
    """Ends the run at its first batch."""

    def before_train_iter(
        self, runner: Any, batch_idx: int, data_batch: dict[str, Any] | None = None
    ) -> None:
        raise FirstBatch


class Items(Dataset[Any]):
    """Samples that take a while to load, with lengths.

    Args:
        seconds: that loading takes.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.length = np.random.default_rng(0).integers(1, 2048, 10_000).tolist()

    def __len__(self) -> int:
        return len(self.length)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(self.seconds)
        return {"inputs": torch.full((4,), float(self.length[index]) / 2048)}


class Tiny(BaseModel):
    """One linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, inputs: torch.Tensor, mode: str = "loss") -> dict[str, torch.Tensor]:
        return {"loss": self.layer(inputs).square().mean()}


def _start(
    folder: Path, name: str, workers: int, seed: int, resume: int = 0, train: int = 0
) -> float:
    """Seconds to the first batch; or train so many steps, with checkpoints."""
    sampler: dict[str, Any] = dict(type="DefaultSampler", shuffle=True)
    loop = "IterBasedTrainLoop"
    if name == "ours":
        sampler = dict(type="xlength.LengthGroupedSampler", per_device_batch_size=1)
        loop = "xlength.TrainLoop"
    hooks: list[Any] = [] if train else [Clock()]
    if name == "ours":
        hooks.append(dict(type="xlength.DataStateHook"))
    checkpoint = dict(type="CheckpointHook", by_epoch=False, interval=10, save_last=False)
    begin = time.perf_counter()
    runner = Runner(
        model=Tiny(),
        work_dir=str(folder),
        train_dataloader=dict(
            batch_size=1,
            num_workers=workers,
            dataset=Items(0.0 if train else ITEM_SECONDS),
            sampler=sampler,
            collate_fn=dict(type="default_collate"),
        ),
        train_cfg=dict(type=loop, max_iters=train or 100_000),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.01)),
        default_hooks=dict(checkpoint=checkpoint, logger=dict(type="LoggerHook", interval=10**9)),
        custom_hooks=hooks,
        randomness=dict(seed=seed),
        default_scope="mmengine",
        log_level="ERROR",
        log_processor=dict(by_epoch=False),
        experiment_name=f"{name}{next(_numbers)}",
        resume=resume > 0,
        load_from=str(folder / f"iter_{resume}.pth") if resume else None,
    )
    try:
        runner.train()
    except FirstBatch:
        pass
    finally:
        seconds = time.perf_counter() - begin
        for handler in list(runner.logger.handlers):
            runner.logger.removeHandler(handler)
            if isinstance(handler, logging.FileHandler):
                handler.close()
    return seconds
