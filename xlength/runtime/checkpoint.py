"""Reading checkpoints with torch >= 2.6, which by default unpickles tensors only."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import torch
from mmengine.runner import CheckpointLoader


def trust_checkpoints(trusted: Iterable[str]) -> None:
    """Let mmengine unpickle checkpoints below the given paths in full, and no others.

    A checkpoint of mmengine holds histories and configs besides tensors, and unpickling such
    objects can run code; so only a run's own files are read that way. All others, such as
    ``load_from`` of foreign weights, are read with ``weights_only=True``.

    Args:
        trusted: files or folders.
    """
    roots = [os.path.realpath(os.path.expanduser(path)) for path in trusted]
    CheckpointLoader.register_scheme("", _loader(roots), force=True)


def _loader(roots: list[str]) -> Callable[..., Any]:
    def load_from_local(filename: str, map_location: Any = None) -> Any:
        path = os.path.realpath(os.path.expanduser(filename))
        if os.path.isdir(path):
            raise IsADirectoryError(f"{filename} is a folder; a checkpoint is a file.")
        if not os.path.isfile(path):
            raise FileNotFoundError(f"{filename} can not be found.")
        own = any(path == root or path.startswith(root + os.sep) for root in roots)
        return read_checkpoint(path, own, map_location)

    return load_from_local


def read_checkpoint(path: str, own: bool, map_location: Any = "cpu") -> Any:
    """Read one file.

    Args:
        path: of the file.
        own: whether it comes from this run, so that it may be unpickled in full.
        map_location: as for ``torch.load``.

    Raises:
        ValueError: it is not the run's own and holds more than tensors and plain values.
    """
    try:
        return torch.load(path, map_location=map_location, weights_only=not own)
    except pickle.UnpicklingError as error:
        if own:
            raise
        raise ValueError(
            f"{path} holds more than weights, and unpickling it could run code, so it is not "
            "loaded. If it is a checkpoint of your own run, continue it with --resume; else save "
            "its 'state_dict' alone with torch.save and load that."
        ) from error


def seed_of(path: str) -> int | None:
    """The seed of the run that wrote a checkpoint; None where it does not say (or is a folder)."""
    if not os.path.isfile(path):
        return None
    checkpoint = torch.load(path, map_location="cpu", weights_only=False, mmap=True)
    return checkpoint.get("meta", {}).get("seed") if isinstance(checkpoint, dict) else None
