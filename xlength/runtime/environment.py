"""What a machine without an accelerator needs, and the end of a process group."""

from __future__ import annotations

import datetime
import logging
import os
import subprocess
from typing import Any

import torch
import torch.distributed as dist
from mmengine.device import get_device
from mmengine.logging import print_log

_HOST_DEVICES = ("cpu", "mps")
_AMP_ONLY = ("dtype", "loss_scale", "use_fsdp")


def has_accelerator() -> bool:
    """Whether mmengine would train on a device with its own collectives (not a CPU, not mps)."""
    return get_device() not in _HOST_DEVICES


def prepare_environment(cfg: Any, launcher: str) -> None:
    """Make a config run on this machine: without an accelerator, over gloo.

    mmengine selects a CUDA device when it sets up a process group and when it wraps a model, which
    fails on a CPU; so the group is set up here, and the wrapper is told to use no device.

    Args:
        cfg: altered in place.
        launcher: ``'none'``, ``'pytorch'``, ``'slurm'`` or ``'mpi'``.
    """
    cfg.setdefault("env_cfg", {"dist_cfg": {"backend": "nccl"}})  # FlexibleRunner asks for it
    if launcher == "none" or has_accelerator():
        return
    _set_rank_variables(launcher)
    if not dist.is_initialized():
        seconds = cfg.env_cfg.get("dist_cfg", {}).get("timeout")
        timeout = None if seconds is None else datetime.timedelta(seconds=seconds)
        dist.init_process_group("gloo", timeout=timeout)
    if cfg.get("runner_type", "Runner") == "Runner":
        wrapper = dict(cfg.get("model_wrapper_cfg") or {})
        wrapper.setdefault("type", "MMDistributedDataParallel")
        if wrapper["type"] == "MMDistributedDataParallel":
            wrapper.setdefault("broadcast_buffers", False)
            wrapper.setdefault("find_unused_parameters", cfg.get("find_unused_parameters", False))
            wrapper["device_ids"] = None
        cfg.model_wrapper_cfg = wrapper
    else:
        _strategy_on_host(cfg)


def _strategy_on_host(cfg: Any) -> None:
    """The same for the strategies of ``FlexibleRunner``."""
    strategy = cfg.get("strategy") or dict(type="DDPStrategy")
    name = getattr(strategy["type"], "__name__", strategy["type"]).rpartition(".")[2]
    wrapper = dict(strategy.get("model_wrapper") or {})
    if name == "DDPStrategy":
        wrapper.setdefault("type", "MMDistributedDataParallel")
        wrapper.setdefault("broadcast_buffers", False)
        wrapper["device_ids"] = None
    elif name == "FSDPStrategy":
        wrapper.setdefault("type", "MMFullyShardedDataParallel")
        wrapper["device_id"] = torch.device("cpu")
    else:
        return
    strategy["model_wrapper"] = wrapper
    cfg.strategy = strategy


def _set_rank_variables(launcher: str) -> None:
    """The variables that torch reads, from those that a launcher other than torchrun sets."""
    env = os.environ
    if launcher == "slurm":
        env["RANK"], env["WORLD_SIZE"] = env["SLURM_PROCID"], env["SLURM_NTASKS"]
        env["LOCAL_RANK"] = env.get("SLURM_LOCALID", "0")
        if "MASTER_ADDR" not in env:
            hosts = subprocess.run(
                ["scontrol", "show", "hostname", env["SLURM_NODELIST"]],
                capture_output=True,
                text=True,
                check=True,
            )
            env["MASTER_ADDR"] = hosts.stdout.split()[0]
        env.setdefault("MASTER_PORT", "29500")
    elif launcher == "mpi":
        env["RANK"], env["WORLD_SIZE"] = env["OMPI_COMM_WORLD_RANK"], env["OMPI_COMM_WORLD_SIZE"]
        env["LOCAL_RANK"] = env["OMPI_COMM_WORLD_LOCAL_RANK"]
        env.setdefault("MASTER_ADDR", "127.0.0.1")
        env.setdefault("MASTER_PORT", "29500")


def choose_precision(cfg: Any, amp: bool) -> None:
    """Mixed precision where the machine has it; on a CPU a warning, and full precision.

    Args:
        cfg: altered in place: its ``optim_wrapper`` becomes ``AmpOptimWrapper`` or stops being it.
        amp: whether mixed precision is asked for on the command line.
    """
    wrapper = cfg.get("optim_wrapper")
    if wrapper is None:
        return
    name = getattr(wrapper.get("type"), "__name__", wrapper.get("type", "OptimWrapper"))
    if get_device() != "cpu":
        if amp and name == "OptimWrapper":
            wrapper["type"] = "AmpOptimWrapper"
            wrapper.setdefault("loss_scale", "dynamic")
        return
    if amp or name == "AmpOptimWrapper":
        print_log(
            "Mixed precision needs an accelerator, there is none: training in the weights' own "
            "precision (OptimWrapper instead of AmpOptimWrapper).",
            "current",
            logging.WARNING,
        )
    if name == "AmpOptimWrapper":
        wrapper["type"] = "OptimWrapper"
        for key in _AMP_ONLY:
            wrapper.pop(key, None)


def leave_process_group() -> None:
    """End the process group after a run, if there is one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
