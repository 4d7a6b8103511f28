"""Samples as a reader sees them: their text, what of it is trained, and who draws them when."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xlength.losses import IGNORE_INDEX
from xlength.plan.epoch import EpochPlan
from xlength.plan.groups import Ints
from xlength.report.configs import is_stream
from xlength.runtime.build import build

IMAGE_TOKEN_INDEX = -200
_RUN = 8
"""Equal tokens in a row from which on they are shown once, with their number."""


@dataclass(frozen=True)
class Span:
    """A stretch of a sample.

    Args:
        text: decoded.
        trained: whether its labels count.
    """

    text: str
    trained: bool


def first_samples(dataset: Any, count: int) -> list[Mapping[str, Any]]:
    """The first samples of a data set or a stream."""
    if not is_stream(dataset):
        return [dataset[i] for i in range(min(count, len(dataset)))]
    return list(islice(iter(dataset), count))


def spans_of(sample: Mapping[str, Any], decode: Callable[[list[int]], str]) -> list[Span]:
    """The text of a sample, split where training begins and ends.

    Args:
        sample: with ``input_ids`` and, if something is trained, ``labels``.
        decode: token ids -> text, see ``text_of``.
    """
    ids = _flat(sample["input_ids"])
    labels = sample.get("labels")
    trained = np.zeros(len(ids), bool) if labels is None else _flat(labels) != IGNORE_INDEX
    borders = np.flatnonzero(np.diff(trained)) + 1
    parts = np.split(ids, borders)
    starts = [0, *borders.tolist()]
    return [
        Span(text_of(part.tolist(), decode), bool(trained[start]))
        for start, part in zip(starts, parts, strict=True)
        if len(part)
    ]


def _flat(values: Any) -> NDArray[np.int64]:
    return np.asarray(values, dtype=np.int64).reshape(-1)


def tokenizer_of(cfg: Any, loader: Any, dataset: Any) -> Any:
    """The tokenizer that a config's data are made with, at whatever depth of data sets around data
    sets; None where neither says one.

    Args:
        cfg: the config.
        loader: of the config, with the data set's.
        dataset: as built.
    """
    while dataset is not None:
        for owner in (dataset, getattr(dataset, "processor", None)):
            own = getattr(owner, "tokenizer", None)
            if own is not None:
                return own
        dataset = getattr(dataset, "dataset", None)
    given, inner = cfg.get("tokenizer"), loader
    while not given and isinstance(inner, Mapping):
        inner = inner.get("dataset")
        given = inner.get("tokenizer") if isinstance(inner, Mapping) else None
    found = build(given)
    return found if hasattr(found, "decode") else None


def text_of(ids: list[int], decode: Callable[[list[int]], str]) -> str:
    """The text of token ids, with ``<image>`` where an image comes and long runs of one token, such
    as those of an image, decoded once, with their number."""
    pieces: list[str] = []
    plain: list[int] = []
    for token, run in groupby(ids):
        count = sum(1 for _ in run)
        if token != IMAGE_TOKEN_INDEX and count < _RUN:
            plain += [token] * count
            continue
        if plain:
            pieces.append(decode(plain))
            plain = []
        name = "<image>" if token == IMAGE_TOKEN_INDEX else decode([token])
        pieces.append(name if count == 1 else f"{name}(x {count})")
    if plain:
        pieces.append(decode(plain))
    return "".join(pieces)


def summary(sample: Mapping[str, Any]) -> str:
    """Numbers of a sample: tokens, trained ones, samples of a pack, sizes of other arrays."""
    ids = _flat(sample["input_ids"])
    facts = [f"{len(ids):,} tokens"]
    if sample.get("labels") is not None:
        trained = int((_flat(sample["labels"]) != IGNORE_INDEX).sum())
        facts.append(f"{trained:,} trained ({trained / max(len(ids), 1):.0%})")
    if sample.get("cumulative_len") is not None:
        facts.append(f"{len(sample['cumulative_len']) - 1} samples in this pack")
    for key, value in sample.items():
        if hasattr(value, "shape") and key not in ("input_ids", "labels", "position_ids"):
            facts.append(f"{key} {tuple(value.shape)}")
    return ", ".join(facts)


def steps_of(plan: EpochPlan, lengths: Ints, steps: int) -> Iterator[list[str]]:
    """The first steps of an epoch: of each rank, rows x longest, and the samples."""
    sizes = np.abs(lengths)
    for row in plan.steps[:steps].tolist():
        cells = []
        for group in row:
            batch = plan.groups[group]
            shown = " ".join(f"#{i}" for i in batch[:4].tolist())
            more = " ..." if len(batch) > 4 else ""
            cells.append(f"{len(batch)} x {int(sizes[batch].max())}\n{shown}{more}")
        yield cells
