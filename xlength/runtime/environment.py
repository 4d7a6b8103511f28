"""What a machine without an accelerator needs, and the end of a process group."""

from __future__ import annotations

import atexit
import datetime
import logging
import os
import subprocess
import sys
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from mmengine.device import get_device
from mmengine.logging import print_log

from xlength.commands import InputError

_RANK_VARIABLES = {
    "pytorch": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"),
    "slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_NODELIST"),
    "mpi": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
    ),
}
"""What each launcher sets in the processes it starts."""
_STARTERS = {"pytorch": "torchrun or tools/dist_train.sh", "slurm": "srun", "mpi": "mpirun"}
_HOST_DEVICES = ("cpu", "mps")
_AMP_ONLY = ("dtype", "loss_scale", "use_fsdp")


def rank_of_launch() -> int:
    """This process's rank as its launcher says it, also before there is a process group."""
    for name in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"):
        if name in os.environ:
            return int(os.environ[name])
    return 0


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
    check_launcher(launcher)
    cfg.setdefault("env_cfg", {"dist_cfg": {"backend": "nccl"}})  # FlexibleRunner asks for it
    if launcher == "none":
        return
    if has_accelerator():
        _init_again(cfg.env_cfg.get("dist_cfg", {}))
        return
    _set_rank_variables(launcher)
    if not dist.is_initialized():
        options: dict[str, Any] = {}
        seconds = cfg.env_cfg.get("dist_cfg", {}).get("timeout")
        if seconds is not None:
            options["timeout"] = datetime.timedelta(seconds=seconds)
        dist.init_process_group("gloo", **options, **_store_of_restart())
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


def check_launcher(launcher: str) -> None:
    """Compare the launcher that is named with the one that started this process.

    Raises:
        InputError: its variables are missing; or torchrun started several processes and none is
            named, so that each would train for itself.
    """
    missing = [name for name in _RANK_VARIABLES.get(launcher, ()) if name not in os.environ]
    if missing:
        raise InputError(
            f"--launcher {launcher} needs the environment variables that {_STARTERS[launcher]} "
            f"sets; {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing"
        )
    size = os.environ.get("WORLD_SIZE", "1")
    if launcher == "none" and "TORCHELASTIC_RUN_ID" in os.environ and size != "1":
        raise InputError(
            f"torchrun started {size} processes, but --launcher is none: each would train for "
            "itself. Add --launcher pytorch"
        )


def _init_again(dist_cfg: dict[str, Any]) -> None:
    """Where torchrun has started the process again, do what mmengine does, with another store."""
    store = _store_of_restart()
    if not store or dist.is_initialized() or not torch.cuda.is_available():
        return
    options = dict(dist_cfg)
    seconds = options.pop("timeout", None)
    if seconds is not None:
        options["timeout"] = datetime.timedelta(seconds=seconds)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(options.pop("backend", "nccl"), **options, **store)


def _store_of_restart() -> dict[str, Any]:
    """Where processes that torchrun has started again meet: it keeps one store over all restarts,
    which still holds the addresses of those that have ended."""
    env = os.environ
    attempt = int(env.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if attempt == 0 or env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    world_size = int(env["WORLD_SIZE"])
    agent = dist.TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), world_size, is_master=False)
    store = dist.PrefixStore(f"attempt{attempt}", agent)
    return {"store": store, "rank": int(env["RANK"]), "world_size": world_size}


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


def leave_process_group(code: int) -> int:
    """End the process group of a finished run and the process with it, if there is a group.

    Gloo's threads can abort an interpreter that ends in the ordinary way ("terminate called without
    an active exception", seen with torch 2.13), which torchrun would take for a failed run.

    Args:
        code: the exit code.

    Returns:
        ``code``, in a process without a group.
    """
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
        atexit._run_exitfuncs()
        end_process(code)
    return code


def end_process(code: int) -> NoReturn:
    """End the process at once, waiting for nothing; the logs are written."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
