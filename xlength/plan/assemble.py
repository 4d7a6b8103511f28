"""What every plan needs: checked lengths, modalities apart, batches dealt to steps."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xlength.plan.balance import deal
from xlength.plan.cost import ATTENTION, Cost
from xlength.plan.epoch import EpochPlan
from xlength.plan.groups import Groups, Ints


def checked_sizes(lengths: NDArray[Any], cost: Cost) -> NDArray[Any]:
    """(n,) tokens of each sample.

    Raises:
        ValueError: there is none, or one has no token.
    """
    if len(lengths) == 0:
        raise ValueError("lengths is empty: there is nothing to plan")
    sizes = cost.sizes(lengths)
    if sizes.min() < 1:
        row = int(np.argmin(sizes))
        raise ValueError(f"lengths must be at least 1 token, got {int(sizes[row])} at row {row}")
    return sizes


def kinds_of(lengths: NDArray[Any]) -> list[Ints]:
    """Samples of each modality: with images (> 0), text only (< 0); or one array."""
    signs = lengths if lengths.ndim == 1 else lengths[:, 0]
    negative = signs < 0
    if negative.all() or not negative.any():
        return [np.arange(len(signs), dtype=np.int64)]
    return [np.flatnonzero(~negative), np.flatnonzero(negative)]


def dealt(
    batches: list[Groups],
    lengths: NDArray[Any],
    cost: Cost,
    world_size: int,
    accumulate: int,
    rng: np.random.RandomState,
) -> EpochPlan:
    """The batches of all kinds, dealt to steps."""
    groups = batches[0] if len(batches) == 1 else _joined(batches)
    kinds = None
    if len(batches) > 1:
        kinds = np.repeat(np.arange(len(batches)), [len(part) for part in batches])
    sizes, run = cost.sizes(lengths), None
    if cost.weights is not None:
        second = groups.sums(cost.extra(lengths))
        run = max(1, round((len(groups) / world_size) ** 0.5))
    elif cost.crossover is not None:
        second = groups.sizes * groups.maxima(sizes)
    else:
        second = ATTENTION.padded(sizes, groups)
    costs = cost.padded(lengths, groups)
    steps = deal(costs, world_size, rng, accumulate=accumulate, kinds=kinds, second=second, run=run)
    return EpochPlan.counted(groups, steps, len(sizes), kinds)


def _joined(parts: list[Groups]) -> Groups:
    return Groups.from_sizes(
        np.concatenate([part.members for part in parts]),
        np.concatenate([part.sizes for part in parts]),
    )
