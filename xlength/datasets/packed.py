"""``PackedDataset``: item i is pack i, laid together when it is asked for."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.context import get_spawning_popen
from typing import Any

import numpy as np
import torch
from mmengine.logging import print_log
from numpy.typing import NDArray
from torch.utils.data import Dataset

from xlength.arrow import is_hf
from xlength.datasets.token_rows import pack_of, refuse_media, token_rows
from xlength.lengths import get_lengths
from xlength.losses import IGNORE_INDEX
from xlength.plan.epoch import epoch_rng
from xlength.plan.groups import Groups, fingerprint
from xlength.plan.outlook import packing_outlook
from xlength.plan.pack import pack_samples
from xlength.plan.pieces import Overlong, Packs, Pieces
from xlength.registry import DATASETS, register
from xlength.runtime.build import build
from xlength.samplers.state import check_state

Ints = NDArray[np.int64]


@register(DATASETS)
class PackedDataset(Dataset[dict[str, Any]]):
    """Packs of a map-style data set, for any loader; its tokens are read lazily and never copied.

    Use it where no ``Packing`` plan can be: under another trainer, or where samples are cut
    (``overlong='split'``, ``strategy='concat'``). The packs are the same in every epoch.

    Price: pack-mates stay together in every epoch; see ``plan.pack`` for the price of each
    strategy.
    Cost: start-up reads the lengths and makes the plan (about 0.1 s for a million rows); then one
    read of a pack's rows an item. Memory: 8 to 32 bytes a sample, shared by the workers of a
    loader, forked or spawned.

    Args:
        dataset: map-style, or its config, with ``input_ids`` and ``labels`` in each row; a
            ``datasets.Dataset`` is read through Arrow.
        max_length: tokens of a pack.
        strategy: ``'best_fit'``, ``'next_fit'`` or ``'concat'``.
        overlong: what to do with longer samples: ``'error'``, ``'truncate'``, ``'split'`` or
            ``'drop'``.
        length_property: where the lengths are; see ``get_lengths``.
        seed: of the order of the packs and of which of equally long samples go together.

    Raises:
        ValueError: an argument or a length is out of range; a sample is too long; no sample is
            left.
    """

    def __init__(
        self,
        dataset: Any,
        max_length: int,
        strategy: str = "best_fit",
        overlong: str = "error",
        length_property: str = "length",
        seed: int = 0,
    ) -> None:
        dataset = build(dataset) if isinstance(dataset, Mapping) else dataset
        lengths = np.abs(get_lengths(dataset, length_property))
        self.dataset = _as_arrow(dataset)
        self.max_length = max_length
        rng = epoch_rng(seed, 0)
        kept = self._learnable(lengths) if overlong == "truncate" else None
        packs, report = _pack_some(lengths, kept, max_length, strategy, overlong, rng)
        if not len(packs):
            raise ValueError(f"no sample is left to pack: {report}")
        self.packs = packs.take(rng.permutation(len(packs)))
        self.sample_lengths = lengths
        self.length = self.packs.fills(lengths)
        """(packs,) int64, tokens of each pack."""
        self._state: dict[str, Any] = {
            "version": 1,
            "type": "PackedDataset",
            "fingerprint": fingerprint(lengths, *_arrays(self.packs)),
            "options": {
                "max_length": max_length,
                "strategy": strategy,
                "overlong": overlong,
                "length_property": length_property,
                "seed": seed,
            },
        }
        self._log(report, strategy)

    def state_dict(self) -> dict[str, Any]:
        """What the packs are made from: plain values. Their order is the sampler's affair."""
        return {**self._state, "options": dict(self._state["options"])}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Check that these are the packs of the state; nothing else is to be continued here.

        Raises:
            ValueError: they are others (``strict``); otherwise there is a warning.
        """
        check_state({"epoch": "of the packs", **state}, self.state_dict(), strict)

    def _learnable(self, lengths: Ints) -> Ints | None:
        """The samples that keep a label when they are cut; None where all do."""
        long = np.flatnonzero(lengths > self.max_length)
        lost = [
            row
            for block in np.array_split(long, max(1, len(long) // 256))
            for row, (_, labels) in zip(block, token_rows(self.dataset, block), strict=True)
            if (labels[1 : self.max_length] == IGNORE_INDEX).all()
        ]
        if not lost:
            return None
        _warn(
            f"{len(lost)} samples are left out, since max_length={self.max_length} cuts off all "
            f"that they teach (the first is row {lost[0]})"
        )
        return np.delete(np.arange(len(lengths)), lost)

    def _log(self, report: Overlong, strategy: str) -> None:
        total = int(self.length.sum())
        print_log(
            f"PackedDataset: {len(self.sample_lengths)} samples -> {len(self)} packs of at most "
            f"{self.max_length} tokens by {strategy}; {total} tokens fill "
            f"{total / (len(self) * self.max_length):.1%} of them.",
            logger="current",
        )
        if report.count:
            _warn(str(report))
        outlook = packing_outlook(self.sample_lengths, self.max_length)
        if outlook and strategy != "concat":
            _warn(outlook)

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Pack ``index``.

        Returns:
            ``input_ids``, ``labels``, ``position_ids``: (tokens,) int64, labels masked at each
            sample's first token, positions restarting there; ``cumulative_len``: (samples + 1,)
            int32, where samples begin and end; ``sample_ids``: (samples,) int64, their indices in
            the data set, and ``starts``: (samples,) int64, the first token of each that is here.

        Raises:
            ValueError: a row has another number of tokens than its length said, or see
                ``token_row``.
        """
        samples, starts, stops = self.packs[int(index)]
        if starts is None or stops is None:
            starts, stops = np.zeros_like(samples), self.sample_lengths[samples]
        rows = token_rows(self.dataset, samples)
        for sample, (ids, _) in zip(samples, rows, strict=True):
            if len(ids) != self.sample_lengths[sample]:
                raise ValueError(
                    f"row {sample} has {len(ids)} tokens, but its length says "
                    f"{self.sample_lengths[sample]}: the lengths are stale"
                )
        spans = list(zip(rows, starts, stops, strict=True))
        return pack_of(
            [row[0][start:stop] for row, start, stop in spans],
            [row[1][start:stop] for row, start, stop in spans],
            samples,
            starts,
        )

    def __getstate__(self) -> dict[str, Any]:
        """Arrays on their way to a spawned worker are moved to shared memory first, once."""
        state = dict(self.__dict__)
        packs, shared = state.pop("packs"), state.pop("_shared", None)
        arrays = [state.pop("sample_lengths"), state.pop("length"), *_arrays(packs)]
        if get_spawning_popen() is None:
            return {**state, "_arrays": arrays}
        if shared is None:
            shared = [torch.from_numpy(array).clone() for array in arrays]
            for tensor in shared:
                tensor.share_memory_()
            self.__setstate__({**state, "_arrays": shared})
        return {**state, "_arrays": shared}

    def __setstate__(self, state: dict[str, Any]) -> None:
        arrays = state.pop("_arrays")
        if isinstance(arrays[0], torch.Tensor):
            self._shared = arrays  # keeps the memory's file descriptors open
            arrays = [array.numpy() for array in arrays]
        lengths, fills, members, offsets, *pieces = arrays
        self.__dict__.update(state, sample_lengths=lengths, length=fills)
        self.packs = Packs(Groups(members, offsets), Pieces(*pieces) if pieces else None)


def _arrays(packs: Packs) -> list[Ints]:
    result = [packs.groups.members, packs.groups.offsets]
    if packs.pieces is not None:
        result += [packs.pieces.samples, packs.pieces.starts, packs.pieces.stops]
    return result


def _as_arrow(dataset: Any) -> Any:
    if not is_hf(dataset, "Dataset"):
        return dataset
    refuse_media(dataset.column_names, "dataset")
    missing = {"input_ids", "labels"} - {*dataset.column_names}
    if missing:
        raise ValueError(f"dataset has no column {sorted(missing)}: it has {dataset.column_names}")
    return dataset.select_columns(["input_ids", "labels"]).with_format("arrow")


def _pack_some(
    lengths: Ints, kept: Ints | None, max_length: int, *options: Any
) -> tuple[Packs, Overlong]:
    """Pack the samples ``kept``, by their indices among all."""
    if kept is None:
        return pack_samples(lengths, max_length, *options)
    packs, report = pack_samples(lengths[kept], max_length, *options)
    if report.count:
        report = replace(report, first_row=int(kept[report.first_row]))
    groups, pieces = packs.groups, packs.pieces
    if pieces is None:
        return Packs(Groups(kept[groups.members], groups.offsets)), report
    return Packs(groups, replace(pieces, samples=kept[pieces.samples])), report


def _warn(message: str) -> None:
    print_log(f"PackedDataset: {message}.", logger="current", level=logging.WARNING)
