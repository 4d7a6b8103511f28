"""From the arguments of ``xlength train`` to a finished run."""

from __future__ import annotations

import os
from argparse import Namespace
from typing import Any

from mmengine.config import Config
from mmengine.registry import RUNNERS
from mmengine.runner import Runner

from xlength.runtime.checkpoint import trust_checkpoints
from xlength.runtime.environment import (
    choose_precision,
    leave_process_group,
    prepare_environment,
)


def train(args: Namespace) -> int:
    """Load the config, build the runner it names, train."""
    cfg = Config.fromfile(args.config)
    if args.cfg_options:
        cfg.merge_from_dict(args.cfg_options)
    apply_arguments(cfg, args)
    choose_precision(cfg, args.amp)
    prepare_environment(cfg, args.launcher)
    trusted = [cfg.work_dir]
    if cfg.resume and cfg.load_from:
        trusted.append(cfg.load_from)
    trust_checkpoints(trusted)
    runner = RUNNERS.build(cfg) if "runner_type" in cfg else Runner.from_cfg(cfg)
    runner.train()
    leave_process_group()
    return 0


def apply_arguments(cfg: Any, args: Namespace) -> None:
    """Put the arguments into the config."""
    cfg.launcher = args.launcher
    if args.work_dir is not None:
        cfg.work_dir = args.work_dir
    elif cfg.get("work_dir") is None:
        name = os.path.splitext(os.path.basename(args.config))[0]
        cfg.work_dir = os.path.join("work_dirs", name)
    if args.seed is not None:
        cfg.merge_from_dict({"randomness": {"seed": args.seed}})
    if args.resume is not None:
        cfg.resume = True
        cfg.load_from = None if args.resume == "latest" else args.resume
    cfg.setdefault("resume", False)
    cfg.setdefault("load_from", None)
