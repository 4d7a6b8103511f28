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
from xlength.plan.stream_blocks import in_blocks

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
    statistic; samples stay in the pool they were read into. Where packed samples are kept apart by
    a schedule of kinds (see ``_kinds_apart``), an eighth of a pool is carried over to the next one;
    some 4 in 100 samples wait for more than two pools, fewer than 1 in 1,000 for more than three;
    of a kind that is rarer than one micro-batch in a pool, until there is one.
    Cost: 1 to 2 microseconds a sample; a pool of 1,000 is sorted in some 0.3 milliseconds.

    Args:
        options: see ``PoolOptions``.
        epoch: epochs after the first have other orders; the first has the original's.
        worker: workers of a rank have other shuffles, so that the batches that a loader takes from
            them in turn are not of one quantile; but in the original's order, where all of them
            have the same.
    """

    def __init__(self, options: PoolOptions, epoch: int = 0, worker: int = 0) -> None:
        self.options = options
        self._seed = first_seed(options, epoch, 0 if options.as_original else worker)
        self.reads = 0
        self.closed = False
        self._flushes = 0
        self._packed_reads = 0
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
        self._packed_reads += packed
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
            "packed_reads": self._packed_reads,
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
        self._packed_reads = state["packed_reads"]
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
        if self.options.as_original:
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
        """Sorted, cut into micro-batches, these shuffled; the cheapest that fill none come last."""
        size = self.options.micro_batch_size
        if self.options.separate_packed:
            batches, rest = self._kinds_apart(pool, full)
        else:
            pool.sort(key=itemgetter(0))
            odd = len(pool) % size
            batches, rest = in_blocks(pool[odd:], len(pool) // size, size)[0], pool[:odd]
        if not self.options.ascending:
            batches = [batch[::-1] for batch in reversed(batches)]
        if shuffle:
            generator.shuffle(batches)
        return [entry for batch in batches for entry in batch] + rest

    def _kinds_apart(self, pool: list[Entry], full: bool) -> tuple[list[list[Entry]], list[Entry]]:
        """Micro-batches of packed samples, the costliest first, then of others by rising cost; and
        what fills none.

        A full pool has as many packed micro-batches as the share of packed samples among all that
        were read (or ``packed_share``) says, which is nearly the same number on all ranks; so a
        step is of the same kind and quantile on all of them. What a rank has in excess is carried
        over to the next pool, altogether equally much on all ranks; of neither kind more than twice
        its share of that, so that a rank whose data differ does not keep them for ever.
        """
        options, size = self.options, self.options.micro_batch_size
        new_from = pool[min(self._carried, len(pool) - 1)][1]
        old = new_from, new_from - len(pool)
        pool.sort(key=itemgetter(0))
        packs, others = ([e for e in pool if e[2] is kind] for kind in (True, False))
        if not full:
            odd = len(packs) % size, len(others) % size
            first = in_blocks(packs[odd[0] :], len(packs) // size, size)[0]
            last = in_blocks(others[odd[1] :], len(others) // size, size)[0]
            return first[::-1] + last, packs[: odd[0]] + others[: odd[1]]
        carried = options.carried_of(len(pool))
        steps = (len(pool) - carried) // size
        share = options.packed_share or self._packed_reads / self.reads
        most = steps - _least(len(others), 2 * (1 - share) * carried, size)
        wanted = min(max(round(share * steps), _least(len(packs), 2 * share * carried, size)), most)
        low, high = max(steps - len(others) // size, 0), min(len(packs) // size, steps)
        count = min(max(wanted, low), high)
        first, rest = in_blocks(packs, count, size, *old)
        last, more = in_blocks(others, steps - count, size, *old)
        self._filling = sorted(rest + more, key=itemgetter(1))
        return first[::-1] + last, []


def _least(held: int, kept: float, size: int) -> int:
    """Micro-batches to give so that no more than ``kept`` samples and a micro-batch are left."""
    return -((int(kept) + size - held) // size)


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
