"""From the arguments of ``xlength train`` to a finished run."""

from __future__ import annotations

import logging
import sys
import traceback
from argparse import Namespace
from typing import Any

import torch.distributed as dist
from mmengine.device import get_device
from mmengine.hooks import Hook
from mmengine.logging import print_log
from mmengine.registry import RUNNERS
from mmengine.runner import Runner

from xlength.commands import InputError
from xlength.hooks.data_state import DataStateHook
from xlength.hooks.plan_guard import PlanGuardHook
from xlength.runtime.config_check import check_config
from xlength.runtime.config_errors import explain
from xlength.runtime.config_file import load_config
from xlength.runtime.console import dumps_in_the_file_only
from xlength.runtime.environment import (
    choose_precision,
    end_process,
    leave_process_group,
    prepare_environment,
)
from xlength.runtime.interrupt import Progress
from xlength.runtime.position import ResumeError
from xlength.runtime.resuming import prepare_resume
from xlength.runtime.stop import STOPPED, Stopped, leave_mark, stop_on_sigterm
from xlength.runtime.wrappers import announce_last_micro_steps
from xlength.samplers.check import accumulative_counts_of, check_batch_size

_LOST_RANK = ("gloo", "NCCL", "remote worker", "Connection closed", "Connection reset")
"""Words of torch's errors in a collective whose peer is gone."""


def train(args: Namespace) -> int:
    """Load the config, build the runner it names, train.

    Raises:
        InputError: the arguments or the config are wrong.
    """
    progress = Progress(args)
    try:
        with progress.interruptible():
            return _train(args, progress)
    except KeyboardInterrupt:
        progress.end()


def _train(args: Namespace, progress: Progress) -> int:
    cfg = progress.cfg = load_config(args)
    start = TrainingStart(progress)
    try:
        check_config(cfg)
        prepare_environment(cfg, args.launcher)
        choose_precision(cfg, args.amp)
        prepare_resume(cfg)
        with dumps_in_the_file_only():
            runner = RUNNERS.build(cfg) if "runner_type" in cfg else Runner.from_cfg(cfg)
        _introduce(runner)
        runner.register_hook(start, "VERY_HIGH")
        _add_hooks(runner)
        runner.train()
    except Stopped as stopped:
        print_log(str(stopped), "current", logging.WARNING)
        leave_mark()
        return leave_process_group(STOPPED)
    except (InputError, ResumeError) as error:
        return _fail(InputError(f"{args.config}: {error}"), error)
    except Exception as error:
        if progress.interrupted:
            raise KeyboardInterrupt from error
        message = None if start.reached else explain(error, cfg)
        if message is None:
            return _fail(error)
        return _fail(InputError(f"{args.config}: {message}"), error)
    return leave_process_group(0)


def _introduce(runner: Any) -> None:
    ranks = f"{runner.world_size} rank{'s' if runner.world_size > 1 else ''}"
    runner.logger.info(
        f"{runner.experiment_name}: {ranks} on {get_device()}, seed {runner.seed}; environment, "
        f"config and the order of hooks stand in {runner.logger.log_file}"
    )


def _add_hooks(runner: Any) -> None:
    """Every run can be stopped and continued and compares its ranks' plans, asked or not."""
    for kind in (DataStateHook, PlanGuardHook):
        if not any(isinstance(hook, kind) for hook in runner.hooks):
            runner.register_hook(kind())
    stop_on_sigterm(runner)


class TrainingStart(Hook):
    """Notes that everything is built and the first step is due.

    Args:
        progress: what is told.
    """

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    @property
    def reached(self) -> bool:
        return self.progress.runner is not None

    def before_train(self, runner: Any) -> None:
        self.progress.runner = runner
        announce_last_micro_steps(runner)
        check_batch_size(runner.train_dataloader, accumulative_counts_of(runner))

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        if self.progress.interrupted:  # and the exception was lost
            raise KeyboardInterrupt


def _fail(error: BaseException, cause: BaseException | None = None) -> int:
    """End a run that failed; other ranks must not wait for this one.

    A process that belongs to a group ends at once: an orderly end could wait for a collective that
    the other ranks have not reached.
    """
    bad_input = isinstance(error, InputError)
    if not (dist.is_available() and dist.is_initialized()):
        if bad_input:
            raise error from cause
        raise error
    from xlength.cli import report_bad_input

    if bad_input:
        code = report_bad_input(error, cause)
    else:
        traceback.print_exception(error)
        if any(word in str(error) for word in _LOST_RANK):
            print(
                "xlength: another rank has ended or does not answer, so this one ends too; "
                "--resume continues from the last checkpoint",
                file=sys.stderr,
            )
        code = 1
    end_process(code)
