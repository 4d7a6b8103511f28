"""Lengths of any data set: read once, checked, as one int64 array."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from mmengine.dataset import ClassBalancedDataset, RepeatDataset
from mmengine.logging import print_log
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, Subset

from xlength.arrow import arrow_column, is_hf, list_sizes

Ints = NDArray[np.int64]

_MARKS = np.iinfo(np.int64).min
"""A row without a usable length carries ``_MARKS + i``: entry i of a list of what is wrong."""

_LIMIT = 2**60
"""Lengths of this size and above are refused; they leave room for the marks."""


def get_lengths(dataset: Any, length_property: str = "length") -> Ints:
    """The length of every sample, in index order.

    Wrappers are unwrapped: torch's ``ConcatDataset`` and ``Subset``, nested; mmengine's
    ``ConcatDataset``, ``RepeatDataset``, ``ClassBalancedDataset`` and the slice that
    ``num_batch_per_epoch`` makes. Below them the first of these that exists counts:

    1. a column ``length_property`` of a ``datasets.Dataset``, read through Arrow;
    2. an attribute, property or method ``length_property`` with one value per sample: list,
       tuple, ndarray, memmap, tensor, ``datasets`` column;
    3. for ``length_property='length'``, the sizes of the lists in a column ``input_ids``,
       through Arrow;
    4. rows that are mappings, in a list or tuple: their ``length_property``, or the size of
       their ``input_ids``. A plain array or list of numbers is taken as the lengths.

    An attribute on a ``datasets.Dataset`` that has another count than the rows (it goes stale
    after ``filter``) is passed over where 3 gives the truth, and refused otherwise.

    Cost: a million rows of a column or of ``input_ids`` take some hundredths of a second, as
    does a list of a million integers. The result is a copy: 8 bytes a sample.

    Args:
        dataset: sized; see above.
        length_property: name of the column, attribute, property or method.

    Returns:
        (n,) int64, tokens of each sample, never zero. Negative only where the source is
        (modality lengths: > 0 has images, < 0 is text only).

    Raises:
        ValueError: the data set is empty or a stream, has no such lengths, or another count of
            them than samples; or some are null, NaN, no whole numbers or zero (the count and
            the first row are named).
    """
    size = _size_of(dataset, length_property)
    if size == 0:
        raise ValueError(
            f"dataset is empty: {_describe(dataset)} has no rows to take {length_property!r} of"
        )
    reader = _Reader(length_property)
    lengths = reader.read(dataset)
    _check_count(dataset, length_property, len(lengths), size)
    reader.check(lengths)
    return lengths


def warn_if_grouping_is_useless(lengths: Ints, length_property: str = "length") -> None:
    """Log a warning where grouping by these lengths cannot help: all equal, or one modality only.

    Args:
        lengths: (n,) int64, from ``get_lengths``.
        length_property: where they came from; a name with ``modality`` in it promises both signs.
    """
    count = len(lengths)
    if count < 2:
        return
    if (np.abs(lengths) == abs(int(lengths[0]))).all():
        message = (
            f"length_property={length_property!r}: all {count} lengths are {abs(int(lengths[0]))}; "
            "grouping by length cannot help here"
        )
        print_log(message, logger="current", level=logging.WARNING)
    images = int((lengths > 0).sum())
    if (images == 0 or images == count) and ("modality" in length_property or images == 0):
        kind = "have images (> 0)" if images else "are text only (< 0)"
        message = (
            f"length_property={length_property!r}: all {count} samples {kind}; only one modality "
            "was found, so samples are grouped by length alone"
        )
        print_log(message, logger="current", level=logging.WARNING)


class _Reader:
    """Reads lengths of one ``length_property``; unusable rows are marked, and named at the end.

    They are named at the end only, since a ``Subset`` may have been made to leave them out, and
    since the user knows the rows of the outermost data set.
    """

    def __init__(self, length_property: str) -> None:
        self.name = length_property
        self.wrong: list[tuple[str, str]] = []

    def read(self, dataset: Any) -> Ints:
        """(n,) int64, with marks."""
        size = _size_of(dataset, self.name)  # also initialises mmengine's lazy wrappers
        if isinstance(dataset, ConcatDataset):
            return np.concatenate([self._part(part) for part in dataset.datasets])
        if isinstance(dataset, Subset):
            return self._part(dataset.dataset)[np.asarray(dataset.indices, dtype=np.int64)]
        if isinstance(dataset, RepeatDataset):
            return np.tile(self._part(dataset.dataset), dataset.times)
        if isinstance(dataset, ClassBalancedDataset):
            return self._part(dataset.dataset)[np.asarray(dataset.repeat_indices, dtype=np.int64)]
        if _is_runner_slice(dataset):
            return self._part(dataset._dataset)[:size]
        if is_hf(dataset, "Dataset"):
            return self._from_hf(dataset, size)
        if self._has_attribute(dataset):
            return self._values(self._attribute(dataset))
        return self._from_rows(dataset)

    def _part(self, dataset: Any) -> Ints:
        lengths = self.read(dataset)
        _check_count(dataset, self.name, len(lengths), len(dataset))
        return lengths

    def _from_hf(self, dataset: Any, size: int) -> Ints:
        if self.name in dataset.column_names:
            return self._values(arrow_column(dataset, self.name))
        found = None
        if self._has_attribute(dataset):
            found = self._values(self._attribute(dataset))
            if len(found) == size:
                return found
        if self.name == "length" and "input_ids" in dataset.column_names:
            return self._values(list_sizes(dataset))
        if found is not None:
            _check_count(dataset, self.name, len(found), size)
        raise self._no_source(dataset, f"columns {dataset.column_names}")

    def _has_attribute(self, dataset: Any) -> bool:
        # The first half lets an AttributeError inside a property come out as itself.
        return hasattr(type(dataset), self.name) or hasattr(dataset, self.name)

    def _attribute(self, dataset: Any) -> Any:
        value = getattr(dataset, self.name)
        return value() if callable(value) else value

    def _from_rows(self, dataset: Any) -> Ints:
        if isinstance(dataset, np.ndarray | torch.Tensor):
            return self._values(dataset)
        if isinstance(dataset, list | tuple):
            if not any(isinstance(row, Mapping) for row in dataset):
                return self._values(dataset)
            if any(isinstance(row, Mapping) and self.name in row for row in dataset):
                return self._values([_key(row, self.name) for row in dataset])
            if self.name == "length":
                rows = [_key(row, "input_ids") for row in dataset]
                return self._values([None if ids is None else len(ids) for ids in rows])
        raise self._no_source(dataset, "no such attribute")

    def _no_source(self, dataset: Any, what_it_has: str) -> ValueError:
        return ValueError(
            f"length_property={self.name!r}: {_describe(dataset)} has {what_it_has}; it needs a "
            "column or attribute of that name with one length per sample"
        )

    def _values(self, values: Any) -> Ints:
        """(n,) int64 of any array or sequence of numbers; what is no whole number is marked."""
        array, null = _to_numpy(values, self.name)
        if array.ndim != 1:
            raise ValueError(
                f"length_property={self.name!r} has shape {array.shape}; it must be "
                "one-dimensional, one length per sample"
            )
        if array.dtype.kind not in "iuf":
            return np.array([self._value(value) for value in array.tolist()], dtype=np.int64)
        with np.errstate(invalid="ignore"):
            good = np.abs(array) < _LIMIT  # False for NaN; the smallest int64 stays negative
            good &= array > -_LIMIT
            if array.dtype.kind == "f":
                good &= np.floor(array) == array
            if null is not None:
                good &= ~null
            result = array.astype(np.int64)
        for row in np.flatnonzero(~good).tolist():
            missing = null is not None and null[row]
            result[row] = self._value(None if missing else array[row].item())
        return result

    def _value(self, value: Any) -> int:
        if isinstance(value, torch.Tensor | np.generic) and getattr(value, "ndim", 0) == 0:
            value = value.item()
        if value is None:
            return self._mark("null", "None")
        if isinstance(value, bool) or not isinstance(value, int | float):
            return self._mark("not numeric", repr(value))
        if value != value:
            return self._mark("NaN", "nan")
        if not -_LIMIT < value < _LIMIT:
            return self._mark("out of range", repr(value))
        if value != int(value):
            return self._mark("not whole", repr(value))
        return int(value)

    def _mark(self, kind: str, value: str) -> int:
        self.wrong.append((kind, value if len(value) <= 40 else value[:37] + "..."))
        return int(_MARKS) + len(self.wrong) - 1

    def check(self, lengths: Ints) -> None:
        """Refuse marked and zero lengths: how many are of the first kind, and its first row."""
        bad = np.flatnonzero(lengths < -_LIMIT)
        if len(bad):
            wrong = [self.wrong[int(mark - _MARKS)] for mark in lengths[bad]]
            kind, value = wrong[0]
            bad = bad[[other == kind for other, _ in wrong]]
            first = "the first" if kind in ("null", "NaN") else f"the first ({value})"
        else:
            bad, kind, first = np.flatnonzero(lengths == 0), "zero", "the first"
        if len(bad):
            raise ValueError(
                f"length_property={self.name!r}: {len(bad)} of {len(lengths)} lengths "
                f"{'is' if len(bad) == 1 else 'are'} {kind}, {first} at row {int(bad[0])}; "
                "every length must be a non-zero whole number of tokens"
            )


def _size_of(dataset: Any, name: str) -> int:
    if is_hf(dataset, "DatasetDict"):
        raise ValueError(
            f"dataset is a DatasetDict with splits {list(dataset)}: choose one of them"
        )
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        raise ValueError(
            f"length_property={name!r}: {_describe(dataset)} has no len(): the lengths of a "
            "stream are not known in advance"
        ) from None


def _check_count(dataset: Any, name: str, count: int, size: int) -> None:
    if count == size:
        return
    hint = ""
    if is_hf(dataset, "Dataset"):
        hint = "; an attribute goes stale after filter(): keep the lengths in a column"
    elif _is_runner_slice(dataset):
        hint = "; num_batch_per_epoch asks for more samples than there are"
    raise ValueError(
        f"length_property={name!r} of {_describe(dataset)} has {count} lengths for {size} "
        f"samples{hint}"
    )


def _describe(dataset: Any) -> str:
    return f"{type(dataset).__module__}.{type(dataset).__qualname__}"


def _is_runner_slice(dataset: Any) -> bool:
    cls = type(dataset)
    return cls.__name__ == "_SlicedDataset" and cls.__module__ == "mmengine.runner.runner"


def _key(row: Any, name: str) -> Any:
    return row.get(name) if isinstance(row, Mapping) else None


def _to_numpy(values: Any, name: str) -> tuple[NDArray[Any], NDArray[np.bool_] | None]:
    """The values, and which of them are null where the source (Arrow) says so."""
    if is_hf(values, "Column") and is_hf(values.source, "Dataset"):
        values = arrow_column(values.source, values.column_name)
    if hasattr(values, "null_count"):  # a pyarrow array, which fills nulls of integers with NaN
        null = values.is_null().to_numpy() if values.null_count else None
        return values.to_numpy(), null
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        values = values.double() if values.is_floating_point() else values
        return values.numpy(), None
    if isinstance(values, np.ndarray):
        return np.asarray(values), None
    if not isinstance(values, Sequence) and not hasattr(values, "__array__"):
        if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__iter__"):
            raise ValueError(
                f"length_property={name!r} is {values!r}; it must be a sequence with one length "
                "per sample"
            )
        values = list(values)
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError):  # ragged, or beyond any integer type
        array = np.empty(len(values), dtype=object)
        array[:] = list(values)
    if array.dtype.kind not in "iuf":
        array = np.empty(len(values), dtype=object)
        array[:] = list(values)
    return array, None
