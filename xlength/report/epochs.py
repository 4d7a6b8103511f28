"""Epochs of the samplers that are no plans, as plans: what every rank draws at every step."""

from __future__ import annotations

import numpy as np

from xlength.plan.epoch import EpochPlan
from xlength.plan.groups import Groups, Ints
from xlength.plan.order import default_mega_batch_mult, length_grouped_order
from xlength.samplers.length_grouped import permutations


def default_sampler_epoch(
    num_samples: int,
    batch_size: int,
    world_size: int,
    *,
    seed: int,
    epoch: int,
    shuffle: bool = True,
    round_up: bool = True,
) -> EpochPlan:
    """What a loader with mmengine's ``DefaultSampler`` computes.

    Args:
        num_samples: of the data set.
        batch_size: of the loader.
        world_size: data-parallel ranks.
        seed, epoch: as in the sampler.
        shuffle, round_up: the sampler's.
    """
    order = np.arange(num_samples, dtype=np.int64)
    if shuffle:
        order = permutations(seed + epoch)(num_samples)
    if round_up:
        order = np.resize(order, -(-num_samples // world_size) * world_size)
    return of_ranks(order, batch_size, world_size, num_samples)


def length_grouped_epoch(
    lengths: Ints,
    batch_size: int,
    world_size: int,
    *,
    seed: int,
    epoch: int,
    per_device_batch_size: int | None = None,
    mega_batch_mult: int | None = None,
    round_up: bool = True,
) -> EpochPlan:
    """What a loader with ``LengthGroupedSampler`` computes.

    Args:
        lengths: (n,) int64, signed by modality.
        batch_size: of the loader.
        world_size: data-parallel ranks.
        seed, epoch: as in the sampler.
        per_device_batch_size: the sampler's, by default the loader's.
        mega_batch_mult, round_up: the sampler's.
    """
    total = (per_device_batch_size or batch_size) * world_size
    window = (mega_batch_mult or default_mega_batch_mult(len(lengths), total)) * total
    order = length_grouped_order(lengths, window, permutations(seed + epoch))
    if round_up:
        order = np.resize(order, -(-len(lengths) // total) * total)
    return of_ranks(order, batch_size, world_size, len(lengths))


def of_ranks(order: Ints, batch_size: int, world_size: int, num_samples: int) -> EpochPlan:
    """Rank r draws every ``world_size``-th index from r on, cut into batches by the loader.

    Where ranks draw unequal numbers, only the steps count that all of them take.
    """
    each = len(order) // world_size
    mine = order[: each * world_size].reshape(each, world_size).T
    steps = -(-each // batch_size)
    sizes = np.full(steps, batch_size, dtype=np.int64)
    sizes[-1] = each - (steps - 1) * batch_size
    groups = Groups.from_sizes(mine.reshape(-1), np.tile(sizes, world_size))
    places = np.arange(world_size * steps, dtype=np.int64).reshape(world_size, steps).T
    return EpochPlan.counted(groups, places, num_samples)
