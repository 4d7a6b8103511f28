"""TrainLoop in real Runners: epochs, orders, resuming, hooks and schedulers."""

from pathlib import Path

import pytest
import torch
from mmengine.hooks import Hook
from mmengine.runner import Runner

import tests.tiny as tiny
from xlength.runtime.checkpoint import trust_checkpoints

LENGTHS = [3 + (7 * i) % 23 for i in range(22)]
"""In batches of 4: 6 batches an epoch, the last of 2."""


class Watch(Hook):
    """Notes what a run does: the samples of each batch, epochs, learning rates."""

    def __init__(self, stop_after=None):
        self.stop_after = stop_after
        self.epochs, self.batches, self.rates, self.indices = [], [], [], []
        self.calls = []

    def before_train_epoch(self, runner):
        self.calls.append(("begin", runner.epoch, runner.iter))
        self.epochs.append([])

    def after_train_epoch(self, runner):
        self.calls.append(("end", runner.epoch, runner.iter))

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        samples = data_batch["data"]["input_ids"][:, 0].tolist()
        self.epochs[-1].append(samples)
        self.batches.append(samples)
        self.indices.append(batch_idx)
        self.rates.append(runner.optim_wrapper.get_lr()["lr"][0])
        if runner.iter + 1 == self.stop_after:
            raise KeyboardInterrupt


def loader(sampler="LengthGroupedSampler", lengths=LENGTHS, **options):
    samplers = {
        "LengthGroupedSampler": dict(
            type="LengthGroupedSampler", per_device_batch_size=4, round_up=False
        ),
        "DefaultSampler": dict(type="DefaultSampler", shuffle=True),
    }
    return dict(
        batch_size=4,
        dataset=dict(type="TinyText", length=list(lengths)),
        sampler=samplers[sampler] if isinstance(sampler, str) else sampler,
        collate_fn=dict(type="tiny_collate"),
        **options,
    )


def train(work_dir, train_cfg, dataloader=None, watch=None, seed=1, **options):
    """Run a Runner to its end, or until the watch stops it."""
    trust_checkpoints([str(work_dir)])
    watch = watch or Watch()
    default_hooks = dict(checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=1000))
    default_hooks.update(options.pop("default_hooks", {}))
    runner = Runner(
        model=dict(type="SupervisedFinetune", llm=tiny.llama(), use_activation_checkpointing=False),
        work_dir=str(work_dir),
        train_dataloader=dataloader or loader(),
        train_cfg=train_cfg,
        optim_wrapper=options.pop("optim_wrapper", dict(optimizer=dict(type="SGD", lr=0.1))),
        default_hooks=default_hooks,
        custom_hooks=[watch],
        randomness=dict(seed=seed),
        default_scope="mmengine",
        log_processor=dict(by_epoch=options.pop("by_epoch", False)),
        experiment_name=f"{work_dir.name}-{id(watch)}",
        **options,
    )
    try:
        runner.train()
    except KeyboardInterrupt:
        assert watch.stop_after is not None
    return watch, runner


def weights(runner):
    return torch.cat([p.detach().flatten() for p in runner.model.parameters()])


LOOPS = {
    "TrainLoop": dict(type="TrainLoop", max_epochs=3),
    "EpochBasedTrainLoop": dict(type="EpochBasedTrainLoop", max_epochs=3),
    "IterBasedTrainLoop": dict(type="IterBasedTrainLoop", max_iters=18),
}


@pytest.mark.parametrize("loop", LOOPS)
def test_orders_differ_by_epoch_and_are_the_same_when_repeated(loop, tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # 2 s at each of mmengine's restarts
    first, _ = train(tmp_path / "first", LOOPS[loop])
    second, _ = train(tmp_path / "second", LOOPS[loop])
    epochs = [first.batches[i : i + 6] for i in (0, 6, 12)]
    for epoch in epochs:
        assert sorted(i for samples in epoch for i in samples) == list(range(22))
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert second.batches == first.batches


def test_all_loops_draw_the_same_batches(tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    runs = [train(tmp_path / name, cfg)[0].batches for name, cfg in LOOPS.items()]
    assert runs[0] == runs[1] == runs[2]


def test_every_pass_over_the_data_is_an_epoch_to_hooks(tmp_path):
    watch, runner = train(tmp_path, dict(type="TrainLoop", max_iters=14))
    assert watch.calls == [
        ("begin", 0, 0),
        ("end", 0, 6),
        ("begin", 1, 6),
        ("end", 1, 12),
        ("begin", 2, 12),
        ("end", 2, 14),
    ]
    assert (runner.max_iters, runner.max_epochs, runner.iter) == (14, 3, 14)


@pytest.mark.parametrize(("max_epochs", "max_iters"), [(2, 12), (0.5, 3), (1.5, 9), (0.01, 1)])
def test_epochs_may_be_fractions(max_epochs, max_iters, tmp_path):
    watch, runner = train(tmp_path, dict(type="TrainLoop", max_epochs=max_epochs))
    assert len(watch.batches) == runner.max_iters == max_iters


def test_batch_indices_count_within_the_epoch_only_for_a_log_by_epochs(tmp_path):
    by_run, _ = train(tmp_path / "a", dict(type="TrainLoop", max_iters=8))
    by_epoch, _ = train(tmp_path / "b", dict(type="TrainLoop", max_iters=8), by_epoch=True)
    assert by_run.indices == list(range(8))
    assert by_epoch.indices == [0, 1, 2, 3, 4, 5, 0, 1]


WORKERS = [dict(num_workers=1), dict(num_workers=1, persistent_workers=True)]
SAMPLERS = ["LengthGroupedSampler", "DefaultSampler", "TokenBudget"]


@pytest.mark.parametrize(
    ("sampler", "stop", "workers"),
    [(s, stop, {}) for s in SAMPLERS for stop in (4, 6, 9)]
    + [(s, 9, workers) for s in SAMPLERS[:2] for workers in WORKERS],
)
def test_a_resumed_run_ends_like_an_undisturbed_one(sampler, workers, stop, tmp_path):
    hooks = dict(checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=1))
    options = dict(sampler=sampler, **workers)
    if sampler == "TokenBudget":
        plan = dict(type="TokenBudget", max_tokens=64)
        options |= dict(
            sampler=dict(type="PlanSampler", plan=plan), batch_sampler=dict(type="PlanBatchSampler")
        )
    cfg = dict(type="TrainLoop", max_iters=15)
    whole, runner = train(tmp_path / "whole", cfg, loader(**options))
    train(tmp_path / "cut", cfg, loader(**options), Watch(stop + 1), default_hooks=hooks)
    checkpoint = str(tmp_path / f"cut/iter_{stop}.pth")
    rest, resumed = train(
        tmp_path / "cut", cfg, loader(**options), resume=True, load_from=checkpoint
    )
    assert rest.batches == whole.batches[stop:]
    assert torch.equal(weights(resumed), weights(runner))
    loaded = runner.train_dataloader.dataset.loaded
    if not workers:  # else samples are loaded in other processes
        assert len(loaded) == sum(map(len, whole.batches))
        assert len(resumed.train_dataloader.dataset.loaded) == sum(map(len, rest.batches))


def test_a_resumed_run_keeps_the_order_of_a_seed_that_was_drawn(tmp_path):
    hooks = dict(checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=1))
    for sampler in ("LengthGroupedSampler", "DefaultSampler"):
        work_dir = tmp_path / sampler
        cfg = dict(type="TrainLoop", max_iters=12)
        whole, _ = train(work_dir, cfg, loader(sampler), seed=None, default_hooks=hooks)
        checkpoint = str(work_dir / "iter_4.pth")
        rest, _ = train(
            work_dir, cfg, loader(sampler), seed=None, resume=True, load_from=checkpoint
        )
        assert rest.batches == whole.batches[4:]


def test_a_checkpoint_by_epochs_begins_the_next_epoch(tmp_path):
    hooks = dict(checkpoint=dict(type="CheckpointHook", by_epoch=True, interval=1))
    cfg = dict(type="TrainLoop", max_epochs=3)
    scheduler = dict(type="MultiStepLR", milestones=[1, 2], gamma=0.1, by_epoch=True)
    whole, _ = train(tmp_path, cfg, default_hooks=hooks, param_scheduler=dict(scheduler))
    rest, _ = train(
        tmp_path,
        cfg,
        param_scheduler=dict(scheduler),
        resume=True,
        load_from=str(tmp_path / "epoch_2.pth"),
    )
    assert rest.calls[0] == ("begin", 2, 12)
    assert rest.batches == whole.batches[12:]
    assert rest.rates == whole.rates[12:]


def test_a_checkpoint_at_the_end_of_an_epoch_ends_it_after_resuming(tmp_path):
    """By iterations it was written before the epoch's schedulers stepped: they step then."""
    hooks = dict(checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=6))
    cfg = dict(type="TrainLoop", max_epochs=3)
    scheduler = dict(type="MultiStepLR", milestones=[1, 2], gamma=0.1, by_epoch=True)
    whole, _ = train(tmp_path, cfg, default_hooks=hooks, param_scheduler=dict(scheduler))
    rest, _ = train(
        tmp_path,
        cfg,
        param_scheduler=dict(scheduler),
        resume=True,
        load_from=str(tmp_path / "iter_6.pth"),
    )
    assert rest.calls[:3] == [("begin", 0, 6), ("end", 0, 6), ("begin", 1, 6)]
    assert rest.batches == whole.batches[6:]
    assert rest.rates == pytest.approx(whole.rates[6:])
    assert len(set(whole.rates)) == 3


def test_a_checkpoint_of_mmengines_loop_is_continued_in_the_right_epoch(tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    hooks = dict(checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=1))
    old, _ = train(tmp_path, dict(type="IterBasedTrainLoop", max_iters=15), default_hooks=hooks)
    new, _ = train(
        tmp_path,
        dict(type="TrainLoop", max_iters=15),
        resume=True,
        load_from=str(tmp_path / "iter_8.pth"),
    )
    assert new.batches == old.batches[8:]


def test_schedulers_by_epoch_can_be_converted_to_iterations(tmp_path):
    scheduler = dict(
        type="LinearLR", start_factor=0.1, by_epoch=True, begin=0, end=2, convert_to_iter_based=True
    )
    watch, _ = train(tmp_path, dict(type="TrainLoop", max_epochs=2), param_scheduler=scheduler)
    assert watch.rates[0] == pytest.approx(0.01)
    assert len(set(watch.rates)) == 12


def test_a_stream_begins_its_next_epoch_when_it_ends(tmp_path):
    data = dict(
        batch_size=4,
        dataset=dict(type="TinyStream", length=LENGTHS[:10]),
        sampler=None,
        collate_fn=dict(type="tiny_collate"),
    )
    watch, runner = train(tmp_path, dict(type="TrainLoop", max_iters=7), data)
    assert [len(epoch) for epoch in watch.epochs] == [3, 3, 1]
    assert watch.epochs[0] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert watch.epochs[1][0] == [1, 2, 3, 4]
    assert runner.max_iters == 7


def test_a_stream_without_a_saved_position_is_read_again_with_a_warning(tmp_path):
    data = dict(
        batch_size=4,
        dataset=dict(type="TinyStream", length=LENGTHS[:10]),
        sampler=None,
        collate_fn=dict(type="tiny_collate"),
    )
    hooks = dict(checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=1))
    cfg = dict(type="TrainLoop", max_iters=7)
    whole, _ = train(tmp_path, cfg, data, default_hooks=hooks)
    checkpoint = str(tmp_path / "iter_4.pth")
    rest, runner = train(tmp_path, cfg, data, resume=True, load_from=checkpoint)
    assert rest.batches == whole.batches[4:]
    log = Path(runner.log_dir, f"{runner.timestamp}.log").read_text()
    assert "Reading 4 batches that were trained on before" in log


def test_validation_goes_by_iterations(tmp_path):
    class Count(Hook):
        def __init__(self):
            self.at = []

        def before_val(self, runner):
            self.at.append(runner.iter)

        def before_train_iter(self, runner, batch_idx, data_batch=None):
            assert runner.model.training

    count = Count()
    watch = Watch()
    runner = Runner(
        model=dict(type="SupervisedFinetune", llm=tiny.llama()),
        work_dir=str(tmp_path),
        train_dataloader=loader(),
        train_cfg=dict(type="TrainLoop", max_iters=9, val_begin=4, val_interval=4),
        val_dataloader=loader(lengths=LENGTHS[:4]),
        val_cfg=dict(),
        val_evaluator=[],
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
        custom_hooks=[count, watch],
        default_scope="mmengine",
        experiment_name=f"val-{id(count)}",
    )
    runner.train()
    assert count.at == [4, 8, 9]
    assert len(watch.batches) == 9


def test_limits_that_cannot_be_are_refused(tmp_path):
    for cfg, message in [
        (dict(), "exactly one of max_iters and max_epochs"),
        (dict(max_iters=3, max_epochs=1), "exactly one of max_iters and max_epochs"),
        (dict(max_iters=2.5), "max_iters must be a whole number of at least 1, got 2.5"),
        (dict(max_iters="abc"), "max_iters must be a whole number of at least 1, got 'abc'"),
        (dict(max_iters=True), "max_iters must be a whole number of at least 1, got True"),
        (dict(max_epochs=0), "max_epochs must be a number above 0, got 0"),
        (dict(max_epochs="3"), "max_epochs must be a number above 0, got '3'"),
        (dict(max_epochs=float("nan")), "max_epochs must be a number above 0, got nan"),
        (dict(max_iters=3, val_interval=0), "val_interval must be a whole number of at least 1"),
        (dict(max_iters=3, val_interval=-5), "val_interval must be a whole .* got -5"),
        (dict(max_iters=3, val_begin="1"), "val_begin must be a whole number of at least 0"),
        (dict(max_iters=3, dynamic_intervals=[(2, 0)]), "dynamic_intervals must be pairs"),
        (dict(max_iters=3, dynamic_intervals=[4]), "dynamic_intervals must be pairs"),
        (dict(max_iters=3, dynamic_intervals=[(4, 2), (2, 1)]), "by rising iteration, got"),
    ]:
        with pytest.raises(ValueError, match=message):
            train(tmp_path, dict(type="TrainLoop", **cfg))
    stream = dict(batch_size=4, dataset=dict(type="TinyStream", length=[3]), sampler=None)
    with pytest.raises(ValueError, match="max_epochs=1 needs a data loader with a length"):
        train(tmp_path, dict(type="TrainLoop", max_epochs=1), stream)


def test_a_batch_size_that_does_not_fit_the_loader_is_warned_about_once():
    from xlength.samplers.check import check_batch_size

    sampler = dict(type="LengthGroupedSampler", per_device_batch_size=1)
    data = Runner.build_dataloader(loader(sampler))
    message = check_batch_size(data, accumulative_counts=4)
    assert "per_device_batch_size is 1" in message and "batch_size is 4" in message
    assert "Make per_device_batch_size 16" in message
    assert check_batch_size(data, accumulative_counts=4) is None
    fitting = dict(type="LengthGroupedSampler", per_device_batch_size=16)
    assert check_batch_size(Runner.build_dataloader(loader(fitting)), 4) is None
    assert check_batch_size(Runner.build_dataloader(loader(fitting)), 3) is not None


def test_the_loop_checks_the_batch_size_when_it_is_built(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "xlength.samplers.check.print_log", lambda message, *_: seen.append(message)
    )
    sampler = dict(type="LengthGroupedSampler", per_device_batch_size=4)
    wrapper = dict(optimizer=dict(type="SGD", lr=0.1), accumulative_counts=2)
    train(tmp_path, dict(type="TrainLoop", max_iters=1), loader(sampler), optim_wrapper=wrapper)
    assert len(seen) == 1 and "accumulated over 2 of them" in seen[0]
