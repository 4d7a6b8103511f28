"""Lengths without a file: shapes that stand for kinds of data, to try a setting before there is
any."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches

import numpy as np
from numpy.typing import NDArray

from xlength.plan.groups import Ints

Random = np.random.RandomState

PUBLISHED: dict[str, tuple[str, tuple[int, ...]]] = {
    "wikipedia": (
        "paragraphs of Wikipedia for BERT, cut at 512 tokens, 16.3 million",
        (5, 36, 48, 59, 70, 84, 100, 120, 143, 171, 204, 243, 288, 342, 407, 484) + (512,) * 5,
    ),
    "squad": (
        "questions and contexts of SQuAD 1.1, cut at 384 tokens, 88,641",
        (36, 84, 107, 117, 124, 130, 135, 141, 147, 153, 159)
        + (166, 174, 182, 191, 203, 217, 235, 260, 299, 384),
    ),
    "recipes": (
        "RecipeNLG as Alpaca instructions, 500,000, with a far outlier",
        (164, 192, 209, 228, 249, 274, 302, 337, 386, 467, 3285),
    ),
    "txt360": (
        "web documents of TxT360 from 256 to 24,576 tokens, 5 million",
        (257, 402, 622, 1050, 24576),
    ),
}
"""Published distributions: what they are of, and evenly spaced quantiles from least to largest.

Sources: ``wikipedia`` and ``squad`` from the histograms that Graphcore published with Krell et al.
2021, "Efficient Sequence Packing without Cross-contamination", arXiv:2107.02027; ``recipes`` from
the card of the data set AdamCodd/recipe-nlg-alpaca (Llama 3 tokens); ``txt360`` from the card of
BEE-spoke-data/TxT360-5M-sample-en (GPT-4 tokens). Between two quantiles lengths are taken to be
evenly spread on a logarithmic axis.
"""

USAGE = (
    "lognormal:MU,SIGMA:MIN,MAX (of the logarithm of the length), capped[:MAX], uniform:MIN,MAX, "
    f"quantiles:Q0,Q1,...,QK (evenly spaced), {', '.join(PUBLISHED)}"
)


def shape_lengths(shape: str, num_samples: int, seed: int = 0) -> Ints:
    """Draw lengths of a shape.

    ``capped`` stands for data that was cut at ``max_length`` (2,048 by default), as many published
    chat sets are: a lognormal body, and half of all samples at the cap itself.

    Args:
        shape: ``lognormal:5.5,1.0:8,8192`` (mean and standard deviation of log(length), least and
            largest length), ``capped``, ``capped:4096``, ``uniform:1,512``,
            ``quantiles:8,120,300,4096`` or a name in ``PUBLISHED``.
        num_samples: how many, at least 1.
        seed: the same lengths for the same seed.

    Returns:
        (n,) int64, in random order.

    Raises:
        ValueError: no such shape, or its numbers are out of range.
    """
    if num_samples < 1:
        raise ValueError(f"num_samples must be at least 1, got {num_samples}")
    kind, _, rest = shape.partition(":")
    rng = Random(np.random.MT19937(np.random.SeedSequence([seed, num_samples])))
    if kind in PUBLISHED:
        if rest:
            raise ValueError(f"shape {shape!r}: {kind} takes no numbers")
        return _from_quantiles(PUBLISHED[kind][1], num_samples, rng)
    if kind not in _SHAPES:
        close = get_close_matches(kind, [*_SHAPES, *PUBLISHED], 1)
        hint = f"did you mean {close[0]!r}?" if close else f"known are {USAGE}"
        raise ValueError(f"unknown shape {shape!r}; {hint}")
    groups = [_numbers(part, shape) for part in rest.split(":")] if rest else []
    return _SHAPES[kind](shape, groups, num_samples, rng)


def _numbers(text: str, shape: str) -> list[float]:
    try:
        return [float(number) for number in text.split(",")]
    except ValueError:
        raise ValueError(f"shape {shape!r}: {text!r} are no numbers; known are {USAGE}") from None


def _counts(groups: list[list[float]], counts: list[int], shape: str, form: str) -> None:
    if [len(group) for group in groups] != counts:
        raise ValueError(f"shape {shape!r} must have the form {form}")


def _range(low: float, high: float, shape: str) -> tuple[int, int]:
    if not 1 <= low <= high < 2**31 or low != int(low) or high != int(high):
        raise ValueError(
            f"shape {shape!r}: lengths must be whole numbers with 1 <= least <= largest, "
            f"got {low:g} and {high:g}"
        )
    return int(low), int(high)


def _lognormal(shape: str, groups: list[list[float]], count: int, rng: Random) -> Ints:
    _counts(groups, [2, 2], shape, "lognormal:MU,SIGMA:MIN,MAX")
    (mu, sigma), bounds = groups
    low, high = _range(bounds[0], bounds[1], shape)
    if not 0 <= sigma <= 10 or not -10 <= mu <= 20:
        raise ValueError(
            f"shape {shape!r}: mu must be in [-10, 20] and sigma in [0, 10], got {mu:g}, {sigma:g}"
        )
    return _whole(np.exp(rng.normal(mu, sigma, count)), low, high)


def _capped(shape: str, groups: list[list[float]], count: int, rng: Random) -> Ints:
    _counts(groups, [1] if groups else [], shape, "capped or capped:MAX")
    _, cap = _range(1, groups[0][0] if groups else 2048, shape)
    return _whole(np.exp(rng.normal(np.log(cap), 0.9, count)), min(8, cap), cap)


def _uniform(shape: str, groups: list[list[float]], count: int, rng: Random) -> Ints:
    _counts(groups, [2], shape, "uniform:MIN,MAX")
    low, high = _range(groups[0][0], groups[0][1], shape)
    return _whole(low + (high - low + 1) * rng.random_sample(count), low, high)


def _quantiles(shape: str, groups: list[list[float]], count: int, rng: Random) -> Ints:
    if len(groups) != 1 or len(groups[0]) < 2 or groups[0] != sorted(groups[0]):
        raise ValueError(f"shape {shape!r} must have the form quantiles:Q0,Q1,...,QK, rising")
    _range(groups[0][0], groups[0][-1], shape)
    return _from_quantiles(tuple(groups[0]), count, rng)


def _from_quantiles(points: tuple[float, ...], count: int, rng: Random) -> Ints:
    places = np.linspace(0, 1, len(points))
    drawn = np.exp(np.interp(rng.random_sample(count), places, np.log(points)))
    return _whole(drawn + 1e-9, int(points[0]), int(points[-1]))


def _whole(values: NDArray[np.float64], low: int, high: int) -> Ints:
    return np.clip(values, low, high).astype(np.int64)


_SHAPES: dict[str, Callable[[str, list[list[float]], int, Random], Ints]] = {
    "lognormal": _lognormal,
    "capped": _capped,
    "uniform": _uniform,
    "quantiles": _quantiles,
}
