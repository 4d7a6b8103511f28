"""``Packing``: the plan that fills rows with samples laid end to end."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xlength.plan.balance import deal
from xlength.plan.cost import ATTENTION, Cost, make_cost
from xlength.plan.epoch import EpochPlan, epoch_rng
from xlength.plan.groups import Groups, Ints
from xlength.plan.options import positive
from xlength.plan.outlook import packing_outlook
from xlength.plan.pack import best_fit, count_best_fit, next_fit
from xlength.plan.pieces import Overlong, check_lengths, cut_overlong
from xlength.plan.windows import even_cuts


@dataclass(frozen=True)
class Packing:
    """Packs of at most ``max_length`` tokens, made anew every epoch, dealt to steps of equal cost.

    A random order is cut into windows; each is packed by best fit, and packs that a window leaves
    part empty are joined where two fit in one. With packs all ranks have like tokens anyway; what
    makes them wait is the sum of squared lengths, so packs of like cost make a step. The costliest
    step comes first, all others are shuffled. Every sample is drawn exactly once an epoch: where
    packs do not fill the last step, the fullest are split in two (only single samples that cannot
    be split are drawn twice).

    The loader needs ``packed_collate_fn``, which lays the samples of a batch in rows; with
    ``overlong='truncate'`` it needs ``max_length`` and ``truncate=True`` too. Where samples are to
    be cut into several packs, see ``PackedDataset``.

    Price: pack-mates are chosen by length: short samples mostly meet short ones. See ``window``.
    Cost: about a millisecond a window and a few passes of numpy over the samples, on every rank;
    nothing is communicated.

    ``len()`` is the same in every epoch: epoch 0 fixes the number of steps. A later epoch that
    needs more packs shuffles anew, and where that does not help doubles its windows.

    Learning rate: a step holds about ``world_size * max_length`` tokens, always.

    Args:
        max_length: tokens of a pack.
        strategy: ``'best_fit'``; or ``'next_fit'``, which keeps the random order, so that
            pack-mates are random, and leaves rows less full.
        window: samples that are packed together. Larger ones fill packs better and repeat
            pack-mates more: about ``window / num_samples`` of the pairs meet again. None packs all.
        overlong: for samples of more than ``max_length`` tokens: ``'error'``, ``'truncate'`` or
            ``'drop'`` (counted among the dropped).
        cost: what is balanced, see ``make_cost``.
        accumulate: micro-steps of an optimiser step: their sums are balanced too.
        packs_per_batch: rows that a rank computes at a time; ``packed_collate_fn`` needs
            ``max_length`` to lay them out.
        drop_last: leave out the packs that do not fill the last step, others in every epoch.
    """

    max_length: int
    strategy: str = "best_fit"
    window: int | None = 2048
    overlong: str = "error"
    cost: Any = "attention"
    accumulate: int = 1
    packs_per_batch: int = 1
    drop_last: bool = False

    def __post_init__(self) -> None:
        for key in ("max_length", "accumulate", "packs_per_batch"):
            positive(key, getattr(self, key))
            object.__setattr__(self, key, int(getattr(self, key)))
        positive("window", self.window, optional=True)
        if self.strategy not in ("best_fit", "next_fit"):
            raise ValueError(
                f"strategy must be 'best_fit' or 'next_fit', got {self.strategy!r}; a "
                "PackedDataset can cut samples at the packs' ends ('concat')"
            )
        if self.overlong not in ("error", "truncate", "drop"):
            raise ValueError(
                f"overlong must be 'error', 'truncate' or 'drop', got {self.overlong!r}; a "
                "PackedDataset can put the parts of a sample into several packs ('split')"
            )
        object.__setattr__(self, "drop_last", bool(self.drop_last))
        object.__setattr__(self, "cost", make_cost(self.cost))
        if self.cost.weights is not None:
            raise ValueError(f"cost={self.cost}: packing takes lengths of one column")

    def build(
        self,
        lengths: NDArray[Any],
        *,
        seed: int,
        epoch: int,
        world_size: int,
        num_steps: int | None = None,
    ) -> EpochPlan:
        """See ``Plan.build``."""
        members, sizes, _ = self._fitting(lengths)
        rng = epoch_rng(seed, epoch)
        row = world_size * self.packs_per_batch
        for strategy, window in _attempts(self.strategy, self.window, len(members)):
            packs = pack_windows(
                members[rng.permutation(len(members))],
                sizes,
                self.max_length,
                window,
                rng,
                strategy,
            )
            if num_steps is None:
                num_steps = self._num_steps(packs, sizes[members], row)
            if len(packs) <= num_steps * row or self.drop_last:
                break
        else:
            raise ValueError(
                f"num_steps={num_steps} is too few for every sample under {self}: they fill "
                f"{len(packs)} packs"
            )
        batches = self._batches(set_count(packs, sizes, num_steps * row, rng), sizes)
        costs = batches.sums(self.cost.of(sizes))
        second = batches.sums(sizes if self.cost.crossover else ATTENTION.of(sizes))
        steps = deal(costs, world_size, rng, accumulate=self.accumulate, second=second)
        return EpochPlan.counted(batches, steps, len(sizes))

    def fingerprint(self) -> str:
        """16 hex digits over all options."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]

    def padded_costs(
        self, lengths: NDArray[Any], batches: Groups, cost: Cost | None = None
    ) -> NDArray[np.float64]:
        """(g,) cost of each batch of packs, every row counted as ``max_length`` tokens.

        Args:
            lengths: (n,) tokens of each sample.
            batches: of an epoch of this plan.
            cost: by default the plan's.
        """
        sizes = np.minimum(np.abs(lengths), self.max_length)
        cost = cost or self.cost
        beyond = batches.sums(cost.of(sizes) - sizes)
        result: NDArray[np.float64] = beyond + self.packs_per_batch * self.max_length
        return result

    def notes(self, lengths: NDArray[Any]) -> list[str]:
        """What is worth a line in the log: samples that are too long, little to be won."""
        _, sizes, report = self._fitting(lengths)
        outlook = packing_outlook(sizes, self.max_length)
        return [f"Packing: {note}." for note in (report if report.count else None, outlook) if note]

    def _fitting(self, lengths: NDArray[Any]) -> tuple[Ints, Ints, Overlong]:
        """Samples to pack, (n,) tokens of all, and what was done to those that are too long."""
        if lengths.ndim != 1 or ((lengths > 0).any() and (lengths < 0).any()):
            raise ValueError(
                "packing takes lengths of one column and one sign: to pack samples with and "
                "without images together, give length_property='length'"
            )
        sizes = check_lengths(lengths, self.max_length)
        if not len(sizes):
            raise ValueError("lengths is empty: there is nothing to plan")
        pieces, report = cut_overlong(sizes, self.max_length, self.overlong)
        members = np.arange(len(sizes), dtype=np.int64) if pieces is None else pieces.samples
        if not len(members):
            raise ValueError(f"no sample is left to pack: {report}")
        return members, np.minimum(sizes, self.max_length), report

    def _num_steps(self, packs: Groups, sizes: Ints, row: int) -> int:
        """Steps of the first epoch: whole optimiser steps."""
        unit = row * self.accumulate
        if self.drop_last and len(packs) >= unit:
            return len(packs) // unit * self.accumulate
        need = max(len(packs), count_best_fit(sizes, self.max_length))
        return -(-need // unit) * self.accumulate

    def _batches(self, packs: Groups, sizes: Ints) -> Groups:
        """Packs of unlike cost to a batch, so that batches are alike."""
        rows = self.packs_per_batch
        if rows == 1:
            return packs
        order = np.argsort(-packs.sums(self.cost.of(sizes)), kind="stable").reshape(rows, -1)
        order[1::2] = order[1::2, ::-1]
        return _merge(packs, order.T.ravel(), np.arange(0, len(packs) + 1, rows))


def pack_windows(
    order: Ints,
    sizes: Ints,
    max_length: int,
    window: int | None,
    rng: np.random.RandomState,
    strategy: str = "best_fit",
) -> Groups:
    """Pack random windows apart, then join packs where two fit in one.

    Args:
        order: (m,) samples in random order.
        sizes: tokens of each sample, indexed by sample.
        max_length: tokens of a pack.
        window: samples packed together; None for all.
        rng: deals samples of equal length.
        strategy: 'best_fit', or 'next_fit', for which windows do not matter.
    """
    if strategy == "next_fit":
        return next_fit(sizes, max_length, order)
    num_windows = 1 if window is None else -(-len(order) // window)
    cuts = even_cuts(len(order), num_windows).tolist()
    parts, counts = [], []
    for begin, end in zip(cuts[:-1], cuts[1:], strict=True):
        members = order[begin:end]
        packs = best_fit(sizes[members], max_length, rng)
        parts.append(members[packs.members])
        counts.append(packs.sizes)
    result = Groups.from_sizes(np.concatenate(parts), np.concatenate(counts))
    if num_windows == 1:
        return result
    joined = best_fit(result.sums(sizes), max_length, rng)
    return _merge(result, joined.members, joined.offsets)


def set_count(packs: Groups, sizes: Ints, count: int, rng: np.random.RandomState) -> Groups:
    """Exactly ``count`` packs: split the fullest in two, or leave random ones out.

    Where all are single samples and still too few, random ones but the costliest are repeated.
    """
    if len(packs) > count:
        return packs.take(np.sort(rng.permutation(len(packs))[:count]))
    while len(packs) < count and (packs.sizes > 1).any():
        packs = _split_fullest(packs, packs.sums(sizes), count - len(packs))
    missing = count - len(packs)
    if not missing:
        return packs
    cheap = np.argsort(packs.sums(sizes), kind="stable")[: max(1, len(packs) - 1)]
    repeats = np.resize(cheap[rng.permutation(len(cheap))], missing)
    return packs.take(np.append(np.arange(len(packs)), repeats))


def _split_fullest(packs: Groups, fills: Ints, number: int) -> Groups:
    """Split up to ``number`` packs of several samples in two, at about half of the samples."""
    several = np.flatnonzero(packs.sizes > 1)
    chosen = several[np.argsort(-fills[several], kind="stable")[:number]]
    middles = packs.offsets[chosen] + packs.sizes[chosen] // 2
    return Groups(packs.members, np.sort(np.append(packs.offsets, middles)))


def _merge(packs: Groups, order: Ints, offsets: Ints) -> Groups:
    """Groups of packs: the packs in ``order``, cut at ``offsets``, as groups of samples."""
    taken = packs.take(order)
    return Groups(taken.members, taken.offsets[offsets])


def _attempts(
    strategy: str, window: int | None, num_samples: int
) -> Iterator[tuple[str, int | None]]:
    """Ways to pack: three tries each, then one that takes fewer packs."""
    if strategy == "next_fit":
        yield from [(strategy, None)] * 3
    while window is not None and window < num_samples:
        yield from [("best_fit", window)] * 3
        window *= 2
    yield "best_fit", None
