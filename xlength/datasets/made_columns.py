"""Columns that a map function makes: their types, found beforehand, and values that do not fit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset, Features, Value
from datasets.arrow_writer import TypedSequence

from xlength.datasets.rows import TOKENS, Row, RowPass

_FIRST, _SPREAD, _BATCH = 20, 30, 1000
_ADVICE = "give it one type in all rows, or leave out such columns by remove_unused_columns=True"


def made_features(rows: Dataset, row_pass: RowPass, remove_unused: bool) -> Features:
    """Types of the columns that the map function makes, from rows that it can use: the first, and
    some spread over all. With ``remove_unused`` a name is enough, but for tokens.

    Raises:
        ValueError: a column has values of several types.
    """
    made: list[Mapping[str, Any]] = []
    map_fn = row_pass.map_fn
    spread = np.linspace(0, len(rows) - 1, _SPREAD, dtype=np.int64).tolist()
    for i in sorted({*range(min(_FIRST, len(rows))), *spread}) if map_fn is not None else ():
        assert map_fn is not None
        try:
            columns = dict(map_fn(Row(rows[i])) or {})
        except Exception:  # such rows are counted, and named, in the pass itself
            continue
        columns.pop("conversation", None)
        made.append(columns)
    names = dict.fromkeys(name for columns in made for name in columns)
    typed = names if not remove_unused else [name for name in names if name in TOKENS]
    types = {name: _type_of(name, [columns.get(name) for columns in made]) for name in typed}
    return Features({name: types.get(name, Value("null")) for name in names})


def _type_of(name: str, values: list[Any]) -> Any:
    try:
        return Dataset.from_dict({name: values}).features[name]
    except Exception as error:
        raise ValueError(f"dataset_map_fn: column {name!r} has no type: {error}; {_ADVICE}") from (
            error
        )


def refuse_column(
    rows: Dataset,
    row_pass: RowPass,
    features: Features,
    where: Callable[[int], str],
    cause: BaseException,
) -> None:
    """Raise ValueError from ``cause`` if the map function makes a value that does not fit the type
    of its column; ``where`` names a row. Cost: a pass over the rows, without the tokenizer."""
    names = [name for name in row_pass.keep if name in features and name != "conversation"]
    mapping = replace(row_pass, encoder=None)
    for start in range(0, len(rows) if names else 0, _BATCH):
        made = []
        for i in range(start, min(start + _BATCH, len(rows))):
            with contextlib.suppress(Exception):
                made.append((i, mapping.run(Row(rows[i])).columns))
        for name in names:
            kind = features[name]
            if _fits([columns.get(name) for _, columns in made], kind):
                continue
            for i, columns in made:
                value = columns.get(name)
                if not _fits([value], kind):
                    raise ValueError(
                        f"dataset_map_fn: column {name!r} is {value!r:.80} in {where(i)}, which is "
                        f"no {_type_name(kind)} as in other rows; {_ADVICE}"
                    ) from cause


def _fits(values: list[Any], kind: Any) -> bool:
    """Whether ``datasets`` can write these values."""
    try:
        pa.array(TypedSequence(values, type=kind))
    except Exception:
        return False
    return True


def _type_name(kind: Any) -> str:
    return str(getattr(kind, "dtype", None) or kind)
