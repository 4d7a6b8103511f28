"""``LengthPoolSortDataset``: a stream in an order in which all ranks meet samples of like length at
the same step."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mmengine.logging import print_log
from torch.utils.data import IterableDataset, get_worker_info

from xlength.datasets.pool_key import Key, SampleCost
from xlength.datasets.stream_cursor import StreamCursor
from xlength.datasets.stream_notes import Epochs, Notes, samples_given
from xlength.datasets.stream_parts import (
    Reader,
    check_loader,
    equal_shares,
    loader_of,
    resolve_shard,
)
from xlength.datasets.stream_seeds import StreamSeeds
from xlength.datasets.stream_source import StreamSource, check_stream, is_one_shot, stream_from
from xlength.datasets.stream_state import check_stream_state, worker_state
from xlength.plan.cost import Cost, make_cost
from xlength.plan.pool_options import PoolOptions
from xlength.plan.sliding import make_sorter
from xlength.registry import DATASETS, register
from xlength.samplers.parallel import data_parallel_info

Spec = str | Mapping[str, Any] | Cost


@register(DATASETS)
class LengthPoolSortDataset(IterableDataset[Any]):
    """Collects ``pool_size`` samples of a stream, sorts them by length, shuffles them with a seed
    that is the same on all ranks, and gives them one by one.

    For data that is never wholly known, so that nothing can be planned: put it between the
    tokenised stream and batching. Each rank reads other shards of the same data, so position i of
    every sorted pool is about the same quantile; the common shuffle keeps that, and all ranks get
    similar lengths at the same step. With the default arguments the first epoch has the order of
    LLaVA-OneVision-2's data set of this name; give ``micro_batch_size`` (the loader's batch size)
    to save padding, and ``mode='sliding'`` to wait least.

    Price: a sample is trained on up to two pools (``mode='sliding'``: up to ``max_age`` steps)
    after it was read; with ``separate_packed`` a few are a pool or two later. Every worker of every
    rank holds up to ``pool_size`` samples: 1,000 samples of 4,096 tokens with labels are some 65 MB
    a worker, with images far more. See ``PoolOptions``, ``PoolSorter`` and ``SlidingSorter``.
    Cost: 2 to 5 microseconds a sample; under a loader 10 more for what the stream may draw
    (``reseed``). Reading goes on while a pool is given: one sample is read for each that is given.
    A state costs as much as some hundred samples; to continue from one, what is held is read again.

    Each worker sorts a pool of its own, and a loader takes a batch from each in turn, so ranks with
    equally many workers stay aligned. A loader with ``in_order=False`` is refused.

    Where a pass ends, ranks may have unequal numbers of samples. So in training with
    ``TrainLoop(max_iters)`` the stream repeats for ever; for a single pass give ``num_samples``, or
    let ``TrainLoop`` agree on the last step (see ``stream_end``).

    In mmengine the loader's config needs ``sampler=None`` spelt out.

    Args:
        dataset: the stream, or its config: a ``datasets`` stream, a WebDataset, any iterable or
            indexable data set, or a function that returns an iterator.
        pool_size: samples to hold; 0 gives the stream as it is. 10 to 100 times the batch size is
            usual; ``xlength report --stream`` computes it.
        key: the length: name of a field or attribute, dotted path, or function of the sample
            (picklable where workers are spawned). Without a field ``length``: ``total_len``, else
            the size of ``tokens``, else of ``input_ids``.
        ascending, seed, tail_shuffle, warmup_steps, initial_pool_size, micro_batch_size,
            separate_packed, mode, max_age, packed_share: see ``PoolOptions``.
        cost: ``'tokens'`` or ``'attention'``, see ``make_cost``: what is sorted by. For packed
            samples, whose totals are alike, ``'attention'`` is the sum of the squares.
        packed_key: see ``SampleCost``.
        repeat: begin again at the end, for ever; by default in ``TrainLoop(max_iters)`` only.
        shard: how a stream that does not split itself is dealt to readers: by ``'rank'`` (and
            worker), by ``'worker'``, or ``'none'``. ``datasets`` streams are split by rank and
            worker by default, WebDatasets split themselves.
        num_samples: samples of one pass, all ranks together, or one number per shard. Then all
            ranks give equally many (what is left over is logged), and ``len()`` is known.
        dp_rank, dp_world_size, device_mesh, mesh_dim: see ``data_parallel_info``.
        reseed: whether what the stream draws from Python's, numpy's and torch's generators (random
            augmentation) depends on ``seed``, epoch, reader and place alone, so that it continues
            exactly too: see ``StreamSeeds``; by default wherever a loader reads.

    Raises:
        ValueError: an argument out of its range.
    """

    def __init__(
        self,
        dataset: Any,
        pool_size: int,
        key: Key = "length",
        ascending: bool = True,
        seed: int = 42,
        tail_shuffle: bool = True,
        warmup_steps: int = 0,
        initial_pool_size: int = 10,
        micro_batch_size: int = 1,
        cost: Spec = "tokens",
        separate_packed: bool = False,
        mode: str = "pool",
        max_age: int | None = None,
        packed_share: float | None = None,
        packed_key: Key | None = None,
        repeat: bool | None = None,
        shard: str | None = None,
        num_samples: int | Sequence[int] | None = None,
        dp_rank: int | None = None,
        dp_world_size: int | None = None,
        device_mesh: Any = None,
        mesh_dim: str | Sequence[str] | None = None,
        reseed: bool | None = None,
    ) -> None:
        self.dataset = stream_from(dataset)
        check_stream(self.dataset)
        self.options = None
        if isinstance(pool_size, bool) or pool_size != 0:
            self.options = PoolOptions(
                pool_size,
                ascending,
                seed,
                tail_shuffle,
                warmup_steps,
                initial_pool_size,
                micro_batch_size,
                separate_packed,
                mode,
                max_age,
                packed_share,
            )
        self.micro_batch_size = micro_batch_size
        self.cost = SampleCost(key, make_cost(cost), packed_key)
        self.rank, self.world_size = data_parallel_info(
            dp_rank, dp_world_size, device_mesh, mesh_dim
        )
        self.shard = shard
        self.num_samples = num_samples
        self.repeat = repeat
        self.seed = seed
        self.reseed = reseed
        self._batch_size: int | None = None
        self._epochs, self._notes = Epochs(), Notes()
        self._cursor: StreamCursor | None = None
        self._here = (0, Reader(self.rank, self.world_size))
        self._resume: dict[str, Any] | None = None
        self._begun = False
        if shard is not None or num_samples is not None:
            self._log_shares(resolve_shard(self.dataset, shard, self.world_size))
        if repeat:
            self.check_repeatable()

    def __iter__(self) -> Iterator[Any]:
        loader = loader_of(self)
        if loader is not None:
            check_loader(loader, self.micro_batch_size)
            self.read_for(loader)
        if self._begun and is_one_shot(self.dataset):
            self.check_repeatable()
        self._begun = True
        epoch = self._epochs.begin()
        resume, self._resume = self._resume, None
        if resume is not None and resume["epoch"] != epoch:
            resume = None
        first_worker = 0 if resume is None else resume["first_worker"]
        reader = Reader.here(self.rank, self.world_size, self, first_worker)
        self._here = (epoch, reader)
        self._cursor = self._new_cursor(epoch, reader)
        if resume is not None:
            self._cursor.restore(*worker_state(resume, reader))
        return self._cursor.samples()

    def __len__(self) -> int:
        """Samples that every rank gives in a pass, at least; without ``num_samples`` some ranks may
        give one more.

        Raises:
            TypeError: that is not known, or there is no end.
        """
        return sum(self._shares(1))

    def num_batches(self, batch_size: int, num_workers: int, drop_last: bool = False) -> int:
        """Batches that a loader makes of a pass, as every worker has an incomplete last one.

        Raises:
            TypeError: that is not known, or there is no end.
        """
        rounding = 0 if drop_last else batch_size - 1
        shares = self._shares(max(num_workers, 1))
        return sum((share + rounding) // batch_size for share in shares)

    def _shares(self, num_workers: int) -> list[int]:
        """Samples that each worker of the rank with the fewest gives in a pass."""
        if self.repeat:
            raise TypeError("a stream that repeats for ever has no length")
        total = len(self.dataset) if self.num_samples is None else self.num_samples
        shard = resolve_shard(self.dataset, self.shard, self.world_size)
        if shard == "none":
            raise TypeError("only a stream that splits itself knows how many samples a rank has")
        return equal_shares(self.dataset, total, self.world_size, num_workers, shard)

    def set_epoch(self, epoch: int) -> None:
        """The epoch that the next iterators begin; a loaded position is kept if it is of this
        epoch."""
        self._epochs.set(epoch)
        if self._resume is not None and self._resume["epoch"] != epoch:
            self._resume = None

    def check_repeatable(self) -> None:
        """Raise ``ValueError`` for a stream that can be read once only."""
        if is_one_shot(self.dataset):
            raise ValueError(
                f"dataset is a {type(self.dataset).__name__}, which can be read once: give the "
                "function that makes it to read it again"
            )

    def state_dict(self) -> dict[str, Any]:
        """Where this reader is, right after the last sample that it gave; a copy."""
        epoch, reader = self._here
        if self._cursor is None:
            epoch = self._epochs.peek()
            if self._resume is not None:
                return copy.deepcopy(self._resume)
            workers = []
        else:
            workers = [{"worker": reader.worker, **self._cursor.state()}]
        return self._state(epoch, reader.num_workers, workers)

    def state_after(
        self,
        num_batches: int,
        batch_size: int,
        num_workers: int,
        drop_last: bool = False,
        epoch: int | None = None,
    ) -> dict[str, Any]:
        """Where all readers of this rank were when a loader had yielded ``num_batches`` of an
        epoch.

        For the main process, whose workers are ahead by some batches; they are not asked.

        Args:
            num_batches: that were consumed since the epoch began, in whichever run.
            batch_size, num_workers, drop_last: of the loader.
            epoch: by default the one that was begun last.

        Returns:
            a state for ``load_state_dict`` of all ranks: this rank goes on at once, others (which
            read other shards) by reading from the beginning of the epoch, so better save that of
            every rank (``merge_states``).
        """
        if epoch is None:
            epoch = max(self._epochs.peek() - 1, 0)
        count = max(num_workers, 1)
        notes = [self._notes.of(worker, epoch) for worker in range(count)]
        totals = [own[-1]["given"] if own and own[-1]["ended"] else None for own in notes]
        given, first_worker = samples_given(num_batches, batch_size, totals, drop_last)
        workers = []
        for worker in range(count):
            state: dict[str, Any] = {"given": 0, "skip": given[worker]}
            for note in notes[worker]:
                if note["given"] <= given[worker]:
                    skip = given[worker] - note["given"] + note["state"]["skip"]
                    state = {**copy.deepcopy(note["state"]), "skip": skip}
            workers.append({"worker": worker, **state})
        return {**self._state(epoch, count, workers), "first_worker": first_worker}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Let the next iterators continue; they begin the state's epoch.

        Args:
            state: from ``state_dict``, ``state_after`` or ``merge_states``.
            strict: refuse a state of other data or options; else begin its epoch anew.

        Raises:
            ValueError: the state does not fit; names what was and what is. Another number of
                workers is found out when they begin.
        """
        self._resume = check_stream_state(state, self._state(0, 1, []), strict)
        self._epochs.set(int(state.get("epoch", 0)))
        self._cursor = None

    def _state(self, epoch: int, num_workers: int, workers: list[dict[str, Any]]) -> dict[str, Any]:
        options = {} if self.options is None else self.options.as_dict()
        return {
            "version": 1,
            "type": type(self).__name__,
            "epoch": epoch,
            "rank": self.rank,
            "world_size": self.world_size,
            "num_workers": num_workers,
            "first_worker": 0,
            "options": {
                **options,
                "cost": repr(self.cost.cost),
                "repeat": bool(self.repeat),
                "reseed": self.reseed,
            },
            "workers": workers,
        }

    def read_for(self, loader: Any) -> None:
        """The next iterator is read by a loader whose data set this one, or one around it that
        gives a sample for each of this one's, is."""
        self._batch_size = loader.batch_size

    def _new_cursor(self, epoch: int, reader: Reader) -> StreamCursor:
        shard = resolve_shard(self.dataset, self.shard, self.world_size)
        share = None
        if self.num_samples is not None:
            shares = equal_shares(
                self.dataset, self.num_samples, self.world_size, reader.num_workers, shard
            )
            share = shares[reader.worker]
        seeds = StreamSeeds.wanted(self.reseed, self.seed, epoch, reader, self._batch_size)
        if get_worker_info() is None:
            self._batch_size = None  # the next iterator may be another loader's
        source = StreamSource(self.dataset, reader, shard, epoch, bool(self.repeat), share, seeds)
        options = self.options

        def note(given: int, state: dict[str, Any], ended: bool) -> None:
            self._notes.add(reader.worker, epoch, given, state, ended)

        return StreamCursor(
            source,
            None if options is None else make_sorter(options, epoch, reader.worker),
            self.cost,
            options is not None and options.separate_packed,
            100 if options is None else max(options.capacity, 100),
            note,
        )

    def _log_shares(self, shard: str) -> None:
        if self.num_samples is None:
            return
        total = self.num_samples if isinstance(self.num_samples, int) else sum(self.num_samples)
        shares = equal_shares(self.dataset, self.num_samples, self.world_size, 1, shard)
        left = total - sum(shares) * (self.world_size if shard == "rank" else 1)
        if left:
            print_log(
                f"num_samples: every rank gives {sum(shares)} of {total} samples in a pass; {left} "
                "are left out, so that all ranks give equally many",
                "current",
                logging.INFO,
            )

    def __getstate__(self) -> dict[str, Any]:
        self.cost.check_picklable()
        loader = loader_of(self)
        if loader is not None:
            check_loader(loader, self.micro_batch_size)
            self.read_for(loader)
        return {**self.__dict__, "_cursor": None}
