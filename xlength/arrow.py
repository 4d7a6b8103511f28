"""Columns of a ``datasets.Dataset`` as Arrow arrays, never row by row."""

from __future__ import annotations

import sys
from typing import Any


def is_hf(value: Any, kind: str) -> bool:
    """Whether it is a ``datasets`` object of this class. Imports nothing."""
    hf = sys.modules.get("datasets.arrow_dataset" if kind == "Column" else "datasets")
    cls = getattr(hf, kind, None)
    return cls is not None and isinstance(value, cls)


def arrow_column(dataset: Any, name: str) -> Any:
    """A column as a pyarrow chunked array, in the order of the rows.

    ``dataset.data`` knows nothing of ``select``, ``shuffle`` and ``filter``; their indices are
    applied here.
    """
    return in_row_order(dataset, dataset.data.column(name))


def in_row_order(dataset: Any, column: Any) -> Any:
    """A value per row of ``dataset.data`` -> a value per row of the data set."""
    if dataset._indices is None:
        return column
    return column.take(dataset._indices.column(0))


def list_sizes(dataset: Any, name: str = "input_ids") -> Any:
    """Sizes of the lists in a column, int32 or int64, in the order of the rows; null for null.

    Cost: reads the offsets only, also where the rows are selected or shuffled.
    """
    import pyarrow.compute as pc
    import pyarrow.types as types

    column = dataset.data.column(name)
    if not (
        types.is_list(column.type)
        or types.is_large_list(column.type)
        or types.is_fixed_size_list(column.type)
    ):
        raise ValueError(f"column {name!r} has type {column.type}; it must be lists of token ids")
    return in_row_order(dataset, pc.list_value_length(column))
