"""Concat packing of a ``datasets.Dataset`` in XTuner's format, from one plan over all rows."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset, Features, Sequence, Value, is_caching_enabled
from datasets.fingerprint import Hasher
from mmengine.logging import print_log

from xlength.arrow import list_sizes
from xlength.plan.epoch import epoch_rng
from xlength.plan.pack import concat
from xlength.plan.pieces import Packs

TOKEN_COLUMNS = ("input_ids", "labels")
_TOKENS_PER_BATCH = 2**22
_TOKENS_PER_PROCESS = 2**26


def pack_dataset(
    dataset: Dataset,
    max_length: int,
    use_varlen_attn: bool = False,
    shuffle_before_pack: bool = True,
    seed: int = 0,
    map_num_proc: int | None = 1,
) -> Dataset:
    """Lay the rows end to end and cut every ``max_length`` tokens, as XTuner does, losing nothing.

    The plan is made once, over the lengths of all rows; worker processes only copy the tokens of
    their packs, so the result does not depend on their number. The last pack may be short. Where
    the data set is cached on disk the result is too, under a name made of its fingerprint, the
    arguments and the seed, so that a second start reads it.

    Price: a sample is cut at almost every pack's end; without ``use_varlen_attn`` samples of one
    pack see each other, as in XTuner.
    Cost: reads and writes every token once, in batches of some 4 million tokens.

    Args:
        dataset: with columns ``input_ids`` and, as a rule, ``labels``, lists of integers.
        max_length: tokens of a pack.
        use_varlen_attn: add ``cumulative_len`` (from 0 to the pack's length) and ``position_ids``
            (restarting at each piece), int32.
        shuffle_before_pack: shuffle the rows first.
        seed: of the shuffle.
        map_num_proc: processes at most; fewer are used where there are few tokens.

    Returns:
        A data set of packs with the token columns and those of ``use_varlen_attn``.

    Raises:
        ValueError: ``input_ids`` is missing; a row is null; a row has another number of labels
            than of tokens; there is no token; ``max_length`` is less than 1.
    """
    columns = [name for name in TOKEN_COLUMNS if name in dataset.column_names]
    sizes = _row_sizes(dataset, columns)
    rows = np.flatnonzero(sizes)
    if not len(rows):
        raise ValueError(f"dataset has no token to pack: {len(dataset)} rows, all of them empty")
    if shuffle_before_pack:
        rows = rows[epoch_rng(seed, 0).permutation(len(rows))]
    plan = concat(sizes[rows], max_length)
    features = {name: dataset.features[name] for name in columns}
    if use_varlen_attn:
        features |= dict.fromkeys(("cumulative_len", "position_ids"), Sequence(Value("int32")))
    total = int(sizes.sum())
    order = [shuffle_before_pack, seed if shuffle_before_pack else None]
    key = Hasher.hash(["pack 1", dataset._fingerprint, max_length, use_varlen_attn, *order])
    result = Dataset.from_dict({"pack": np.arange(len(plan))}).map(
        _CopyPacks(dataset.select_columns(columns), rows, plan, use_varlen_attn),
        batched=True,
        batch_size=max(1, _TOKENS_PER_BATCH // max_length),
        remove_columns=["pack"],
        features=Features(features),
        num_proc=_num_processes(map_num_proc, total, len(plan)),
        cache_file_name=_cache_file(dataset, key),
        new_fingerprint=key,
        desc="Packing",
    )
    _report(len(dataset), rows, total, plan, max_length, result)
    return result


class _CopyPacks:
    """Copies the tokens of packs; runs in worker processes."""

    def __init__(self, dataset: Dataset, rows: Any, plan: Packs, use_varlen_attn: bool) -> None:
        self.dataset = dataset.with_format("arrow")
        self.rows = rows
        self.plan = plan
        self.use_varlen_attn = use_varlen_attn

    def __call__(self, batch: dict[str, list[int]]) -> pa.Table:
        packs, pieces = batch["pack"], self.plan.pieces
        assert pieces is not None
        offsets = self.plan.groups.offsets[packs[0] : packs[-1] + 2]
        first, last = int(offsets[0]), int(offsets[-1])
        lengths = pieces.lengths[first:last]
        # Packs follow each other, so do their samples; the first and last may be cut.
        samples = self.rows[pieces.samples[first] : pieces.samples[last - 1] + 1]
        table = self.dataset[_as_slice(samples)]
        begin = int(pieces.starts[first])
        ends = np.append(0, np.cumsum(lengths))
        cuts = ends[offsets - first]
        result = {
            name: _lists(_flat(table.column(name)).slice(begin, int(cuts[-1])), cuts)
            for name in table.column_names
        }
        if self.use_varlen_attn:
            result |= _borders(ends, offsets - first, cuts)
        return pa.table(result)


def _as_slice(rows: Any) -> Any:
    """A slice where the rows follow each other, which Arrow takes without copying."""
    if len(rows) == rows[-1] - rows[0] + 1 and (np.diff(rows) == 1).all():
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows


def _borders(ends: Any, offsets: Any, cuts: Any) -> dict[str, pa.Array]:
    """``ends``: where the pieces of a batch end, after 0; ``offsets``: the pieces of each pack."""
    positions = np.arange(ends[-1]) - np.repeat(ends[:-1], np.diff(ends))
    # A pack of k pieces has k + 1 numbers; where a pack ends and the next begins is said twice.
    counts = np.diff(offsets) + 1
    list_offsets = np.append(0, np.cumsum(counts))
    pack_of = np.repeat(np.arange(len(counts)), counts)
    cumulative = ends[np.arange(list_offsets[-1]) - pack_of] - cuts[pack_of]
    return {
        "cumulative_len": _lists(pa.array(cumulative.astype(np.int32)), list_offsets),
        "position_ids": _lists(pa.array(positions.astype(np.int32)), cuts),
    }


def _lists(values: pa.Array, offsets: Any) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), values)


def _flat(column: pa.ChunkedArray) -> pa.Array:
    parts = [chunk.flatten() for chunk in column.chunks]
    return parts[0] if len(parts) == 1 else pa.concat_arrays(parts)


def _row_sizes(dataset: Dataset, columns: list[str]) -> Any:
    """(n,) int64, tokens of each row, checked against the labels."""
    if "input_ids" not in columns:
        raise ValueError(
            f"dataset has no column 'input_ids' to pack: it has {dataset.column_names}"
        )
    result = None
    for name in columns:
        sizes = list_sizes(dataset, name)
        if sizes.null_count:
            nulls = np.flatnonzero(sizes.is_null().to_numpy())
            raise ValueError(f"column {name!r}: {len(nulls)} rows are null, first row {nulls[0]}")
        sizes = sizes.to_numpy().astype(np.int64)
        if result is not None and (sizes != result).any():
            row = int(np.flatnonzero(sizes != result)[0])
            raise ValueError(
                f"row {row} has {result[row]} input_ids and {sizes[row]} labels; "
                "every token needs a label"
            )
        result = sizes
    return result


def _num_processes(limit: int | None, total: int, num_packs: int) -> int | None:
    wanted = min(limit or 1, -(-total // _TOKENS_PER_PROCESS), num_packs)
    return wanted if wanted > 1 else None


def _cache_file(dataset: Dataset, key: str) -> str | None:
    if not is_caching_enabled() or not dataset.cache_files:
        return None
    return os.path.join(os.path.dirname(dataset.cache_files[0]["filename"]), f"packed-{key}.arrow")


def _report(
    num_rows: int, rows: Any, total: int, plan: Packs, max_length: int, result: Dataset
) -> None:
    assert plan.pieces is not None
    copied = int(plan.pieces.lengths.sum())
    assert copied == total and len(result) == len(plan), "packing lost tokens"
    last = total - (len(plan) - 1) * max_length
    empty = f", {num_rows - len(rows)} of them empty" if len(rows) < num_rows else ""
    short = "" if last == max_length else f", the last one short ({last} tokens)"
    message = f"Packing: {num_rows} rows{empty} with {total} tokens -> {len(plan)} packs of "
    print_log(f"{message}{max_length} tokens{short}.", logger="current")
