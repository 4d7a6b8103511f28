"""How busy the ranks are kept, and how long planning takes: our plans beside other samplers."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import numpy as np

from xlength.bench.plan_peers import peers
from xlength.bench.timing import peak_bytes, seconds
from xlength.plan.cost import ATTENTION
from xlength.plan.groups import Ints
from xlength.plan.specs import FixedBatch, TokenBudget
from xlength.report.measures import Strategy, measure
from xlength.report.strategies import Setting, plan_strategy, strategies

BATCH_SIZE, WORLD_SIZE = 16, 8

Row = dict[str, Any]


def run(options: Namespace) -> list[Row]:
    """One row a strategy, with the columns of the report; then the time that planning takes.

    All run on the same lengths, for eight simulated ranks, in batches of 16 rows or of so many
    padded tokens as 32 samples of the mean length have. ``ours`` is the wall efficiency by
    attention cost, ``peer`` that of the length-grouped order, ``limit`` what the longest sample
    leaves possible: while one rank computes it, no other can have more work than the budget allows.
    ``plan_seconds`` are those of one rank; ``max_batch_tokens``, padded, is what the memory needs.
    """
    lengths = _lengths(options)
    rows = list(_strategy_rows(lengths, options))
    rows += list(_time_rows(options))
    return rows


def _lengths(options: Namespace) -> Ints:
    """Yours, or made ones: many short samples, a heavy tail, one giant; as mixtures of sets are."""
    if options.lengths:
        return np.abs(np.load(options.lengths)).astype(np.int64)
    random = np.random.default_rng(options.seed)
    count = 4_000 if options.quick else 40_000
    body = np.exp(random.normal(5.2, 0.6, count))
    tail = np.exp(random.normal(6.5, 0.7, count // 10))
    drawn = np.append(body, tail)[random.permutation(len(body) + len(tail))]
    lengths = np.clip(drawn, 16, 6_000).astype(np.int64)
    lengths[len(lengths) // 2] = 11_546
    return lengths


def _strategy_rows(lengths: Ints, options: Namespace) -> Iterator[Row]:
    budget = max(int(lengths.max()), int(32 * lengths.mean()))
    setting = Setting(WORLD_SIZE, BATCH_SIZE, seed=options.seed, max_tokens=budget)
    ours = {strategy.name: strategy for strategy in strategies(lengths, setting)}
    items = [
        ours["DefaultSampler"],
        ours["LengthGroupedSampler"],
        *peers(lengths, BATCH_SIZE, WORLD_SIZE, budget, options.seed),
        plan_strategy(FixedBatch(BATCH_SIZE), lengths, setting),
        plan_strategy(TokenBudget(budget, 1024), lengths, setting),
        plan_strategy(TokenBudget(budget), lengths, setting),
    ]
    limit = _limit(lengths, budget)
    measured = [(item, measure(item, lengths, ATTENTION, ATTENTION)) for item in items]
    base = measured[1][1].wall_efficiency_attention
    for item, row in measured:
        figures = row.as_dict()
        if item.kind == "peer":  # all ranks were run, one after the other
            figures["plan_seconds"] /= WORLD_SIZE
        wall = row.wall_efficiency_attention
        yield {
            "case": _name(item),
            "ours": wall,
            "peer": base,
            "ratio": wall / base,
            "limit": limit if "TokenBudget" in item.name else None,
            **{key: figures[key] for key in _COLUMNS},
            "note": item.note or "peer: LengthGroupedSampler (XTuner's order); by attention cost",
        }


_COLUMNS = (
    "steps",
    "padding_efficiency",
    "rank_balance",
    "wall_efficiency_tokens",
    "wall_efficiency_attention",
    "step_correlation",
    "batchmate_repeat",
    "repeated",
    "dropped",
    "plan_seconds",
    "max_batch_tokens",
)


def _name(strategy: Strategy) -> str:
    window = strategy.options.get("window")
    return strategy.name if window is None else f"{strategy.name}, window {window}"


def _limit(lengths: Ints, max_tokens: int) -> float:
    """Wall efficiency by attention cost that the longest sample leaves possible."""
    costs = np.sort(ATTENTION.of(lengths))[::-1]
    others = np.sort(lengths)[::-1][1 : 1 + 8 * WORLD_SIZE]
    fullest = (max_tokens // others * ATTENTION.of(others)).max()
    waiting = max(0.0, (WORLD_SIZE - 1) * (costs[0] - fullest))
    return float(costs.sum() / (costs.sum() + waiting))


def _time_rows(options: Namespace) -> Iterator[Row]:
    count = 100_000 if options.quick else 1_000_000
    random = np.random.default_rng(options.seed)
    lengths = np.clip(random.lognormal(5.5, 1.0, count), 8, 8192).astype(np.int64)
    peer = _peer_seconds(lengths, options.seed)
    cases: list[tuple[Any, int, float]] = [
        (TokenBudget(16_384), 8, 0.5),
        (TokenBudget(16_384), 600, 0.5),
        (FixedBatch(BATCH_SIZE), 8, 0.15),
        (FixedBatch(BATCH_SIZE), 600, 0.15),
    ]
    for plan, world_size, limit in cases:

        def build(plan: Any = plan, world_size: int = world_size) -> Any:
            return plan.build(lengths, seed=options.seed, epoch=0, world_size=world_size)

        mine = seconds(build)
        yield {
            "case": f"planning {type(plan).__name__}, {count:,} lengths, {world_size} ranks",
            "ours": mine,
            "peer": peer,
            "ratio": peer / mine,
            "limit": limit * count / 1_000_000,
            "bytes_per_sample": peak_bytes(build) / count,
            "note": "planning: seconds; peer: transformers' LengthGroupedSampler, one epoch",
        }


def _peer_seconds(lengths: Ints, seed: int) -> float:
    import torch
    from transformers.trainer_pt_utils import LengthGroupedSampler

    sampler = LengthGroupedSampler(
        BATCH_SIZE * WORLD_SIZE,
        lengths=lengths.tolist(),
        generator=torch.Generator().manual_seed(seed),
    )
    start = time.perf_counter()
    list(sampler)
    return time.perf_counter() - start
