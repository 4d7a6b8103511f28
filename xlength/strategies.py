"""``FSDPStrategy``: mmengine's, which resumes with today's torch."""

from __future__ import annotations

from typing import Any

from mmengine._strategy import FSDPStrategy as MMEngineFSDPStrategy
from torch.distributed.fsdp import FullyShardedDataParallel

from xlength.registry import STRATEGIES, register


@register(STRATEGIES)
class FSDPStrategy(MMEngineFSDPStrategy):
    """mmengine's ``FSDPStrategy``, whose 0.10.7 loads an optimiser's state with torch 2.0's order
    of arguments and so cannot resume with a later torch. Arguments and files are the same.
    """

    def load_optim_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the optimiser's state, whole or sharded as ``state_dict_cfg`` says."""
        state = FullyShardedDataParallel.optim_state_dict_to_load(
            self.model, self.optim_wrapper.optimizer, state_dict
        )
        self.optim_wrapper.load_state_dict(state)
