"""Where a validation can be cut off, so that all ranks end at the same step."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from mmengine.hooks import Hook
from mmengine.runner import ValLoop

from xlength.runtime.loaders import is_stream

CUT_VALIDATION = "cut_validation"
"""In the message hub: the iteration whose validation was cut off; ``TrainLoop`` begins it anew."""

_HARMLESS = (
    "xlength.",
    "mmengine.hooks.hook",
    "mmengine.hooks.runtime_info_hook",
    "mmengine.hooks.sync_buffer_hook",
)
"""Modules whose ``before_val`` and ``before_val_epoch`` leave the model as it was trained."""

_MANY = 2**31


class ValidationSteps:
    """In which steps of a validation the ranks ask each other whether to stop.

    Args:
        runner: whose validation begins.
        world_size: number of ranks.
    """

    def __init__(self, runner: Any, world_size: int) -> None:
        self.steps, self.ends_with = _MANY, "step"
        self._is_alone = world_size == 1
        loop, loader = runner.val_loop, runner.val_dataloader
        changer = next((hook for hook in runner.hooks if _may_change_the_model(hook)), None)
        if changer is not None:
            self.steps = 0
            self.ends_with = f"validation, which {type(changer).__name__} may change the model for"
        elif not self._is_alone and (type(loop).run is not ValLoop.run or is_stream(loader)):
            self.steps = 0
            self.ends_with = "validation, whose steps the ranks may not share"
        elif not self._is_alone:
            self.steps = len(loader)
        self._step = 0
        self._due, self._every = 1, 1
        self._since = time.monotonic()

    def is_time_to_ask(self) -> bool:
        """To be called in every step."""
        self._step += 1
        return self._step == self._due and self._step <= self.steps

    def seconds(self) -> float:
        """That a step took since ranks asked last."""
        since, self._since = self._since, time.monotonic()
        return (self._since - since) / self._every

    def ask_again(self, seconds: float) -> None:
        """After about a second, by the steps of the slowest rank, so that ranks seldom wait."""
        self._every = 1 if self._is_alone else int(np.clip(1 / max(seconds, 1e-3), 1, 100))
        self._due += self._every


def _may_change_the_model(hook: Hook) -> bool:
    """For a validation, and changes it back behind it, as ``EMAHook``."""
    methods = (getattr(type(hook), name) for name in ("before_val", "before_val_epoch"))
    return not all(method.__module__.startswith(_HARMLESS) for method in methods)
