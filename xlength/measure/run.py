"""Counting all blocks of a source, on all cores, in order, from where an earlier run was killed."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

from xlength.commands import InputError
from xlength.measure import blocks
from xlength.measure.blocks import Block
from xlength.measure.counting import Counted, RowCounter
from xlength.measure.journal import Journal
from xlength.measure.sources import Part

_AHEAD = 3
"""Blocks a process that wait to be counted, or to be written in order."""


def count_all(
    parts: Sequence[Part], counter: RowCounter, journal: Journal, num_proc: int, bad_rows: str
) -> None:
    """Count what the journal does not have yet.

    Args:
        parts: of the source.
        counter: how.
        journal: keeps each block.
        num_proc: processes; 1 counts in this one.
        bad_rows: ``'error'`` stops at the first row that cannot be used, ``'skip'`` counts them.

    Raises:
        InputError: a row cannot be used; names its place, and what is wrong.
    """
    from tqdm import tqdm

    json_only = all(part.columns is None for part in parts)
    known = (json_only or all(part.columns is not None for part in parts)) and not any(
        part.name.endswith(".gz") for part in parts
    )
    total = sum(part.size for part in parts) if known else None
    bar = tqdm(
        total=total,
        desc="Measuring",
        unit="B" if json_only else " rows",
        unit_scale=json_only,
        initial=_passed(parts, journal) if known else 0,
    )
    with bar:
        for part, block, counted in _counted(parts, counter, journal, num_proc):
            _check(parts[part], counted, journal, part, bad_rows)
            journal.add(part, block.number, counted)
            bar.update(block.size)
            bar.set_postfix_str(f"{journal.num_samples:,} samples", refresh=False)


class _Task:
    """A block on its way."""

    def __init__(self, part: int, number: int, block: Block) -> None:
        self.part, self.number, self.block = part, number, block
        self.size = block.size
        self.result: Future[Counted] | None = None


def _tasks(parts: Sequence[Part], journal: Journal) -> Iterator[_Task]:
    done_part, done_block = journal.done
    for i, part in enumerate(parts):
        if i >= done_part:
            skip = done_block + 1 if i == done_part else 0
            for number, block in enumerate(part.blocks(skip), skip):
                yield _Task(i, number, block)


def _counted(
    parts: Sequence[Part], counter: RowCounter, journal: Journal, num_proc: int
) -> Iterator[tuple[int, _Task, Counted]]:
    """The blocks in order, some being counted ahead."""
    if num_proc == 1:
        for task in _tasks(parts, journal):
            yield task.part, task, counter.count(task.block)
        return
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process a core
    can_fork = "fork" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("fork" if can_fork else None)
    setup: tuple[Any, ...] = (None, None) if can_fork else (counter, blocks.tables)
    global _counter
    _counter = counter
    waiting: deque[_Task] = deque()
    pool = ProcessPoolExecutor(num_proc, context, _start, (os.getpid(), *setup))
    try:
        for task in _tasks(parts, journal):
            task.result = pool.submit(_count, task.block)
            waiting.append(task)
            if len(waiting) >= _AHEAD * num_proc:
                yield _done(waiting)
        while waiting:
            yield _done(waiting)
    finally:
        pool.shutdown(cancel_futures=True)


def _done(waiting: deque[_Task]) -> tuple[int, _Task, Counted]:
    task = waiting.popleft()
    assert task.result is not None
    return task.part, task, task.result.result()


_counter: RowCounter


def _start(parent: int, counter: RowCounter | None, tables: list[Any] | None) -> None:
    """Set up a worker process; it ends when its parent was killed."""
    global _counter
    if counter is not None:
        _counter = counter
    if tables is not None:
        blocks.tables[:] = tables

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _count(block: Block) -> Counted:
    return _counter.count(block)


def _passed(parts: Sequence[Part], journal: Journal) -> int:
    """Bytes or rows of what an earlier run counted, for the bar."""
    done_part, done_block = journal.done
    before = sum(part.size for part in parts[:done_part])
    part = parts[done_part]
    return before + min(part.size, (done_block + 1) * part.unit)


def _check(part: Part, counted: Counted, journal: Journal, number: int, bad_rows: str) -> None:
    if bad_rows == "skip" or not counted.counts["malformed"]:
        return
    place, why = counted.first["malformed"]
    before = journal.place if journal.done[0] == number else 0
    raise InputError(
        f"{part.where(before + place)}: {why} (--bad-rows skip leaves such rows out, counted)"
    )
