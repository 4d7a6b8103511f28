"""Measurements kept in files that are named by what they depend on."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from xlength.datasets.measured import Measured

Ints = NDArray[np.int64]


def cached(
    path: Path,
    make: Callable[[], tuple[Measured, Ints]],
    good: Callable[[Measured], bool],
    not_before: float = 0.0,
) -> tuple[Measured, Ints]:
    """What ``make`` returns, from the file if it is there, else made and written.

    Of several processes that ask for the same file one makes it; the others wait on a lock of the
    file system, not in a collective, and read it. If that one fails, the next one tries, and fails
    with the same message.

    Args:
        path: of an ``.npz`` file, named by a fingerprint.
        make: the measurement, and the rows' places in their file.
        good: whether what the file holds may be used.
        not_before: seconds since the epoch; a file written earlier is not used.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.with_suffix(".lock")):
        if path.exists() and path.stat().st_mtime >= not_before:
            # A file that something else left half-written is made anew.
            with contextlib.suppress(OSError, ValueError, KeyError, EOFError, BadZipFile):
                measured, spans = _load(path)
                if good(measured):
                    return measured, spans
        measured, spans = make()
        _save(path, measured, spans)
        return measured, spans


def _save(path: Path, measured: Measured, spans: Ints) -> None:
    notes = json.dumps({"counts": measured.counts, "examples": measured.examples})
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial.npz")
    try:
        np.savez(
            partial,
            rows=measured.rows,
            lengths=measured.lengths,
            image_tokens=measured.image_tokens,
            spans=spans,
            notes=notes,
        )
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _load(path: Path) -> tuple[Measured, Ints]:
    with np.load(path, allow_pickle=False) as file:
        notes = json.loads(str(file["notes"]))
        examples = {k: [(int(i), str(t)) for i, t in v] for k, v in notes["examples"].items()}
        measured = Measured(
            rows=file["rows"],
            lengths=file["lengths"],
            image_tokens=file["image_tokens"],
            counts=notes["counts"],
            examples=examples,
        )
        return measured, file["spans"]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    try:
        import fcntl
    except ImportError:  # Windows: each process measures for itself
        yield
        return
    with open(path, "w") as file:
        # On a file system without locks each process measures for itself.
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
