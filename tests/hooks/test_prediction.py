"""Predicted beside measured: in one process, after a resume, and on two ranks beside the report."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from mmengine.runner import Runner

import tests.tiny as tiny
from xlength.cli import main
from xlength.hooks.prediction import predict
from xlength.plan.cost import ATTENTION
from xlength.runtime.checkpoint import trust_checkpoints

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = [3 + (7 * i) % 23 for i in range(60)]
SAMPLERS = {
    "default": dict(sampler=dict(type="DefaultSampler", shuffle=True), batch_size=4),
    "grouped": dict(
        sampler=dict(type="LengthGroupedSampler", per_device_batch_size=4), batch_size=4
    ),
    "budget": dict(
        sampler=dict(type="PlanSampler", plan=dict(type="TokenBudget", max_tokens=80, window=20)),
        batch_sampler=dict(type="PlanBatchSampler"),
        batch_size=1,
    ),
    "packing": dict(
        sampler=dict(type="PlanSampler", plan=dict(type="Packing", max_length=60)),
        batch_sampler=dict(type="PlanBatchSampler"),
        collate_fn=dict(type="packed_collate_fn"),
        batch_size=1,
    ),
}


def runner_of(work_dir, name="budget", loop=None, visualizer=None, **loader):
    return Runner(
        model=dict(type="SupervisedFinetune", llm=tiny.llama(), use_activation_checkpointing=False),
        work_dir=str(work_dir),
        train_dataloader=dict(
            **{
                "dataset": dict(type="TinyText", length=LENGTHS),
                "collate_fn": dict(type="tiny_collate"),
                **SAMPLERS[name],
                **loader,
            },
        ),
        train_cfg=loop or dict(type="TrainLoop", max_epochs=2),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
        custom_hooks=[dict(type="LengthStatsHook")],
        default_hooks=dict(logger=dict(type="LoggerHook", interval=4)),
        visualizer=visualizer,
        randomness=dict(seed=1),
        default_scope="mmengine",
        experiment_name=f"{Path(work_dir).name}-{name}",
    )


def epochs_of(runner):
    """What the JSON log has of each epoch, and the text log."""
    scalars = Path(runner.log_dir, "vis_data/scalars.json").read_text().splitlines()
    lines = [json.loads(line) for line in scalars]
    log = Path(runner.log_dir, f"{runner.timestamp}.log").read_text()
    return [line for line in lines if "epoch/wall_efficiency" in line], log


@pytest.mark.parametrize("name", SAMPLERS)
def test_each_epoch_measures_what_its_plan_predicts(name, tmp_path):
    runner = runner_of(tmp_path, name)
    runner.train()
    epochs, log = epochs_of(runner)
    assert len(epochs) == 2
    for number, epoch in enumerate(epochs, 1):
        for figure in ("padding_efficiency", "wall_efficiency"):
            measured, predicted = epoch[f"epoch/{figure}"], epoch[f"epoch/predicted_{figure}"]
            assert measured == pytest.approx(predicted, abs=1e-6)
            assert f"{figure} {measured:.4f} (predicted {predicted:.4f})" in log
        assert f"Over epoch {number}: padding_efficiency" in log
    values = [epoch["epoch/wall_efficiency"] for epoch in epochs]
    assert name == "packing" or values[0] != values[1]  # one row is never padded
    assert "part from the plan's prediction" not in log


def test_a_part_of_an_epoch_or_of_a_run_is_named_as_one(tmp_path):
    runner = runner_of(tmp_path, "grouped", loop=dict(type="TrainLoop", max_epochs=1.4))
    runner.train()
    _, log = epochs_of(runner)
    assert "Over epoch 1: padding" in log and "Over 6 of the 15 steps of epoch 2: padding" in log
    assert "Over the run: padding" in log
    trust_checkpoints([str(tmp_path)])
    again = tmp_path / "again"
    runner = runner_of(again, "grouped", loop=dict(type="TrainLoop", max_epochs=1.6))
    runner.resume(str(tmp_path / "epoch_2.pth"))
    runner.train()
    _, log = epochs_of(runner)
    assert "Over epoch" not in log and "Over 3 of the 15 steps of epoch 2: padding" in log
    assert "Over the run since iteration 21: padding" in log


def test_of_a_stream_that_repeats_only_the_number_of_steps_is_said(tmp_path):
    data = dict(type="TinyText", length=LENGTHS)
    stream = dict(type="LengthPoolSortDataset", pool_size=8, micro_batch_size=4, dataset=data)
    loop = dict(type="TrainLoop", max_iters=20)  # a pass has 15 batches
    runner = runner_of(tmp_path, "default", loop=loop, sampler=None, dataset=stream)
    runner.train()
    _, log = epochs_of(runner)
    assert "Over 20 steps of epoch 1: padding" in log


def test_tensorboard_shows_the_epochs_too(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    backends = [dict(type="LocalVisBackend"), dict(type="TensorboardVisBackend")]
    visualizer = dict(type="Visualizer", vis_backends=backends, name=tmp_path.name)
    runner = runner_of(tmp_path, visualizer=visualizer)
    runner.train()
    epochs, _ = epochs_of(runner)
    events = EventAccumulator(str(Path(runner.log_dir, "vis_data")))
    events.Reload()
    for name in ("epoch/wall_efficiency", "epoch/predicted_wall_efficiency"):
        shown = [event.value for event in events.Scalars(name)]
        assert shown == pytest.approx([epoch[name] for epoch in epochs], rel=1e-5)
    assert len(events.Scalars("wall_efficiency")) > 1


def test_an_epoch_that_began_before_is_compared_from_its_step_on(tmp_path):
    runner = runner_of(tmp_path, loop=dict(type="TrainLoop", max_epochs=1))
    loop = runner._train_loop = runner.build_train_loop(runner._train_loop)
    sampler = loop.dataloader.batch_sampler.sampler
    sampler.load_state_dict(sampler.state_dict(5))
    loop.start_at(0, 5, iteration=5)
    runner.train()
    (epoch,), log = epochs_of(runner)
    for figure in ("padding_efficiency", "wall_efficiency"):
        assert epoch[f"epoch/{figure}"] == pytest.approx(epoch[f"epoch/predicted_{figure}"])
    whole = predict(loop.dataloader, 0, len(sampler), ATTENTION)
    assert epoch["epoch/wall_efficiency"] != pytest.approx(whole["wall_efficiency"], abs=1e-6)


def padded_to_60(samples):
    """A collate function that pads too much."""
    import torch

    batch = tiny.collate(samples)
    for key, value in batch["data"].items():
        fill = -100 if key == "labels" else 0
        wide = torch.full((len(samples), 60), fill, dtype=value.dtype)
        wide[:, : value.shape[1]] = value
        batch["data"][key] = wide
    return batch


def test_a_collate_function_that_pads_otherwise_is_warned_about_once(tmp_path):
    runner = runner_of(tmp_path, collate_fn=padded_to_60)
    runner.train()
    epochs, log = epochs_of(runner)
    assert epochs[0]["epoch/padding_efficiency"] < 0.5
    assert log.count("padding_efficiency and wall_efficiency of this epoch part from the plan") == 1
    assert "collate" in log


def test_where_nothing_is_known_only_what_is_measured_is_shown(tmp_path):
    class Mine:
        """A sampler of the user's own."""

        def __init__(self, dataset, seed=None):
            self.size = len(dataset)

        def __iter__(self):
            return iter(range(self.size))

        def __len__(self):
            return self.size

    runner = runner_of(tmp_path, "default", sampler=dict(type=Mine))
    runner.train()
    epochs, log = epochs_of(runner)
    assert len(epochs) == 2 and "epoch/predicted_wall_efficiency" not in epochs[0]
    assert "predicted" not in log.split("Over epoch 1")[1].split("\n")[0]


def test_a_loop_without_epochs_reports_over_the_run_only(tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    runner = runner_of(tmp_path, loop=dict(type="IterBasedTrainLoop", max_iters=40))
    runner.train()
    epochs, log = epochs_of(runner)
    assert epochs == [] and "Over the run: padding_efficiency" in log


def test_two_ranks_measure_what_the_report_says_of_the_quickstart(tmp_path):
    """A real run under torchrun and gloo beside ``xlength report`` of the same config."""
    config = tmp_path / "config.py"
    where = tmp_path.parent / "python_docs"
    config.write_text(
        f"_base_ = [{str(ROOT / 'configs/quickstart/length_grouped.py')!r}]\n"
        "train_dataloader = dict(dataset=dict(\n"
        "    max_dataset_length=608, max_length=512,\n"
        f"    dataset=dict(cache_dir={str(where)!r}), tokenizer=dict(cache_dir={str(where)!r})))\n"
        "train_cfg = dict(_delete_=True, type='TrainLoop', max_epochs=1)\n"
        "model = dict(llm=dict(config=dict(hidden_size=32, num_hidden_layers=1)))\n"
    )
    out = tmp_path / "report.json"
    assert main(["report", str(config), "--world-size", "2", "--json", str(out)]) == 0
    now = json.loads(out.read_text())["strategies"][0]
    assert now["kind"] == "config" and now["name"] == "LengthGroupedSampler"
    done = subprocess.run(
        [ROOT / "tools/dist_train.sh", str(config), "2", "--work-dir", str(tmp_path / "run")],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYTHON": sys.executable,
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (log,) = (tmp_path / "run").glob("*/*.log")
    text = log.read_text()
    found = dict(re.findall(r"(\w+) ([\d.]+) \(predicted [\d.]+\)", text.split("Over epoch 1")[1]))
    assert set(found) == {"padding_efficiency", "wall_efficiency", "rank_balance"}
    measured = {name: float(value) for name, value in found.items()}
    assert measured["padding_efficiency"] == pytest.approx(now["padding_efficiency"], abs=0.02)
    assert measured["wall_efficiency"] == pytest.approx(now["wall_efficiency_attention"], abs=0.02)
    assert measured["rank_balance"] == pytest.approx(now["rank_balance"], abs=0.02)
    lines = [
        json.loads(line) for line in next((tmp_path / "run").glob("*/vis_data/scalars.json")).open()
    ]
    shown = [line["wall_efficiency"] for line in lines if "wall_efficiency" in line]
    assert shown and 0.3 < np.mean(shown) <= 1


@pytest.mark.parametrize("num_workers", [0, 2])
def test_packs_are_predicted_as_packs_also_where_workers_are_seeded(num_workers):
    from functools import partial

    from torch.utils.data import DataLoader

    from tests.tiny import TinyText
    from xlength import Packing, PlanBatchSampler, PlanSampler, packed_collate_fn
    from xlength.hooks.prediction import predict
    from xlength.plan.cost import TOKENS
    from xlength.runtime.random_state import WorkerSeeds

    dataset = TinyText([3 + (7 * i) % 23 for i in range(60)])
    sampler = PlanSampler(dataset, Packing(max_length=64), seed=0)
    loader = DataLoader(
        dataset,
        batch_sampler=PlanBatchSampler(sampler, 1),
        num_workers=num_workers,
        collate_fn=partial(packed_collate_fn),
    )
    seeds = WorkerSeeds.install(loader, 0)
    assert (seeds is None) == (num_workers == 0)
    assert predict(loader, 0, 5, TOKENS)["padding_efficiency"] == 1
