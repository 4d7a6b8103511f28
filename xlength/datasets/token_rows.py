"""What packing needs of a row: its token ids and labels, checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xlength.arrow import is_hf
from xlength.losses import IGNORE_INDEX

Ints = NDArray[np.int64]
_MEDIA = ("pixel_values", "image", "video", "audio", "input_features")


def media_of(names: Iterable[str]) -> list[str]:
    """Those of the keys or columns that hold images or other media."""
    return [name for name in names if name.startswith(_MEDIA)]


def refuse_media(names: Iterable[str], where: str) -> None:
    """Raise ValueError where a key or column holds images or other media, which cannot be packed
    here."""
    media = media_of(names)
    if media:
        raise ValueError(
            f"{where} has {', '.join(map(repr, media))}: samples with images or other media are "
            "packed by a Packing plan and packed_collate_fn only, and as LLaVADataset makes them"
        )


def token_row(row: Mapping[str, Any], where: str, with_media: bool = False) -> tuple[Ints, Ints]:
    """Token ids and labels of a row, (t,) int64 each.

    Args:
        row: with ``input_ids`` and ``labels``.
        where: names the row in an error.
        with_media: let images and other media pass.

    Raises:
        ValueError: one is missing or empty, they are not equally long, the row is padded already,
            or has media.
    """
    if not with_media:
        refuse_media([name for name in row if row[name] is not None], where)
    missing = [name for name in ("input_ids", "labels") if row.get(name) is None]
    if missing:
        raise ValueError(f"{where} has no {' and no '.join(missing)}; it has {sorted(row)}")
    ids, labels = _ints(row["input_ids"]), _ints(row["labels"])
    if ids.ndim != 1 or ids.shape != labels.shape or not len(ids):
        raise ValueError(
            f"{where} has input_ids of shape {ids.shape} and labels of shape {labels.shape}; they "
            "must be 1-d, equally long and not empty"
        )
    mask = row.get("attention_mask")
    if mask is not None and not np.asarray(mask).all():
        raise ValueError(f"{where} is padded already: its attention_mask has zeros")
    return ids, labels


def token_rows(dataset: Any, rows: Sequence[int] | Ints) -> list[tuple[Ints, Ints]]:
    """``token_row`` of some rows of a map-style data set.

    Args:
        dataset: a ``datasets.Dataset`` formatted as Arrow is read without making Python lists.
        rows: their indices.
    """
    if not is_hf(dataset, "Dataset"):
        return [token_row(dataset[int(row)], f"row {row}") for row in rows]
    table = dataset[[int(row) for row in rows]]
    columns = [_lists(table.column(name)) for name in ("input_ids", "labels")]
    return [
        token_row({"input_ids": ids, "labels": labels}, f"row {row}")
        for row, ids, labels in zip(rows, *columns, strict=True)
    ]


def pack_of(ids: list[Ints], labels: list[Ints], samples: Any, starts: Any) -> dict[str, Any]:
    """The item of a pack whose pieces are laid end to end; see ``PackedDataset.__getitem__``.

    Args:
        ids, labels: tokens and labels of each piece.
        samples, starts: (k,) which sample each piece is of, and its first token there.
    """
    ends = np.cumsum([0, *map(len, ids)])
    all_labels = np.concatenate(labels)
    all_labels[ends[:-1]] = IGNORE_INDEX
    return {
        "input_ids": np.concatenate(ids),
        "labels": all_labels,
        "position_ids": np.arange(ends[-1]) - np.repeat(ends[:-1], np.diff(ends)),
        "cumulative_len": ends.astype(np.int32),
        "sample_ids": np.asarray(samples, dtype=np.int64),
        "starts": np.asarray(starts, dtype=np.int64),
    }


def _lists(column: Any) -> list[Ints | None]:
    """The lists of an Arrow column as arrays, None for a null."""
    result: list[Ints | None] = []
    for part in column.chunks:
        sizes = part.value_lengths().fill_null(0).to_numpy()
        ends = np.cumsum(sizes)
        values = part.flatten().to_numpy(zero_copy_only=False)
        lists = [values[end - size : end] for size, end in zip(sizes, ends, strict=True)]
        nulls = part.is_null().to_numpy(zero_copy_only=False) if part.null_count else ()
        for i in np.flatnonzero(nulls):
            lists[i] = None
        result += lists
    return result


def _ints(values: Any) -> Ints:
    return np.asarray(values).astype(np.int64, copy=False)
