"""An epoch that another number of ranks goes on with: what is left of it, planned anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xlength.plan.epoch import EpochPlan, Plan
from xlength.plan.groups import Groups, Ints

Stretch = tuple[int, int]
"""(world_size, steps): that many ranks took so many steps of the epoch."""


def continued_plan(
    plan: Plan,
    lengths: NDArray[Any],
    history: Sequence[Stretch],
    *,
    seed: int,
    epoch: int,
    world_size: int,
    num_steps: int | None = None,
) -> EpochPlan:
    """The plan of an epoch, or of what is left of it after other numbers of ranks began it.

    Kept is the set: every sample that the first plan would still have drawn is drawn exactly once
    (where fewer samples than ranks are left, as the plan's docstring says); what it dropped by
    ``drop_last`` stays dropped, and nothing more is. What changes is the
    grouping: the samples that are left are put into batches and steps anew, by the same options.

    Cost: one plan a stretch, all but the last for the samples alone.

    Args:
        plan, lengths, seed, epoch: as for ``Plan.build``.
        history: what happened in this epoch before, oldest first; empty for a whole epoch.
        world_size: data-parallel ranks that go on.
        num_steps: of a whole epoch on ``world_size`` ranks; not used where there is a history.

    Returns:
        A plan over the samples of the whole data set; it has no steps if nothing is left.
    """
    members: Ints | None = None
    for ranks, steps in history:
        if members is None:
            num = plan.build(lengths, seed=0, epoch=0, world_size=ranks).num_steps
            begun = plan.build(lengths, seed=seed, epoch=epoch, world_size=ranks, num_steps=num)
        else:
            begun = _plan_of(plan, lengths, members, seed, epoch, ranks)
        members = samples_left(begun, steps)
    if members is None:
        return plan.build(
            lengths, seed=seed, epoch=epoch, world_size=world_size, num_steps=num_steps
        )
    return _plan_of(plan, lengths, members, seed, epoch, world_size)


def samples_left(plan: EpochPlan, steps: int) -> Ints:
    """Samples, rising and each once, that a plan draws after its first ``steps``, not in them."""
    left = np.zeros(plan.num_samples, dtype=np.bool_)
    left[plan.groups.take(plan.steps[steps:].ravel()).members] = True
    left[plan.groups.take(plan.steps[:steps].ravel()).members] = False
    return np.flatnonzero(left).astype(np.int64)


def _plan_of(
    plan: Plan, lengths: NDArray[Any], members: Ints, seed: int, epoch: int, world_size: int
) -> EpochPlan:
    """The plan of some samples, which keep their numbers."""
    if not len(members):
        empty = Groups.from_sizes(members, np.zeros(0, dtype=np.int64))
        steps = np.zeros((0, world_size), dtype=np.int64)
        return EpochPlan(empty, steps, len(lengths), dropped=len(lengths))
    if getattr(plan, "drop_last", False):
        plan = replace(plan, drop_last=False)  # type: ignore[type-var]
    part = plan.build(lengths[members], seed=seed, epoch=epoch, world_size=world_size)
    groups = Groups(members[part.groups.members], part.groups.offsets)
    dropped = len(lengths) - len(members) + part.dropped
    return EpochPlan(groups, part.steps, len(lengths), part.repeated, dropped, part.mixed_steps)
