"""Packing: which samples share a row of at most ``max_length`` tokens."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xlength.plan.groups import Groups, Ints
from xlength.plan.pieces import Overlong, Packs, Pieces, check_lengths, cut_overlong

STRATEGIES = ("best_fit", "next_fit", "concat")

Random = np.random.RandomState | np.random.Generator
Run = tuple[int, int, int, int]
"""(first pack, packs, samples laid in each, samples that each held before)."""


def pack_samples(
    lengths: NDArray[Any],
    max_length: int,
    strategy: str = "best_fit",
    overlong: str = "error",
    rng: Random | None = None,
) -> tuple[Packs, Overlong]:
    """Pack samples, whatever their length.

    Args:
        lengths: (n,) integers, tokens of each sample; the sign is ignored.
        max_length: tokens of a pack.
        strategy: 'best_fit' fills packs best; 'next_fit' keeps the order of the samples; 'concat'
            keeps the order and cuts samples at the packs' ends, so that all packs but the last are
            full.
        overlong: for the samples over ``max_length``, see ``cut_overlong``; 'concat' cuts them like
            any other.
        rng: deals samples of equal length to packs at random (best_fit) or shuffles the order first
            (the others); None keeps the order.

    Returns:
        The packs, and what was done to samples that are too long.

    Raises:
        ValueError: see ``cut_overlong``; the strategy is unknown.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy must be one of {', '.join(STRATEGIES)}, got {strategy!r}")
    if strategy == "concat":
        sizes = check_lengths(lengths, max_length)
        order = None if rng is None else rng.permutation(len(sizes))
        return concat(sizes, max_length, order), Overlong("split", max_length)
    pieces, report = cut_overlong(lengths, max_length, overlong)
    sizes = check_lengths(lengths, max_length) if pieces is None else pieces.lengths
    if strategy == "best_fit":
        return Packs(best_fit(sizes, max_length, rng), pieces), report
    order = None if rng is None else rng.permutation(len(sizes))
    return Packs(next_fit(sizes, max_length, order), pieces), report


def best_fit(lengths: NDArray[Any], max_length: int, rng: Random | None = None) -> Groups:
    """Best-fit-decreasing over the histogram of lengths: the longest first, each into the fullest
    pack it fits.

    Open packs with the same room are handled together, and so are samples of the same length; the
    packs are those of best fit sample by sample (ties to the pack that changed last). Which sample
    goes where is decided at the end.

    Price: pack-mates are chosen by length: the longest samples always meet the short ones that
    complete them.
    Cost: one step of Python for each distinct length and each class of packs that is used up (some
    20,000 for a million samples at 8,192), and a few passes of numpy over the samples; at most 48
    bytes a sample.
    Source: best-fit-decreasing (Johnson, 1973), on a histogram as in Krell et al. 2021,
    arXiv:2107.02027.

    Args:
        lengths: (n,) integers in [1, ``max_length``], tokens of each sample.
        max_length: tokens of a pack.
        rng: deals samples of equal length at random; None deals them in order.

    Returns:
        One group of samples per pack, longest samples first within a pack; n samples in all, each
        once.

    Raises:
        ValueError: a length is out of range.
    """
    sizes = _check_fitting(lengths, max_length)
    if not len(sizes):
        return Groups(np.zeros(0, dtype=np.int64), np.zeros(1, dtype=np.int64))
    values, counts = histogram(sizes, max_length)
    runs, pack_sizes = _best_fit_runs(values, counts, max_length)
    return _deal(_by_falling_length(sizes, values, rng), runs, pack_sizes)


def _best_fit_runs(values: Ints, counts: Ints, max_length: int) -> tuple[list[Run], Ints]:
    """Place ``counts[i]`` samples of ``values[i]`` tokens, the longest first.

    Returns:
        Runs, in the order in which they use up the samples, and (packs,) the samples in each pack.
    """
    shortest = int(values[0])
    # Room left -> classes of open packs (first pack, packs, samples in each), the last changed at
    # the end.
    classes: dict[int, list[tuple[int, int, int]]] = {}
    rooms: list[int] = []  # the keys of classes that hold a pack, sorted
    closed: list[tuple[int, int, int]] = []
    runs: list[Run] = []
    num_packs = 0
    for length, left in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        at = bisect_left(rooms, length)
        while left:
            if at == len(rooms):
                room, first, filled, available = max_length, num_packs, 0, left
            else:
                room = rooms[at]
                stack = classes[room]
                first, available, filled = stack.pop()
            each = min(room // length, left)
            used = min(available, left // each)
            if at == len(rooms):
                num_packs += used
            elif used < available:
                stack.append((first + used, available - used, filled))
            elif not stack:
                del rooms[at]
            runs.append((first, used, each, filled))
            left -= used * each
            room -= each * length
            if room < shortest:
                closed.append((first, used, filled + each))
                continue
            stack = classes.setdefault(room, [])
            if not stack:
                insort(rooms, room, hi=at)
                at += 1
            stack.append((first, used, filled + each))
    sizes = np.empty(num_packs, dtype=np.int64)
    for first, used, filled in _all(closed, classes):
        sizes[first : first + used] = filled
    return runs, sizes


def _all(
    closed: list[tuple[int, int, int]], classes: dict[int, list[tuple[int, int, int]]]
) -> Iterator[tuple[int, int, int]]:
    yield from closed
    for stack in classes.values():
        yield from stack


def _deal(order: Ints, runs: list[Run], pack_sizes: Ints) -> Groups:
    """Give the samples, longest first, to the packs as the runs say."""
    offsets = np.zeros(len(pack_sizes) + 1, dtype=np.int64)
    np.cumsum(pack_sizes, out=offsets[1:])
    first, used, each, filled = np.array(runs, dtype=np.int64).T
    # One visit: one pack takes ``each`` samples in a row.
    visit = np.arange(used.sum(), dtype=np.int64)
    visit += np.repeat(first - (np.cumsum(used) - used), used)
    taken = np.repeat(each, used)
    begins = offsets[visit]
    del visit
    begins += np.repeat(filled, used)
    begins -= np.cumsum(taken) - taken
    places = np.repeat(begins, taken)
    del begins, taken
    places += np.arange(len(order), dtype=np.int64)
    members = np.empty(len(order), dtype=np.int64)
    members[places] = order
    return Groups(members, offsets)


def histogram(sizes: Ints, max_length: int) -> tuple[Ints, Ints]:
    """Distinct lengths, rising, and how many samples have each."""
    if max_length <= 4 * len(sizes) + 65536:
        counts = np.bincount(sizes)
        values = np.flatnonzero(counts)
        return values, counts[values]
    values, counts = np.unique(sizes, return_counts=True)
    return values, counts


def _by_falling_length(sizes: Ints, values: Ints, rng: Random | None) -> Ints:
    """(n,) samples, longest first; equal ones in order, or in a random order.

    A stable sort of 16-bit keys is a radix sort in numpy, so one or two of them sort in linear
    time.
    """
    shuffled = None
    if rng is not None:
        shuffled = np.arange(len(sizes), dtype=np.int32 if len(sizes) < 2**31 else np.int64)
        rng.shuffle(shuffled)
        sizes = sizes[shuffled]
    longest = int(values[-1])
    order = np.argsort(_low_bits(longest - sizes), kind="stable")
    shift = 16
    while (longest - int(values[0])) >> shift:
        high = _low_bits((longest - sizes[order]) >> shift)
        order = order[np.argsort(high, kind="stable")]
        shift += 16
    return order if shuffled is None else shuffled[order].astype(np.int64, copy=False)


def _low_bits(keys: Ints) -> NDArray[np.uint16]:
    return (keys & 0xFFFF).astype(np.uint16)


def next_fit(lengths: NDArray[Any], max_length: int, order: Any = None) -> Groups:
    """Fill one pack after the other in the given order; open a new one when the next sample does
    not fit.

    Price: keeps the order (a shuffled one stays random), but leaves more room empty than best fit:
    about 1/4 of a pack where lengths are spread evenly up to ``max_length``, little where samples
    are short.
    Cost: a binary search per sample; at most 40 bytes a sample.

    Args:
        lengths: (n,) integers in [1, ``max_length``].
        max_length: tokens of a pack.
        order: (m,) indices of samples; None takes all in order.

    Returns:
        One group of samples per pack.
    """
    sizes = _check_fitting(lengths, max_length)
    members = (
        np.arange(len(sizes), dtype=np.int64) if order is None else np.asarray(order, np.int64)
    )
    ends = np.zeros(len(members) + 1, dtype=np.int64)
    np.cumsum(sizes[members], out=ends[1:])
    following = np.searchsorted(ends, ends[:-1] + max_length, side="right") - 1
    offsets = [0]
    hops = following.tolist()
    while offsets[-1] < len(members):
        offsets.append(hops[offsets[-1]])
    return Groups(members, np.array(offsets, dtype=np.int64))


def concat(lengths: NDArray[Any], max_length: int, order: Any = None) -> Packs:
    """Lay samples end to end and cut every ``max_length`` tokens, as XTuner's packer does, but keep
    the tail.

    Price: a sample is cut at almost every pack's end, and its second part does not see the first.
    Cost: a few passes of numpy over the samples and the packs.

    Args:
        lengths: (n,) integers of at least 1.
        max_length: tokens of a pack.
        order: (m,) indices of samples; None takes all in order.

    Returns:
        Packs of pieces; all but the last hold exactly ``max_length`` tokens.
    """
    sizes = check_lengths(lengths, max_length)
    members = (
        np.arange(len(sizes), dtype=np.int64) if order is None else np.asarray(order, np.int64)
    )
    ends = np.cumsum(sizes[members], dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    cuts = np.arange(max_length, total, max_length, dtype=np.int64)
    # A piece ends where a sample ends or a pack ends; where both do, once.
    inner = cuts[ends[np.searchsorted(ends, cuts)] != cuts] if len(cuts) else cuts
    at = np.searchsorted(ends, inner)
    stops = np.insert(ends, at, inner)
    samples = np.insert(members, at, members[at])
    firsts = np.insert(ends - sizes[members], at, (ends - sizes[members])[at])
    begins = np.append(np.zeros(min(1, len(stops)), dtype=np.int64), stops[:-1])
    pieces = Pieces(samples, begins - firsts, stops - firsts)
    inner_offsets = np.searchsorted(stops, cuts) + 1
    offsets = np.concatenate([[0], inner_offsets, [len(stops)] if total else []]).astype(np.int64)
    return Packs(Groups(np.arange(len(stops), dtype=np.int64), offsets), pieces)


def _check_fitting(lengths: NDArray[Any], max_length: int) -> Ints:
    sizes = check_lengths(lengths, max_length)
    if len(sizes) and int(sizes.max()) > max_length:
        cut_overlong(sizes, max_length, "error")
    return sizes


def count_best_fit(lengths: NDArray[Any], max_length: int) -> int:
    """The packs that ``best_fit`` makes of all samples together, without making them."""
    sizes = _check_fitting(lengths, max_length)
    if not len(sizes):
        return 0
    return len(_best_fit_runs(*histogram(sizes, max_length), max_length)[1])
