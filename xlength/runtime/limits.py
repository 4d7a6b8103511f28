"""Checks of the numbers that a training loop is given."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any


def check_limits(max_iters: Any, max_epochs: Any) -> None:
    """How long to train: one of the two.

    Raises:
        ValueError: names the parameter, its value and the rule.
    """
    if (max_iters is None) == (max_epochs is None):
        raise ValueError(
            "give exactly one of max_iters and max_epochs, got "
            f"max_iters={max_iters} and max_epochs={max_epochs}"
        )
    if max_iters is not None:
        check_whole("max_iters", max_iters, 1)
    elif not (_is_number(max_epochs) and max_epochs > 0):
        raise ValueError(f"max_epochs must be a number above 0, got {max_epochs!r}")


def check_validation(val_begin: Any, val_interval: Any, dynamic_intervals: Any) -> None:
    """When to validate.

    Raises:
        ValueError: names the parameter, its value and the rule.
    """
    check_whole("val_begin", val_begin, 0)
    check_whole("val_interval", val_interval, 1)
    pairs = [] if dynamic_intervals is None else dynamic_intervals
    ok = isinstance(pairs, Sequence) and all(
        isinstance(pair, Sequence) and len(pair) == 2 and all(_is_whole(n, 1) for n in pair)
        for pair in pairs
    )
    begins = [pair[0] for pair in pairs] if ok else []
    if not ok or begins != sorted(set(begins)):
        raise ValueError(
            "dynamic_intervals must be pairs (iteration, interval) of whole numbers of at least 1, "
            f"by rising iteration, got {dynamic_intervals!r}"
        )


def check_whole(name: str, value: Any, least: int) -> None:
    """Refuse what is no whole number of at least ``least``."""
    if not _is_whole(value, least):
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")


def _is_whole(value: Any, least: int) -> bool:
    return _is_number(value) and int(value) == value and value >= least


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
