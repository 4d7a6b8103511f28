"""Random augmentation of streams: what is drawn for a sample depends on its place alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from xlength.datasets.stream_parts import Reader, loader_of
from xlength.runtime.random_state import random_states, restore_random_states

_END = object()
_BLOCK = 256
_READ, _BATCH = 0, 1


class StreamSeeds:
    """Seeds Python's, numpy's and torch's generators anew before every sample that is read, from
    the stream's seed, epoch, rank, worker, pass and the sample's place in the pass.

    So what a map function draws for a sample is the same whenever it is read: by a run that was
    never disturbed, and by a resumed one, which reads again what its pool held. Nothing has to be
    saved for that. It is another in every epoch, pass, rank and worker.

    Where the training itself runs in this process (``isolated``), its generators are put back after
    each batch, so that dropout draws what it would draw without the stream. In a worker they are
    seeded once more where a batch is full, for a collate function that draws.

    Limits: only the generators of the host count. A state in the middle of a group of a batched
    ``map`` of ``datasets`` has the rest of that group drawn anew: let what is random be mapped
    sample by sample, behind it. Threads that draw meanwhile are not held off.

    Cost: 10 microseconds a sample and, where isolated, 100 a batch; ``reseed=False`` saves them
    where nothing is random.

    Args:
        seed: of the stream.
        epoch: from 0.
        reader: who reads.
        batch_size: samples of a batch, as the loader takes them.
        isolated: whether others draw in this process too.
    """

    def __init__(
        self, seed: int, epoch: int, reader: Reader, batch_size: int, isolated: bool
    ) -> None:
        self.batch_size = batch_size
        self._numbers = (abs(seed), int(seed < 0), epoch, reader.rank, reader.worker)
        self._isolated = isolated
        self._block: tuple[int, ...] = ()
        self._words: list[int] = []

    reading = False
    """Whether a stream that is seeded reads in this process now."""

    @classmethod
    def wanted(
        cls, reseed: bool | None, seed: int, epoch: int, reader: Reader, batch_size: int | None
    ) -> StreamSeeds | None:
        """For an iterator that begins in this process; None where nothing is to be seeded.

        Args:
            reseed: None for wherever a loader reads.
            seed, epoch, reader: see above.
            batch_size: None where it is not known: each sample then counts as a batch.
        """
        in_worker = get_worker_info() is not None
        if reseed is None:
            reseed = in_worker or cls.reading or loader_of(None) is not None
        return cls(seed, epoch, reader, batch_size or 1, not in_worker) if reseed else None

    def before_read(self, number_of_pass: int, place: int) -> None:
        """Seed for sample ``place`` (from 1) of a pass; 0 is for where the pass begins."""
        block, index = divmod(place, _BLOCK)
        if self._block != (number_of_pass, block):
            self._block = (number_of_pass, block)
            self._words = self._draw(_READ, number_of_pass, block, count=2 * _BLOCK)
        self._seed(self._words[2 * index], self._words[2 * index + 1])

    def over(self, samples: Iterator[Any], number_of_pass: int, place: int) -> Iterator[Any]:
        """The samples behind a place of a pass, each read with its own seeds."""
        while True:
            place += 1
            self.before_read(number_of_pass, place)
            sample = next(samples, _END)
            if sample is _END:
                return
            yield sample

    def in_batches(self, samples: Iterator[Any], given: Callable[[], int]) -> Iterator[Any]:
        """The samples that a reader gives, and at the end of every batch the generators as the rest
        of the process is to find them.

        Args:
            samples: of the reader.
            given: tells how many it gave in the epoch.
        """
        sample = None
        while sample is not _END:
            before = random_states(devices=False) if self._isolated else None
            for place in range(1, self.batch_size + 1):
                around, StreamSeeds.reading = StreamSeeds.reading, True
                try:
                    sample = next(samples, _END)
                finally:
                    StreamSeeds.reading = around
                if sample is _END or place == self.batch_size:
                    if before is None:
                        self._seed(*self._draw(_BATCH, given(), count=2))
                    else:
                        restore_random_states(before)
                if sample is _END:
                    break
                yield sample

    def _draw(self, *numbers: int, count: int) -> list[int]:
        words = np.random.SeedSequence([*self._numbers, *numbers]).generate_state(count)
        return [int(word) for word in words]

    @staticmethod
    def _seed(one: int, other: int) -> None:
        # numpy and torch have the same generator, and take 32 bits: two unlike seeds.
        random.seed(one << 32 | other)
        np.random.seed(one)
        torch.default_generator.manual_seed(other)
