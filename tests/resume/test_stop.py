"""SIGTERM in real Runners: the run ends with a checkpoint and goes on as if it had not."""

import os
import signal

import pytest
from mmengine.hooks import Hook

from tests.resume.runs import assert_same_end, resume, train
from xlength.runtime.stop import Stopped, stop_on_sigterm

LOOPS = {
    "TrainLoop": dict(type="TrainLoop", max_epochs=3),
    "IterBasedTrainLoop": dict(type="IterBasedTrainLoop", max_iters=18),
    "EpochBasedTrainLoop": dict(type="EpochBasedTrainLoop", max_epochs=3),
}


@pytest.fixture(autouse=True)
def same_handler(monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    before = signal.getsignal(signal.SIGTERM)
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


def stopped(work_dir, hook, cfg, **options):
    """The message that a run ends with, and the name of its last checkpoint."""
    with pytest.raises(Stopped) as caught:
        train(work_dir, cfg, hooks=[hook], prepare=stop_on_sigterm, **options)
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
