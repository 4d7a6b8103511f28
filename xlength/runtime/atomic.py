"""Checkpoints that are whole or not there, and finding the last whole one."""

from __future__ import annotations

import os
import re
import zipfile
from pathlib import Path

from mmengine.fileio import LocalBackend, register_backend

_PARTIAL = ".partial"


def write_atomically() -> None:
    """Let mmengine write local files so that a kill at any moment leaves the old or the new one.

    It replaces mmengine's backend for local paths in this process; ``xlength train`` calls it.
    Strategies that write by themselves (DeepSpeed, sharded FSDP) are not reached.
    """
    register_backend("local", AtomicBackend, force=True, prefixes="")


class AtomicBackend(LocalBackend):
    """Local files: written under another name, flushed to the disk and renamed.

    ``CheckpointHook`` removes the oldest checkpoint before it writes the next one; here the removal
    of a checkpoint waits until the next one is there, so that there always is one.

    Price: for a moment there is one checkpoint more than ``max_keep_ckpts``.
    """

    _doomed: list[str] = []

    def put(self, obj: bytes, filepath: str | Path) -> None:
        """Write ``obj`` to ``filepath``, whole or not at all."""
        write_file(filepath, obj)
        doomed, self._doomed[:] = list(self._doomed), []
        for path in doomed:
            if path != os.path.abspath(filepath) and os.path.isfile(path):
                os.remove(path)

    def remove(self, filepath: str | Path) -> None:
        """Remove a file; a checkpoint when the next one is written."""
        if str(filepath).endswith(".pth") and os.path.isfile(filepath):
            self._doomed.append(os.path.abspath(filepath))
        else:
            super().remove(filepath)


def write_file(path: str | Path, content: bytes) -> None:
    """Write a file so that after a crash it is the old one or the new one, never a part."""
    path = os.fspath(path)
    folder = os.path.dirname(path) or "."
    os.makedirs(folder, exist_ok=True)
    partial = f"{path}{_PARTIAL}"
    with open(partial, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)  # the new name too
    finally:
        os.close(handle)


def damage_of(path: str | Path) -> str | None:
    """What is wrong with a checkpoint file, None for a whole one (and for a folder).

    Cost: reads it once.
    """
    if os.path.isdir(path):
        return None
    size = os.path.getsize(path)
    if not zipfile.is_zipfile(path):
        return f"it has no end ({size:,} bytes), so its writing was cut off"
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
    except (zipfile.BadZipFile, OSError) as error:
        return str(error)
    return None if broken is None else f"the checksum of {broken} is wrong"


def checkpoints_in(work_dir: str | Path) -> list[Path]:
    """Checkpoints of a run, newest first by when they were written: those with mmengine's names,
    that of ``last_checkpoint``, and others that are called like it."""
    folder = Path(work_dir)
    note = folder / "last_checkpoint"
    last = Path(note.read_text().strip()) if note.is_file() else None
    names = r"(iter|epoch)_\d+\.pth"
    if last is not None:  # others that are called like it
        names += "|" + re.sub(r"\d+", r"\\d+", re.escape(last.name))
    found = [p for p in folder.glob("*.pth") if re.fullmatch(names, p.name) and p.exists()]
    found.sort(key=lambda path: (path.stat().st_mtime_ns, _number(path)), reverse=True)
    if last is not None and last.name:
        last = last if last.exists() else folder / last.name  # the folder may have been moved
        # A kill between the two leaves a checkpoint that is newer than the note.
        known = {os.path.realpath(path) for path in found}
        if last.exists() and os.path.realpath(last) not in known:
            found.insert(0, last)
    return found


def last_whole(checkpoints: list[Path]) -> tuple[Path | None, list[tuple[Path, str]]]:
    """The first whole one, and those before it with what is wrong with each.

    One that is further than a damaged one, by the number in its name, is of another run.
    """
    damaged: list[tuple[Path, str]] = []
    for path in checkpoints:
        if any(_kind(path) == _kind(bad) and _number(path) > _number(bad) for bad, _ in damaged):
            continue
        damage = damage_of(path)
        if damage is None:
            return path, damaged
        damaged.append((path, damage))
    return None, damaged


def _kind(path: Path) -> str:
    return path.stem.rpartition("_")[0]


def _number(path: Path) -> int:
    digits = re.findall(r"\d+", path.stem)
    return int(digits[-1]) if digits else 0
