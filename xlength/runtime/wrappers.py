"""The model and the optimiser as a runner has wrapped them."""

from __future__ import annotations

from typing import Any

from mmengine.model import is_model_wrapper


def unwrapped(model: Any) -> Any:
    """The model inside mmengine's wrappers of DDP, FSDP or DeepSpeed."""
    while is_model_wrapper(model) or not hasattr(model, "parse_losses"):
        inner = getattr(model, "module", None) or getattr(model, "model", None)
        if inner is None:
            break
        model = inner
    return model


def announce_last_micro_steps(runner: Any) -> None:
    """Tell a token-weighted loss which micro-step is the last before the optimiser steps.

    It then needs one all-reduce per optimiser step instead of one per micro-step; and that
    DeepSpeed does not let accumulated gradients be corrected.
    """
    weighted = getattr(unwrapped(runner.model), "token_weighted_loss", None)
    if weighted is not None:
        weighted.is_last = getattr(runner.optim_wrapper, "should_sync", None)
        weighted.can_correct = weighted.is_last is not None
