"""What a sample, and a batch of samples, costs to compute."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xlength.plan.crossover import crossover_of
from xlength.plan.groups import Groups
from xlength.plan.options import refuse_unknown

DEFAULT_CROSSOVER = 12288
"""Length, in tokens, at which attention is taken to cost as much as the rest of a layer."""


def _numbers(name: str, values: Any) -> tuple[float, ...]:
    """The values of an option that has one number per column."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ValueError(f"{name} must be one number per column of the lengths, got {values!r}")
    values = tuple(values)
    if not all(map(_is_number, values)):
        raise ValueError(f"{name} must be one number per column of the lengths, got {values!r}")
    return tuple(map(float, values))


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


@dataclass(frozen=True, repr=False)
class Cost:
    """Cost of one sample of length l, in units of one token without attention: ``l + l^2 / c``.

    Where lengths are (n, k) and ``weights`` are given, the first column counts what the language
    model computes and the others what is computed besides, such as the patches that a vision tower
    sees: ``weights[0] * (l + l^2 / c) + weights[1] * patches + ...``. Of a batch, the first term is
    padded to the longest sample and the others are plain sums.

    Args:
        crossover: c, the length in tokens at which attention costs as much as all the rest; None
            counts tokens only.
        weights: (k,) cost of one unit of each column; None for lengths of one column.
        sequence: (k,) tokens of the language model's sequence per unit of each column: ``(1, 0)``
            where the first column is the whole length, ``(1, 0.25)`` where it is the text alone and
            four patches make a token. By default the first column is the whole length.
    """

    crossover: float | None = None
    weights: tuple[float, ...] | None = None
    sequence: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.crossover is not None and not (_is_number(self.crossover) and self.crossover > 0):
            raise ValueError(
                f"crossover must be a positive length in tokens, got {self.crossover!r}"
            )
        if self.weights is None:
            if self.sequence is not None:
                raise ValueError(f"sequence={self.sequence} needs weights, one per column")
            return
        weights = _numbers("weights", self.weights)
        default = (1.0,) + (0.0,) * (len(weights) - 1)
        sequence = _numbers("sequence", default if self.sequence is None else self.sequence)
        for name, values in (("weights", weights), ("sequence", sequence)):
            if not values or min(values) < 0 or values[0] == 0:
                raise ValueError(f"{name} must be positive, then non-negative, got {values}")
        if len(weights) != len(sequence):
            raise ValueError(f"sequence {sequence} must have one number per weight of {weights}")
        object.__setattr__(self, "weights", weights)
        object.__setattr__(self, "sequence", sequence)

    def __repr__(self) -> str:
        if self.weights is None:
            return "tokens" if self.crossover is None else f"attention({self.crossover:g})"
        return (
            f"multimodal(weights={self.weights}, sequence={self.sequence}, "
            f"crossover={self.crossover})"
        )

    def sizes(self, lengths: NDArray[Any]) -> NDArray[Any]:
        """(n,) tokens of each sample's sequence, from lengths of either sign, (n,) or (n, k)."""
        lengths = np.asarray(lengths)
        self._check(lengths)
        result: NDArray[Any] = np.abs(lengths)
        if self.sequence is None:
            return result
        if not any(self.sequence[1:]):
            return result[:, 0]
        tokens: NDArray[Any] = np.ceil(result @ np.array(self.sequence) - 1e-9).astype(np.int64)
        return tokens

    def of(self, lengths: NDArray[Any]) -> NDArray[np.float64]:
        """Lengths in tokens, of either sign, (n,) or (n, k) -> (n,) float64 costs."""
        return self._of_sizes(self.sizes(lengths)) + self.extra(lengths)

    def extra(self, lengths: NDArray[Any]) -> NDArray[np.float64]:
        """(n,) cost of the columns after the first, which are never padded; 0 without them."""
        if self.weights is None:
            return np.zeros(len(lengths))
        rest: NDArray[np.float64] = np.abs(lengths[:, 1:]) @ np.array(self.weights[1:])
        return rest

    def padded(self, lengths: NDArray[Any], groups: Groups) -> NDArray[np.float64]:
        """(g,) cost of each batch as it is computed: rows x cost(longest), plus the unpadded."""
        result = groups.sizes * self._of_sizes(groups.maxima(self.sizes(lengths)))
        return result if self.weights is None else result + groups.sums(self.extra(lengths))

    def _of_sizes(self, sizes: NDArray[Any]) -> NDArray[np.float64]:
        size = sizes.astype(np.float64)
        result = size if self.crossover is None else size + size * size / self.crossover
        return result if self.weights is None else self.weights[0] * result

    def _check(self, lengths: NDArray[Any]) -> None:
        columns = None if self.weights is None else len(self.weights)
        if lengths.ndim == 1 and columns is None:
            return
        if lengths.ndim != 2 or columns is None or lengths.shape[1] != columns:
            wanted = "(n,)" if columns is None else f"(n, {columns}), a column per weight"
            raise ValueError(f"lengths must have shape {wanted} for {self}, got {lengths.shape}")


TOKENS = Cost()
ATTENTION = Cost(DEFAULT_CROSSOVER)

_KEYS = {
    "tokens": (),
    "attention": ("crossover", "config"),
    "multimodal": ("weights", "sequence", "crossover", "config"),
}


def make_cost(spec: str | Mapping[str, Any] | Cost) -> Cost:
    """A cost from a config: a name, a dict with ``type``, or a ``Cost`` as it is.

    Args:
        spec: ``'tokens'``; ``'attention'`` (crossover 12,288); ``dict(type='attention',
            crossover=N)``; ``dict(type='attention', config=C)`` with a transformers config or the
            path of one, see ``crossover_of``; or ``dict(type='multimodal', weights=(1, 0.2),
            sequence=None, crossover=None)`` for lengths of several columns.

    Raises:
        ValueError: an unknown type or key, named, with the closest known one; or a bad value.
    """
    if isinstance(spec, Cost):
        return spec
    if not isinstance(spec, str | Mapping):
        raise ValueError(
            f"cost must be one of {', '.join(map(repr, _KEYS))}, or a dict with such a type, got "
            f"{spec!r}"
        )
    options: dict[str, Any] = {"type": spec} if isinstance(spec, str) else dict(spec)
    kind = str(options.pop("type", None))
    refuse_unknown("cost type", [kind], list(_KEYS))
    refuse_unknown(f"key of cost {kind!r}", list(options), list(_KEYS[kind]))
    config = options.pop("config", None)
    crossover = options.pop("crossover", None)
    if config is not None:
        if crossover is not None:
            raise ValueError(f"give cost either crossover={crossover!r} or config, not both")
        crossover = crossover_of(config)
    if kind == "attention" and crossover is None:
        crossover = DEFAULT_CROSSOVER
    if kind == "multimodal" and "weights" not in options:
        raise ValueError("cost 'multimodal' needs weights: the cost of one unit of each column")
    return Cost(crossover, **options)


def padded_costs(lengths: NDArray[Any], groups: Groups, cost: Cost = TOKENS) -> NDArray[np.float64]:
    """(g,) cost of each batch as it is computed, padded: rows x cost(longest)."""
    return cost.padded(lengths, groups)
