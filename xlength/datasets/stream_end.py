"""Equal work at the end of a stream: all ranks stop at the same step.

Ranks read other shards, so one may have a batch more than another; with nobody to meet it in the
next collective it would wait for ever. The workers of a loader have no process group, so the main
processes agree, over the host's network.
"""

from __future__ import annotations

import datetime
import logging
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from mmengine.logging import print_log

INTERVAL = 8


class EqualSteps:
    """Ends a pass over a loader at the last step for which every rank has a batch.

    A rank looks ahead by some batches; once in ``interval`` steps all ranks tell each other how
    many they have, while a step is computed, and none goes further than the one with the fewest.

    Price: the batches that only some ranks have are left out, and counted in a warning; up to
    ``interval`` + 1 batches are held in the main process.
    Cost: one integer from each rank in ``interval`` steps; the first steps of a pass are agreed on
    in smaller portions, so that training begins with the first batch.

    Made on all ranks at once. Where there is one process, it changes nothing.

    Args:
        interval: steps.
        timeout: seconds to wait for a rank that does not answer.
    """

    def __init__(self, interval: int = INTERVAL, timeout: float = 1800) -> None:
        if interval < 1:
            raise ValueError(f"interval must be at least 1, got {interval}")
        self.interval = interval
        self._group: Any = None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            limit = datetime.timedelta(seconds=timeout)
            self._group = dist.new_group(backend="gloo", timeout=limit)

    def over(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches of one pass, equally many on all ranks."""
        if self._group is None:
            yield from batches
            return
        source = iter(batches)
        ahead: deque[Any] = deque()
        size, steps = 1, 0
        _fetch(source, ahead, size)
        counts = self._gathered(min(len(ahead), size))()
        while True:
            most = min(counts)
            now = [ahead.popleft() for _ in range(most)]
            if most < size:
                yield from now
                break
            following = min(size * 2, self.interval)
            for i in range(size):
                _fetch(source, ahead, -(-following * (i + 1) // size))
                if i == size - 1:
                    answers = self._gathered(min(len(ahead), following))
                batch, now[i] = now[i], None
                yield batch
            steps += size
            size = following
            counts = answers()
        self._tell(counts, steps + most)

    def _gathered(self, value: int) -> Any:
        """Begin to gather a number from all ranks; call the result to wait for the list of them."""
        mine = torch.tensor([value])
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        work = dist.all_gather(parts, mine, group=self._group, async_op=True)

        def wait() -> list[int]:
            work.wait()
            return [int(part) for part in parts]

        return wait

    def _tell(self, counts: list[int], steps: int) -> None:
        """Log what is left out; every rank knows how much the others had read ahead."""
        left = sum(counts) - len(counts) * min(counts)
        if left == 0:
            return
        ended = [rank for rank, count in enumerate(counts) if count == min(counts)]
        print_log(
            f"The pass ends after {steps} steps on all ranks, since ranks {ended[:8]} have no more "
            f"data. At least {left} batches of other ranks are left out.",
            "current",
            logging.WARNING,
        )


def _fetch(source: Iterator[Any], ahead: deque[Any], count: int) -> None:
    """Read until ``count`` batches are ahead, or the source ends."""
    while len(ahead) < count:
        try:
            ahead.append(next(source))
        except StopIteration:
            return
