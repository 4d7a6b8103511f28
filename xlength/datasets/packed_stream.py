"""``PackedStream``: packs of a stream, made from a pool of its samples."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mmengine.logging import print_log
from torch.utils.data import IterableDataset

from xlength.datasets.pool_key import Key
from xlength.datasets.pool_sort import LengthPoolSortDataset
from xlength.datasets.stream_parts import check_loader, loader_of
from xlength.datasets.token_rows import pack_of, token_row
from xlength.plan.pack_pool import Held, PackOptions
from xlength.registry import DATASETS, register


@register(DATASETS)
class PackedStream(IterableDataset[dict[str, Any]]):
    """Packs a stream: each worker of each rank holds ``pool_size`` samples and gives full packs.

    A pack begins with the sample that has waited longest and is filled by best fit from the pool;
    nothing is cut, lost or seen twice, and no sample waits for more than ``pool_size`` packs. Items
    are those of ``PackedDataset``, to be collated by ``packed_collate_fn``.

    All packs have nearly equal tokens. To give all ranks packs of equal *cost* at the same step,
    which is what they wait for, put ``LengthPoolSortDataset`` around it::

        dataset=dict(
            type='xlength.LengthPoolSortDataset', pool_size=64, mode='sliding', cost='attention',
            shard='none', dataset=dict(type='xlength.PackedStream', dataset=..., max_length=8192))

    (``shard='none'``, since this class splits its stream already.)

    Price: every worker holds ``pool_size`` samples, and what is held is read again to continue.
    Short samples wait longer than long ones where they do not fill a gap.
    Cost: some 5 microseconds a sample besides laying out its tokens.

    A state holds, beside the parent's, which samples are held (also those that fitted no pack so
    far); it is right at any moment, in particular right after a pack. Streams, splitting by rank
    and worker, epochs and states are those of ``LengthPoolSortDataset``.

    Args:
        dataset: the stream, or its config, see ``LengthPoolSortDataset``; its samples have
            ``input_ids`` and ``labels``.
        max_length, pool_size, overlong: see ``PackOptions``.
        key: the length, see ``LengthPoolSortDataset``.
        repeat: begin again at the end, for ever; by default in ``TrainLoop(max_iters)`` only.
        shard: how the stream is split, see ``LengthPoolSortDataset``.
        dp_rank, dp_world_size, device_mesh, mesh_dim: see ``data_parallel_info``.
        seed, reseed: of what the stream draws, see ``LengthPoolSortDataset``; nothing else is
            random here.

    Raises:
        ValueError: an argument out of its range; while reading: a sample is too long, or has no
            tokens or labels, or another number of tokens than its length says.
    """

    def __init__(
        self,
        dataset: Any,
        max_length: int,
        pool_size: int = 1000,
        overlong: str = "error",
        key: Key = "length",
        repeat: bool | None = None,
        shard: str | None = None,
        dp_rank: int | None = None,
        dp_world_size: int | None = None,
        device_mesh: Any = None,
        mesh_dim: str | Sequence[str] | None = None,
        seed: int = 42,
        reseed: bool | None = None,
    ) -> None:
        self.options = PackOptions(max_length, pool_size, overlong, self._note_overlong)
        self._overlong = 0
        self._reader = LengthPoolSortDataset(
            dataset,
            pool_size,
            key,
            repeat=repeat,
            shard=shard,
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
            device_mesh=device_mesh,
            mesh_dim=mesh_dim,
            seed=seed,
            reseed=reseed,
        )
        # It packs instead of sorting.
        self._reader.options = self.options  # type: ignore[assignment]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        loader = loader_of(self)
        if loader is not None:
            check_loader(loader, loader.batch_size)
            self._reader.read_for(loader)
        self._overlong = 0
        return self._packs(iter(self._reader))

    def _packs(self, pools: Iterator[Any]) -> Iterator[dict[str, Any]]:
        for pieces in pools:
            yield _lay_out(pieces)
        if self._overlong:
            self._warn(f"{self._overlong} samples of the epoch")

    def _note_overlong(self, serial: int, length: int) -> None:
        if not self._overlong:
            self._warn(f"sample {serial} of the stream ({length} tokens; more may follow)")
        self._overlong += 1

    def _warn(self, what: str) -> None:
        done = {"truncate": "cut to it", "split": "cut into several pieces", "drop": "left out"}
        print_log(
            f"PackedStream: longer than max_length={self.options.max_length}, so "
            f"{done[self.options.overlong]}: {what}.",
            "current",
            logging.WARNING,
        )

    @property
    def repeat(self) -> bool | None:
        """Whether the stream begins again at its end, for ever; None where the loop may say so."""
        return self._reader.repeat

    @repeat.setter
    def repeat(self, value: bool | None) -> None:
        self._reader.repeat = value

    def check_repeatable(self) -> None:
        """Raise ``ValueError`` for a stream that can be read once only."""
        self._reader.check_repeatable()

    def set_epoch(self, epoch: int) -> None:
        """The epoch that the next iterators begin; a loaded position of this epoch is kept."""
        self._reader.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where this reader is, right after the last pack that it gave; a copy."""
        return {**self._reader.state_dict(), "type": "PackedStream"}

    def state_after(self, *args: Any, **options: Any) -> dict[str, Any]:
        """Where all readers of this rank were when a loader had yielded some batches of packs; see
        ``LengthPoolSortDataset.state_after``."""
        return {**self._reader.state_after(*args, **options), "type": "PackedStream"}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Continue from a state; see ``LengthPoolSortDataset.load_state_dict``."""
        if state.get("type") == "PackedStream":
            state = {**state, "type": "LengthPoolSortDataset"}
        elif "type" in state:
            raise ValueError(f"a PackedStream cannot continue a state of type {state['type']!r}")
        self._reader.load_state_dict(state, strict)


def _lay_out(pieces: Sequence[Held]) -> dict[str, Any]:
    """The pack of some pieces, as ``PackedDataset`` gives it."""
    ids, labels = [], []
    for held in pieces:
        tokens, targets = token_row(held.sample, f"sample {held.serial} of the stream")
        stop = held.start + held.length
        if len(tokens) < stop:
            raise ValueError(
                f"sample {held.serial} of the stream has {len(tokens)} tokens, fewer than its "
                f"length says ({stop} or more)"
            )
        ids.append(tokens[held.start : stop])
        labels.append(targets[held.start : stop])
    return pack_of(ids, labels, [h.serial for h in pieces], [h.start for h in pieces])
