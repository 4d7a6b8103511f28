"""What a stream's order costs when several ranks compute it in step: run the real sorters on
lengths."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xlength.plan.groups import Ints
from xlength.plan.pool_options import PoolOptions
from xlength.plan.sliding import make_sorter


def sorted_stream(
    sorter: Any, keys: Iterable[float], packed: Iterable[bool] | None = None
) -> Iterator[int]:
    """Drive one sorter over a stream of keys: the positions in the stream, in the order they are
    given.

    Args:
        sorter: a fresh ``PoolSorter`` or ``SlidingSorter``.
        keys: cost of each sample.
        packed: whether each sample is packed; by default none is.
    """
    source = iter(keys)
    kinds = None if packed is None else iter(packed)
    index = 0
    while True:
        for _ in range(sorter.wants()):
            key = next(source, None)
            if key is None:
                sorter.close()
                break
            sorter.push(key, index, False if kinds is None else bool(next(kinds)))
            index += 1
        if not len(sorter):
            return
        yield sorter.pop()


def orders_of_ranks(
    options: PoolOptions,
    keys: Sequence[Sequence[float] | NDArray[Any]],
    packed: Sequence[Sequence[bool] | NDArray[Any]] | None = None,
    epoch: int = 0,
    num_workers: int = 1,
) -> list[Ints]:
    """What every rank yields: positions in its own stream.

    With several workers a rank's stream is dealt to them sample by sample, each sorts its own
    share, and micro-batches are taken from them in turn, as a loader does.

    Args:
        options: see ``PoolOptions``.
        keys: of each rank, (n_rank,) cost of each sample of its stream.
        packed: of each rank, (n_rank,) whether each sample is packed.
        epoch: see ``PoolSorter``.
        num_workers: workers of each rank.

    Returns:
        of each rank, (n_rank,) int64.
    """
    result = []
    for rank, own in enumerate(keys):
        values = np.asarray(own)
        kinds = None if packed is None else np.asarray(packed[rank])
        parts = []
        for worker in range(num_workers):
            order = sorted_stream(
                make_sorter(options, epoch, worker),
                values[worker::num_workers].tolist(),
                None if kinds is None else kinds[worker::num_workers].tolist(),
            )
            parts.append(np.fromiter(order, dtype=np.int64) * num_workers + worker)
        result.append(_in_turn(parts, options.micro_batch_size))
    return result


def _in_turn(parts: list[Ints], size: int) -> Ints:
    if len(parts) == 1:
        return parts[0]
    rounds = max((len(part) + size - 1) // size for part in parts)
    pieces = [part[i * size : (i + 1) * size] for i in range(rounds) for part in parts]
    return np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int64)


def waiting(costs: NDArray[Any]) -> float:
    """Mean cost of the slowest rank / mean cost of all ranks, from (ranks, steps); 1 is none."""
    return float(costs.max(axis=0).mean() / costs.mean())


def steps_of(values: NDArray[Any], size: int) -> NDArray[Any]:
    """(ranks, n) in the order given -> (ranks, n // size, size): the whole micro-batches of each
    rank."""
    whole = values.shape[1] // size * size
    return values[:, :whole].reshape(len(values), -1, size)
