"""Rows -> token lengths, as training would make them, without keeping the tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xlength.datasets.rows import EMPTY, KEPT, MALFORMED, UNTRAINED, RowPass
from xlength.measure.blocks import Block, Row

_BATCH = 256
_NAMES = {MALFORMED: "malformed", EMPTY: "empty", UNTRAINED: "untrained"}


@dataclass
class Counted:
    """What a block, or all blocks so far, held.

    Args:
        lengths: (k,) int32 tokens of the rows that are trained on.
        step: lines or rows of the block.
        counts: rows ``read``, ``kept``, ``malformed``, ``empty`` (nobody answers), ``untrained``
            (no label), ``cut`` (at max_length), and ``cut_tokens``.
        first: of each kind that is no good, the place of the first row and what is wrong.
    """

    lengths: NDArray[np.int32]
    step: int
    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, tuple[int, str]] = field(default_factory=dict)


class RowCounter:
    """Counts the tokens of blocks; sent to worker processes.

    Args:
        row_pass: map function, template and encoder; None where ``column`` says the length.
        column: ``length`` (numbers) or ``input_ids`` (lists) of rows that are measured already.
    """

    def __init__(self, row_pass: RowPass | None, column: str = "") -> None:
        self.row_pass = row_pass
        self.column = column

    def count(self, block: Block) -> Counted:
        """Read and count one block."""
        rows, step = block.rows()
        lengths: list[int] = []
        result = Counted(np.zeros(0, np.int32), step)
        for row in rows:
            if row.value is None:
                self._note(result, "malformed", row.place, row.problem)
        good = [row for row in rows if row.value is not None]
        for start in range(0, len(good), _BATCH):
            self._count(good[start : start + _BATCH], lengths, result)
        result.lengths = np.array(lengths, dtype=np.int32)
        result.counts["read"] = len(rows)
        result.counts["kept"] = len(lengths)
        return result

    def _count(self, rows: Sequence[Row], lengths: list[int], result: Counted) -> None:
        if self.row_pass is None:
            for row in rows:
                self._known(row, lengths, result)
            return
        made = self.row_pass(_columns(rows))
        verdicts, sizes = made["xlength_verdict"], made["length"]
        reasons, cuts = made["xlength_reason"], made["xlength_cut"]
        for row, verdict, size, reason, cut in zip(
            rows, verdicts, sizes, reasons, cuts, strict=True
        ):
            if verdict != KEPT:
                self._note(result, _NAMES[verdict], row.place, reason)
                continue
            lengths.append(size)
            if cut:
                self._note(result, "cut", row.place, f"{cut} tokens over")
                result.counts["cut_tokens"] += cut

    def _known(self, row: Row, lengths: list[int], result: Counted) -> None:
        assert row.value is not None
        value = row.value.get(self.column)
        if self.column == "input_ids" and isinstance(value, Sized):
            value = len(value)
        if isinstance(value, bool) or not isinstance(value, int) or not value:
            self._note(result, "malformed", row.place, f"{self.column!r} is {value!r}")
        else:
            lengths.append(value)

    @staticmethod
    def _note(result: Counted, kind: str, place: int, why: str) -> None:
        result.counts[kind] += 1
        known = result.first.get(kind)
        if known is None or place < known[0]:
            result.first[kind] = (place, why)


def _columns(rows: Sequence[Row]) -> dict[str, list[Any]]:
    values = [row.value or {} for row in rows]
    names = dict.fromkeys(name for value in values for name in value)
    return {name: [value.get(name) for value in values] for name in names}


def first_row(blocks: Iterator[Block]) -> tuple[dict[str, Any] | None, str]:
    """The first row that can be parsed; and what is wrong with the first that cannot."""
    problem = ""
    for block in blocks:
        for row in block.rows()[0]:
            if row.value is not None:
                return row.value, problem
            problem = problem or row.problem
    return None, problem
