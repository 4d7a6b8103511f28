"""Plans: the whole order of an epoch, made by pure functions of numpy arrays. Imports numpy only."""

from xlength.plan.cost import ATTENTION, DEFAULT_CROSSOVER, TOKENS, Cost, padded_costs
from xlength.plan.groups import Groups, fingerprint
from xlength.plan.order import default_mega_batch_mult, length_grouped_order
from xlength.plan.report import (
    batchmate_repeat,
    padding_efficiency,
    rank_balance,
    step_correlation,
    step_costs,
    wall_efficiency,
)

__all__ = [
    "ATTENTION",
    "DEFAULT_CROSSOVER",
    "TOKENS",
    "Cost",
    "Groups",
    "batchmate_repeat",
    "default_mega_batch_mult",
    "fingerprint",
    "length_grouped_order",
    "padded_costs",
    "padding_efficiency",
    "rank_balance",
    "step_correlation",
    "step_costs",
    "wall_efficiency",
]
