"""Sorting a stream through a sliding buffer: at every step all ranks take the same quantile of what
they hold."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping
from itertools import islice
from random import Random
from typing import Any

from xlength.plan.pack_pool import PackOptions, PackPool
from xlength.plan.pool import PoolSorter
from xlength.plan.pool_options import Entry, PoolOptions, first_seed
from xlength.plan.quantiles import QuantileMeans

MEMORY = 10
"""Pools that a running mean remembers, about."""


class SlidingSorter:
    """A sorted buffer of ``pool_size`` samples; driven as ``PoolSorter`` is.

    At step t the ``micro_batch_size`` neighbours at quantile u_t are given, and as many are read.
    u_t depends on (seed, epoch, t) and the worker alone: in every ``pool_size //
    micro_batch_size`` steps each of as many quantiles comes up once, in random order, so both
    extremes are served as often as the middle. Where a quantile lies in the buffer is corrected by
    where it lay in the pools before (``QuantileMeans``). No pool has to begin at the same sample on
    all ranks, so a sample that one rank skips costs nothing, and waiting is less than with pools of
    the same size. Where samples come due (``max_age``), they are given instead: together with their
    neighbours, if one micro-batch can hold them all, else the oldest ones.

    With ``separate_packed`` there is a buffer for each kind, and the schedule of kinds is common: a
    step is one of packed samples where u_t is below their share among all samples read so far,
    which is nearly the same number on all ranks. A kind that runs short (a buffer half as full as
    its share says) is passed over.

    Price: a sample may wait up to ``max_age`` steps, though half are given within three quarters
    of the steps of a pool. To resume, all samples since the oldest held one are read again: about
    seven pools.
    Cost: 2 to 3 microseconds a sample at ``pool_size`` 1,000.

    Args:
        options: see ``PoolOptions``.
        epoch: each has its own u_t.
        worker: each of a rank has its own u_t, the same on all ranks.
    """

    def __init__(self, options: PoolOptions, epoch: int = 0, worker: int = 0) -> None:
        self.options = options
        self._seed = first_seed(options, epoch, worker)
        self.reads = 0
        self.closed = False
        self.forced = 0
        """Steps at which samples came due."""
        self.clock: Callable[[], int] | None = None
        """Tells the step that u_t is for, where it is not the number of those before."""
        self._packed_reads = 0
        self._step = 0
        self._ready: list[Entry] = []  # last one first
        self._buffers = (_Buffer(), _Buffer())  # others, packed
        self._waiting: dict[int, Entry] = {}  # by serial, in the order they were read
        self._oldest = 0
        self._order: list[int] = []
        self._cycle = -1
        self._quantile = 0
        self._weight = 1.0
        self._means = tuple(
            QuantileMeans(options.steps_of_pool, options.capacity)
            for _ in range(1 + options.separate_packed)
        )
        self._growing = options.warmup_steps > 0
        self._capacity = options.capacity
        self._separate = options.separate_packed
        self._steps_of_pool = options.steps_of_pool
        self._size = options.micro_batch_size
        self._first_due_step = options.age_limit - options.steps_of_pool - options.spare_steps

    def __len__(self) -> int:
        """Samples that are held."""
        return len(self._ready) + len(self._waiting)

    def wants(self) -> int:
        """How many samples to push before the next one is popped; may be negative."""
        if self.closed:
            return 0
        held = len(self._ready) + len(self._waiting)
        if self._growing:
            size = self.options.size_at(self.reads - held)
            self._growing = size < self._capacity
            return size - held
        return self._capacity - held

    def push(self, key: float, sample: Any, packed: bool = False) -> None:
        """Take in the next sample of the stream."""
        serial = self.reads
        entry = (key, serial, packed, sample)
        self._waiting[serial] = entry
        kind = 0
        if packed and self._separate:
            kind = 1
            self._packed_reads += 1
        buffer = self._buffers[kind]
        place = bisect_right(buffer.keys, key)
        buffer.keys.insert(place, key)
        buffer.entries.insert(place, entry)
        self.reads = serial + 1

    def close(self) -> None:
        """The stream has ended: what is held is the tail."""
        self.closed = True

    def pop(self) -> Any:
        """The next sample in order.

        Raises:
            IndexError: nothing is held.
        """
        if not self._ready:
            if self._size == 1 and self.clock is None and not self._separate:
                return self._next_one()
            self._select()
        return self._ready.pop()[3]

    def held(self) -> list[Entry]:
        """What is held: first the rest of the present micro-batch, as it will be given, then the
        others as they were read."""
        return self._ready[::-1] + list(self._waiting.values())

    def state(self) -> dict[str, Any]:
        """Plain numbers from which, with the held samples, ``restore`` makes the same sorter."""
        return {
            "reads": self.reads,
            "packed_reads": self._packed_reads,
            "step": self._step,
            "means": [means.means[:] for means in self._means],
            "ready": [entry[1] for entry in reversed(self._ready)],
            "rest": list(self._waiting),
        }

    def restore(self, state: Mapping[str, Any], entries: Mapping[int, Entry]) -> None:
        """Continue from a state; see ``PoolSorter.restore``."""
        self.reads = state["reads"]
        self._packed_reads = state["packed_reads"]
        self._step = state["step"]
        for means, saved in zip(self._means, state["means"], strict=True):
            means.means = list(saved)
        self._growing = self.options.warmup_steps > 0
        self._ready = [entries[serial] for serial in reversed(state["ready"])]
        self._waiting = {serial: entries[serial] for serial in state["rest"]}
        self._oldest = min(state["rest"], default=0)
        self._buffers = (_Buffer(), _Buffer())
        for entry in sorted(self._waiting.values()):
            buffer = self._buffers[self._kind_of(entry)]
            buffer.keys.append(entry[0])
            buffer.entries.append(entry)

    def _kind_of(self, entry: Entry) -> int:
        return 1 if self._separate and entry[2] else 0

    def _next_one(self) -> Any:
        """What ``_select`` does, for micro-batches of one sample and one kind, in less time."""
        waiting, oldest = self._waiting, self._oldest
        if not waiting:
            raise IndexError("no sample is held")
        while oldest not in waiting:
            oldest += 1
        self._oldest = oldest
        buffer = self._buffers[0]
        step = self._step
        if oldest <= step - self._first_due_step:
            self.forced += 1
            place = buffer.find(waiting[oldest])
        else:
            place = int(self._next_quantile() * len(waiting))
            place = self._means[0].correct(buffer.keys, place, self._quantile, self._weight)
        self._step = step + 1
        del buffer.keys[place]
        entry = buffer.entries.pop(place)
        del waiting[entry[1]]
        return entry[3]

    def _select(self) -> None:
        """Take the micro-batch of this step out of the buffers."""
        waiting, oldest = self._waiting, self._oldest
        if not waiting:
            raise IndexError("no sample is held")
        while oldest not in waiting:
            oldest += 1
        self._oldest = oldest
        due_before = (self._step - self._first_due_step + 1) * self._size
        if oldest < due_before:
            batch = self._due(due_before)
        else:
            batch = self._at(self._next_quantile())
        for entry in batch:
            del waiting[entry[1]]
        batch.reverse()
        self._ready = batch
        self._step += 1

    def _next_quantile(self) -> float:
        """u_t, in (0, 1)."""
        step = self._step if self.clock is None else self.clock()
        cycle, position = divmod(step, self._steps_of_pool)
        if cycle != self._cycle:
            self._cycle = cycle
            self._weight = max(1 / (cycle + 1), 1 / MEMORY)
            self._order = list(range(self._steps_of_pool))
            Random(self._seed + cycle).shuffle(self._order)
            if not self.options.ascending:
                self._order = [self._steps_of_pool - 1 - number for number in self._order]
        self._quantile = self._order[position]
        return (self._quantile + 0.5) / self._steps_of_pool

    def _at(self, u: float) -> list[Entry]:
        """The neighbours at quantile u."""
        kind = 0
        if self._separate:
            kind, u = self._kind_at(u)
        buffer, size = self._buffers[kind], self._size
        held = len(buffer.entries)
        if held < size and held < len(self._waiting):
            # The stream ends, and neither kind fills a micro-batch: take of both.
            batch = buffer.cut(0, held)
            return batch + self._buffers[1 - kind].cut(0, size - held)
        blocks = held // size
        block = int(u * blocks)
        if block >= blocks - 1:  # It ends at the costliest sample.
            return buffer.cut(max(held - size, 0), size)
        # Blocks at equal distances, so that nothing lies between two of them for long.
        place = block * (held - size) // (blocks - 1) + size - 1
        place = self._means[kind].correct(buffer.keys, place, self._quantile, self._weight)
        return buffer.cut(max(place - size + 1, 0), size)

    def _kind_at(self, u: float) -> tuple[int, float]:
        """The kind whose turn it is, and the quantile within it."""
        share = self.options.packed_share or self._packed_reads / self.reads
        kind = 1 if u < share else 0
        # The costliest samples of both kinds lie at the ends of [0, 1], where a share that differs
        # a little between ranks moves nothing; the cheapest ones meet in between.
        u = 1.0 - u / share if kind else (u - share) / (1.0 - share)
        expected = (share if kind else 1.0 - share) * len(self._waiting)
        if len(self._buffers[kind].entries) < max(self._size, expected / 2):
            other = 1 - kind
            if len(self._buffers[other].entries) >= self._size:
                return other, u
        return kind, u

    def _due(self, due_before: int) -> list[Entry]:
        """A micro-batch of all samples that are due or, if these are no neighbours, the oldest."""
        self.forced += 1
        kind = self._kind_of(self._waiting[self._oldest])
        buffer, size = self._buffers[kind], self._size
        waiting = (entry for entry in self._waiting.values() if self._kind_of(entry) == kind)
        oldest = list(islice(waiting, size))
        places = [buffer.find(entry) for entry in oldest if entry[1] < due_before]
        low, high = min(places), max(places)
        spare = size - (high - low + 1)
        if spare >= 0:
            return buffer.cut(max(min(low - spare // 2, len(buffer.entries) - size), 0), size)
        for entry in oldest:
            buffer.cut(buffer.find(entry), 1)
        return sorted(oldest)


class _Buffer:
    """Held samples, sorted by key; equal keys in the order they came."""

    __slots__ = ("entries", "keys")

    def __init__(self) -> None:
        self.keys: list[float] = []
        self.entries: list[Entry] = []

    def find(self, entry: Entry) -> int:
        return self.entries.index(entry, bisect_left(self.keys, entry[0]))

    def cut(self, start: int, size: int) -> list[Entry]:
        """Take ``size`` neighbours out."""
        taken = self.entries[start : start + size]
        del self.entries[start : start + size]
        del self.keys[start : start + size]
        return taken


def make_sorter(
    options: PoolOptions | PackOptions, epoch: int = 0, worker: int = 0
) -> PoolSorter | SlidingSorter | PackPool:
    """The sorter of the mode, for one reader and one epoch; for a stream of packs, the packer."""
    if isinstance(options, PackOptions):
        return PackPool(options)
    return (PoolSorter if options.mode == "pool" else SlidingSorter)(options, epoch, worker)
