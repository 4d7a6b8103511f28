"""What a loader that is already there will compute: its sampler as a strategy."""

from __future__ import annotations

from typing import Any

from mmengine.dataset import DefaultSampler

from xlength.plan.epoch import EpochPlan
from xlength.report.epochs import default_sampler_epoch, of_ranks
from xlength.report.measures import Strategy
from xlength.samplers.length_grouped import LengthGroupedSampler
from xlength.samplers.plan import PlanSampler


def strategy_of(
    sampler: Any, batch_size: int | None, num_samples: int, world_size: int, packed: bool = False
) -> Strategy | None:
    """The strategy of a sampler object, with its own seed.

    Args:
        sampler: ``DefaultSampler``, ``LengthGroupedSampler`` or ``PlanSampler``.
        batch_size: the loader's, None where the sampler gives whole batches.
        num_samples: of the data set.
        world_size: data-parallel ranks.
        packed: whether the loader lays samples end to end.

    Returns:
        None for any other sampler: what it draws is not known without drawing it.
    """
    if isinstance(sampler, PlanSampler):
        return _of_plan(sampler, packed)
    if batch_size is None:
        return None
    if isinstance(sampler, LengthGroupedSampler):
        return _of_length_grouped(sampler, batch_size)
    if type(sampler) is not DefaultSampler:
        return None

    def build(epoch: int, num_steps: int | None) -> EpochPlan:
        return default_sampler_epoch(
            num_samples,
            batch_size,
            world_size,
            seed=sampler.seed,
            epoch=epoch,
            shuffle=sampler.shuffle,
            round_up=sampler.round_up,
        )

    options = {"shuffle": sampler.shuffle}
    return Strategy("DefaultSampler", build, options, packed=packed, kind="sampler")


def _of_plan(sampler: PlanSampler, packed: bool) -> Strategy:
    plan = sampler.plan

    def build(epoch: int, num_steps: int | None) -> EpochPlan:
        return plan.build(
            sampler.length,
            seed=sampler.seed,
            epoch=epoch,
            world_size=sampler.world_size,
            num_steps=sampler.num_steps,
        )

    rows = None
    if packed and getattr(plan, "packs_per_batch", 1) > 1:
        rows = (plan.packs_per_batch, plan.max_length)
    elif packed and getattr(plan, "overlong", "error") == "truncate":
        rows = (1, plan.max_length)
    return Strategy(type(plan).__name__, build, {}, packed=packed, rows=rows, note=repr(plan))


def _of_length_grouped(sampler: LengthGroupedSampler, batch_size: int) -> Strategy:
    def build(epoch: int, num_steps: int | None) -> EpochPlan:
        order = sampler.order(epoch)
        return of_ranks(order, batch_size, sampler.world_size, len(sampler.length))

    options = {"per_device_batch_size": sampler.per_device_batch_size}
    return Strategy("LengthGroupedSampler", build, options, kind="sampler")
