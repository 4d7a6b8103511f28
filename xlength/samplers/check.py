"""Does the sampler's idea of a batch fit the loader's?"""

from __future__ import annotations

import inspect
import logging
from typing import Any
from weakref import WeakSet

from mmengine.logging import print_log
from torch.utils.data import BatchSampler

_checked: WeakSet[Any] = WeakSet()


def check_batch_size(dataloader: Any, accumulative_counts: int = 1) -> str | None:
    """Warn where ``per_device_batch_size`` of the loader's sampler does not fit the loader.

    The sampler makes runs of ``per_device_batch_size`` samples of like length; cut into batches of
    another size they straddle two runs, and ranks or micro-steps of one optimiser step get unlike
    lengths.

    Args:
        dataloader: a ``DataLoader``, or its batch sampler; asked about again, it is passed over.
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
    many = accumulative_counts > 1
    over = f" and gradients are accumulated over {accumulative_counts} of them" if many else ""
    message = (
        f"{type(sampler).__name__}: per_device_batch_size is {per_device}, but the data loader's "
        f"batch_size is {batch_size}{over}: samples of like length would not share a batch. Make "
        f"per_device_batch_size {wanted} or a multiple of it."
    )
    print_log(message, "current", logging.WARNING)
    return message


def check_who_draws(sampler: Any) -> None:
    """``check_batch_size`` where no loop or hook of xlength runs, as in XTuner.

    Called by the sampler's ``__iter__``: what draws from it is a loader's batch sampler, which
    knows the batch size, though not over how many batches gradients are accumulated.
    """
    frame = inspect.currentframe()
    for _ in range(2):
        frame = frame.f_back if frame is not None else None
    drawer = frame.f_locals.get("self") if frame is not None else None
    if isinstance(drawer, BatchSampler) and drawer.sampler is sampler:
        check_batch_size(drawer)


def accumulative_counts_of(runner: Any) -> int:
    """Micro-steps per optimiser step of a runner whose optimiser is built or still a config."""
    wrapper = getattr(runner, "optim_wrapper", None)
    if isinstance(wrapper, dict):
        counts = wrapper.get("accumulative_counts", 1)
    else:
        counts = getattr(wrapper, "_accumulative_counts", 1)
    return counts if isinstance(counts, int) else 1
