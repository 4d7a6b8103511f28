"""What ``xlength bench packing`` is measured against."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np

from xlength.plan.groups import Ints

GROUP = 100_000
"""Samples that the packer under numba sorts and packs together."""


def next_fit_in_loops(lengths: Ints, max_length: int) -> int:
    """Packs of next-fit, sample by sample."""
    packs: list[list[int]] = [[]]
    room = max_length
    for sample, length in enumerate(lengths.tolist()):
        if length > room:
            packs.append([])
            room = max_length
        packs[-1].append(sample)
        room -= length
    return len(packs)


def first_fit_in_loops(lengths: Ints, max_length: int) -> int:
    """Packs of first-fit-decreasing, sample by sample, pack by pack."""
    packs: list[list[int]] = []
    rooms: list[int] = []
    sizes = lengths.tolist()
    for sample in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        length = sizes[sample]
        for pack, room in enumerate(rooms):
            if length <= room:
                packs[pack].append(sample)
                rooms[pack] -= length
                break
        else:
            packs.append([sample])
            rooms.append(max_length - length)
    return len(packs)


def by_binpacking(lengths: Ints, max_length: int) -> int:
    """Packs of the package ``binpacking``."""
    import binpacking

    return len(binpacking.to_constant_volume(dict(enumerate(lengths.tolist())), max_length))


def first_fit_by_numba(lengths: Ints, max_length: int) -> int:
    """Packs of first-fit-decreasing in groups of 100,000 samples, compiled by numba."""
    pack = _compiled_first_fit()
    count = 0
    for begin in range(0, len(lengths), GROUP):
        group = lengths[begin : begin + GROUP]
        order = np.argsort(-group, kind="stable")
        pack_of, packs = pack(group[order], max_length)
        assert len(pack_of) == len(group)
        count += int(packs)
    return count


@cache
def _compiled_first_fit() -> Any:
    import numba

    def first_fit(falling: Ints, max_length: int) -> tuple[Ints, int]:
        pack_of = np.empty(len(falling), dtype=np.int64)
        rooms = np.empty(len(falling), dtype=np.int64)
        packs = 0
        for i in range(len(falling)):
            pack = 0
            while pack < packs and rooms[pack] < falling[i]:
                pack += 1
            if pack == packs:
                rooms[pack] = max_length
                packs += 1
            rooms[pack] -= falling[i]
            pack_of[i] = pack
        return pack_of, packs

    return numba.njit(first_fit)


class TrlBestFit:
    """TRL's best-fit-decreasing of one table of token ids, which are bytes here."""

    def __init__(self, lengths: Ints) -> None:
        import pyarrow as pa

        ends = np.append(0, np.cumsum(lengths)).astype(np.int32)
        values = pa.array(np.zeros(int(ends[-1]), dtype=np.uint8))
        self.table = pa.table({"input_ids": pa.ListArray.from_arrays(pa.array(ends), values)})

    def __call__(self, lengths: Ints, max_length: int) -> int:
        from trl.data_utils import _pack_bfd

        return len(_pack_bfd(self.table, max_length))


@contextmanager
def short_rows(count: int, seed: int) -> Iterator[Any]:
    """A data set on disk: rows of 8 to 63 tokens, with labels and a length column."""
    import pyarrow as pa
    from datasets import Dataset, load_from_disk

    lengths = np.random.default_rng(seed).integers(8, 64, count)
    ends = pa.array(np.append(0, np.cumsum(lengths)).astype(np.int32))
    tokens = pa.array(np.arange(int(lengths.sum()), dtype=np.int32) % 32_000)
    rows = pa.ListArray.from_arrays(ends, tokens)
    table = pa.table({"input_ids": rows, "labels": rows, "length": pa.array(lengths)})
    with tempfile.TemporaryDirectory() as folder:
        Dataset(table).save_to_disk(folder)
        yield load_from_disk(folder)


def first_batch_of_ours(dataset: Any, max_length: int) -> Any:
    """Plan, and the first batch of a loader."""
    from torch.utils.data import DataLoader

    from xlength.collate_packed import packed_collate_fn
    from xlength.datasets.packed import PackedDataset

    packed = PackedDataset(dataset, max_length)
    return next(iter(DataLoader(packed, 1, collate_fn=packed_collate_fn)))


def first_batch_of_trl(dataset: Any, max_length: int) -> Any:
    """Pack all, and the first row."""
    from trl import pack_dataset

    columns = dataset.select_columns(["input_ids", "labels"])
    options = {"load_from_cache_file": False}
    return pack_dataset(columns, max_length, map_kwargs=options)[0]


def first_batch_of_map(dataset: Any, max_length: int) -> Any:
    """Lay all end to end under ``datasets.map``, batch by batch, as packing scripts do."""

    def pack(batch: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        result = {}
        for name, lists in batch.items():
            flat = [token for row in lists for token in row]
            result[name] = [flat[i : i + max_length] for i in range(0, len(flat), max_length)]
        return result

    columns = dataset.select_columns(["input_ids", "labels"])
    return columns.map(pack, batched=True, load_from_cache_file=False)[0]
