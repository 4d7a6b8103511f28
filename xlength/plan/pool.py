"""Sorting a stream by pools, so that all ranks meet samples of like length at the same step.

Collect ``pool_size`` samples, sort them by cost, shuffle them with a seed that is the same on all
ranks, give them one by one. Each rank reads other shards of the same data, so position i of every
sorted pool is about the same quantile; the common shuffle keeps that, and evens out the cost of
successive steps.

The mechanism, the seeds and the two orders are those of LLaVA-OneVision-2's
``LengthPoolSortDataset``; reading goes on here while a pool drains. Nothing is read or written in
this module: a driver pushes and pops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from random import Random
from typing import Any, TypeVar

from xlength.plan.pool_options import Entry, PoolOptions, first_seed

T = TypeVar("T")

PACKED_OFFSET = 1_000_000
TAIL_OFFSET = 1234 - 42


class PoolSorter:
    """The pools of one reader in one epoch: push samples in, pop them in order.

    While a pool drains, the next one fills at the same pace, so never more than ``pool_size``
    samples are held and no more than one has to be read before the next one can be given (a few
    while the pools grow, in the warm-up). A driver does, for ever::

        for _ in range(sorter.wants()):
            sorter.push(key, sample)   # or sorter.close() at the end of the stream
        sample = sorter.pop()          # IndexError: all is given

    Price: at a position of the pool, the length differs between ranks by the spread of its order
    statistic; samples stay in the pool they were read into.
    Cost: 1 to 2 microseconds a sample; a pool of 1,000 is sorted in some 0.3 milliseconds.

    Args:
        options: see ``PoolOptions``.
        epoch: epochs after the first have other orders; the first has the original's.
        worker: workers of a rank have other shuffles, so that the batches that a loader takes from
            them in turn are not of one quantile; but for ``micro_batch_size=1``, where the original
            gives all of them the same.
    """

    def __init__(self, options: PoolOptions, epoch: int = 0, worker: int = 0) -> None:
        self.options = options
        self._seed = first_seed(options, epoch, 0 if options.micro_batch_size == 1 else worker)
        self.reads = 0
        self.closed = False
        self._flushes = 0
        self._ready: list[Entry] = []  # last one first
        self._filling: list[Entry] = []
        self._drained_size = 1
        self._carried = 0  # samples that came into the filling pool from the one before
        self._next_size = options.size_of_pool(0)

    def __len__(self) -> int:
        """Samples that are held."""
        return len(self._ready) + len(self._filling)

    def wants(self) -> int:
        """How many samples to push before the next one is popped; may be negative."""
        if self.closed:
            return 0
        size = self._next_size
        if self._ready:
            given = self._drained_size - len(self._ready)
            paced = given * (size - self._carried) // self._drained_size
            return self._carried + paced - len(self._filling)
        return size - len(self._filling)

    def push(self, key: float, sample: Any, packed: bool = False) -> None:
        """Take in the next sample of the stream."""
        self._filling.append((key, self.reads, packed, sample))
        self.reads += 1

    def close(self) -> None:
        """The stream has ended: what is held is the tail."""
        self.closed = True

    def pop(self) -> Any:
        """The next sample in order.

        Raises:
            IndexError: nothing is held.
        """
        if not self._ready:
            self._flush()
        return self._ready.pop()[3]

    def held(self) -> list[Entry]:
        """What is held: first what is in order already, as it will be given, then the rest as it
        was read."""
        return self._ready[::-1] + self._filling

    def state(self) -> dict[str, Any]:
        """Plain numbers from which, with the held samples, ``restore`` makes the same sorter."""
        return {
            "reads": self.reads,
            "flushes": self._flushes,
            "drained_size": self._drained_size,
            "carried": self._carried,
            "ready": [entry[1] for entry in reversed(self._ready)],
            "rest": [entry[1] for entry in self._filling],
        }

    def restore(self, state: Mapping[str, Any], entries: Mapping[int, Entry]) -> None:
        """Continue from a state.

        Args:
            state: from ``state()``.
            entries: the held samples by their serial number.
        """
        self.reads = state["reads"]
        self._flushes = state["flushes"]
        self._drained_size = state["drained_size"]
        self._carried = state["carried"]
        self._next_size = self.options.size_of_pool(self._flushes)
        self._ready = [entries[serial] for serial in reversed(state["ready"])]
        self._filling = [entries[serial] for serial in state["rest"]]

    def _flush(self) -> None:
        """Put the pool that was filling in order; the next one begins with what is carried over."""
        pool, self._filling = self._filling, []
        if not pool:
            raise IndexError("no sample is held")
        full = len(pool) >= self._next_size
        seed = self._seed
        if full:
            seed += pool[-1][1]
            generators = Random(seed), Random(seed + PACKED_OFFSET)
            self._flushes += 1
        else:
            generators = (Random(seed + TAIL_OFFSET),) * 2
        shuffle = full or self.options.tail_shuffle
        if self.options.micro_batch_size == 1:
            order = self._one_by_one(pool, *generators, shuffle)
        else:
            order = self._micro_batches(pool, generators[0], shuffle, full)
        order.reverse()
        self._ready = order
        self._drained_size = len(order)
        self._carried = len(self._filling)
        self._next_size = self.options.size_of_pool(self._flushes)

    def _one_by_one(
        self, pool: list[Entry], generator: Random, packed_generator: Random, shuffle: bool
    ) -> list[Entry]:
        """The original's order."""
        pool.sort(key=itemgetter(0), reverse=not self.options.ascending)
        if not self.options.separate_packed:
            if shuffle:
                generator.shuffle(pool)
            return pool
        others, packs = ([e for e in pool if e[2] is kind] for kind in (False, True))
        if shuffle:
            generator.shuffle(others)
            packed_generator.shuffle(packs)
        return interleave(others, packs)

    def _micro_batches(
        self, pool: list[Entry], generator: Random, shuffle: bool, full: bool
    ) -> list[Entry]:
        """Sorted, cut into micro-batches, these shuffled; the cheapest that fill none come last.

        Packed samples, if apart, come first before the shuffle, the costliest first, then the
        others by rising cost: so a micro-batch is of the same kind and quantile on all ranks, but
        for a few cheap ones of each kind. What fills no micro-batch of its kind, or else one
        micro-batch, is carried over to the next pool, so that all ranks give equally many.
        """
        size = self.options.micro_batch_size
        pool.sort(key=itemgetter(0))
        rest: list[Entry] = []
        if self.options.separate_packed:
            kinds = [[e for e in pool if e[2] is kind] for kind in (True, False)]
            odd = [len(kind) % size for kind in kinds]
            if full and not any(odd):
                odd[0 if len(kinds[0]) > len(kinds[1]) else 1] = size
            rest = [e for kind, count in zip(kinds, odd, strict=True) for e in kind[:count]]
            packs, others = (kind[count:] for kind, count in zip(kinds, odd, strict=True))
            pool = packs[::-1] + others
            if full:
                self._filling, rest = sorted(rest, key=itemgetter(1)), []
        else:
            odd_ones = len(pool) % size
            rest, pool = pool[:odd_ones], pool[odd_ones:]
        if not self.options.ascending:
            pool.reverse()
        batches = [pool[start : start + size] for start in range(0, len(pool), size)]
        if shuffle:
            generator.shuffle(batches)
        return [entry for batch in batches for entry in batch] + rest


def interleave(one: Sequence[T], other: Sequence[T]) -> list[T]:
    """Both sequences in one, the shorter one's items at equal distances; at equal sizes ``one``
    begins."""
    many, few = (other, one) if len(one) < len(other) else (one, other)
    result: list[T] = []
    if not few:
        return list(many)
    distance = len(many) / len(few)
    taken, due = 0, distance
    for item in few:
        while taken < len(many) and taken < due:
            result.append(many[taken])
            taken += 1
        result.append(item)
        due += distance
    result.extend(many[taken:])
    return result
