"""``PlanGuardHook``: stops a run whose ranks do not share one plan."""

from __future__ import annotations

from typing import Any

from mmengine.hooks import Hook

from xlength.registry import HOOKS, register
from xlength.runtime.loaders import sampler_of
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

    Cost: one gather of seven numbers an epoch, over the host's network.
    """

    # After DistSamplerSeedHook, which sets the epoch.
    priority = "BELOW_NORMAL"

    def __init__(self) -> None:
        self._checked: int | None = None

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
                check_same_plan(sampler)
            self._checked = sampler.epoch
