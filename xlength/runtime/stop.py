"""SIGTERM, as a cluster sends it before it takes a machine away: save, then end."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
from mmengine.hooks import CheckpointHook, Hook
from mmengine.logging import print_log

from xlength.runtime.host_group import HostGroup, configured_timeout

STOPPED = 75
"""Exit code of a run that was asked to stop, has saved a checkpoint and can be continued with
``--resume``: EX_TEMPFAIL of sysexits.h. A second signal ends it at once, with 128 + 15."""

SAME_SIGNAL_SECONDS = 1.0
"""A signal that comes so soon after the first is the same one: a cluster sends it to all processes,
and a launcher passes it on to them once more."""


class Stopped(Exception):
    """The run was asked to stop, and has saved a checkpoint."""


class StopHook(Hook):
    """On SIGTERM to any rank, all ranks save a checkpoint at the end of the running step.

    Cost: nothing for one process; for several, one number from each rank over the host's network at
    every step, since all must agree on the step (some 0.1 ms on one machine).
    """

    # Before DataStateHook, which asks whether a checkpoint is due.
    priority = 75

    def __init__(self) -> None:
        self.asked = False
        self._asked_at = 0.0
        self._before: Any = None
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
        signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        """Let a ``CheckpointHook``, which comes later, save now if any rank was asked to stop."""
        flags = self._group.gather(np.array([float(self.asked)]))
        if flags is None:
            raise RuntimeError(
                "another rank has ended, or has not answered within the "
                f"{configured_timeout(runner):.0f} s of env_cfg.dist_cfg.timeout, so this one ends "
                "too; --resume continues from the last checkpoint"
            )
        if flags.any():
            self.asked = True
            self.saves = _saves_every_step(runner)

    def wait_for_all(self) -> None:
        """Until every rank is here: a launcher ends the others as soon as one has ended."""
        self._group.gather(np.zeros(1))

    def _ask(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.asked and self._asked_at and now - self._asked_at < SAME_SIGNAL_SECONDS:
            return
        if self.asked:
            os._exit(128 + number)
        self.asked, self._asked_at = True, now
        print_log(
            "SIGTERM: a checkpoint is saved at the end of this step, then the run ends with code "
            f"{STOPPED}. A second one ends it at once.",
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


def stop_on_sigterm(runner: Any) -> None:
    """Add what is needed to a runner, also a ``CheckpointHook`` where there is none."""
    stop = StopHook()
    if not any(isinstance(hook, CheckpointHook) for hook in runner.hooks):
        runner.register_hook(CheckpointHook(interval=-1, by_epoch=False, save_last=False))
    runner.register_hook(stop)
    runner.register_hook(EndHook(stop))
