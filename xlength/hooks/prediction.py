"""What the plan of an epoch promises, to be compared with what training measured."""

from __future__ import annotations

from typing import Any

import numpy as np

from xlength.lengths import get_lengths
from xlength.plan.cost import TOKENS, Cost
from xlength.plan.epoch import EpochPlan
from xlength.plan.groups import Ints
from xlength.plan.report import rank_balance
from xlength.report.measures import Strategy, batch_costs
from xlength.report.samplers import strategy_of
from xlength.runtime.loaders import is_stream, sampler_of
from xlength.runtime.random_state import collate_of
from xlength.samplers.plan import PlanSampler

FIGURES = ("padding_efficiency", "wall_efficiency", "rank_balance")


def predict(loader: Any, start: int, num_steps: int, cost: Cost) -> dict[str, float] | None:
    """Figures of some steps of the present epoch, from the loader's sampler alone.

    Repeated samples count as useful here, as they do in a measurement, which cannot tell.

    Cost: the epoch's plan, which ``PlanSampler`` keeps; for other samplers it is made once more.

    Args:
        loader: of the training data.
        start: batches of the epoch that were passed before.
        num_steps: batches that were measured.
        cost: by which ranks are compared.

    Returns:
        None where the order or the lengths are not known: a stream, another sampler, a data set of
        ready packs.
    """
    if cost.weights is not None or num_steps < 1:
        return None
    found = _epoch_of(loader)
    if found is None:
        return None
    plan, strategy, lengths = found
    steps = plan.steps[start : start + num_steps]
    if len(steps) < num_steps:
        return None
    sizes = np.abs(lengths)
    if strategy.rows is not None:
        sizes = np.minimum(sizes, strategy.rows[1])
    groups = plan.groups
    tokens = groups.sums(sizes)[steps].sum()
    padded = batch_costs(strategy, sizes, groups, TOKENS)[steps].sum()
    costs = batch_costs(strategy, sizes, groups, cost)[steps]
    useful = groups.sums(cost.of(sizes))[steps].sum()
    result = {
        "padding_efficiency": float(tokens / padded),
        "wall_efficiency": float(useful / (plan.world_size * costs.max(axis=1).sum())),
    }
    if plan.world_size > 1:
        result["rank_balance"] = rank_balance(costs)
    return result


def _epoch_of(loader: Any) -> tuple[EpochPlan, Strategy, Ints] | None:
    dataset: Any = getattr(loader, "dataset", None)
    sampler, _ = sampler_of(loader)
    if is_stream(loader) or not hasattr(dataset, "__len__") or _has_packs(dataset):
        return None
    packed = "packed_collate_fn" in _name_of(collate_of(loader))
    world_size = getattr(sampler, "world_size", 1)
    strategy = strategy_of(sampler, loader.batch_size, len(dataset), world_size, packed)
    if strategy is None or getattr(sampler, "_history", None) and strategy.kind != "plan":
        return None
    if isinstance(sampler, PlanSampler):
        lengths, plan = sampler.length, sampler.epoch_plan()
    else:
        lengths = getattr(sampler, "length", None)
        plan = strategy.build(sampler.epoch, None)
    if not isinstance(lengths, np.ndarray):
        try:
            lengths = get_lengths(dataset)
        except (ValueError, TypeError, AttributeError):
            return None
    return plan, strategy, lengths


def _has_packs(dataset: Any) -> bool:
    """Whether its items are packs, whose cost their length does not tell."""
    columns = getattr(dataset, "column_names", None) or ()
    return hasattr(dataset, "packs") or "cumulative_len" in columns


def _name_of(function: Any) -> str:
    function = getattr(function, "func", function)  # of a partial
    return str(getattr(function, "__name__", ""))
