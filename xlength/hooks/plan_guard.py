"""``PlanGuardHook``: stops a run whose ranks do not share one plan."""

from __future__ import annotations

import logging
from typing import Any

from mmengine.hooks import Hook
from mmengine.logging import print_log

from xlength.registry import HOOKS, register
from xlength.runtime.host_group import configured_timeout
from xlength.runtime.loaders import sampler_of
from xlength.samplers.check import accumulative_counts_of
from xlength.samplers.guard import check_same_plan
from xlength.samplers.length_grouped import LengthGroupedSampler
from xlength.samplers.plan import PlanSampler


@register(HOOKS)
class PlanGuardHook(Hook):
    """Compares, at the start of every epoch of training, the sampler's plan over all ranks.

    A rank with other data (a stale cache, another file), another seed or other options plans other
    steps; training would go on with wrong data, or hang where the number of steps differs. This
    hook stops all ranks with a message that says which rank differs and in what; see
    ``check_same_plan``. Works with every sampler of xlength; others are passed over.

    Before training it warns where the plan balances other micro-steps (``accumulate``) than the
    optimiser accumulates.

    Cost: one gather of seven numbers an epoch, over the host's network.
    """

    # After DistSamplerSeedHook, which sets the epoch.
    priority = "BELOW_NORMAL"

    def __init__(self) -> None:
        self._checked: int | None = None

    def before_train(self, runner: Any) -> None:
        """Compare the plan's micro-steps with the optimiser's."""
        sampler, _ = sampler_of(runner.train_dataloader)
        planned = getattr(getattr(sampler, "plan", None), "accumulate", None)
        counts = accumulative_counts_of(runner)
        if planned is not None and planned != counts:
            print_log(
                f"{type(sampler.plan).__name__} balances optimiser steps of accumulate={planned} "
                f"micro-steps, but gradients are accumulated over {counts}: set "
                f"accumulate={counts} in the plan, so that ranks share those equally",
                "current",
                logging.WARNING,
            )

    def before_train_epoch(self, runner: Any) -> None:
        """Compare, where the loop goes by epochs or begins."""
        self._checked = None
        self._check(runner)

    def before_train_iter(
        self, runner: Any, batch_idx: int, data_batch: dict[str, Any] | None = None
    ) -> None:
        """Compare, where a loop that goes by iterations has begun another epoch of the data."""
        self._check(runner)

    def _check(self, runner: Any) -> None:
        sampler, _ = sampler_of(runner.train_dataloader)
        if isinstance(sampler, (PlanSampler, LengthGroupedSampler)):
            if sampler.epoch != self._checked:
                check_same_plan(sampler, timeout=configured_timeout(runner))
            self._checked = sampler.epoch
