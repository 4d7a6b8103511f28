"""The strategies that a report compares, with settings that suit the lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from xlength.plan.cost import ATTENTION, TOKENS, Cost
from xlength.plan.epoch import EpochPlan
from xlength.plan.groups import Ints
from xlength.plan.packing import Packing
from xlength.plan.specs import FixedBatch, TokenBudget
from xlength.report.epochs import default_sampler_epoch, length_grouped_epoch
from xlength.report.measures import Row, Strategy, measure

DEFAULT_WINDOW = 4096
FREE_REPEAT, PRICE = 0.10, 0.25
"""Batch-mate repeat that counts for nothing, and what the rest of it counts for, see ``score``."""
TOLERANCE = 0.01
"""Score that a smaller window may lose against the best."""
_MANY_SAMPLES, _MOST_WINDOWS = 200_000, 10


@dataclass(frozen=True)
class Setting:
    """What the strategies are compared for.

    Args:
        world_size: data-parallel ranks.
        batch_size: samples of a batch where it is fixed.
        cost: by which ranks are compared and plans balanced.
        attention: the attention cost that is reported beside tokens.
        accumulate: micro-steps of an optimiser step.
        seed: of the run.
        max_tokens: of ``TokenBudget`` and of a pack; None chooses.
        window: of ``TokenBudget``; None chooses.
        media: samples have images or other media, so that they cannot be packed.
    """

    world_size: int
    batch_size: int
    cost: Cost = ATTENTION
    attention: Cost = ATTENTION
    accumulate: int = 1
    seed: int = 0
    max_tokens: int | None = None
    window: int | None = None
    media: bool = False

    @property
    def cost_name(self) -> str:
        """``'tokens'`` or ``'attention'``."""
        return "tokens" if self.cost == TOKENS else "attention"


def budget_of(lengths: Ints, setting: Setting) -> int:
    """Padded tokens of a batch that make about as many steps as ``batch_size`` samples do.

    That is the mean length times the batch size and a little for what a batch leaves empty, or the
    longest sample where that is more; so the learning rate and its schedule still fit, and no batch
    needs more memory than ``batch_size`` samples of the longest length did.
    """
    if setting.max_tokens is not None:
        return setting.max_tokens
    sizes = np.abs(lengths)
    return max(int(sizes.max()), int(np.ceil(1.03 * setting.batch_size * float(sizes.mean()))))


def plan_strategy(plan: Any, lengths: Ints, setting: Setting, **more: Any) -> Strategy:
    """A plan as ``PlanSampler`` runs it: steps fixed by the first epoch of seed 0."""

    def build(epoch: int, num_steps: int | None) -> EpochPlan:
        if num_steps is None and (setting.seed, epoch) != (0, 0):
            num_steps = build_with(0, 0, None).num_steps
        return build_with(setting.seed, epoch, num_steps)

    def build_with(seed: int, epoch: int, num_steps: int | None) -> EpochPlan:
        return plan.build(
            lengths, seed=seed, epoch=epoch, world_size=setting.world_size, num_steps=num_steps
        )

    return Strategy(type(plan).__name__, build, options_of(plan), **more)


def options_of(plan: Any) -> dict[str, Any]:
    """The options of a plan that differ from its defaults, and the window, as a config has them."""
    options = {}
    for name, field in type(plan).__dataclass_fields__.items():
        value = getattr(plan, name)
        if name == "cost":
            if value != ATTENTION:
                options[name] = cost_option(value)
        elif value != field.default or name == "window" and value is not None:
            options[name] = value
    return options


def cost_option(cost: Cost) -> Any:
    """A cost as a config writes it."""
    if cost == TOKENS:
        return "tokens"
    return "attention" if cost == ATTENTION else dict(type="attention", crossover=cost.crossover)


def strategies(lengths: Ints, setting: Setting) -> list[Strategy]:
    """mmengine's sampler, the length-grouped one, and the plans that suit the lengths."""
    batch_size, world_size = setting.batch_size, setting.world_size
    per_device = batch_size * setting.accumulate
    common: dict[str, Any] = dict(cost=setting.cost, accumulate=setting.accumulate)

    def default(epoch: int, num_steps: int | None) -> EpochPlan:
        return default_sampler_epoch(
            len(lengths), batch_size, world_size, seed=setting.seed, epoch=epoch
        )

    def grouped(epoch: int, num_steps: int | None) -> EpochPlan:
        return length_grouped_epoch(
            lengths,
            batch_size,
            world_size,
            seed=setting.seed,
            epoch=epoch,
            per_device_batch_size=per_device,
        )

    max_tokens = budget_of(lengths, setting)
    window = setting.window or DEFAULT_WINDOW
    fixed = FixedBatch(batch_size, **common)
    budget = TokenBudget(max_tokens, window=window, **common)
    result = [
        Strategy("DefaultSampler", default, {"shuffle": True}, kind="sampler"),
        Strategy(
            "LengthGroupedSampler",
            grouped,
            {"per_device_batch_size": per_device},
            kind="sampler",
        ),
        plan_strategy(fixed, lengths, setting),
        plan_strategy(budget, lengths, setting),
    ]
    if can_pack(lengths, setting):
        packing = Packing(max_tokens, **common)
        result.append(plan_strategy(packing, lengths, setting, packed=True))
    return result


def can_pack(lengths: Ints, setting: Setting) -> bool:
    """Packs hold text alone."""
    return not setting.media and not (lengths.min() < 0 < lengths.max())


def window_curve(lengths: Ints, setting: Setting) -> list[Strategy]:
    """``TokenBudget`` under windows from small to all samples."""
    max_tokens = budget_of(lengths, setting)
    first = 1 << max(4, (8 * setting.batch_size - 1).bit_length())  # some eight batches
    doublings = max(0, int(np.log2(max(1.0, len(lengths) / (1.5 * first)))))
    step = 2 if doublings < _MOST_WINDOWS and len(lengths) <= _MANY_SAMPLES else 4
    windows: list[int | None] = []
    window = first
    while 1.5 * window < len(lengths):
        windows.append(window)
        window *= step
    windows.append(None)
    return [
        plan_strategy(
            TokenBudget(max_tokens, window=w, cost=setting.cost, accumulate=setting.accumulate),
            lengths,
            setting,
        )
        for w in windows
    ]


def score(row: Row, cost: Cost) -> float:
    """What strategies are compared by: wall efficiency, less a price for little variety.

    Up to ``FREE_REPEAT`` of the pairs may meet again for nothing; each further tenth counts as 2.5
    % of the wall efficiency. In a small set all that group by length meet often; this leaves the
    choice among them to the machines' time.
    """
    repeat = 0.0 if np.isnan(row.batchmate_repeat) else row.batchmate_repeat
    return row.wall_efficiency(cost) * (1 - PRICE * max(0.0, repeat - FREE_REPEAT))


def best_window(curve: Iterable[Row], cost: Cost) -> Row:
    """The smallest window whose score is within ``TOLERANCE`` of the best."""
    rows = list(curve)
    best = max(score(row, cost) for row in rows)
    return next(row for row in rows if score(row, cost) >= best - TOLERANCE)


def measure_all(
    items: list[Strategy],
    lengths: Ints,
    setting: Setting,
    progress: Callable[[str], None] = lambda name: None,
) -> list[Row]:
    """Rows of all strategies, two at a time: numpy sorts outside Python's lock."""

    def one(strategy: Strategy) -> Row:
        row = measure(strategy, lengths, setting.cost, setting.attention)
        progress(strategy.name)
        return row

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, items))
