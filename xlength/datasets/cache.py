"""Prepared rows on disk: one folder for one content, complete or absent."""

from __future__ import annotations

import gc
import json
import os
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets import Dataset, Features, concatenate_datasets
from numpy.typing import NDArray

from xlength.arrow import arrow_column
from xlength.datasets.rows import EMPTY, KEPT, MALFORMED, UNTRAINED, VERDICT, RowPass

_STATE = "state.json"
_BATCH = 256


def folder_of(key: str) -> Path:
    """Where rows of this content are kept: below the cache folder of ``datasets``."""
    return Path(datasets.config.HF_DATASETS_CACHE) / "xlength" / key


def exists(folder: Path) -> bool:
    """Whether the folder holds prepared rows; it is never there in part."""
    return (folder / _STATE).is_file()


def remove(folder: Path) -> None:
    """Forget the rows, if there are any. Processes that read them keep what they mapped."""
    shutil.rmtree(folder, ignore_errors=True)


def write(
    folder: Path,
    rows: Dataset,
    row_pass: RowPass,
    features: Features,
    num_proc: int,
    judge: Callable[[dict[str, Any]], Mapping[str, Any]],
) -> None:
    """Run the pass over the rows and keep its result, verdicts included.

    It is written beside the folder and moved there when it is whole, so a killed run leaves
    nothing that looks complete; of two machines that prepare the same on one disk, one wins.

    Args:
        folder: from ``folder_of``.
        rows: the source.
        row_pass: see there.
        features: of the result.
        num_proc: worker processes; 1 works in this process.
        judge: makes of the counts (see ``_counts``) what is kept beside the rows, JSON values with
            ``renames``; if it raises, nothing is kept.
    """
    name = f".{folder.name}.{socket.gethostname()}.{os.getpid()}"
    temporary = folder.with_name(name)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    # A collection in a worker would touch, and so copy, all that this process holds.
    gc.freeze()
    try:
        made = rows.map(
            row_pass,
            batched=True,
            batch_size=_BATCH,
            remove_columns=[name for name in rows.column_names if name not in features],
            features=features,
            num_proc=num_proc if num_proc > 1 else None,
            cache_file_name=str(temporary / "rows.arrow"),
            load_from_cache_file=False,
            new_fingerprint=folder.name,
            desc="Tokenising" if row_pass.encoder is not None else "Mapping",
        )
        state = judge(_counts(made))
        del made  # it maps the files that are moved now
        (temporary / _STATE).write_text(json.dumps(state), encoding="utf-8")
        if not exists(folder):
            remove(folder)  # what a user deleted in part
        try:
            os.replace(temporary, folder)
        except OSError:
            if not exists(folder):
                raise
    finally:
        gc.unfreeze()
        shutil.rmtree(temporary, ignore_errors=True)


def read(folder: Path) -> tuple[Dataset, dict[str, Any]]:
    """The rows to train on, memory-mapped, and the state."""
    state = json.loads((folder / _STATE).read_text(encoding="utf-8"))
    files = sorted(str(path) for path in folder.glob("rows*.arrow"))
    result = concatenate_datasets([Dataset.from_file(path) for path in files])
    verdicts = _numbers(result, "xlength_verdict")
    result = result.remove_columns(list(VERDICT))
    if (verdicts != KEPT).any():
        result = result.select(np.flatnonzero(verdicts == KEPT))
    for old, new in state["renames"]:
        if old in result.column_names:
            result = result.rename_column(old, new)
    result._fingerprint = folder.name
    return result, state


def _counts(made: Dataset) -> dict[str, Any]:
    """How many rows there are of each verdict, the first of each, and what was cut off."""
    verdicts = _numbers(made, "xlength_verdict")
    cut = _numbers(made, "xlength_cut")
    malformed = np.flatnonzero(verdicts == MALFORMED)
    return {
        "rows": len(made),
        "malformed": _summary(malformed),
        "reasons": _reasons(made, malformed[:5]),
        "empty": _summary(np.flatnonzero(verdicts == EMPTY)),
        "untrained": _summary(np.flatnonzero(verdicts == UNTRAINED)),
        "cut": _summary(np.flatnonzero((verdicts == KEPT) & (cut > 0))),
        "lost": _lost(made),
        "cut_tokens": int(cut[verdicts == KEPT].sum()),
        "kept": int((verdicts == KEPT).sum()),
        "tokens": int(_numbers(made, "length")[verdicts == KEPT].sum()),
    }


def _summary(rows: NDArray[np.int64]) -> dict[str, int | None]:
    return {"count": len(rows), "first": int(rows[0]) if len(rows) else None}


def _lost(made: Dataset) -> dict[str, Any]:
    """How many rows have columns that are not kept, the first of them, and the names."""
    import pyarrow.compute as pc

    lost = arrow_column(made, "xlength_lost")
    names = {name for text in pc.unique(lost).to_pylist() for name in text.split(", ") if name}
    rows = np.flatnonzero(pc.not_equal(lost, "").to_numpy()) if names else np.zeros(0, np.int64)
    return {**_summary(rows), "names": sorted(names)}


def _reasons(made: Dataset, rows: Sequence[int] | NDArray[np.int64]) -> list[str]:
    return [made[int(row)]["xlength_reason"] for row in rows]


def _numbers(dataset: Dataset, name: str) -> NDArray[np.int64]:
    result: NDArray[np.int64] = arrow_column(dataset, name).to_numpy().astype(np.int64)
    return result
