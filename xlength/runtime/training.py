"""From the arguments of ``xlength train`` to a finished run."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from argparse import Namespace
from typing import Any

import torch.distributed as dist
from mmengine.hooks import Hook
from mmengine.logging import print_log
from mmengine.registry import RUNNERS
from mmengine.runner import Runner, find_latest_checkpoint

from xlength.commands import InputError
from xlength.runtime.checkpoint import seed_of, trust_checkpoints
from xlength.runtime.config_check import check_config
from xlength.runtime.config_errors import explain
from xlength.runtime.config_file import load_config
from xlength.runtime.environment import (
    choose_precision,
    leave_process_group,
    prepare_environment,
)
from xlength.runtime.wrappers import announce_last_micro_steps
from xlength.samplers.check import accumulative_counts_of, check_batch_size


def train(args: Namespace) -> int:
    """Load the config, build the runner it names, train.

    Raises:
        InputError: the arguments or the config are wrong.
    """
    cfg = load_config(args)
    start = TrainingStart()
    try:
        check_config(cfg)
        prepare_environment(cfg, args.launcher)
        choose_precision(cfg, args.amp)
        _prepare_resume(cfg)
        runner = RUNNERS.build(cfg) if "runner_type" in cfg else Runner.from_cfg(cfg)
        runner.register_hook(start, "VERY_HIGH")
        runner.train()
    except InputError as error:
        return _fail(InputError(f"{args.config}: {error}"))
    except Exception as error:
        message = None if start.reached else explain(error, cfg)
        if message is None:
            return _fail(error)
        return _fail(InputError(f"{args.config}: {message}"), error)
    leave_process_group()
    return 0


class TrainingStart(Hook):
    """Notes that everything is built and the first step is due."""

    reached = False

    def before_train(self, runner: Any) -> None:
        self.reached = True
        announce_last_micro_steps(runner)
        check_batch_size(runner.train_dataloader, accumulative_counts_of(runner))


def _prepare_resume(cfg: Any) -> None:
    """Let mmengine read the run's own checkpoints, and take over the seed of the resumed one."""
    trusted = [cfg.work_dir]
    checkpoint = cfg.load_from if cfg.resume else None
    if checkpoint is not None:
        if not os.path.exists(checkpoint):
            raise InputError(f"there is no checkpoint {checkpoint!r} to resume from")
        trusted.append(checkpoint)
    elif cfg.resume:
        checkpoint = find_latest_checkpoint(cfg.work_dir)
        if checkpoint is None:
            print_log(f"No checkpoint in {cfg.work_dir} yet: a new run begins.", "current")
    trust_checkpoints(trusted)
    seed = None if checkpoint is None else seed_of(checkpoint)
    asked = cfg.get("randomness", {}).get("seed")
    if seed is not None and seed != asked:
        if asked is not None:
            print_log(
                f"The seed is {seed}, that of the run to resume, not {asked}.",
                "current",
                logging.WARNING,
            )
        cfg.merge_from_dict({"randomness": {"seed": seed}})


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
        code = 1
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
