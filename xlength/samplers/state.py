"""Checks of a saved sampler state against the sampler that is to continue it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from mmengine.logging import print_log

from xlength.runtime.state_differences import differences

_RULES = {
    "version": "the state's layout",
    "type": "the sampler",
    "fingerprint": "the lengths of the data",
}


def check_state(state: Mapping[str, Any], expected: Mapping[str, Any], strict: bool) -> bool:
    """Whether ``state`` continues what ``expected`` (a fresh state of the present sampler)
    describes.

    Returns:
        True if it fits; False if it does not and ``strict`` is off, after a warning.

    Raises:
        ValueError: it does not fit and ``strict`` is on; names what was and what is.
        KeyError: the state lacks a key, so it is no sampler state.
    """
    missing = [key for key in expected if key not in state]
    if missing:
        raise KeyError(f"not a sampler state: it lacks {', '.join(missing)}")
    changes = differences(state, expected, _RULES)
    if not changes:
        return True
    message = "the saved state does not fit this run: " + "; ".join(changes)
    if strict:
        raise ValueError(
            message + ". Restore what was, or load with strict=False to start the epoch anew"
        )
    print_log(f"{message}. Epoch {state['epoch']} starts anew.", "current", logging.WARNING)
    return False


def step_of(state: Mapping[str, Any], length: int, uneven: bool = False) -> int:
    """The state's step, checked to lie in the epoch.

    Args:
        state: of any rank.
        length: of the epoch on this rank.
        uneven: the rank that wrote the state may have one step more: the last one is passed then.
    """
    step = int(state["step"])
    if not 0 <= step <= length + uneven:
        raise ValueError(f"step must be in [0, {length}], the epoch's length, got {step}")
    return min(step, length)


def history_of(state: Mapping[str, Any], world_size: int) -> list[tuple[int, int]]:
    """What other numbers of ranks did in the state's epoch: (world_size, step) each, oldest first.

    Empty where as many ranks as now began the epoch; then ``step`` counts from its beginning, else
    from the last change.
    """
    history = [(int(ranks), int(step)) for ranks, step in state.get("history", ())]
    if state["world_size"] != world_size:
        print_log(
            f"{state['world_size']} data-parallel ranks began epoch {state['epoch']} and "
            f"{world_size} go on with it: every sample that is left is drawn once, in other steps.",
            "current",
        )
        history.append((int(state["world_size"]), int(state["step"])))
    return history
