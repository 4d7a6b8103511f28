"""States of streams: checked against what is to continue them, and of several ranks in one."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from mmengine.logging import print_log

from xlength.datasets.stream_parts import Reader
from xlength.runtime.state_differences import differences

_RULES = {
    "version": "the state's layout",
    "type": "the data set",
    "world_size": "the data-parallel size",
}


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One state for all ranks, from that of each; each rank picks its own when it loads it."""
    return {**states[0], "ranks": [dict(state) for state in states]}


def check_stream_state(
    state: Mapping[str, Any], expected: Mapping[str, Any], strict: bool
) -> dict[str, Any] | None:
    """A copy of the state for this rank, or None if it does not fit and ``strict`` is off.

    Args:
        state: what is loaded.
        expected: a state of the present data set.
        strict: whether to raise where it does not fit.

    Raises:
        KeyError: it is no state of a stream.
        ValueError: it does not fit; names what was and what is.
    """
    missing = [key for key in (*_RULES, "epoch", "options", "workers") if key not in state]
    if missing:
        raise KeyError(f"not a state of a stream: it lacks {', '.join(missing)}")
    changes = differences(state, expected, _RULES)
    if changes:
        message = "the saved state does not fit this stream: " + "; ".join(changes)
        if strict:
            raise ValueError(
                f"{message}. Restore what was, or load with strict=False to begin epoch "
                f"{state['epoch']} anew"
            )
        print_log(f"{message}. Epoch {state['epoch']} begins anew.", "current", logging.WARNING)
        return None
    own = [other for other in state.get("ranks", ()) if other["rank"] == expected["rank"]]
    result = copy.deepcopy(dict(own[0] if own else state))
    result.pop("ranks", None)
    if result["rank"] != expected["rank"]:
        # Another rank read other shards: only how far it was is true here too.
        result["workers"] = [
            {"worker": w["worker"], "given": 0, "skip": w["given"] + w["skip"]}
            for w in result["workers"]
        ]
    return result


def worker_state(state: Mapping[str, Any], reader: Reader) -> tuple[Mapping[str, Any] | None, int]:
    """What a reader continues from: its cursor's state, if there is one, and samples to pass over.

    Raises:
        ValueError: the state is of another number of workers.
    """
    workers = {own["worker"]: own for own in state["workers"]}
    if workers and (state["num_workers"] != reader.num_workers or reader.worker not in workers):
        raise ValueError(
            f"the state was saved with {state['num_workers']} workers (it holds those of "
            f"{sorted(workers)}), and is loaded in {reader}: use as many workers as before"
        )
    own = workers.get(reader.worker)
    if own is None:
        return None, 0
    if "source" not in own:
        return None, own["skip"]
    return own, 0
