"""Wall time and memory of a call, for ratios taken in one run."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from statistics import median
from typing import Any


def seconds(call: Callable[[], Any], repeats: int = 3) -> float:
    """Median wall time of ``repeats`` calls."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return median(times)


def peak_bytes(call: Callable[[], Any]) -> int:
    """Most memory that numpy and Python held at once during the call, beyond what was held before
    it.

    Tensors of torch are not counted.
    """
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        result = call()
        peak = tracemalloc.get_traced_memory()[1]
        del result
        return peak - before
    finally:
        tracemalloc.stop()
