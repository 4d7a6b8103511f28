"""Which strategy to take, what it buys, what it costs, and the lines for the config."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from xlength.plan.cost import TOKENS
from xlength.report.measures import Row
from xlength.report.strategies import Setting, score

WORTH = 0.02
"""Score that a less simple strategy must gain to be recommended."""

_FROM_SIMPLE = ("DefaultSampler", "LengthGroupedSampler", "TokenBudget", "FixedBatch", "Packing")


def recommend(rows: Iterable[Row], setting: Setting) -> Row:
    """The simplest strategy within ``WORTH`` of the best score.

    A budget of tokens comes before fixed batches, since its batches need equal memory, and packing
    last, since it needs another collate function and a model that keeps samples apart.

    Args:
        rows: of strategies for data that can be indexed; others are passed over.
        setting: the cost counts.
    """
    known = [row for row in rows if row.strategy.kind in ("sampler", "plan")]
    best = max(score(row, setting.cost) for row in known)
    known.sort(key=lambda row: _FROM_SIMPLE.index(row.strategy.name))
    return next(row for row in known if score(row, setting.cost) >= best - WORTH)


def verdict(row: Row, base: Row, setting: Setting) -> str:
    """The gain over ``base`` and the price, in a sentence or two."""
    name, cost = row.strategy.name, "token" if setting.cost == TOKENS else "attention"
    then, now = base.wall_efficiency(setting.cost), row.wall_efficiency(setting.cost)
    before = "now" if base.strategy.kind == "config" else f"with {base.strategy.name}"
    if now - then < WORTH:
        kept = "this config" if base.strategy.kind == "config" else base.strategy.name
        return f"Keep {kept}: nothing here gains more than {WORTH} of wall efficiency over it."
    dropped = f", and {row.dropped} samples an epoch are left out" if row.dropped else ""
    return (
        f"{name}: wall efficiency {now:.3f} ({cost} cost) instead of {then:.3f} {before}, so where "
        f"computing takes the time an epoch is {now / then:.1f} times shorter; the price: "
        f"{row.batchmate_repeat:.1%} of the pairs that share a batch share one again in the next "
        f"epoch ({base.batchmate_repeat:.1%} {before}){dropped}."
        + _about_steps(row, base)
        + _about_memory(row, base)
    )


def _about_steps(row: Row, base: Row) -> str:
    ratio = base.steps / row.steps
    if 0.9 < ratio < 1.1:
        return ""
    change = f"{ratio:.1f} times as many" if ratio > 1 else f"1/{1 / ratio:.1f} of the"
    return (
        f" An epoch has {row.steps:,} steps instead of {base.steps:,}, each of {change} samples: "
        "mind the learning rate, or change max_tokens or the accumulation."
    )


def _about_memory(row: Row, base: Row) -> str:
    if row.max_batch_tokens >= 0.9 * base.max_batch_tokens:
        return ""
    return (
        f" Its largest batch has {row.max_batch_tokens:,} tokens instead of "
        f"{base.max_batch_tokens:,}: where that fitted, max_tokens may be that large."
    )


def config_lines(
    row: Row,
    setting: Setting,
    length_property: str = "length",
    merge: Collection[str] | None = None,
) -> str:
    """Python to paste at the end of a config.

    Args:
        row: what to switch on.
        setting: the batch size is written where the strategy takes one.
        length_property: the sampler's.
        merge: for a file that gets ``train_dataloader`` from its ``_base_``, the keys that it has
            there: it is assigned anew, to be merged. None updates what the file itself has.
    """
    name = row.strategy.name
    plan: dict[str, Any] = {"type": f"xlength.{name}", **row.strategy.options}
    loader: dict[str, Any] = {}
    if name == "DefaultSampler":
        loader["batch_size"] = setting.batch_size
        loader["sampler"] = dict(type="DefaultSampler", shuffle=True)
        loader["batch_sampler"] = None
    elif name == "LengthGroupedSampler":
        loader["batch_size"] = setting.batch_size
        loader["sampler"] = plan
        loader["batch_sampler"] = None
    else:
        loader["batch_size"] = 1  # the plan decides
        loader["sampler"] = dict(type="xlength.PlanSampler", plan=plan)
        loader["batch_sampler"] = dict(type="xlength.PlanBatchSampler")
    if length_property != "length" and name != "DefaultSampler":
        loader["sampler"]["length_property"] = length_property
    if name == "Packing":
        loader["collate_fn"] = dict(type="xlength.packed_collate_fn")
    if merge is not None:
        for key, value in loader.items():
            if isinstance(value, dict) and key in merge:
                loader[key] = {"_delete_": True, **value}
        return f"train_dataloader = {source(loader)}\n"
    return f"train_dataloader.update{source(loader)[4:]}\n"


def source(value: Any, indent: int = 0) -> str:
    """Python source of plain values; dicts as ``dict(...)``, one key a line where they are long."""
    if not isinstance(value, Mapping):
        return _literal(value)
    flat = ", ".join(f"{key}={source(inner)}" for key, inner in value.items())
    if len(flat) + indent < 84 and not (indent == 0 and len(value) > 1):
        return f"dict({flat})"
    inner = " " * (indent + 4)
    rows = [f"{inner}{key}={source(item, indent + 4)},\n" for key, item in value.items()]
    return f"dict(\n{''.join(rows)}{' ' * indent})"


def _literal(value: Any) -> str:
    if type(value) is str:
        return f'"{value}"'
    if isinstance(value, float) and math.isfinite(value) and value == int(value):
        return str(int(value))
    return repr(value)
