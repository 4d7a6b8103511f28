"""The figures of one strategy: a row of the report's table and of its JSON."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xlength.plan.cost import TOKENS, Cost
from xlength.plan.epoch import EpochPlan
from xlength.plan.groups import Groups, Ints
from xlength.plan.report import batchmate_repeat, rank_balance, step_correlation


@dataclass(frozen=True)
class Strategy:
    """A way to order and batch samples, to be simulated.

    Args:
        name: of the sampler or the plan.
        build: (epoch, steps of the first epoch or None) -> the epoch.
        options: what to write into a config besides the name.
        packed: whether the samples of a batch are laid end to end, not padded.
        rows: where packed, the rows of a batch and the tokens of each; None for one row as long as
            its samples.
        kind: ``'sampler'``, ``'plan'``, ``'stream'``, or ``'config'`` for what a config does now.
        note: what the figures do not say.
    """

    name: str
    build: Callable[[int, int | None], EpochPlan]
    options: Mapping[str, Any] = field(default_factory=dict)
    packed: bool = False
    rows: tuple[int, int] | None = None
    kind: str = "plan"
    note: str = ""


@dataclass(frozen=True)
class Row:
    """What one strategy does in an epoch; the figures are those of ``xlength.plan.report``.

    Args:
        strategy: what was simulated.
        costs: (num_steps, world_size) float64 by the chosen cost, as computed, for the plots.
        rows_per_batch: fewest, mean and most samples in a batch.
        others: as in DESIGN's table of words.
    """

    strategy: Strategy
    steps: int
    padding_efficiency: float
    rank_balance: float
    wall_efficiency_tokens: float
    wall_efficiency_attention: float
    step_correlation: float
    batchmate_repeat: float
    repeated: int
    dropped: int
    plan_seconds: float
    mixed_steps: int
    rows_per_batch: tuple[int, float, int]
    max_batch_tokens: int
    costs: NDArray[np.float64]

    def wall_efficiency(self, cost: Cost) -> float:
        """Under tokens or attention, whichever ``cost`` is."""
        return self.wall_efficiency_tokens if cost == TOKENS else self.wall_efficiency_attention

    def as_dict(self) -> dict[str, Any]:
        """One entry of ``strategies`` in the report's JSON."""
        least, mean, most = self.rows_per_batch
        return {
            "name": self.strategy.name,
            "steps": self.steps,
            "padding_efficiency": self.padding_efficiency,
            "rank_balance": self.rank_balance,
            "wall_efficiency_tokens": self.wall_efficiency_tokens,
            "wall_efficiency_attention": self.wall_efficiency_attention,
            "step_correlation": self.step_correlation,
            "batchmate_repeat": self.batchmate_repeat,
            "repeated": self.repeated,
            "dropped": self.dropped,
            "plan_seconds": self.plan_seconds,
            "mixed_steps": self.mixed_steps,
            "rows_per_batch": {"min": least, "mean": mean, "max": most},
            "max_batch_tokens": self.max_batch_tokens,
            "options": {key: _plain(value) for key, value in self.strategy.options.items()},
            "kind": self.strategy.kind,
            "note": self.strategy.note,
        }


def measure(strategy: Strategy, lengths: Ints, cost: Cost, attention: Cost, epochs: int = 2) -> Row:
    """Simulate the first epoch of a strategy, and the second for its batch-mates.

    Args:
        strategy: what to simulate.
        lengths: (n,) int64 tokens, of either sign.
        cost: by which ranks are compared: tokens, or ``attention``.
        attention: the attention cost, reported beside tokens.
        epochs: 1 leaves the batch-mates out (NaN).
    """
    start = time.perf_counter()
    now = strategy.build(0, None)
    plan_seconds = time.perf_counter() - start
    repeat = float("nan")
    if epochs > 1:
        repeat = batchmate_repeat(now.groups, strategy.build(1, now.num_steps).groups)
    sizes = np.abs(lengths[: now.num_samples])
    if strategy.rows is not None:
        sizes = np.minimum(sizes, strategy.rows[1])
    tokens = batch_costs(strategy, sizes, now.groups, TOKENS)
    by_attention = batch_costs(strategy, sizes, now.groups, attention)
    counts = now.groups.sizes
    used = np.unique(now.steps) if now.steps.size != len(now.groups) else slice(None)
    real = float(now.groups.sums(sizes)[now.steps].sum())
    costs = (tokens if cost == TOKENS else by_attention)[now.steps]
    return Row(
        strategy=strategy,
        steps=now.num_steps,
        padding_efficiency=real / float(tokens[now.steps].sum()),
        rank_balance=rank_balance(costs),
        wall_efficiency_tokens=_wall(now, sizes, tokens, TOKENS),
        wall_efficiency_attention=_wall(now, sizes, by_attention, attention),
        step_correlation=step_correlation(sizes, now.groups, now.steps),
        batchmate_repeat=repeat,
        repeated=now.repeated,
        dropped=now.dropped,
        plan_seconds=plan_seconds,
        mixed_steps=now.mixed_steps,
        rows_per_batch=(
            int(counts[used].min()),
            float(counts[used].mean()),
            int(counts[used].max()),
        ),
        max_batch_tokens=int(tokens[used].max()),
        costs=costs,
    )


def batch_costs(strategy: Strategy, sizes: Ints, groups: Groups, cost: Cost) -> NDArray[np.float64]:
    """(g,) cost of each batch as it is computed.

    Padded: rows x cost(longest). Packed: the sum over samples, since samples do not see each other;
    and where rows are filled up to a length, that padding.
    """
    if not strategy.packed:
        return cost.padded(sizes, groups)
    result = groups.sums(cost.of(sizes))
    if strategy.rows is not None and strategy.rows[0] > 1:
        rows, width = strategy.rows
        result = result + (rows * width - groups.sums(sizes))
    return result


def _wall(now: EpochPlan, sizes: Ints, costs: NDArray[np.float64], cost: Cost) -> float:
    """As ``xlength.plan.wall_efficiency``: a sample that is drawn twice counts once."""
    values = cost.of(sizes)
    if now.dropped:
        seen = np.zeros(len(sizes), dtype=np.bool_)
        seen[now.groups.take(now.steps.reshape(-1)).members] = True
        values = values[seen]
    slowest = float(costs[now.steps].max(axis=1).sum())
    return float(values.sum()) / (now.world_size * slowest)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return value if isinstance(value, (int, float, str, bool, type(None))) else str(value)
