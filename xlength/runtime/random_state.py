"""Random states of a process and of its loader's workers, saved, restored and seeded."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


def random_states(devices: bool = True) -> dict[str, Any]:
    """The states of Python's, numpy's and torch's generators, of all devices of this process."""
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if devices and torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def restore_random_states(states: Mapping[str, Any]) -> None:
    """Continue from ``random_states``; devices that are no longer there are passed over."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    for device, state in enumerate(states.get("cuda", ())):
        if torch.cuda.is_available() and device < torch.cuda.device_count():
            torch.cuda.set_rng_state(state, device)


@contextmanager
def kept_random_states() -> Iterator[None]:
    """Whatever is drawn inside leaves no trace: validation must not change what training draws,
    since a run that is resumed behind it does not validate again."""
    states = random_states()
    yield
    restore_random_states(states)


def seed_everything(*numbers: int) -> None:
    """Seed Python's, numpy's and torch's generators from several numbers, all of which count."""
    words = np.random.SeedSequence([abs(int(n)) for n in numbers]).generate_state(4)
    np.random.seed(words[0])
    random.seed(int(words[1]))
    torch.manual_seed(int(words[2]) << 32 | int(words[3]))


class WorkerSeeds:
    """Seeds the generators of a loader's workers anew for every batch, from run seed, epoch, rank
    and the batch's place in the epoch.

    So augmentation differs in every epoch, and a resumed run draws the same numbers for a batch as
    an undisturbed one, with any number of workers. mmengine seeds a worker once, by its number,
    with the same value in every epoch.

    Cost: some 20 microseconds a batch in the worker.

    Args:
        loader: of a map-style data set; its ``worker_init_fn`` (called first) and ``collate_fn``
            are wrapped.
        rank: data-parallel, so that ranks that share their samples augment them alike.
    """

    def __init__(self, loader: DataLoader[Any], rank: int) -> None:
        self.rank = rank
        self.seed = self.epoch = self.start = 0
        self.num_batches = self._end = len(loader)
        self._init: Callable[[int], None] | None = loader.worker_init_fn
        self._collate = loader.collate_fn
        loader.worker_init_fn = self.begin
        loader.collate_fn = self.collate

    @classmethod
    def install(cls, loader: Any, rank: int) -> WorkerSeeds | None:
        """For a loader with workers; None where there is nothing to seed.

        A stream is not seeded by batches, as its workers read ahead: ``StreamSeeds``.
        """
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            return None
        return cls(loader, rank) if loader.num_workers > 0 else None

    def set(self, seed: int, epoch: int, start: int, left: int | None = None) -> None:
        """What the next iterator of the loader begins with, in the main process.

        Args:
            seed: of the run.
            epoch: from 0.
            start: batches of the epoch that are passed over.
            left: batches of it that follow, where they are not all the others, as in an epoch that
                another number of ranks began.
        """
        self.seed, self.epoch, self.start = seed, epoch, start
        self._end = self.num_batches if left is None else start + left

    def begin(self, worker: int) -> None:
        """In a worker, before its first batch."""
        if self._init is not None:
            self._init(worker)
        self._place = self.start + worker
        self._seed()

    def collate(self, samples: Any) -> Any:
        """Collate, then seed for the worker's next batch."""
        batch = self._collate(samples)
        info = get_worker_info()
        if info is not None:
            self._place += info.num_workers
            self._seed()
        return batch

    def _seed(self) -> None:
        if self._place >= self._end:  # a persistent worker's next batch is of the next epoch
            info = get_worker_info()
            self.epoch, self._end = self.epoch + 1, self.num_batches
            self._place = 0 if info is None else info.id
        seed_everything(self.seed, self.epoch, self.rank, self._place)


def collate_of(loader: Any) -> Any:
    """The loader's own ``collate_fn``, also where ``WorkerSeeds`` has wrapped it."""
    function = getattr(loader, "collate_fn", None)
    owner = getattr(function, "__self__", None)
    return owner._collate if isinstance(owner, WorkerSeeds) else function
