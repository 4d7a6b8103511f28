"""Numbers gathered from all ranks over the host's network, apart from training's collectives."""

from __future__ import annotations

import datetime
import logging
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from mmengine.logging import print_log
from numpy.typing import NDArray

TIMEOUT_SECONDS = 600


def configured_timeout(runner: Any) -> float:
    """Seconds that a run waits for a rank: ``env_cfg.dist_cfg.timeout``, or the default here."""
    dist_cfg = runner.cfg.get("env_cfg", {}).get("dist_cfg") or {}
    return float(dist_cfg.get("timeout") or TIMEOUT_SECONDS)


class HostGroup:
    """All ranks, over gloo; a rank that has ended costs a warning, and never training.

    Made on all ranks at once. In a single process it gathers from that one.

    Args:
        what: what is gathered, for the warning.
        timeout: seconds to wait for a rank that neither answers nor ends.
    """

    def __init__(self, what: str, timeout: float = TIMEOUT_SECONDS) -> None:
        self.what = what
        self.alive = True
        self.world_size = 1
        if dist.is_available() and dist.is_initialized():
            self.world_size = dist.get_world_size()
            limit = datetime.timedelta(seconds=timeout)
            self.group = dist.new_group(backend="gloo", timeout=limit)

    def gather(self, values: NDArray[np.float64]) -> NDArray[np.float64] | None:
        """Gather from all ranks.

        Args:
            values: (k,) with the same k on all ranks.

        Returns:
            (ranks, k), or None, from then on, after a rank did not answer.
        """
        if self.world_size == 1:
            return values[None]
        if not self.alive:
            return None
        mine = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float64))
        parts = [torch.empty_like(mine) for _ in range(self.world_size)]
        try:
            dist.all_gather(parts, mine, group=self.group)
        except RuntimeError as error:
            self.alive = False
            print_log(
                f"Not all ranks answered, so {self.what} is no longer gathered: {error}",
                "current",
                logging.WARNING,
            )
            return None
        return torch.stack(parts).numpy()
