"""Does the sampler's idea of a batch fit the loader's?"""

from __future__ import annotations

import logging
from typing import Any
from weakref import WeakSet

from mmengine.logging import print_log

_checked: WeakSet[Any] = WeakSet()


def check_batch_size(dataloader: Any, accumulative_counts: int = 1) -> str | None:
    """Warn where ``per_device_batch_size`` of the loader's sampler does not fit the loader.

    The sampler makes runs of ``per_device_batch_size`` samples of like length; cut into batches of
    another size they straddle two runs, and ranks or micro-steps of one optimiser step get unlike
    lengths.

    Args:
        dataloader: a ``DataLoader``; asked about again, it is passed over.
        accumulative_counts: micro-steps per optimiser step.

    Returns:
        The warning, None if all is well.
    """
    sampler = getattr(dataloader, "sampler", None)
    per_device = getattr(sampler, "per_device_batch_size", None)
    batch_size = getattr(dataloader, "batch_size", None)
    if per_device is None or batch_size is None or sampler in _checked:
        return None
    _checked.add(sampler)
    wanted = batch_size * accumulative_counts
    if per_device % wanted == 0:
        return None
    message = (
        f"{type(sampler).__name__}: per_device_batch_size is {per_device}, but the data loader's "
        f"batch_size is {batch_size} and gradients are accumulated over {accumulative_counts} of "
        "them: samples of like length would not share a batch. Make per_device_batch_size "
        f"{wanted} or a multiple of it."
    )
    print_log(message, "current", logging.WARNING)
    return message


def accumulative_counts_of(runner: Any) -> int:
    """Micro-steps per optimiser step of a runner whose optimiser is built or still a config."""
    wrapper = getattr(runner, "optim_wrapper", None)
    if isinstance(wrapper, dict):
        counts = wrapper.get("accumulative_counts", 1)
    else:
        counts = getattr(wrapper, "_accumulative_counts", 1)
    return counts if isinstance(counts, int) else 1
