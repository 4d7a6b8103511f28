"""One pass over the rows: map function, template, token ids and labels. Nothing is dropped here.

Every row gives one row: one that cannot be used says why in the columns of ``VERDICT``, so that no
worker process loses any, and so that they can still be counted when the result is read back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from datasets import Features, Value
from datasets.features import Sequence as ListOf

KEPT, MALFORMED, EMPTY, UNTRAINED = range(4)

VERDICT = Features(
    xlength_verdict=Value("int8"),
    xlength_reason=Value("string"),
    xlength_cut=Value("int64"),
    xlength_lost=Value("string"),
)
"""What became of a row (see above), why it is malformed, how many tokens were cut off, and which
columns that it has are not kept."""

TOKENS = Features(input_ids=ListOf(Value("int32")), labels=ListOf(Value("int32")))

CONVERSATION = [
    {
        "system": Value("string"),
        "input": Value("string"),
        "output": Value("string"),
        "output_with_loss": Value("bool"),
        "need_eos_token": Value("bool"),
        "sep": Value("string"),
    }
]
_TURN = {"system": "", "input": "", "output": "", "output_with_loss": True} | {
    "need_eos_token": True,
    "sep": "",
}

RowFunction = Callable[[Any], Mapping[str, Any] | None]


class Encoder(Protocol):
    """``TurnEncoder`` and ``ChatEncoder``."""

    def prepare(self, row: Mapping[str, Any], turns: Sequence[Mapping[str, Any]]) -> list[Any]: ...

    def encode(self, rows: Sequence[Sequence[Any]]) -> list[tuple[Any, Any, int]]: ...


@dataclass
class RowPass:
    """Maps a batch of rows; called by ``Dataset.map(..., batched=True)`` in worker processes.

    Args:
        map_fn: row -> ``{'conversation': turns, ...}``, or None.
        template_fn: row with a conversation -> ``{'conversation': turns}``, or None.
        renames: old name of a column -> new name, after the template.
        encoder: makes tokens of turns; None where the rows have ``input_ids`` already.
        with_labels: refuse rows without a trainable label.
        keep: names of the columns that ``map_fn`` makes and that stay.
        keep_all: every other column that ``map_fn`` makes is one that is lost.
        fail_fast: do not tokenise what comes after a malformed row; it will be refused anyway.
    """

    map_fn: RowFunction | None
    template_fn: RowFunction | None
    renames: Mapping[str, str]
    encoder: Encoder | None
    with_labels: bool
    keep: Sequence[str]
    fail_fast: bool
    keep_all: bool = False
    failed: bool = False

    def __call__(self, batch: Any) -> dict[str, list[Any]]:
        batch = batch.copy()  # what is read of it is not written again, only what is made
        names = list(batch)
        size = len(batch[names[0]])
        outcomes = [self._outcome(Row(batch, i)) for i in range(size)]
        if self.encoder is not None:
            self._tokenise(outcomes)
        for outcome in outcomes:
            self._judge(outcome)
        result: dict[str, list[Any]] = {name: [] for name in self.columns()}
        for outcome in outcomes:
            for name, values in result.items():
                values.append(outcome.columns.get(name))
        return result

    def columns(self) -> list[str]:
        """Names of the columns that a call returns."""
        tokens = list(TOKENS) if self.encoder is not None else []
        return [*self.keep, *tokens, "length", *VERDICT]

    def run(self, row: Mapping[str, Any]) -> Outcome:
        """One row as far as its turns; raises what is wrong with it."""
        outcome = Outcome(row=Row(row))
        if self.map_fn is not None:
            outcome.update(self.map_fn(outcome.row))
        if self.template_fn is not None:
            outcome.update(self.template_fn(outcome.row))
        for old, new in self.renames.items():
            outcome.rename(old, new)
        turns = outcome.row.get("conversation")
        if turns is not None and not isinstance(turns, list):
            raise ValueError(f"'conversation' is {turns!r}; it must be a list of turns")
        outcome.has_turns = bool(turns)
        if "conversation" in self.keep:
            outcome.columns["conversation"] = [_turn(turn) for turn in turns or ()]
        if self.encoder is not None:
            outcome.pieces = self.encoder.prepare(outcome.row, turns or ())
            outcome.has_turns = bool(outcome.pieces)
        return outcome

    def _outcome(self, row: Row) -> Outcome:
        try:
            return self.run(row)
        except UnicodeDecodeError:  # of the whole batch, whose column cannot be read
            raise
        except Exception as error:
            self.failed = True
            said = str(error) if isinstance(error, ValueError) else ""
            return Outcome(row=Row({}), reason=said or repr(error))

    def _tokenise(self, outcomes: list[Outcome]) -> None:
        assert self.encoder is not None
        skip = self.failed and self.fail_fast
        usable = [o for o in outcomes if o.has_turns and not o.reason and not skip]
        encoded = self.encoder.encode([outcome.pieces for outcome in usable])
        for outcome, (ids, labels, cut) in zip(usable, encoded, strict=True):
            outcome.columns |= {"input_ids": ids, "labels": labels, "xlength_cut": cut}
            outcome.row["input_ids"], outcome.row["labels"] = ids, labels

    def _judge(self, outcome: Outcome) -> None:
        ids, labels = outcome.row.get("input_ids"), outcome.row.get("labels")
        silent = self.encoder is not None and not outcome.has_turns
        if outcome.reason:
            verdict = MALFORMED
        elif silent or ids is None or not len(ids):
            verdict = EMPTY
        elif self.with_labels and not _trainable(labels):
            verdict = UNTRAINED
        else:
            verdict = KEPT
        outcome.columns.setdefault("xlength_cut", 0)
        outcome.columns |= {
            "length": 0 if ids is None else len(ids),
            "xlength_verdict": verdict,
            "xlength_reason": outcome.reason,
            "xlength_lost": self._lost(outcome) if self.keep_all else "",
        }

    def _lost(self, outcome: Outcome) -> str:
        kept = {*self.columns(), *TOKENS, "conversation"}
        return ", ".join(sorted(str(name) for name in outcome.columns if name not in kept))


@dataclass
class Outcome:
    """What has become of a row so far."""

    row: Row
    reason: str = ""
    has_turns: bool = False

    def __post_init__(self) -> None:
        self.columns: dict[str, Any] = {}
        self.pieces: list[Any] = []

    def update(self, made: Mapping[str, Any] | None) -> None:
        for key, value in (made or {}).items():
            self.row[key] = self.columns[key] = value

    def rename(self, old: str, new: str) -> None:
        self.row[new] = self.row.pop(old)
        if old in self.columns:
            self.columns[new] = self.columns.pop(old)


class Row(MutableMapping[str, Any]):
    """A row of a batch; a column is read, and an image decoded, when it is asked for."""

    def __init__(self, source: Mapping[str, Any], index: int | None = None) -> None:
        self.source = source
        self.index = index
        self.names = dict.fromkeys(source)
        self.own: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        if key in self.own:
            return self.own[key]
        if key not in self.names:
            raise KeyError(key)
        value = self.source[key]
        return value if self.index is None else value[self.index]

    def get(self, key: str, default: Any = None) -> Any:
        """As ``dict.get``; the one of ``Mapping`` is slow."""
        return self[key] if key in self.names else default

    def __setitem__(self, key: str, value: Any) -> None:
        self.own[key] = value
        self.names.setdefault(key)

    def __delitem__(self, key: str) -> None:
        del self.names[key]
        self.own.pop(key, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def copy(self) -> dict[str, Any]:
        """All columns, as a dict."""
        return dict(self)


def _turn(turn: Mapping[str, Any]) -> dict[str, Any]:
    given = {key: turn.get(key) for key in _TURN}
    return {key: _TURN[key] if value is None else value for key, value in given.items()}


def _trainable(labels: Any) -> bool:
    # The first label is never predicted: a model's loss shifts them by one.
    return labels is not None and bool((np.asarray(labels)[1:] >= 0).any())
