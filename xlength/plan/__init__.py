"""Plans: the whole order of an epoch, made by pure functions of arrays. Imports numpy only."""

from xlength.plan.balance import deal
from xlength.plan.cost import ATTENTION, DEFAULT_CROSSOVER, TOKENS, Cost, padded_costs
from xlength.plan.epoch import EpochPlan, Plan, epoch_rng
from xlength.plan.groups import Groups, fingerprint
from xlength.plan.order import default_mega_batch_mult, length_grouped_order
from xlength.plan.outlook import packing_outlook
from xlength.plan.pack import best_fit, concat, next_fit, pack_samples
from xlength.plan.pieces import Overlong, Packs, Pieces, cut_overlong
from xlength.plan.report import (
    batchmate_repeat,
    padding_efficiency,
    rank_balance,
    step_correlation,
    step_costs,
    wall_efficiency,
)
from xlength.plan.specs import FixedBatch, TokenBudget

__all__ = [
    "ATTENTION",
    "DEFAULT_CROSSOVER",
    "TOKENS",
    "TokenBudget",
    "Cost",
    "EpochPlan",
    "FixedBatch",
    "Groups",
    "Plan",
    "Overlong",
    "Packs",
    "Pieces",
    "batchmate_repeat",
    "deal",
    "best_fit",
    "concat",
    "cut_overlong",
    "default_mega_batch_mult",
    "epoch_rng",
    "fingerprint",
    "length_grouped_order",
    "next_fit",
    "pack_samples",
    "packing_outlook",
    "padded_costs",
    "padding_efficiency",
    "rank_balance",
    "step_correlation",
    "step_costs",
    "wall_efficiency",
]
