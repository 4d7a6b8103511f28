"""Process groups and precision on machines without an accelerator."""

import socket

import pytest
import torch.distributed as dist
from mmengine.config import Config

from xlength.commands import InputError
from xlength.runtime.environment import (
    choose_precision,
    has_accelerator,
    prepare_environment,
)

host_only = pytest.mark.skipif(has_accelerator(), reason="about machines without an accelerator")


@pytest.fixture
def environ(monkeypatch):
    """An environment without any launcher's variables; the process group ends with the test."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
    yield monkeypatch
    if dist.is_initialized():
        dist.destroy_process_group()


LAUNCHERS = {
    "pytorch": dict(RANK=0, WORLD_SIZE=1, LOCAL_RANK=0, MASTER_ADDR="127.0.0.1"),
    "slurm": dict(SLURM_PROCID=0, SLURM_NTASKS=1, SLURM_NODELIST="here", MASTER_ADDR="127.0.0.1"),
    "mpi": dict(OMPI_COMM_WORLD_RANK=0, OMPI_COMM_WORLD_SIZE=1, OMPI_COMM_WORLD_LOCAL_RANK=0),
}


@host_only
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_launcher_gets_a_group_on_the_host(launcher, environ):
    for name, value in LAUNCHERS[launcher].items():
        environ.setenv(name, str(value))
    cfg = Config({})
    prepare_environment(cfg, launcher)
    assert dist.get_backend() == "gloo" and dist.get_world_size() == 1
    assert cfg.model_wrapper_cfg.device_ids is None


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_launcher_that_did_not_start_this_process_is_refused(launcher, environ):
    with pytest.raises(InputError, match=f"--launcher {launcher} needs the environment variables"):
        prepare_environment(Config({}), launcher)


def test_several_processes_without_a_launcher_are_refused(environ):
    environ.setenv("TORCHELASTIC_RUN_ID", "x")
    environ.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="2 processes, but --launcher is none"):
        prepare_environment(Config({}), "none")
    environ.setenv("WORLD_SIZE", "1")
    prepare_environment(Config({}), "none")


@host_only
def test_wrappers_of_the_users_own_are_kept(environ):
    for name, value in LAUNCHERS["pytorch"].items():
        environ.setenv(name, str(value))
    own = dict(type="MMDistributedDataParallel", find_unused_parameters=True)
    cfg = Config({"model_wrapper_cfg": own})
    prepare_environment(cfg, "pytorch")
    assert cfg.model_wrapper_cfg.find_unused_parameters is True
    assert cfg.model_wrapper_cfg.device_ids is None
    for strategy, key, value in [
        ("DDPStrategy", "device_ids", None),
        ("xlength.FSDPStrategy", "device_id", "cpu"),
    ]:
        cfg = Config({"runner_type": "FlexibleRunner", "strategy": dict(type=strategy)})
        prepare_environment(cfg, "pytorch")
        chosen = cfg.strategy.model_wrapper[key]
        assert chosen is value or str(chosen) == value


@host_only
def test_mixed_precision_falls_back_and_keeps_the_rest():
    wrapper = dict(
        type="AmpOptimWrapper",
        dtype="float16",
        loss_scale="dynamic",
        accumulative_counts=2,
        optimizer=dict(type="AdamW", lr=1e-3),
    )
    cfg = Config({"optim_wrapper": wrapper})
    choose_precision(cfg, amp=False)
    assert cfg.optim_wrapper == dict(
        type="OptimWrapper", accumulative_counts=2, optimizer=dict(type="AdamW", lr=1e-3)
    )
