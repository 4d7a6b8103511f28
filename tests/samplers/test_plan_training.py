"""Plans in real Runners, by config: the batches trained on are those of the plan."""

from pathlib import Path

import numpy as np
import pytest
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.runner import Runner

import tests.tiny as tiny
import xlength  # noqa: F401  registers the components

LENGTHS = [3 + (7 * i) % 23 for i in range(60)]
BUDGET = dict(type="TokenBudget", max_tokens=80, window=20)


class Watch(Hook):
    """Notes the samples and the padded tokens of each batch."""

    priority = "LOWEST"

    def __init__(self):
        self.epochs = []

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        epoch = runner.train_dataloader.batch_sampler.sampler.epoch
        while len(self.epochs) <= epoch:
            self.epochs.append([])
        ids = data_batch["data"]["input_ids"]
        assert ids.numel() <= 80
        self.epochs[epoch].append(ids[:, 0].tolist())


def run(work_dir, loop, plan=BUDGET, seed=1, optim_wrapper=None, **loader):
    """Train a tiny model and return the runner and the samples of each batch."""
    watch = Watch()
    runner = Runner(
        model=dict(type="SupervisedFinetune", llm=tiny.llama(), use_activation_checkpointing=False),
        work_dir=str(work_dir),
        train_dataloader=dict(
            batch_size=1,
            dataset=dict(type="TinyText", length=LENGTHS),
            sampler=dict(type="xlength.PlanSampler", plan=plan, shuffle=True),
            batch_sampler=dict(type="PlanBatchSampler"),
            collate_fn=dict(type="tiny_collate"),
            **loader,
        ),
        train_cfg=loop,
        optim_wrapper=optim_wrapper or dict(optimizer=dict(type="SGD", lr=0.1)),
        custom_hooks=[watch, dict(type="PlanGuardHook")],
        randomness=dict(seed=seed),
        default_scope="mmengine",
        experiment_name=f"{Path(work_dir).name}-{id(watch)}",
    )
    runner.train()
    return runner, watch.epochs


def planned(seed, epochs):
    """The batches of each epoch, from the plan alone."""
    from xlength.samplers.plans import build_plan

    plan, lengths = build_plan(BUDGET), np.array(LENGTHS)
    num_steps = plan.build(lengths, seed=0, epoch=0, world_size=1).num_steps
    return [
        list(
            plan.build(lengths, seed=seed, epoch=epoch, world_size=1, num_steps=num_steps).batches(
                0
            )
        )
        for epoch in range(epochs)
    ]


@pytest.mark.parametrize(
    "loop",
    [
        dict(type="EpochBasedTrainLoop", max_epochs=3),
        dict(type="IterBasedTrainLoop", max_iters=54),
        dict(type="TrainLoop", max_epochs=3),
    ],
    ids=lambda loop: loop["type"],
)
@pytest.mark.parametrize("workers", [0, 2])
def test_three_epochs_train_on_the_three_plans(loop, workers, tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    runner, epochs = run(tmp_path, loop, num_workers=workers)
    assert len(runner.train_dataloader) == 18
    assert epochs == planned(runner.seed, 3)
    assert all(sorted(sum(epoch, [])) == list(range(60)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_run_repeated_trains_on_the_same_and_another_seed_on_other_batches(tmp_path):
    loop = dict(type="TrainLoop", max_epochs=1)
    first, again, other = (run(tmp_path, loop, seed=seed)[1] for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize(("accumulate", "warned"), [(1, True), (2, False)])
def test_other_micro_steps_than_the_optimisers_are_warned_about(accumulate, warned, tmp_path):
    loop = dict(type="TrainLoop", max_epochs=1)
    optimiser = dict(optimizer=dict(type="SGD", lr=0.1), accumulative_counts=2)
    plan = {**BUDGET, "accumulate": accumulate}
    runner, _ = run(tmp_path, loop, plan, optim_wrapper=optimiser)
    log = "".join(path.read_text() for path in Path(runner.log_dir).glob("*.log"))
    assert ("balances optimiser steps of accumulate=1 micro-steps, but gradients" in log) == warned


LAZY = """
from xlength import PlanBatchSampler, PlanSampler, TokenBudget

train_dataloader = dict(
    batch_size=1,
    dataset=dict(type='TinyText', length=list(range(3, 40))),
    sampler=dict(
        type=PlanSampler,
        plan=dict(type=TokenBudget, max_tokens=80, cost=dict(type='attention', crossover=100))),
    batch_sampler=dict(type=PlanBatchSampler))
"""


def test_a_lazy_config_names_sampler_and_plan_by_their_classes(tmp_path):
    path = tmp_path / "lazy.py"
    path.write_text(LAZY)
    loader = Runner.build_dataloader(Config.fromfile(path, lazy_import=True).train_dataloader, 1)
    assert "cost=attention(100)" in repr(loader.batch_sampler.sampler.plan)
    assert sorted(sum(loader.batch_sampler, [])) == list(range(37))


def test_contradicting_batch_sizes_stop_the_run_with_both_numbers(tmp_path):
    with pytest.raises(ValueError, match="batch_size is 16, but the plan has batches of 4 rows"):
        Runner.build_dataloader(
            dict(
                batch_size=16,
                dataset=dict(type="TinyText", length=LENGTHS),
                sampler=dict(type="PlanSampler", plan=dict(type="FixedBatch", batch_size=4)),
                batch_sampler=dict(type="PlanBatchSampler"),
            ),
            seed=0,
        )
