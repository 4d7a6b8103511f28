"""Samplers of other libraries, run for every rank, as epochs that can be measured."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Any

import torch

from xlength.plan.epoch import EpochPlan
from xlength.plan.groups import Groups, Ints
from xlength.report.epochs import of_ranks
from xlength.report.measures import Strategy

Batches = list[list[int]]


def peers(
    lengths: Ints, batch_size: int, world_size: int, max_tokens: int, seed: int
) -> list[Strategy]:
    """Of transformers, and of lhotse where it is installed.

    Args:
        lengths: (n,) int64 tokens, all positive.
        batch_size: of samplers with batches of a fixed size, and on average of the others.
        world_size: ranks that are simulated, one after the other.
        max_tokens: of a batch, for lhotse: the sum of its lengths.
        seed: of the run.
    """
    values, count = lengths.tolist(), len(lengths)

    def grouped(epoch: int, num_steps: int | None) -> EpochPlan:
        return _length_grouped(values, batch_size, world_size, seed + epoch)

    def distributed(epoch: int, num_steps: int | None) -> EpochPlan:
        return _distributed(values, batch_size, world_size, seed, epoch)

    def rebalanced(epoch: int, num_steps: int | None) -> EpochPlan:
        return of_batches(
            (_rebalanced(values, batch_size, world_size, rank, seed, epoch), count)
            for rank in range(world_size)
        )

    result = [
        Strategy("transformers LengthGroupedSampler", grouped, kind="peer"),
        Strategy("transformers DistributedLengthGroupedSampler", distributed, kind="peer"),
        Strategy("transformers BatchRebalanceSampler", rebalanced, kind="peer"),
    ]
    if find_spec("lhotse") is not None:
        build = _lhotse(values, max_tokens, world_size, seed)
        note = "lhotse: max_duration counts the sum of lengths; padded batches may exceed it"
        result.append(Strategy("lhotse DynamicBucketingSampler", build, kind="peer", note=note))
    return result


def of_batches(ranks: Iterable[tuple[Batches, int]]) -> EpochPlan:
    """The steps that all ranks take, from the batches of each rank and the number of samples."""
    rows = list(ranks)
    num_steps = min(len(batches) for batches, _ in rows)
    groups = Groups.from_lists(batch for batches, _ in rows for batch in batches[:num_steps])
    steps = torch.arange(len(groups)).reshape(len(rows), num_steps).T.numpy()
    return EpochPlan.counted(groups, steps, rows[0][1])


def _length_grouped(lengths: list[int], batch_size: int, world_size: int, seed: int) -> EpochPlan:
    """As transformers' Trainer runs it: accelerate deals whole batches to the ranks in turn."""
    from accelerate.data_loader import BatchSamplerShard
    from torch.utils.data import BatchSampler
    from transformers.trainer_pt_utils import LengthGroupedSampler

    def of_rank(rank: int) -> Batches:
        generator = torch.Generator().manual_seed(seed)
        sampler = LengthGroupedSampler(batch_size, lengths=lengths, generator=generator)
        batches = BatchSampler(sampler, batch_size, drop_last=False)
        return list(BatchSamplerShard(batches, world_size, rank))

    return of_batches((of_rank(rank), len(lengths)) for rank in range(world_size))


def _distributed(
    lengths: list[int], batch_size: int, world_size: int, seed: int, epoch: int
) -> EpochPlan:
    from transformers.trainer_pt_utils import DistributedLengthGroupedSampler

    indices = []
    for rank in range(world_size):
        sampler = DistributedLengthGroupedSampler(
            batch_size, num_replicas=world_size, rank=rank, seed=seed, lengths=lengths
        )
        sampler.set_epoch(epoch)
        indices.append(list(sampler))
    order = torch.tensor(indices).T.reshape(-1).numpy()
    return of_ranks(order, batch_size, world_size, len(lengths))


def _rebalanced(
    lengths: list[int], batch_size: int, world_size: int, rank: int, seed: int, epoch: int
) -> Batches:
    from transformers.trainer_pt_utils import BatchRebalanceSampler

    sampler = BatchRebalanceSampler(
        lengths, batch_size * world_size, world_size, 1, seed=seed, rank=rank, drop_last=False
    )
    sampler.set_epoch(epoch)
    return list(sampler)


def _lhotse(
    lengths: list[int], max_tokens: int, world_size: int, seed: int
) -> Callable[[int, int | None], EpochPlan]:
    """Cuts whose seconds are tokens, in 30 buckets that the ranks share."""
    from lhotse import CutSet
    from lhotse.dataset.sampling import DynamicBucketingSampler
    from lhotse.testing.dummies import dummy_cut

    cuts: list[Any] = []

    def build(epoch: int, num_steps: int | None) -> EpochPlan:
        if not cuts:
            made = (dummy_cut(i, duration=float(length)) for i, length in enumerate(lengths))
            cuts.append(CutSet.from_cuts(made))
        return of_batches((of_rank(rank, epoch), len(lengths)) for rank in range(world_size))

    def of_rank(rank: int, epoch: int) -> Batches:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sampler = DynamicBucketingSampler(
                cuts[0],
                max_duration=float(max_tokens),
                num_buckets=30,
                shuffle=True,
                drop_last=False,
                world_size=world_size,
                rank=rank,
                seed=seed,
            )
            sampler.set_epoch(epoch)
            return [[_index(cut.id) for cut in batch] for batch in sampler]

    return build


def _index(cut_id: str) -> int:
    """The sample of a cut; ranks without a batch at the end get copies named ``..._dup0``."""
    return int(cut_id.rsplit("-", 1)[-1].split("_")[0])
