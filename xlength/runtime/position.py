"""Where a run is in its data, in the loader's terms; and mmengine's loops made to start there."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist
from mmengine.hooks import CheckpointHook

from xlength.runtime.host_group import HostGroup
from xlength.runtime.loaders import sampler_of


class ResumeError(ValueError):
    """A saved position does not fit the run that is to continue from it."""


@dataclass(frozen=True)
class Position:
    """Batches that are trained on.

    Args:
        epoch: from 0.
        step: batches of it.
        iter: batches of the run.
    """

    epoch: int = 0
    step: int = 0
    iter: int = 0


def loader_facts(loader: Any) -> dict[str, Any]:
    """What must be equal for a position in batches to mean the same samples."""
    dataset = loader.dataset
    try:
        num_samples = len(dataset)
    except TypeError:
        num_samples = None
    sampler, _ = sampler_of(loader)
    world_size = None if hasattr(sampler, "left") else getattr(sampler, "world_size", None)
    return {
        "batch_size": loader.batch_size,
        "drop_last": loader.drop_last,
        "num_samples": num_samples,
        "world_size": world_size,
    }


def changed_facts(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between two ``loader_facts``, as text."""
    names = {
        "batch_size": "the data loader's batch_size",
        "drop_last": "the data loader's drop_last",
        "num_samples": "the number of samples",
        "world_size": "the data-parallel size (of a sampler without a state)",
    }
    return [
        f"{name} was {was.get(key)!r} and is {now.get(key)!r}"
        for key, name in names.items()
        if was.get(key) != now.get(key)
    ]


def batches_of(samples: int, per_batch: int, loader: Any) -> int:
    """Batches that a loader makes of so many steps of its sampler."""
    return samples // per_batch if loader.drop_last else -(-samples // per_batch)


def is_checkpoint_due(runner: Any, by_epoch: bool) -> bool:
    """Whether a ``CheckpointHook`` saves at the end of this iteration, or of this epoch."""
    for hook in runner.hooks:
        if not isinstance(hook, CheckpointHook) or hook.by_epoch != by_epoch:
            continue
        if by_epoch:
            every, is_last = hook.every_n_epochs, hook.is_last_train_epoch
        else:
            every, is_last = hook.every_n_train_iters, hook.is_last_train_iter
        if every(runner, hook.interval, hook.save_begin) or (hook.save_last and is_last(runner)):
            return True
    return False


def optimiser_has_stepped(runner: Any) -> bool:
    """Whether the micro-step that ended was the last of an optimiser step."""
    asked = getattr(runner.optim_wrapper, "should_update", None)
    return True if asked is None else bool(asked())


def learning_rates(runner: Any) -> dict[str, Any]:
    """Hyperparameters of the optimiser and states of its schedulers, which step by micro-steps."""
    wrappers = _named(runner.optim_wrapper)
    schedulers = runner.param_schedulers or []
    lists = schedulers if isinstance(schedulers, dict) else {"": schedulers}
    return {
        "groups": {
            name: [
                {key: value for key, value in group.items() if key != "params"}
                for group in wrapper.param_groups
            ]
            for name, wrapper in wrappers.items()
        },
        "schedulers": {name: [s.state_dict() for s in every] for name, every in lists.items()},
    }


def restore_learning_rates(runner: Any, saved: Mapping[str, Any]) -> None:
    """Put back what ``learning_rates`` took."""
    schedulers = runner.param_schedulers or []
    lists = schedulers if isinstance(schedulers, dict) else {"": schedulers}
    for name, every in lists.items():
        for scheduler, state in zip(every, saved["schedulers"].get(name, ()), strict=False):
            scheduler.load_state_dict(state)
    for name, wrapper in _named(runner.optim_wrapper).items():
        for group, values in zip(wrapper.param_groups, saved["groups"][name], strict=True):
            group.update(values)


def _named(optim_wrapper: Any) -> dict[str, Any]:
    items = getattr(optim_wrapper, "optim_wrappers", None)
    return dict(items) if items is not None else {"": optim_wrapper}


def gather_to_first(group: HostGroup, value: Any) -> list[bytes] | None:
    """Pickled values of all ranks on rank 0; None elsewhere.

    Raises:
        RuntimeError: a rank has ended or does not answer; a checkpoint without its part would not
            be continued exactly, so there must be none.
    """
    mine = pickle.dumps(value)
    if group.world_size == 1:
        return [mine]
    sizes = group.gather(np.array([len(mine)], dtype=np.float64))
    if sizes is None:
        raise RuntimeError(f"another rank has ended or does not answer: {group.what} is unknown")
    parts: list[Any] | None = [None] * group.world_size if dist.get_rank() == 0 else None
    dist.gather_object(mine, parts, dst=0, group=group.group)
    return parts


class EpochIterator:
    """Batches without end from a position on, for mmengine's ``IterBasedTrainLoop``.

    That loop takes as many batches from its public ``dataloader_iterator`` as were trained on
    before; these are nothing here. With ``onedl-mmengine`` it calls ``skip_iter`` instead.

    Args:
        loader: of the training data.
        position: to start at; ``iter`` batches are passed over.
        place: called before the first batch; returns what is left of the epoch.
        prepare: called when the first iterator is made.
        passed: batches that the loop will ask for and not train on.
    """

    def __init__(
        self,
        loader: Any,
        position: Position,
        place: Callable[[], Iterable[Any]],
        prepare: Callable[[], None],
        passed: int,
    ) -> None:
        self.epoch, self.step = position.epoch, position.step
        self._loader = loader
        self._place = place
        self._prepare = prepare
        self._passed = passed
        self._iterator: Iterator[Any] | None = None

    def __iter__(self) -> EpochIterator:
        return self

    def skip_iter(self, num_iters: int) -> None:
        """Nothing: the position is right already."""

    def __next__(self) -> Any:
        if self._passed:
            self._passed -= 1
            return None
        if self._iterator is None:
            self._iterator = prepared(self._place(), self._prepare, self.step == 0)
        batch = next(self._iterator, None)
        if batch is None:
            self._next_epoch()
            batch = next(self._iterator)
        self.step += 1
        return batch

    def _next_epoch(self) -> None:
        self.epoch, self.step = self.epoch + 1, 0
        sampler, _ = sampler_of(self._loader)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(self.epoch)
        self._iterator = iter(self._loader)


def prepared(batches: Iterable[Any], prepare: Callable[[], None], first: bool) -> Iterator[Any]:
    """The batches, with ``prepare`` called before their iterator is made where they are an epoch's
    first, and behind it otherwise: making one draws a random number."""
    if first:
        prepare()
    iterator = iter(batches)
    if not first:
        prepare()
    return iterator
