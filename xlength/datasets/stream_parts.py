"""Who reads what of a stream: its split by rank and worker, and shares that are known
beforehand."""

from __future__ import annotations

import copy
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mmengine.logging import print_log
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from xlength.arrow import is_hf

SHARDS = ("rank", "worker", "none")


@dataclass(frozen=True)
class Reader:
    """One of the processes that read a stream: worker ``worker`` of ``num_workers`` of a rank."""

    rank: int = 0
    world_size: int = 1
    worker: int = 0
    num_workers: int = 1

    def __str__(self) -> str:
        return f"worker {self.worker} of {self.num_workers}, rank {self.rank} of {self.world_size}"

    @classmethod
    def here(cls, rank: int, world_size: int, owner: Any = None, first_worker: int = 0) -> Reader:
        """The reader that this process is.

        A loader always begins with its worker 0, so to continue where another one is next, the
        workers trade places for an epoch; a parent that splits itself sees the new place in
        ``get_worker_info`` too.

        Args:
            rank, world_size: data-parallel.
            owner: the data set that asks; only the one that made workers trade places ends it.
            first_worker: the one whose batch a loader takes first.
        """
        info = get_worker_info()
        if info is None:
            return cls(rank, world_size)
        mover, own_info = _moved.get(os.getpid(), (None, info))
        if first_worker or mover == id(owner):
            _moved[os.getpid()] = (id(owner), own_info)
            info = copy.copy(own_info)
            place = (own_info.id + first_worker) % own_info.num_workers
            object.__setattr__(info, "id", place)
            torch_worker._worker_info = info
        return cls(rank, world_size, info.id, info.num_workers)

    def stride(self, shard: str) -> tuple[int, int]:
        """(first, step): which samples of a stream that every reader sees whole are this one's.

        Successive samples go to successive ranks, so that ranks get equally many, to one sample.
        """
        if shard == "none":
            return 0, 1
        if shard == "worker":
            return self.worker, self.num_workers
        return self.worker * self.world_size + self.rank, self.world_size * self.num_workers


_moved: dict[int, tuple[int, Any]] = {}
"""Of a worker process that traded places: who did it, and what torch said of the process."""


def resolve_shard(dataset: Any, shard: str | None, world_size: int) -> str:
    """How a stream is to be split.

    Args:
        dataset: the stream.
        shard: what the user asked for: split by ``'rank'`` (and worker), by ``'worker'`` alone, or
            not at all (``'none'``).
        world_size: data-parallel ranks.

    Raises:
        ValueError: an unknown value; or none is given and cannot be guessed.
    """
    if shard is not None:
        if shard not in SHARDS:
            raise ValueError(f"shard must be 'rank', 'worker' or 'none', got {shard!r}")
        return shard
    if type(dataset).__module__.split(".")[0] == "webdataset":
        return "none"  # its node and worker splitters do
    if is_hf(dataset, "IterableDataset") or not isinstance(dataset, IterableDataset):
        return "rank"
    if world_size == 1 and get_worker_info() is None:
        return "rank"
    raise ValueError(
        f"shard must say how {type(dataset).__name__} is to be split, since an IterableDataset may "
        "split itself: 'none' if it splits itself by rank and worker, 'worker' if by rank only, "
        "'rank' if every process sees the whole stream"
    )


def equal_shares(
    dataset: Any,
    num_samples: int | Sequence[int],
    world_size: int,
    num_workers: int,
    shard: str,
) -> list[int]:
    """Samples that worker w of every rank gives in a pass: as many as the rank with the fewest has.

    Args:
        dataset: the stream.
        num_samples: in the whole stream; or in each of its shards.
        world_size: data-parallel ranks.
        num_workers: of each rank.
        shard: see ``resolve_shard``.

    Returns:
        (num_workers,) samples.

    Raises:
        ValueError: the sizes do not tell what a reader has.
    """
    sizes = [num_samples] if isinstance(num_samples, int) else [int(size) for size in num_samples]
    if min(sizes, default=0) < 1:
        raise ValueError(f"num_samples must be at least 1, got {num_samples!r}")
    if shard == "none":
        raise ValueError(
            "num_samples needs shard='rank' or 'worker': else nobody knows who has what"
        )
    if is_hf(dataset, "IterableDataset"):
        num_shards = getattr(dataset, "num_shards", None) or dataset.n_shards
        return _shares_of_shards(num_shards, sizes, world_size, num_workers)
    total = sum(sizes)
    last = Reader(world_size - 1, world_size, 0, num_workers)
    shares = []
    for worker in range(num_workers):
        first, step = Reader(last.rank, world_size, worker, num_workers).stride(shard)
        shares.append(max(0, -((first - total) // step)))
    return shares


def _shares_of_shards(
    num_shards: int, sizes: list[int], world_size: int, num_workers: int
) -> list[int]:
    """Shares of a ``datasets`` stream, whose shards go whole to ranks and then to workers.

    From the second epoch on ``datasets`` deals the shards in another order, so every shard counts
    as much as the smallest.
    """
    if len(sizes) != num_shards:
        if len(sizes) > 1 or sizes[0] % num_shards:
            raise ValueError(
                f"num_samples must have one size per shard, of which there are {num_shards}, or be "
                f"one multiple of {num_shards} if all are equal; got {sizes[:8]}"
            )
        sizes = [sizes[0] // num_shards] * num_shards
    if num_shards % world_size == 0:
        own = num_shards // world_size
        return [len(range(worker, own, num_workers)) * min(sizes) for worker in range(num_workers)]
    if num_shards == 1:
        return [sizes[0] // world_size] + [0] * (num_workers - 1)
    raise ValueError(
        f"num_samples needs shards that can be dealt to {world_size} ranks, got {num_shards} shards"
    )


def loader_of(dataset: Any) -> Any:
    """The loader that iterates over a data set now, from the frames of the calls; None if there is
    none. For the data set None, a loader of any.

    A data set is not told which loader reads it. In a forked worker, and where it is pickled for
    a spawned one, the loader is a local variable of torch's own code some calls up.
    """
    frame = sys._getframe(1)
    while frame is not None:
        package = str(frame.f_globals.get("__name__")).split(".")[0]
        if package in ("torch", "torchdata") and "loader" in frame.f_code.co_varnames:
            loader = frame.f_locals.get("loader")
            if isinstance(loader, DataLoader) and (dataset is None or loader.dataset is dataset):
                return loader
        frame = frame.f_back  # type: ignore[assignment]
    return None


def check_loader(loader: Any, micro_batch_size: int) -> None:
    """Refuse a loader that would destroy the order.

    Args:
        loader: of torch.
        micro_batch_size: neighbours that are kept together.

    Raises:
        ValueError: it takes batches from workers as they come.
    """
    if loader.num_workers > 0 and not getattr(loader, "in_order", True):
        raise ValueError(
            "in_order=False takes batches from whichever worker is first, so ranks would no longer "
            "meet samples of like length at the same step: leave the loader's in_order True"
        )
    batch_size, info = loader.batch_size, get_worker_info()
    tells = info is None or info.id == 0
    if tells and batch_size is not None and batch_size != micro_batch_size:
        print_log(
            f"micro_batch_size is {micro_batch_size} and the loader's batch size is {batch_size}: "
            "samples that share a batch will not all be of like length; set them equal",
            "current",
            logging.WARNING,
        )
