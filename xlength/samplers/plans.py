"""The plans in the ``PLANS`` registry, and how one is built from a config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from xlength.plan.options import refuse_unknown
from xlength.plan.packing import Packing
from xlength.plan.specs import FixedBatch, TokenBudget
from xlength.registry import PLANS, register

for _plan in (FixedBatch, TokenBudget, Packing):
    register(PLANS)(_plan)


def build_plan(plan: Any) -> Any:
    """A plan from a config, or as it is.

    Args:
        plan: an object with ``build``, or a dict whose ``type`` is a class or the name of one in
            ``PLANS`` (``'TokenBudget'``, ``'xlength.TokenBudget'``).

    Raises:
        ValueError: no such plan, or it has no such option; names the one that was probably meant.
    """
    if not isinstance(plan, Mapping):
        if not hasattr(plan, "build") or isinstance(plan, type):
            raise ValueError(
                "plan must be a plan or its dict, such as dict(type='TokenBudget', "
                f"max_tokens=16384), got {plan!r}"
            )
        return plan
    options = dict(plan)
    kind = options.pop("type", None)
    if not isinstance(kind, type):
        name = str(kind).removeprefix("xlength.")
        refuse_unknown("plan type", [name], sorted(PLANS.module_dict))
        kind = PLANS.module_dict[name]
    return _built(kind, options)


def _built(kind: Any, options: dict[str, Any]) -> Any:
    name = kind.__name__
    if is_dataclass(kind):
        known = [field.name for field in fields(kind)]
        refuse_unknown(f"key of {name}", list(options), known)
    try:
        return kind(**options)
    except TypeError as error:  # a required option is missing
        raise ValueError(f"plan {name}: {error}") from None
