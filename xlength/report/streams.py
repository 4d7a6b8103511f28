"""A stream sorted by pools, beside the strategies for data that can be indexed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from xlength.plan.cost import TOKENS
from xlength.plan.epoch import EpochPlan, epoch_rng
from xlength.plan.groups import Groups, Ints
from xlength.plan.pool_options import PoolOptions
from xlength.plan.stream_ranks import orders_of_ranks
from xlength.report.measures import Row, Strategy, measure
from xlength.report.strategies import Setting, cost_option

POOL_BATCHES = 64
"""Micro-batches in a pool, where nothing else is known."""
_MOST_SAMPLES = 65_536
_SEED_OF_SHUFFLE = 7


def pool_strategy(lengths: Ints, setting: Setting) -> Strategy:
    """``LengthPoolSortDataset`` with micro-batches of the batch size, one worker a rank.

    The stream is taken to be shuffled anew each epoch and dealt to the ranks sample by sample.
    Steps are those that all ranks fill; what is left over belongs to the next pass.

    Cost: 3 microseconds a sample, of the first 65,536 alone.
    """
    kept = np.abs(lengths[:_MOST_SAMPLES])
    world_size, size = setting.world_size, setting.batch_size
    options = PoolOptions(POOL_BATCHES * size, micro_batch_size=size)
    by_cost = None if setting.cost == TOKENS else setting.cost

    def build(epoch: int, num_steps: int | None) -> EpochPlan:
        order = stream_order(len(kept), epoch)
        shares = [order[rank::world_size] for rank in range(world_size)]
        keys = [kept[share] if by_cost is None else by_cost.of(kept[share]) for share in shares]
        places = orders_of_ranks(options, keys, epoch=epoch)
        steps = max(1, min(len(share) for share in shares) // size)
        drawn = [share[place][: steps * size] for share, place in zip(shares, places, strict=True)]
        sizes = np.concatenate([_sizes(len(part), size, steps) for part in drawn])
        groups = Groups.from_sizes(np.concatenate(drawn), sizes)
        table = np.arange(world_size * steps, dtype=np.int64).reshape(world_size, steps).T
        return EpochPlan.counted(groups, table, len(kept))

    shown: dict[str, object] = {"pool_size": options.pool_size, "micro_batch_size": size}
    if by_cost is not None:
        shown["cost"] = cost_option(by_cost)
    note = "a stream, shuffled anew each epoch"
    if len(kept) < len(lengths):
        note += f"; its first {len(kept):,} samples"
    return Strategy("LengthPoolSortDataset", build, shown, kind="stream", note=note)


def pool_row(lengths: Ints, setting: Setting) -> Row:
    """The row of ``pool_strategy``, with the steps of the whole stream; nothing of it is lost."""
    row = measure(pool_strategy(lengths, setting), lengths, setting.cost, setting.attention)
    whole = max(1, len(lengths) // (setting.world_size * setting.batch_size))
    return replace(row, steps=whole, dropped=0)


def stream_order(num_samples: int, epoch: int) -> Ints:
    """(n,) int64: the order in which a stream gives its samples in an epoch."""
    return epoch_rng(_SEED_OF_SHUFFLE, epoch).permutation(num_samples).astype(np.int64)


def _sizes(total: int, size: int, steps: int) -> Ints:
    """(steps,) samples of each micro-batch; only a stream of less than one has a smaller one."""
    result = np.full(steps, size, dtype=np.int64)
    result[-1] = total - (steps - 1) * size
    return result
