"""Measures of a plan: pure functions of lengths, batches and steps. See ``xlength report`` for the
table.

``steps`` is (num_steps, world_size) int64: row s holds, for every data-parallel rank, the index of
its group in ``groups``. Lengths may be signed; their size counts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xlength.plan.cost import TOKENS, Cost, padded_costs
from xlength.plan.groups import Groups, Ints


def padding_efficiency(lengths: NDArray[Any], groups: Groups) -> float:
    """Real tokens / padded tokens over all batches, in (0, 1]."""
    size = np.abs(lengths)
    return _ratio(size[groups.members].sum(), (groups.sizes * groups.maxima(size)).sum())


def step_costs(
    lengths: NDArray[Any], groups: Groups, steps: Ints, cost: Cost = TOKENS
) -> NDArray[np.float64]:
    """(num_steps, world_size) float64, the padded cost of every rank's batch at every step."""
    return padded_costs(lengths, groups, cost)[steps]


def rank_balance(costs: NDArray[np.float64]) -> float:
    """Mean over steps of (mean / largest cost over ranks), from ``step_costs``; in (0, 1]."""
    slowest = costs.max(axis=1)
    return float(np.mean(costs.mean(axis=1) / slowest))


def wall_efficiency(
    lengths: NDArray[Any], groups: Groups, steps: Ints, cost: Cost = TOKENS
) -> float:
    """Share of all machines' time that is useful: cost of the real samples / (world size x sum of
    slowest ranks).

    A sample that is drawn twice counts once: its repetition is no useful work.
    """
    drawn = np.unique(groups.take(steps.reshape(-1)).members)
    slowest = step_costs(lengths, groups, steps, cost).max(axis=1).sum()
    return _ratio(cost.of(lengths[drawn]).sum(), steps.shape[1] * slowest)


def step_correlation(lengths: NDArray[Any], groups: Groups, steps: Ints) -> float:
    """Lag-1 correlation of successive steps' mean lengths; 0 = no saw-tooth, or undefined."""
    totals = groups.sums(np.abs(lengths))[steps].sum(axis=1)
    means = totals / groups.sizes[steps].sum(axis=1)
    before, after = means[:-1], means[1:]
    if len(before) < 2 or np.ptp(before) == 0 or np.ptp(after) == 0:
        return 0.0
    return float(np.corrcoef(before, after)[0, 1])


def batchmate_repeat(groups: Groups, next_groups: Groups) -> float:
    """Share of the pairs that share a batch in one epoch and share one again in the next.

    A sample that was drawn more than once stands where it was drawn first. Cost: one sort of the
    samples.
    """
    now, then = _group_of(groups), _group_of(next_groups)
    length = min(len(now), len(then))
    both = (now[:length] >= 0) & (then[:length] >= 0)
    now, then = now[:length][both], then[:length][both]
    pairs = _pairs(now)
    return _ratio(_pairs(now * (len(next_groups) + 1) + then), pairs) if pairs else 0.0


def _group_of(groups: Groups) -> Ints:
    """(largest member + 1,) int64: the group that draws each sample first, -1 for none."""
    owner = np.repeat(np.arange(len(groups), dtype=np.int64), groups.sizes)
    result = np.full(int(groups.members.max(initial=-1)) + 1, -1, dtype=np.int64)
    result[groups.members[::-1]] = owner[::-1]
    return result


def _pairs(labels: Ints) -> int:
    counts = np.unique(labels, return_counts=True)[1]
    return int((counts * (counts - 1) // 2).sum())


def _ratio(part: Any, whole: Any) -> float:
    return float(part) / float(whole) if whole else 0.0
