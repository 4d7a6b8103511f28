"""Where a report's lengths come from: a file of lengths or a made shape; see also ``configs``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from xlength.commands import InputError
from xlength.plan.groups import Ints
from xlength.plan.shapes import shape_lengths
from xlength.report.measures import Strategy


@dataclass
class Source:
    """Lengths, and what is known besides.

    Args:
        name: for the headline.
        lengths: (n,) int64, of either sign; zeros are possible.
        parts: (name, first sample, number of samples) of each source.
        media: samples have images, though all lengths may be positive.
        two_modalities: both signs are expected.
        length_property: where a sampler finds them.
        strategy: what a config does now.
        batch_size, accumulate, max_tokens: a config's, or what comes closest to its plan.
        merge: where the loader comes from a ``_base_`` config, its keys; see ``config_lines``.
        pool: a config's data set is a ``LengthPoolSortDataset`` already.
        packs: a config's samples are ready packs, so lines to paste would not fit.
        notes: warnings of the measurement.
    """

    name: str
    lengths: Ints
    parts: list[tuple[str, int, int]] = field(default_factory=list)
    media: bool = False
    two_modalities: bool = False
    length_property: str = "length"
    strategy: Strategy | None = None
    batch_size: int | None = None
    accumulate: int = 1
    max_tokens: int | None = None
    merge: Sequence[str] | None = None
    pool: bool = False
    packs: bool = False
    notes: list[str] = field(default_factory=list)


def from_shape(shape: str, num_samples: int, seed: int) -> Source:
    """Made lengths, see ``shape_lengths``."""
    try:
        lengths = shape_lengths(shape, num_samples, seed)
    except ValueError as error:
        raise InputError(f"--shape: {error}") from None
    return Source(shape, lengths)


def from_file(path: Path) -> Source:
    """Lengths that ``xlength measure`` or numpy wrote, with the side file if there is one.

    Raises:
        InputError: it is no one-dimensional array of whole numbers.
    """
    try:
        values = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise InputError(f"{path} is no file of lengths (.npy): {error}") from None
    if not isinstance(values, np.ndarray) or values.ndim != 1:
        shape = getattr(values, "shape", type(values).__name__)
        raise InputError(f"{path} must hold one length per sample, got shape {shape}")
    if values.dtype.kind == "f":
        with np.errstate(invalid="ignore"):
            bad = np.flatnonzero(values != np.floor(values))
        if len(bad):
            raise InputError(
                f"{path}: lengths must be whole numbers, {len(bad)} are not, the first "
                f"({values[bad[0]]}) at row {int(bad[0])}"
            )
    elif values.dtype.kind not in "iu":
        raise InputError(f"{path} must hold whole numbers, got {values.dtype}")
    source = Source(path.name, values.astype(np.int64))
    _read_side_file(path.with_suffix(".json"), source)
    return source


def _read_side_file(path: Path, source: Source) -> None:
    try:
        side = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(side, Mapping) or side.get("num_samples") != len(source.lengths):
            return
        starts = 0
        for part in side.get("parts", ()):
            source.parts.append((str(part["name"]), starts, int(part["num_samples"])))
            starts += int(part["num_samples"])
        source.media = bool(side.get("media", False))
        source.two_modalities = bool(side.get("two_modalities", False))
        source.length_property = str(side.get("length_property", "length"))
    except (OSError, ValueError, KeyError, TypeError):
        return


def named_parts(source: Source, lengths: Ints) -> Sequence[tuple[str, int, int]]:
    """The sources of a histogram; the whole set where they are not known or rows were left out."""
    whole = [(source.name, 0, len(lengths))]
    return source.parts if len(lengths) == len(source.lengths) and source.parts else whole
