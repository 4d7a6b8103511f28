"""Lengths of several columns, for costs that weigh text and images apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, Subset

from xlength.lengths import _Reader, get_lengths
from xlength.plan.groups import Ints


def get_columns(dataset: Any, length_property: str | Sequence[str], num_columns: int) -> Ints:
    """(n, k) int64 lengths of every sample, in index order.

    Args:
        dataset: sized; torch's ``ConcatDataset`` and ``Subset`` are unwrapped.
        length_property: names of k columns or attributes, each as for ``get_lengths``; or the name
            of one attribute, property or method that gives an (n, k) array.
        num_columns: k.

    Raises:
        ValueError: another number of columns, or of rows than samples; no whole numbers; a zero in
            the first column, or a negative number in another.
    """
    if isinstance(length_property, str):
        lengths = _table(dataset, length_property)
    else:
        names = list(length_property)
        first = get_lengths(dataset, names[0])
        lengths = np.stack([first, *(_amounts(dataset, name) for name in names[1:])], axis=1)
    if lengths.shape != (len(dataset), num_columns):
        raise ValueError(
            f"length_property={length_property!r} has shape {lengths.shape}; the cost needs "
            f"({len(dataset)}, {num_columns}): a row per sample and a column per weight"
        )
    for bad, rule in (
        (lengths[:, 0] == 0, "the first column must not be zero"),
        ((lengths[:, 1:] < 0).any(axis=1), "columns after the first must not be negative"),
    ):
        if bad.any():
            row = int(np.argmax(bad))
            raise ValueError(
                f"length_property={length_property!r}: {rule}, got {lengths[row].tolist()} "
                f"at row {row} ({int(bad.sum())} such rows)"
            )
    return lengths


def _amounts(dataset: Any, name: str) -> Ints:
    """(n,) int64 of one column, in which zeros are good."""
    reader = _Reader(name)
    values = reader.read(dataset)
    reader.check(np.where(values == 0, 1, values))
    return values


def _table(dataset: Any, name: str) -> Ints:
    if isinstance(dataset, ConcatDataset):
        return np.concatenate([_table(part, name) for part in dataset.datasets])
    if isinstance(dataset, Subset):
        return _table(dataset.dataset, name)[np.asarray(dataset.indices, dtype=np.int64)]
    if not hasattr(dataset, name):
        raise ValueError(
            f"length_property={name!r}: {type(dataset).__name__} has no such attribute with an "
            "(n, k) array; or give the names of k columns"
        )
    values = getattr(dataset, name)
    array = np.asarray(values() if callable(values) else values)
    if array.ndim != 2 or array.dtype.kind not in "iu":
        raise ValueError(
            f"length_property={name!r} must be an (n, k) array of whole numbers, got shape "
            f"{array.shape} of {array.dtype}"
        )
    return array.astype(np.int64)
