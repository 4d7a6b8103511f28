"""One rank on each node prepares, the others wait on the host."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from mmengine.logging import print_log

_POLL = 0.2
_calls: Iterator[int] = itertools.count()


def on_one_rank_per_node(prepare: Callable[[], str]) -> str:
    """Call ``prepare`` on one rank of each node; every rank gets what it returned on its node.

    The others ask the process group's key-value store every now and then. No collective is
    involved, so nothing on an accelerator can time out, and only the string travels. If ``prepare``
    fails, the others fail too and say why. Without a process group it is called here.

    Every rank must call this equally often and in the same order. They wait for
    ``XLENGTH_DATASET_TIMEOUT`` minutes at most (or ``XTUNER_DATASET_TIMEOUT``), 60 by default.

    Args:
        prepare: returns a short string, such as the path of what it prepared.

    Raises:
        RuntimeError: the preparing rank failed, or was not heard of in time.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return prepare()
    node = _Node(_store(), next(_calls))
    if not node.is_leader():
        return node.wait()
    try:
        result = prepare()
    except BaseException as error:
        node.fail(f"{type(error).__name__}: {error}")
        raise
    node.succeed(result)
    return result


def check_same_everywhere(fact: str, what: str) -> None:
    """Raise ValueError on the ranks whose ``fact`` is another one than that of the first to come.

    Args:
        fact: not empty, short.
        what: what must be equal, for the error.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return
    key = f"xlength/same/{next(_calls)}"
    first = _store().compare_set(key, "", fact).decode()
    if first != fact:
        raise ValueError(
            f"{what} differs between ranks: {fact} on rank {dist.get_rank()}, {first} on another; "
            "every node must read the same data with the same versions"
        )


class _Node:
    """What the ranks of one node tell each other about one call."""

    def __init__(self, store: Any, call: int) -> None:
        self.store = store
        self.key = f"xlength/prepare/{call}/{_node_name()}"

    def is_leader(self) -> bool:
        """Local rank 0 where the launcher says so, else the first that asks."""
        local_rank = os.environ.get("LOCAL_RANK")
        if local_rank is not None:
            return int(local_rank) == 0
        return bool(self.store.add(f"{self.key}/asked", 1) == 1)

    def succeed(self, result: str) -> None:
        self.store.set(self.key, "+" + result)

    def fail(self, reason: str) -> None:
        """Tell why, and give the others a moment to hear it: this process may own the store."""
        self.store.set(self.key, "-" + reason)
        waiting = int(os.environ.get("LOCAL_WORLD_SIZE") or dist.get_world_size()) - 1
        for _ in range(int(5 / _POLL)):
            if self.store.add(f"{self.key}/heard", 0) >= waiting:
                break
            time.sleep(_POLL)

    def wait(self) -> str:
        timeout = _timeout()
        deadline = time.monotonic() + timeout.total_seconds()
        print_log(f"Waiting for the data set, at most {timeout}.", logger="current")
        while not self._asked(lambda: self.store.check([self.key])):
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"rank {dist.get_rank()} waited {timeout} for the data set to be prepared on "
                    "its node; XLENGTH_DATASET_TIMEOUT sets the minutes to wait"
                )
            time.sleep(_POLL)
        answer: str = self._asked(lambda: self.store.get(self.key)).decode()
        if answer.startswith("-"):
            self._asked(lambda: self.store.add(f"{self.key}/heard", 1))
            raise RuntimeError(f"the rank that prepares the data set failed: {answer[1:]}")
        return answer[1:]

    def _asked(self, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except Exception as error:
            raise RuntimeError(
                "the process group's store is gone: the rank that prepares the data set has "
                "probably died"
            ) from error


def _timeout() -> timedelta:
    for name in ("XLENGTH_DATASET_TIMEOUT", "XTUNER_DATASET_TIMEOUT"):
        value = os.environ.get(name)
        if value:
            try:
                return timedelta(minutes=float(value))
            except ValueError:
                raise ValueError(f"{name}={value!r} must be a number of minutes") from None
    return timedelta(minutes=60)


def _node_name() -> str:
    for name in ("GROUP_RANK", "SLURM_NODEID"):
        if os.environ.get(name):
            return f"{name}={os.environ[name]}"
    return socket.gethostname()


def _store() -> Any:
    store = dist.distributed_c10d._get_default_store()
    if store is None:
        raise RuntimeError(
            f"the process group ({dist.get_backend()}) has no key-value store; initialise it with "
            "gloo or nccl and env://"
        )
    return store
