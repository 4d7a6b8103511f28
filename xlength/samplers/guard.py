"""Do all ranks have the same plan? Ranks that do not would train on the wrong data, or hang."""

from __future__ import annotations

import hashlib
import sys
import zlib
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from xlength.runtime.host_group import TIMEOUT_SECONDS, HostGroup

_PARTS = ("lengths", "seed", "epoch", "options", "versions", "position", "plan")

_SUMMED = 32_768
"""Places of the steps, at most, that go into the checksum."""

_groups: WeakKeyDictionary[Any, HostGroup] = WeakKeyDictionary()


def check_same_plan(
    sampler: Any,
    gather: Callable[[NDArray[np.float64]], NDArray[np.float64] | None] | None = None,
    timeout: float = TIMEOUT_SECONDS,
) -> None:
    """Compare a sampler's plan of the present epoch over all ranks; call it on all of them.

    A digest of what the plan is made from (lengths, seed, epoch, options, versions of the code) and
    of its steps is gathered over the host's network (gloo), apart from the collectives of training.
    The message arrives on every rank, so that none waits.

    Cost: one gather of seven numbers a rank, and a checksum of the steps (well under a
    millisecond); the first call makes the group.

    Args:
        sampler: any sampler with ``state_dict``, such as ``PlanSampler``, ``LengthGroupedSampler``.
        gather: (k,) numbers of this rank -> (ranks, k), or None where a rank does not answer; by
            default over a group of all processes.
        timeout: seconds to wait for a rank, of the group that the first call makes.

    Raises:
        RuntimeError: a rank differs from most others (or from rank 0), or data-parallel ranks are
            missing; names the ranks and what is different.
    """
    if gather is None:
        if sampler not in _groups:
            _groups[sampler] = HostGroup("the digest of the plan", timeout)
        gather = _groups[sampler].gather
    table = gather(np.array([*_digest(sampler), getattr(sampler, "rank", 0)], dtype=np.float64))
    if table is None:
        return
    problems = _differences(table[:, :-1]) or _missing_ranks(table[:, -1], sampler)
    if problems:
        raise RuntimeError(
            f"the ranks do not share one plan of epoch {sampler.epoch}, so training would use the "
            f"wrong data or hang: {'; '.join(problems)}"
        )


def _digest(sampler: Any) -> list[int]:
    """One number of at most 48 bits (exact in float64) per part."""
    state = sampler.state_dict(0)
    options = (state["version"], state["type"], state["world_size"], state["options"])
    steps = 0
    if hasattr(sampler, "epoch_plan"):
        all_steps = sampler.epoch_plan().steps.reshape(-1)
        some = all_steps[:: 1 + len(all_steps) // _SUMMED]
        steps = zlib.crc32(np.ascontiguousarray(some, dtype="<i8").data)
    return [
        _number(state["fingerprint"]),
        int(state["seed"]),
        int(state["epoch"]),
        _number(repr(options)),
        _number(f"{np.__version__} {getattr(sys.modules['xlength'], '__version__', '')}"),
        _number(repr((_position(sampler), state.get("history")))),
        steps,
    ]


def _position(sampler: Any) -> int:
    """Where in the epoch the next iterator begins; -1 at its end, which ranks may reach after
    unequal numbers of samples."""
    left = sampler.left()
    return sampler.epoch_length() - left if left else -1


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "little")


def _differences(table: NDArray[np.float64]) -> list[str]:
    """What is unlike the most common value of each part, (ranks, parts) -> lines."""
    lines = []
    for part, column in zip(_PARTS, table.T, strict=True):
        values, counts = np.unique(column, return_counts=True)
        if len(values) == 1:
            continue
        usual = values[counts.argmax()] if counts.max() > len(column) / 2 else column[0]
        others = np.flatnonzero(column != usual)
        reference = int(np.flatnonzero(column == usual)[0])
        line = f"{_ranks(others)} from rank {reference} in {part}"
        if part in ("seed", "epoch"):
            line += f" ({int(column[others[0]])} instead of {int(usual)})"
        lines.append(line)
    # The steps follow from the rest: name them only where nothing else explains it.
    return lines[:-1] if len(lines) > 1 and lines[-1].endswith("in plan") else lines


def _missing_ranks(ranks: NDArray[np.float64], sampler: Any) -> list[str]:
    missing = np.setdiff1d(np.arange(sampler.world_size), ranks)
    if not len(missing):
        return []
    return [
        f"no process has data-parallel rank {int(missing[0])} of {sampler.world_size} "
        f"({len(missing)} missing): their samples would not be trained on"
    ]


def _ranks(ranks: NDArray[Any]) -> str:
    names = ", ".join(str(int(rank)) for rank in ranks[:8])
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank {names} differs" if len(ranks) == 1 else f"ranks {names}{more} differ"
