"""SIGTERM in real Runners: the run ends with a checkpoint and goes on as if it had not."""

import os
import signal

import pytest
from mmengine.hooks import Hook

from tests.resume.runs import LENGTHS, assert_same_end, loader, resume, train
from xlength.runtime.stop import Stopped, stop_on_sigterm

LOOPS = {
    "TrainLoop": dict(type="TrainLoop", max_epochs=3),
    "IterBasedTrainLoop": dict(type="IterBasedTrainLoop", max_iters=18),
    "EpochBasedTrainLoop": dict(type="EpochBasedTrainLoop", max_epochs=3),
}


@pytest.fixture(autouse=True)
def same_handler(monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


class Terminate(Hook):
    """Sends SIGTERM to this process in one iteration."""

    priority = "VERY_HIGH"

    def __init__(self, at):
        self.at = at

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.iter + 1 == self.at:
            os.kill(os.getpid(), signal.SIGTERM)


class TerminateInValidation(Hook):
    """Sends SIGTERM to this process in the first step of some validations.

    Notes steps that begin, as (iteration, step), and validations that end: (iteration, batches).
    """

    def __init__(self, *numbers):
        self.numbers = numbers
        self.count, self.steps, self.ended = 0, [], []

    def before_val_iter(self, runner, batch_idx, data_batch=None):
        self.steps.append((runner.iter, batch_idx))
        if batch_idx == 0:
            self.count += 1
            if self.count in self.numbers:
                os.kill(os.getpid(), signal.SIGTERM)

    def after_val_epoch(self, runner, metrics=None):
        self.ended.append((runner.iter, metrics["seen"]))


def stopped(work_dir, hook, cfg, **options):
    """The message that a run ends with, and the name of its last checkpoint."""
    hooks = [hook, *options.pop("hooks", [])]
    with pytest.raises(Stopped) as caught:
        train(work_dir, cfg, hooks=hooks, prepare=stop_on_sigterm, **options)
    return str(caught.value), os.path.basename((work_dir / "last_checkpoint").read_text())


BY_EPOCH = dict(by_epoch=True, interval=1)
CHECKPOINTS = {
    "iter": ({}, "iter_8.pth", "iter_4.pth"),
    "named": (dict(filename_tmpl="step-{}.pth"), "step-8.pth", "step-4.pth"),
    "one name": (dict(filename_tmpl="latest.pth"), "latest.pth", None),
    "epoch": (dict(BY_EPOCH, max_keep_ckpts=1), "iter_8.pth", "epoch_1.pth"),
    "named epoch": (dict(BY_EPOCH, filename_tmpl="e{}.pth"), "iter_8.pth", "e1.pth"),
}
"""Options of the CheckpointHook, what it is to save after 8 iterations and had saved before."""


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("case", CHECKPOINTS)
def test_a_run_ends_with_the_step_that_runs_whatever_its_checkpoints_are_called(
    case, loop, tmp_path
):
    checkpoint, name, earlier = CHECKPOINTS[case]
    options = dict(interval=4, checkpoint=checkpoint)
    message, last = stopped(tmp_path / "cut", Terminate(8), LOOPS[loop], **options)
    assert message.startswith("stopped on SIGTERM after 8 iterations, saved ")
    assert last == name
    if "epoch" in case and loop == "IterBasedTrainLoop":
        earlier = None  # no epoch ends there
    files = {path.name for path in (tmp_path / "cut").glob("*.pth")}
    assert files == {name, earlier} - {None}
    whole = train(tmp_path / "whole", LOOPS[loop], **options)
    rest = resume(tmp_path / "cut", name.removesuffix(".pth"), LOOPS[loop], **options)
    assert rest[0].batches == whole[0].batches[8:]
    if loop == "TrainLoop":
        assert_same_end(rest, whole, 8)


VALIDATION = dict(
    val_dataloader=loader("DefaultSampler", LENGTHS[:12]),
    val_cfg=dict(),
    val_evaluator=dict(type="Seen"),
    interval=100,
)
"""In 3 batches."""
EVERY_4 = dict(type="TrainLoop", max_iters=9, val_interval=4)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_validation_is_cut_off_and_begun_anew_and_nothing_is_lost(accumulate, tmp_path):
    """Accumulated over 3, the micro-step behind the last optimiser step is done again too."""
    options = dict(VALIDATION, accumulate=accumulate)
    hook = TerminateInValidation(1)
    message, last = stopped(tmp_path / "cut", hook, EVERY_4, **options)
    assert hook.steps == [(4, 0)]
    assert message.startswith("stopped on SIGTERM in the validation after 4 iterations, saved ")
    assert message.endswith("; --resume begins it anew")
    assert last == "iter_4.pth"
    whole = train(tmp_path / "whole", EVERY_4, **options)
    rest = resume(tmp_path / "cut", 4, EVERY_4, hooks=[hook], **options)
    assert_same_end(rest, whole, 4 - 4 % accumulate)
    assert hook.ended == [(4, 3), (8, 3), (9, 3)]


def test_the_last_validation_is_begun_anew_though_nothing_is_left_to_train(tmp_path):
    """Cut off twice, the second time right after resuming."""
    cfg = dict(EVERY_4, max_iters=4)
    stopped(tmp_path, TerminateInValidation(1), cfg, **VALIDATION)
    message, _ = stopped(
        tmp_path,
        TerminateInValidation(1),
        cfg,
        resume=True,
        load_from=str(tmp_path / "iter_4.pth"),
        **VALIDATION,
    )
    assert "nothing was trained since the checkpoint that was resumed" in message
    hook = TerminateInValidation()
    watch, _ = resume(tmp_path, 4, cfg, hooks=[hook], **VALIDATION)
    assert watch.batches == [] and hook.ended == [(4, 3)]


def test_a_validation_whose_model_a_hook_changes_is_carried_to_its_end(tmp_path):
    """EMAHook swaps the weights: saved inside, the average would be trained on."""
    hook, average = TerminateInValidation(1), dict(type="EMAHook", momentum=0.1)
    message, last = stopped(tmp_path / "cut", hook, EVERY_4, hooks=[average], **VALIDATION)
    assert hook.steps == [(4, 0), (4, 1), (4, 2)]
    assert message.startswith("stopped on SIGTERM behind the validation after 4 iterations, saved ")
    (log,) = (tmp_path / "cut").glob("*/*.log")
    assert "at the end of this validation, which EMAHook may change" in log.read_text()
    whole = train(tmp_path / "whole", EVERY_4, hooks=[average], **VALIDATION)
    rest = resume(tmp_path / "cut", 4, EVERY_4, hooks=[average, hook], **VALIDATION)
    assert_same_end(rest, whole, 4)
    assert hook.ended == [(4, 3), (8, 3), (9, 3)]


@pytest.mark.parametrize("loop", ["IterBasedTrainLoop", "EpochBasedTrainLoop"])
def test_mmengines_loops_go_on_without_the_validation_that_was_cut_off(loop, tmp_path):
    cfg = dict(LOOPS[loop], val_interval=1 if "Epoch" in loop else 6)
    hook = TerminateInValidation(2)
    message, last = stopped(tmp_path / "cut", hook, cfg, **VALIDATION)
    assert hook.steps == [(6, 0), (6, 1), (6, 2), (12, 0)]
    assert message.endswith("; --resume goes on without it")
    assert last == "iter_12.pth"
    whole = train(tmp_path / "whole", cfg, **VALIDATION)
    rest = resume(tmp_path / "cut", 12, cfg, hooks=[hook], **VALIDATION)
    assert rest[0].batches == whole[0].batches[12:]
    assert hook.ended == [(6, 3), (18, 3)]


def test_a_validation_of_its_own_is_none_of_trainings(tmp_path):
    """Behind the training, with the runner and its hooks as they are."""
    options = dict(VALIDATION, hooks=[hook := TerminateInValidation()])
    _, runner = train(tmp_path, dict(EVERY_4, max_iters=4), prepare=stop_on_sigterm, **options)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert runner.val() == {"seen": 3}
    assert len(hook.steps) == 6
