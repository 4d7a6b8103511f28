"""What the workers of a loader tell the main process about where they are in a stream.

A worker is some batches ahead of what the trainer has consumed, so its state at this moment is not
the one to save. It leaves a note every thousand samples or so; from the last note before the batch
that was consumed, and the number of samples between the two, the main process has the worker's
exact state without asking it.
"""

from __future__ import annotations

import os
import pickle
import shutil
import tempfile
import uuid
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import get_worker_info

MAX_WORKERS = 1024
KEPT = 8


class Epochs:
    """The next epoch of every worker, in memory that they and the main process share.

    ``set_epoch`` reaches persistent workers that way; and where nobody calls it, every new iterator
    of a worker begins the next epoch.
    """

    def __init__(self) -> None:
        self._next = torch.zeros(MAX_WORKERS, dtype=torch.int64).share_memory_()

    def set(self, epoch: int) -> None:
        """The epoch that all begin next; called in a worker, the one that this worker does."""
        info = get_worker_info()
        if info is None:
            self._next.fill_(epoch)
        else:
            self._next[info.id] = epoch

    def peek(self) -> int:
        """The epoch that worker 0 begins next."""
        return int(self._next[0])

    def begin(self) -> int:
        """The epoch that this process begins now."""
        info = get_worker_info()
        place = 0 if info is None else info.id
        epoch = int(self._next[place])
        self._next[place] = epoch + 1
        return epoch

    def __deepcopy__(self, memo: Any) -> Epochs:
        copied = Epochs()
        copied._next.copy_(self._next)
        return copied


class Notes:
    """The last states of every worker, in one small file each, and in memory where there are no
    workers.

    Cost: a few hundred microseconds a note, and some 100 kB a worker in the folder for
    temporary files, which goes with the object that made it.
    """

    def __init__(self) -> None:
        self._own: list[dict[str, Any]] = []
        # Made by the first worker that has something to note.
        self._folder = os.path.join(tempfile.gettempdir(), f"xlength_stream_{uuid.uuid4().hex}")
        weakref.finalize(self, _remove, self._folder, os.getpid())

    def __getstate__(self) -> dict[str, Any]:
        return {"_own": [], "_folder": self._folder}

    def __deepcopy__(self, memo: Any) -> Notes:
        return Notes()

    def add(
        self, worker: int, epoch: int, given: int, state: Mapping[str, Any], ended: bool = False
    ) -> None:
        """Note that after ``given`` samples of its epoch a worker is in this state.

        Args:
            worker: its number.
            epoch: that it is in.
            given: samples that it gave.
            state: of its reader.
            ended: whether that was its last sample.
        """
        self._own.append({"epoch": epoch, "given": given, "state": state, "ended": ended})
        del self._own[:-KEPT]
        if get_worker_info() is not None:
            os.makedirs(self._folder, mode=0o700, exist_ok=True)
            path = self._path(worker)
            partial = path.with_suffix(".partial")
            partial.write_bytes(pickle.dumps(self._own))
            os.replace(partial, path)

    def of(self, worker: int, epoch: int) -> list[dict[str, Any]]:
        """A worker's notes of this epoch, oldest first."""
        path = self._path(worker)
        notes: list[dict[str, Any]] = self._own if worker == 0 else []
        if path.is_file():
            notes = pickle.loads(path.read_bytes())
        return [note for note in notes if note["epoch"] == epoch]

    def _path(self, worker: int) -> Path:
        return Path(self._folder) / f"worker{worker}.pkl"


def _remove(folder: str, process: int) -> None:
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


def samples_given(
    num_batches: int, batch_size: int, totals: Sequence[int | None], drop_last: bool = False
) -> tuple[list[int], int]:
    """How many samples each worker gave for the first batches of a loader, and whose turn it is.

    A loader takes a batch from each worker in turn, and passes over workers that have ended.

    Args:
        num_batches: that the loader yielded.
        batch_size: samples of a batch.
        totals: samples that a worker has altogether, None where that is not known yet.
        drop_last: whether an incomplete last batch is left out.

    Returns:
        samples of each worker, and the worker whose batch comes next.

    Raises:
        ValueError: the workers have fewer batches than that.
    """
    rounding = 0 if drop_last else batch_size - 1
    most = [num_batches if total is None else (total + rounding) // batch_size for total in totals]
    taken = [0] * len(totals)
    left = num_batches
    while left:
        alive = [worker for worker, batches in enumerate(most) if taken[worker] < batches]
        if not alive:
            raise ValueError(
                f"num_batches={num_batches}, but the workers have {sum(taken)} batches in all"
            )
        rounds = min(left // len(alive), min(most[worker] - taken[worker] for worker in alive))
        for place, worker in enumerate(alive):
            taken[worker] += rounds or int(place < left)
        left -= rounds * len(alive) or left
    samples = [
        count * batch_size if total is None else min(count * batch_size, total)
        for count, total in zip(taken, totals, strict=True)
    ]
    alive = [w for w, total in enumerate(totals) if total is None or taken[w] < most[w]]
    return samples, min(alive, key=lambda worker: (taken[worker], worker), default=0)
