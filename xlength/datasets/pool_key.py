"""What a sample costs, and whether it is packed: looked up in the sample itself."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from xlength.plan.cost import Cost

Key = str | Callable[[Any], Any]

BORDERS = ("cu_lengths", "cu_seqlens", "cumulative_len")
_MISSING = object()
_FALLBACKS = (("total_len", False), ("tokens", True), ("input_ids", True))


class SampleCost:
    """Cost of a sample, from its length or, for a pack, from the lengths of the samples in it.

    Args:
        key: a field or attribute, a dotted path of them, or a function of the sample. Where the
            field ``'length'`` does not exist: ``total_len``, else the size of ``tokens``, else of
            ``input_ids``.
        cost: of a length l, ``l`` or ``l + l^2 / crossover``. A pack of k samples costs the sum of
            theirs, as they do not attend to each other.
        packed_key: where the borders of the samples in a pack are (k + 1 numbers from 0 to its
            length), or a function that returns them, or None for a sample that is no pack. By
            default ``cu_lengths``, ``cu_seqlens`` or ``cumulative_len``.

    Raises:
        ValueError: ``cost`` is one for lengths of several columns.
    """

    def __init__(self, key: Key, cost: Cost, packed_key: Key | None = None) -> None:
        for name, value in (("key", key), ("packed_key", packed_key)):
            if not (isinstance(value, str) or callable(value) or value is None):
                raise ValueError(f"{name} must be a name or a function, got {value!r}")
        if key is None:
            key = "length"
        if cost.weights is not None:
            raise ValueError(f"cost must be of one length per sample, got {cost!r}")
        self.key = key
        self.cost = cost
        self.packed_key = packed_key

    def of(self, sample: Any, index: int) -> float:
        """The cost.

        Args:
            sample: of the stream.
            index: its place in the stream, for messages.

        Raises:
            ValueError: its length is missing, None, zero, or no whole number.
        """
        crossover = self.cost.crossover
        if crossover is None:
            return self.length(sample, index)
        borders = self.borders(sample)
        if borders is None or len(borders) <= 2:
            length = self.length(sample, index)
            return length + length * length / crossover
        sizes = np.diff(np.asarray(borders, dtype=np.float64))
        return float(sizes.sum() + (sizes * sizes).sum() / crossover)

    def length(self, sample: Any, index: int) -> int:
        """Tokens of the sample, at least 1."""
        key = self.key
        if type(sample) is dict and key in sample:
            value = sample[key]
        else:
            value = self._find(sample, index)
        if type(value) is int and value > 0:
            return value
        return self._checked(value, index)

    def is_packed(self, sample: Any) -> bool:
        """Whether several samples are laid together in it."""
        borders = self.borders(sample)
        return borders is not None and len(borders) > 2

    def borders(self, sample: Any) -> Any:
        """(k + 1,) borders of the k samples of a pack, None where there are none."""
        if callable(self.packed_key):
            return self.packed_key(sample)
        names = BORDERS if self.packed_key is None else (self.packed_key,)
        for name in names:
            value = _lookup(sample, name)
            if value is not _MISSING and value is not None:
                # A batch of one: XTuner wraps the borders of its only row in a list.
                nested = isinstance(value, list | tuple) and len(value) == 1
                return value[0] if nested and hasattr(value[0], "__len__") else value
        return None

    def check_picklable(self) -> None:
        """For workers that are spawned.

        Raises:
            ValueError: a function cannot be sent to them.
        """
        for name, value in (("key", self.key), ("packed_key", self.packed_key)):
            try:
                pickle.dumps(value)
            except Exception as error:
                raise ValueError(
                    f"{name}={value!r} cannot be pickled, as it must be for workers that are "
                    "spawned: give the name of a field, or a function defined at the top of a "
                    "module"
                ) from error

    def _find(self, sample: Any, index: int) -> Any:
        if callable(self.key):
            return self.key(sample)
        value = _lookup(sample, self.key)
        if value is not _MISSING:
            return value
        if self.key == "length":
            for name, sized in _FALLBACKS:
                value = _lookup(sample, name)
                if value is not _MISSING and value is not None:
                    return len(value) if sized else value
        tried = ", 'total_len', 'tokens' and 'input_ids'" if self.key == "length" else ""
        raise ValueError(
            f"key {self.key!r}: sample {index} of the stream, a {type(sample).__name__}, has no "
            f"{self.key!r}{tried}"
        )

    def _checked(self, value: Any, index: int) -> int:
        """The size of a length that is no plain positive int: numpy, torch, signed by modality."""
        number = value
        if hasattr(number, "item"):
            try:
                number = number.item()
            except (ValueError, RuntimeError):
                number = None
        if isinstance(number, float) and number.is_integer():
            number = int(number)
        if isinstance(number, bool) or not isinstance(number, int) or number == 0:
            raise ValueError(
                f"key {self.key!r}: the length of sample {index} of the stream is {value!r}; it "
                "must be a whole number of at least 1"
            )
        return abs(number)


def _lookup(sample: Any, name: str) -> Any:
    """A field or attribute by its name or dotted path; ``_MISSING`` if there is none."""
    value = _field(sample, name)
    if value is not _MISSING or "." not in name:
        return value
    value = sample
    for part in name.split("."):
        value = _field(value, part)
        if value is _MISSING:
            break
    return value


def _field(sample: Any, name: str) -> Any:
    if isinstance(sample, Mapping):
        return sample.get(name, _MISSING)
    return getattr(sample, name, _MISSING)
