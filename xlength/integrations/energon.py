"""``LengthPoolSortDataset`` for Megatron-Energon: all ranks meet samples of like length at the same
step.

Needs the extra ``energon`` (megatron-energon >= 7.4). Put it between encoding and batching, in the
``build_batch`` of a task encoder::

    from megatron.energon import DefaultTaskEncoder, WorkerConfig, stateless
    from megatron.energon import get_savable_loader, get_train_dataset
    from xlength.integrations.energon import LengthPoolSortDataset

    class TaskEncoder(DefaultTaskEncoder):
        @stateless
        def encode_sample(self, sample):
            return Encoded.derive_from(sample, tokens=tokenize(sample.text))

        def build_batch(self, dataset, *, batch_size, worker_config, **options):
            dataset = LengthPoolSortDataset(
                dataset, pool_size=1000, micro_batch_size=batch_size,
                worker_config=worker_config)
            return super().build_batch(
                dataset, batch_size=batch_size, worker_config=worker_config, **options)

    worker_config = WorkerConfig.default_worker_config(num_workers=4)
    dataset = get_train_dataset(
        path, batch_size=8, shuffle_buffer_size=None, max_samples_per_sequence=None,
        worker_config=worker_config, task_encoder=TaskEncoder())
    loader = get_savable_loader(dataset)
    ...
    state = loader.save_state_rank()  # later: loader.restore_state_rank(state)

``encode_sample`` must be ``@stateless`` to be restored, as for Energon's own buffers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from xlength.datasets.pool_key import Key, SampleCost
from xlength.plan.cost import Cost, make_cost
from xlength.plan.pool_options import PoolOptions
from xlength.plan.sliding import SlidingSorter, make_sorter

try:
    from megatron.energon import SavableDataset, WorkerConfig
    from megatron.energon.wrappers.base import BaseWrapperDataset, get_sample_restore_key
except ImportError as error:
    raise ImportError(
        "xlength.integrations.energon needs megatron-energon: pip install 'xlength[energon]'"
    ) from error

_END = object()


class LengthPoolSortDataset(BaseWrapperDataset[Any, Any]):
    """Sorts encoded samples by length in pools or in a sliding buffer.

    The same orders, options, costs and prices as ``xlength.LengthPoolSortDataset``; splitting by
    rank and worker is Energon's. What is held is saved as the samples' restore keys, so that
    exactly the same samples follow after a restore, and the pool is not read anew.

    Args:
        dataset: of encoded samples.
        pool_size: samples that every worker holds.
        key: the length: field, attribute, dotted path, function, or by default ``length``,
            ``total_len``, or the size of ``tokens`` or ``input_ids``.
        ascending, seed, tail_shuffle, warmup_steps, initial_pool_size, micro_batch_size,
            separate_packed, mode, max_age, packed_share: see ``PoolOptions``.
        cost, packed_key: see ``SampleCost``.
        follow_loader: ``mode='sliding'``: let the loader's step and not the number of samples given
            decide on the quantile. Then a batch that ``encode_batch`` skips on one rank does not
            shift this rank's schedule; for pipelines in which a step takes one micro-batch.
        worker_config: of the pipeline.

    Raises:
        ValueError: an argument out of its range; while reading, a length is missing or none.
    """

    _savable_fields = ("_restore_keys", "_sorter_state", "_epoch")

    def __init__(
        self,
        dataset: SavableDataset[Any],
        pool_size: int,
        *,
        key: Key = "length",
        ascending: bool = True,
        seed: int = 42,
        tail_shuffle: bool = True,
        warmup_steps: int = 0,
        initial_pool_size: int = 10,
        micro_batch_size: int = 1,
        cost: str | Mapping[str, Any] | Cost = "tokens",
        separate_packed: bool = False,
        mode: str = "pool",
        max_age: int | None = None,
        packed_share: float | None = None,
        packed_key: Key | None = None,
        follow_loader: bool = False,
        worker_config: WorkerConfig,
    ) -> None:
        super().__init__(dataset, worker_config=worker_config)
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
        if follow_loader and mode != "sliding":
            raise ValueError(f"follow_loader=True needs mode='sliding', got {mode!r}")
        self.cost = SampleCost(key, make_cost(cost), packed_key)
        self.follow_loader = follow_loader
        self.reset_state_own()

    def reset_state_own(self) -> None:
        """Back to the beginning of the first epoch, with nothing held."""
        self._sorter: Any = None
        self._restore_keys: list[Any] = []
        self._sorter_state: dict[str, Any] | None = None
        self._epoch = 0

    def len_worker(self, worker_idx: int | None = None) -> int:
        """Samples of a worker: all that it reads."""
        length: int = self.dataset.len_worker(worker_idx)
        return length

    def __iter__(self) -> Iterator[Any]:
        sorter = self._sorter = self._begin()
        source = iter(self.dataset)
        separate = self.options.separate_packed
        while True:
            for _ in range(sorter.wants()):
                sample = next(source, _END)
                if sample is _END:
                    sorter.close()
                    break
                self._push(sorter, sample, separate)
            if not len(sorter):
                break
            yield sorter.pop()
        self._epoch += 1
        self._sorter = None

    def _loader_step(self) -> int:
        """The batch that the loader asks this worker for, of its own."""
        index: int = self.worker_config.active_worker_batch_index
        return index // max(self.worker_config.num_workers, 1)

    def _push(self, sorter: Any, sample: Any, separate: bool) -> None:
        packed = separate and self.cost.is_packed(sample)
        sorter.push(self.cost.of(sample, sorter.reads), sample, packed)

    def _begin(self) -> Any:
        """The sorter to go on with: the present one, the saved one, or a fresh one of this
        epoch."""
        if self._sorter is not None:
            return self._sorter
        sorter = make_sorter(self.options, self._epoch, self.worker_config.rank_worker_id())
        if isinstance(sorter, SlidingSorter) and self.follow_loader:
            sorter.clock = self._loader_step
        state, self._sorter_state = self._sorter_state, None
        if state is not None:
            serials = [*state["ready"], *state["rest"]]
            entries = {}
            for serial, restore_key in zip(serials, self._restore_keys, strict=True):
                sample = self.dataset.restore_sample(restore_key)
                packed = self.options.separate_packed and self.cost.is_packed(sample)
                entries[serial] = (self.cost.of(sample, serial), serial, packed, sample)
            sorter.restore(state, entries)
            if state["closed"]:
                sorter.close()
        return sorter

    def save_state(self) -> Any:
        """What is held, by restore keys, where the sorter is, and the state of the inner data
        set."""
        if self._sorter is not None:
            self._restore_keys = [get_sample_restore_key(entry[3]) for entry in self._sorter.held()]
            self._sorter_state = {**self._sorter.state(), "closed": self._sorter.closed}
        state = super().save_state()
        if self._sorter is not None:
            self._sorter_state = None
        return state

    def restore_state(self, state: Any) -> None:
        """Take over a saved state; what was held is restored when iteration begins."""
        super().restore_state(state)
        self._sorter = None

    def config(self) -> dict[str, Any]:
        """For Energon's check that two pipelines are the same."""
        return {
            "type": type(self).__qualname__,
            **self.options.as_dict(),
            "key": self.cost.key
            if isinstance(self.cost.key, str)
            else self._function_config(self.cost.key),
            "cost": repr(self.cost.cost),
            "follow_loader": self.follow_loader,
            "dataset": self.dataset.config(),
            "worker_config": self.worker_config.config(),
        }

    def __str__(self) -> str:
        return f"LengthPoolSortDataset(pool_size={self.options.pool_size}, dataset={self.dataset})"
