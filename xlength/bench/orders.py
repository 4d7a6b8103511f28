"""One epoch of the length-grouped order against the same algorithm in Python loops."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import numpy as np

from xlength.bench.timing import peak_bytes, seconds
from xlength.plan.groups import Ints
from xlength.plan.order import default_mega_batch_mult, length_grouped_order
from xlength.samplers.length_grouped import permutations

PER_DEVICE_BATCH_SIZE, WORLD_SIZE = 16, 8


def run(options: Namespace) -> list[dict[str, Any]]:
    """Rows for single-modality and mixed lengths: seconds of ours and of the loops, and extra bytes
    a sample.

    The limit is one permutation plus one sort of all lengths by numpy.
    """
    lengths = _lengths(options)
    signs = np.where(np.random.default_rng(options.seed).random(len(lengths)) < 0.5, 1, -1)
    return [
        _row("single modality", lengths, options.seed),
        _row("mixed modality", lengths * signs, options.seed),
    ]


def _lengths(options: Namespace) -> Ints:
    if options.lengths:
        given: Ints = np.abs(np.load(options.lengths)).astype(np.int64)
        return given
    count = 100_000 if options.quick else 1_000_000
    drawn = np.random.default_rng(options.seed).lognormal(5.5, 1.0, count)
    return np.clip(drawn, 8, 8192).astype(np.int64)


def _row(case: str, lengths: Ints, seed: int) -> dict[str, Any]:
    total = PER_DEVICE_BATCH_SIZE * WORLD_SIZE
    window = default_mega_batch_mult(len(lengths), total) * total

    def ours() -> Ints:
        return length_grouped_order(lengths, window, permutations(seed))

    values = lengths.tolist()

    def loops() -> list[int]:
        return order_in_loops(values, window, permutations(seed))

    def limit() -> Ints:
        return np.argsort(lengths[permutations(seed)(len(lengths))])

    if ours().tolist() != loops():
        raise AssertionError("the two orders differ, so their times mean nothing")
    mine, peer, bound = seconds(ours), seconds(loops), seconds(limit)
    permutation_bytes = 8  # of torch, which the tracer does not see
    return {
        "case": f"{case}, {len(lengths):,} lengths",
        "ours": mine,
        "peer": peer,
        "ratio": peer / mine,
        "limit": bound,
        "bytes_per_sample": peak_bytes(ours) / len(lengths) + permutation_bytes,
        "note": "peer: the same order in Python loops; limit: a permutation and a sort",
    }


def order_in_loops(lengths: list[int], window: int, permute: Callable[[int], Ints]) -> list[int]:
    """The length-grouped order in loops: lists, and ``sorted`` with a key inside each window."""

    def sorted_windows(sizes: list[int]) -> list[list[int]]:
        drawn = permute(len(sizes)).tolist()
        windows = [drawn[i : i + window] for i in range(0, len(drawn), window)]
        return [sorted(part, key=lambda i: sizes[i], reverse=True) for part in windows]

    if all(length > 0 for length in lengths) or all(length < 0 for length in lengths):
        windows = sorted_windows(lengths)
    else:
        kinds = []
        for sign in (1, -1):
            members = [i for i, length in enumerate(lengths) if sign * length > 0]
            sizes = [sign * lengths[i] for i in members]
            kinds.append([[members[i] for i in part] for part in sorted_windows(sizes)])
        whole = kinds[0][:-1] + kinds[1][:-1]
        order = permute(len(whole)).tolist()
        last = sorted(kinds[0][-1] + kinds[1][-1], key=lambda i: abs(lengths[i]), reverse=True)
        windows = [*(whole[i] for i in order), last]
    firsts = [abs(lengths[part[0]]) for part in windows]
    longest = firsts.index(max(firsts))
    windows[0][0], windows[longest][0] = windows[longest][0], windows[0][0]
    return [i for part in windows for i in part]
