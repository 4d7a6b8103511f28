"""Which checkpoint ``xlength train --resume`` continues from, and with which seed."""

from __future__ import annotations

import logging
import os
import shlex
from pathlib import Path
from typing import Any

from mmengine.logging import print_log

from xlength.commands import InputError
from xlength.runtime.atomic import (
    checkpoints_in,
    damage_of,
    last_whole,
    write_atomically,
    write_file,
)
from xlength.runtime.checkpoint import seed_of, trust_checkpoints
from xlength.runtime.environment import rank_of_launch


def prepare_resume(cfg: Any) -> None:
    """Choose the checkpoint, check that it is whole, and take over its run's seed.

    The latest one is chosen where none is named; a damaged one is passed over with a warning, for
    the one before it. One that is named must be whole.

    Args:
        cfg: altered in place: ``load_from``, ``resume``, the seed.

    Raises:
        InputError: there is no such checkpoint, or it is damaged; offers the one before it.
    """
    trusted = [cfg.work_dir]
    checkpoint = None
    if cfg.resume:
        checkpoint = _named(cfg.load_from) if cfg.load_from is not None else _latest(cfg.work_dir)
        cfg.resume = checkpoint is not None
    if checkpoint is not None:
        cfg.load_from = checkpoint
        trusted.append(checkpoint)
    trust_checkpoints(trusted)
    write_atomically()
    seed = None if checkpoint is None else seed_of(checkpoint)
    asked = cfg.get("randomness", {}).get("seed")
    if seed is not None and seed != asked:
        if asked is not None:
            print_log(
                f"The seed is {seed}, that of the run to resume, not {asked}.",
                "current",
                logging.WARNING,
            )
        cfg.merge_from_dict({"randomness": {"seed": seed}})


def _named(checkpoint: str) -> str:
    if not os.path.exists(checkpoint):
        raise InputError(f"there is no checkpoint {checkpoint!r} to resume from")
    inside = checkpoints_in(checkpoint) if os.path.isdir(checkpoint) else []
    if inside:  # a strategy may save a checkpoint as a folder, but that holds no others
        raise InputError(
            f"{checkpoint} is a folder; name a checkpoint in it (the newest is {inside[0]})"
        )
    damage = damage_of(checkpoint)
    if damage is None:
        return checkpoint
    path = Path(checkpoint)
    others = checkpoints_in(path.parent)
    same = [other for other in others if other.name == path.name]
    before, _ = last_whole([path, *(other for other in others if other not in same)])
    offer = "there is no other one"
    if before is not None:
        offer = f"the one before it is whole: --resume {shlex.quote(str(before))}"
    raise InputError(f"the checkpoint {checkpoint} is damaged: {damage}; {offer}")


def _latest(work_dir: str) -> str | None:
    checkpoints = checkpoints_in(work_dir)
    if not checkpoints:
        print_log(f"No checkpoint in {work_dir} yet: a new run begins.", "current")
        return None
    whole, damaged = last_whole(checkpoints)
    if whole is None:
        names = ", ".join(str(path) for path, _ in damaged)
        raise InputError(f"every checkpoint in {work_dir} is damaged ({names}): {damaged[0][1]}")
    for path, damage in damaged:
        print_log(
            f"The checkpoint {path} is damaged: {damage}. The run continues from {whole}, the last "
            "whole one before it.",
            "current",
            logging.WARNING,
        )
    _note(Path(work_dir), whole)
    return str(whole)


def _note(work_dir: Path, checkpoint: Path) -> None:
    """Let ``last_checkpoint``, which others read too, name the one that is continued: a kill after
    writing a checkpoint leaves the name of the one before."""
    note = work_dir / "last_checkpoint"
    named = Path(note.read_text().strip()) if note.is_file() else None
    checkpoint = Path(os.path.abspath(checkpoint))
    if named != checkpoint and rank_of_launch() == 0:
        write_file(note, str(checkpoint).encode())
