"""Runs in this process that are cut off and resumed, with data that are augmented at random."""

import random
from pathlib import Path

import numpy as np
import torch
from mmengine.evaluator import BaseMetric
from mmengine.hooks import Hook
from mmengine.registry import DATASETS, HOOKS, METRICS
from mmengine.runner import FlexibleRunner, Runner

import tests.tiny as tiny
from xlength.runtime.checkpoint import trust_checkpoints

LENGTHS = [3 + (7 * i) % 23 for i in range(22)]
"""In batches of 4: 6 batches an epoch, the last of 2."""


@DATASETS.register_module(force=True)
class NoisyText(tiny.TinyText):
    """Text whose last token is drawn from the three generators whenever it is loaded."""

    def __getitem__(self, index):
        item = super().__getitem__(index)
        ids = list(item["input_ids"])
        drawn = random.random() + np.random.random() + float(torch.rand(()))
        ids[-1] = 1 + int(drawn / 3 * 120)
        return {"input_ids": ids, "labels": ids}


class Watch(Hook):
    """Notes the samples, tokens and learning rates of every batch; can cut the run off."""

    def __init__(self, stop_after=None):
        self.stop_after = stop_after
        self.batches, self.tokens, self.rates = [], [], []
        self.epochs = []

    def before_train_epoch(self, runner):
        self.epochs.append((runner.epoch, runner.iter))

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        ids = data_batch["data"]["input_ids"]
        self.batches.append(ids[:, 0].tolist())
        self.tokens.append(ids.sum().item())
        self.rates.append(runner.optim_wrapper.get_lr()["lr"][0])
        if runner.iter + 1 == self.stop_after:
            raise KeyboardInterrupt


@HOOKS.register_module(force=True)
class EarlySave(Hook):
    """Saves before the first step."""

    priority = "LOWEST"

    def before_train(self, runner):
        runner.save_checkpoint(runner.work_dir, "early.pth", by_epoch=False)


@METRICS.register_module(force=True)
class Seen(BaseMetric):
    """Number of batches of all ranks, at most the samples."""

    def process(self, data_batch, data_samples):
        self.results.append(0)

    def compute_metrics(self, results):
        return {"seen": len(results)}


SAMPLERS = {
    "LengthGroupedSampler": dict(
        sampler=dict(type="LengthGroupedSampler", per_device_batch_size=4, round_up=False)
    ),
    "TokenBudget": dict(
        sampler=dict(type="PlanSampler", plan=dict(type="TokenBudget", max_tokens=64)),
        batch_sampler=dict(type="PlanBatchSampler"),
    ),
    "Packing": dict(
        batch_size=1,
        sampler=dict(type="PlanSampler", plan=dict(type="Packing", max_length=64)),
        batch_sampler=dict(type="PlanBatchSampler"),
    ),
    "DefaultSampler": dict(sampler=dict(type="DefaultSampler", shuffle=True)),
}


def loader(sampler="LengthGroupedSampler", lengths=LENGTHS, dataset="NoisyText", **options):
    return {
        "batch_size": 4,
        "dataset": dict(type=dataset, length=list(lengths)),
        "collate_fn": dict(type="tiny_collate"),
        **SAMPLERS[sampler],
        **options,
    }


def stream(lengths=LENGTHS, **options):
    return dict(
        batch_size=4,
        sampler=None,
        dataset=dict(
            type="LengthPoolSortDataset",
            pool_size=8,
            micro_batch_size=4,
            dataset=dict(type="NoisyText", length=list(lengths)),
        ),
        collate_fn=dict(type="tiny_collate"),
        **options,
    )


def train(work_dir, train_cfg, data=None, stop_after=None, seed=1, interval=1, **options):
    """Run to the end or until ``stop_after``; returns what was watched and the runner."""
    trust_checkpoints([str(work_dir)])
    watch = Watch(stop_after)
    by_epoch = options.pop("by_epoch", False)
    state = options.pop("state", dict(type="DataStateHook"))
    accumulate = options.pop("accumulate", 1)
    checkpoint = dict(type="CheckpointHook", by_epoch=by_epoch, interval=interval)
    prepare = options.pop("prepare", None)
    kind = FlexibleRunner if "strategy" in options else Runner
    runner = kind(
        model=dict(
            type="SupervisedFinetune",
            llm=tiny.llama(attention_dropout=0.2),
            use_activation_checkpointing=False,
        ),
        work_dir=str(work_dir),
        train_dataloader=data or loader(),
        train_cfg=train_cfg,
        optim_wrapper=dict(optimizer=dict(type="AdamW", lr=0.01), accumulative_counts=accumulate),
        param_scheduler=options.pop(
            "param_scheduler", dict(type="LinearLR", start_factor=0.1, by_epoch=False, end=12)
        ),
        default_hooks=dict(checkpoint={**checkpoint, **options.pop("checkpoint", {})}),
        custom_hooks=[watch, *([state] if state else []), *options.pop("hooks", [])],
        randomness=dict(seed=seed),
        default_scope="mmengine",
        log_processor=dict(by_epoch=False),
        experiment_name=f"{work_dir.name}-{id(watch)}",
        **options,
    )
    if prepare is not None:
        prepare(runner)
    try:
        runner.train()
    except KeyboardInterrupt:
        assert stop_after is not None
    return watch, runner


def resume(work_dir, at, train_cfg, data=None, **options):
    """Continue from the checkpoint of an iteration (a number) or of an epoch (``epoch_2``)."""
    name = f"iter_{at}" if isinstance(at, int) else at
    checkpoint = str(work_dir / f"{name}.pth")
    return train(work_dir, train_cfg, data, resume=True, load_from=checkpoint, **options)


def log_of(runner):
    return next(Path(runner.log_dir).glob("*.log")).read_text()


def weights(runner):
    return torch.cat([p.detach().flatten() for p in runner.model.parameters()])


def assert_same_end(rest, whole, done):
    """The resumed run (watch, runner) did what the undisturbed one did after ``done`` batches."""
    assert rest[0].batches == whole[0].batches[done:]
    assert rest[0].tokens == whole[0].tokens[done:], "other augmentation"
    assert rest[0].rates == whole[0].rates[done:]
    assert torch.equal(weights(rest[1]), weights(whole[1])), "other weights"
