"""One reader's part of a stream, pass after pass, from any position."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset

from xlength.arrow import is_hf
from xlength.datasets.stream_parts import Reader
from xlength.datasets.stream_seeds import StreamSeeds
from xlength.runtime.build import build


class StreamSource:
    """The samples of one reader, with a state.

    A state is the pass, how many samples of it were read, and the parent's own state where it has
    one. A parent without one is read from the beginning of the pass and what was read before is
    passed over (at once, where it can be indexed). A ``datasets`` stream with a shuffle buffer
    counts as one without: ``datasets`` does not save what the buffer holds. (By its own word it may
    skip a batch of a batched ``map`` after ``with_format('arrow')``.)

    Args:
        dataset: a ``datasets.IterableDataset``, an indexable data set or list, an iterable, or a
            function that returns an iterator.
        reader: which process this is.
        shard: see ``resolve_shard``.
        epoch: of the first pass; ``set_epoch`` of the parent gets it, plus the pass.
        repeat: begin again when the stream ends, for ever.
        share: samples to give in every pass; by default all there are.
        seeds: for what the parent draws; None leaves the generators alone.
    """

    def __init__(
        self,
        dataset: Any,
        reader: Reader,
        shard: str,
        epoch: int,
        repeat: bool = False,
        share: int | None = None,
        seeds: StreamSeeds | None = None,
    ) -> None:
        self.dataset = dataset
        self.reader = reader
        self.shard = shard
        self.epoch = epoch
        self.repeat = repeat
        self.share = share
        self.seeds = seeds
        self._pass = 0
        self._count = 0
        self._parent: Any = None
        self._resumed: Any = None

    def state(self) -> dict[str, Any]:
        """A copy of where this source is."""
        parent = self._resumed
        if self._parent is not None:
            parent = copy.deepcopy(self._parent.state_dict())
        return {"pass": self._pass, "count": self._count, "parent": parent}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; before the first sample is read."""
        self._pass = state["pass"]
        self._count = state["count"]
        self._resumed = copy.deepcopy(state["parent"])

    def __iter__(self) -> Iterator[Any]:
        if self.share == 0:
            return
        while True:
            for sample in self._one_pass() if self._count != self.share else ():
                self._count += 1
                yield sample
                if self._count == self.share:
                    break
            self._check_share()
            idle = self._count == 0
            if idle or not self.repeat:
                return
            self._pass += 1
            self._count = 0
            self._resumed = None

    def _seeded(self, samples: Iterator[Any], place: int) -> Iterator[Any]:
        """The samples from a place of the pass on, each made with the seeds of its own."""
        return samples if self.seeds is None else self.seeds.over(samples, self._pass, place)

    def _check_share(self) -> None:
        if self.share is not None and self._count < self.share:
            raise ValueError(
                f"num_samples promises {self.share} samples to {self.reader}, and the stream has "
                f"{self._count} for it"
            )

    def _one_pass(self) -> Iterator[Any]:
        """What is left of the present pass."""
        first, step = self.reader.stride(self.shard)
        parent = self.dataset
        self._parent = None
        if self.seeds is not None:
            self.seeds.before_read(self._pass, 0)
        if is_hf(parent, "IterableDataset"):
            parent, first, step = self._split_hf(parent), 0, 1
        if hasattr(parent, "set_epoch"):
            parent.set_epoch(self.epoch + self._pass)
        if _is_indexable(parent):
            indices = range(first + step * self._count, len(parent), step)
            return self._seeded((parent[index] for index in indices), self._count)
        skip = self._count
        if has_state(parent):
            if self._resumed is not None:
                parent.load_state_dict(self._resumed)
                skip = 0
            self._parent = parent
        if skip < self._count:  # It stands right behind the last sample that was this reader's.
            first = step - 1
        own = self._seeded(islice(begin(parent), first, None, step), self._count - skip)
        return islice(own, skip, None) if skip else own

    def _split_hf(self, parent: Any) -> Any:
        """A copy of its own, which ``datasets`` itself splits by worker where there are some."""
        from datasets.distributed import split_dataset_by_node

        ours = self.shard == "rank" and getattr(parent, "_distributed", None) is None
        rank, world_size = (self.reader.rank, self.reader.world_size) if ours else (0, 1)
        return split_dataset_by_node(parent, rank=rank, world_size=world_size)


def stream_from(dataset: Any) -> Any:
    """A stream from its config; anything else as it is.

    A config of a generator function makes a new generator whenever it is read.
    """
    if not isinstance(dataset, Mapping):
        return dataset
    built = build(dataset)
    return partial(build, dataset) if is_one_shot(built) else built


def begin(dataset: Any) -> Iterator[Any]:
    """An iterator over a stream, from its beginning."""
    return iter(dataset() if is_function(dataset) else dataset)


def is_function(dataset: Any) -> bool:
    """Whether it is a function that returns an iterator, as generator functions are."""
    return callable(dataset) and not hasattr(dataset, "__iter__")


def is_one_shot(dataset: Any) -> bool:
    """Whether it is an iterator, which can be read once only."""
    return isinstance(dataset, Iterator)


def check_stream(dataset: Any) -> None:
    """Refuse what is no stream.

    Raises:
        ValueError: it can neither be iterated over nor called nor indexed.
    """
    if not (is_function(dataset) or isinstance(dataset, Iterable) or _is_indexable(dataset)):
        raise ValueError(
            "dataset must be an iterable, a data set or a function that returns an iterator, got "
            f"{type(dataset).__name__}"
        )


def has_state(dataset: Any) -> bool:
    """Whether it can say where it is, exactly."""
    if not (hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")):
        return False
    rows = getattr(dataset, "_ex_iterable", None)
    return not (is_hf(dataset, "IterableDataset") and _has_shuffle_buffer(rows))


def _has_shuffle_buffer(part: Any) -> bool:
    if type(part).__name__.startswith("BufferShuffled"):
        return True
    inner = getattr(part, "ex_iterables", None) or [getattr(part, "ex_iterable", None)]
    return any(_has_shuffle_buffer(other) for other in inner if other is not None)


def _is_indexable(dataset: Any) -> bool:
    return (
        hasattr(dataset, "__getitem__")
        and hasattr(dataset, "__len__")
        and not isinstance(dataset, IterableDataset | Mapping)
    )
