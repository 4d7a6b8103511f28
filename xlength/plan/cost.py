"""What a sample, and a batch of samples, costs to compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xlength.plan.groups import Groups

DEFAULT_CROSSOVER = 12288
"""Length, in tokens, at which attention costs as much as the rest of a layer of a 7-billion-parameter model."""


@dataclass(frozen=True)
class Cost:
    """Cost of one sample of length l, in units of one token's cost without attention: ``l + l^2 / crossover``.

    Args:
        crossover: tokens; None counts tokens only.
    """

    crossover: float | None = None

    def of(self, lengths: NDArray[Any]) -> NDArray[np.float64]:
        """(n,) lengths in tokens, of either sign -> (n,) float64 costs."""
        size = np.abs(np.asarray(lengths)).astype(np.float64)
        if self.crossover is None:
            return size
        return size + size * size / self.crossover


TOKENS = Cost()
ATTENTION = Cost(DEFAULT_CROSSOVER)


def padded_costs(lengths: NDArray[Any], groups: Groups, cost: Cost = TOKENS) -> NDArray[np.float64]:
    """(g,) cost of each batch as it is computed, padded: rows x cost(longest)."""
    result: NDArray[np.float64] = groups.sizes * cost.of(groups.maxima(np.abs(lengths)))
    return result
