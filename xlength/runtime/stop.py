"""SIGTERM, as a cluster sends it before it takes a machine away: save, then end."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from mmengine.hooks import CheckpointHook, Hook
from mmengine.logging import print_log
from numpy.typing import NDArray

from xlength.runtime.host_group import HostGroup, configured_timeout
from xlength.runtime.validation import CUT_VALIDATION, ValidationSteps

STOPPED = 75
"""Exit code of a run that was asked to stop, has saved a checkpoint and can be continued with
``--resume``: EX_TEMPFAIL of sysexits.h. A second signal ends it at once, with 128 + 15."""

SAME_SIGNAL_SECONDS = 1.0
"""A signal that comes so soon after the first is the same one: a cluster sends it to all processes,
and a launcher passes it on to them once more."""


class Stopped(Exception):
    """The run was asked to stop, and has saved a checkpoint."""


class StopHook(Hook):
    """On SIGTERM to any rank, all ranks save a checkpoint at the end of the running step, of
    training or of validation, and end.

    What is saved in a validation is the training before it. ``TrainLoop`` begins a validation that
    was cut off anew when the run is resumed; mmengine's loops go on without it. A validation is not
    cut off but carried to its end, without another step of training, where one cannot stop inside:
    where a hook may have changed the model for it (``EMAHook``, or one of the user's own with
    ``before_val`` or ``before_val_epoch``); and on several ranks, which may take unequal numbers of
    steps, in another loop than ``ValLoop`` or over a stream.

    Cost: nothing for one process; for several, one number from each rank over the host's network at
    every step, since all must agree on the step (some 0.1 ms on one machine); in a validation about
    once a second.
    """

    # Before DataStateHook, which asks whether a checkpoint is due.
    priority = 75

    def __init__(self) -> None:
        self.asked = False
        self._asked_at = 0.0
        self._before: Any = None
        self._group: HostGroup | None = None
        self._has_trained = False
        self._validation: ValidationSteps | None = None
        self.saves: CheckpointHook | None = None  # from when on all ranks know

    def before_train(self, runner: Any) -> None:
        """Listen, from now on."""
        loader = runner.train_dataloader
        loader = getattr(loader, "_loader", loader)
        if getattr(loader, "num_workers", 0) > 0:
            loader.worker_init_fn = EndedByParent(loader.worker_init_fn)
        self._group = HostGroup("a request to stop", configured_timeout(runner))
        self._before = signal.signal(signal.SIGTERM, self._ask)

    def after_train(self, runner: Any) -> None:
        """Leave the signal as it was."""
        self._group = None
        signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        """Let a ``CheckpointHook``, which comes later, save now if any rank was asked to stop."""
        self._has_trained = True
        if self._is_any_asked(runner):
            self.saves = _saves_every_step(runner)

    def before_val(self, runner: Any) -> None:
        """Find out in which steps of the validation all ranks can agree to stop."""
        if self._group is None:  # not a validation of training
            return
        self._validation = ValidationSteps(runner, self._group.world_size)
        steps = self._gathered(runner, float(self._validation.steps))
        self._validation.steps = int(steps.min())

    def before_val_iter(
        self, runner: Any, batch_idx: int, data_batch: dict[str, Any] | None = None
    ) -> None:
        """End here, if any rank was asked to."""
        if self._validation is None or not self._validation.is_time_to_ask():
            return
        asked, seconds = self._gathered(runner, float(self.asked), self._validation.seconds()).T
        if asked.any():
            runner.message_hub.update_info(CUT_VALIDATION, runner.iter)
            self._end_in_validation(runner, "in")
        self._validation.ask_again(seconds.max())

    def end_behind_validation(self, runner: Any) -> None:
        """End, if any rank was asked to: there is no need for another step of training."""
        self._validation = None
        if self._group is not None and self._is_any_asked(runner):
            self._end_in_validation(runner, "behind")

    def _end_in_validation(self, runner: Any, where: str) -> None:
        """Save what was trained before it, and end."""
        iteration = runner.iter
        saved = "nothing was trained since the checkpoint that was resumed"
        if self._has_trained:
            hook = _saves_every_step(runner)
            meta = dict(epoch=runner.epoch, iter=iteration)
            hook._save_checkpoint_with_step(runner, iteration, meta=meta)
            saved = f"saved {hook.last_ckpt}"
        self.wait_for_all()
        message = f"stopped on SIGTERM {where} the validation after {iteration} iterations, {saved}"
        if where == "in":
            anew = hasattr(runner.train_loop, "start_at")  # a TrainLoop
            message += f"; --resume {'begins it anew' if anew else 'goes on without it'}"
        raise Stopped(message)

    def _is_any_asked(self, runner: Any) -> bool:
        """Whether any rank was asked to stop; the same on all of them."""
        asked = bool(self._gathered(runner, float(self.asked)).any())
        self.asked |= asked
        return asked

    def _gathered(self, runner: Any, *values: float) -> NDArray[np.float64]:
        """(ranks, values)."""
        assert self._group is not None
        gathered = self._group.gather(np.array(values))
        if gathered is None:
            raise RuntimeError(
                "another rank has ended, or has not answered within the "
                f"{configured_timeout(runner):.0f} s of env_cfg.dist_cfg.timeout, so this one ends "
                "too; --resume continues from the last checkpoint"
            )
        return gathered

    def wait_for_all(self) -> None:
        """Until every rank is here: a launcher ends the others as soon as one has ended."""
        if self._group is not None:
            self._group.gather(np.zeros(1))

    def _ask(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._asked_at and now - self._asked_at < SAME_SIGNAL_SECONDS:
            return
        if self._asked_at:
            os._exit(128 + number)
        self._asked_at = now
        if self.asked:  # another rank had the signal before, and told this one
            return
        self.asked = True
        when = "step" if self._validation is None else self._validation.ends_with
        print_log(
            f"SIGTERM: a checkpoint is saved at the end of this {when}, then the run ends with "
            f"code {STOPPED}. A second one ends it at once.",
            "current",
        )


def _saves_every_step(runner: Any) -> CheckpointHook:
    """The first ``CheckpointHook``, told to save at the end of this step and of each that follows.

    One that saves by epochs names this checkpoint by its iteration, and keeps it.
    """
    hook = next(hook for hook in runner.hooks if isinstance(hook, CheckpointHook))
    hook.interval, hook.save_begin = 1, 0
    if hook.by_epoch:
        hook.by_epoch, hook.filename_tmpl, hook.max_keep_ckpts = False, "iter_{}.pth", -1
    return hook


class EndedByParent:
    """A ``worker_init_fn`` after which a loader's worker ends on its parent's SIGTERM only.

    A launcher, or ``timeout``, signals the whole group of processes. The worker goes on then, since
    the step that runs still needs it; its parent ends it with the run.

    Args:
        init: called first, with the worker's number.
    """

    def __init__(self, init: Callable[[int], None] | None) -> None:
        self.init = init

    def __call__(self, worker: int) -> None:
        if self.init is not None:
            self.init(worker)
        if hasattr(signal, "sigwaitinfo"):
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    parent = os.getppid()
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)


class EndHook(Hook):
    """Ends a run that was asked to stop, when its checkpoint is written.

    Args:
        stop: knows whether it was.
    """

    priority = "LOWEST"

    def __init__(self, stop: StopHook) -> None:
        self.stop = stop

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        """End."""
        hook, iteration = self.stop.saves, runner.iter + 1
        if hook is None or hook.last_ckpt is None:
            return
        due = os.path.basename(hook.filename_tmpl.format(iteration))
        if os.path.basename(hook.last_ckpt) == due:
            self.stop.wait_for_all()
            raise Stopped(
                f"stopped on SIGTERM after {iteration} iterations, saved {hook.last_ckpt}"
            )

    def after_val(self, runner: Any) -> None:
        """End, behind hooks that put the model back."""
        self.stop.end_behind_validation(runner)


def leave_mark() -> None:
    """Tell ``tools/torchrun.py``, which started this process, that it ends with ``STOPPED``."""
    mark = os.environ.get("XLENGTH_STOP_MARK")
    if mark is not None:
        Path(mark).touch()


def stop_on_sigterm(runner: Any) -> None:
    """Add what is needed to a runner, also a ``CheckpointHook`` where there is none."""
    stop = StopHook()
    if not any(isinstance(hook, CheckpointHook) for hook in runner.hooks):
        runner.register_hook(CheckpointHook(interval=-1, by_epoch=False, save_last=False))
    runner.register_hook(stop)
    runner.register_hook(EndHook(stop))
