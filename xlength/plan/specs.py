"""The plans that a config names: frozen options with ``build``."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xlength.plan.assemble import checked_sizes, dealt, kinds_of
from xlength.plan.balance import share_steps
from xlength.plan.batch import fixed_batches
from xlength.plan.budget import Limits, Windows, count_batches, cut_batches
from xlength.plan.cost import make_cost
from xlength.plan.epoch import EpochPlan, epoch_rng
from xlength.plan.options import positive


@dataclass(frozen=True)
class FixedBatch:
    """Batches of ``batch_size`` samples of like length, dealt to steps of equal cost.

    All samples (or those of each random window) are sorted by length and cut into batches; batches
    of like cost make a step, the costliest step comes first and all others are shuffled. Every rank
    has the same number of steps. Where the samples do not fill the last step, every sample is still
    drawn exactly once: some batches, evenly spread over the epoch and over lengths, have a row
    less. With ``exact`` all have ``batch_size`` rows: fewer than ``world_size * batch_size *
    accumulate`` samples are drawn twice, spread as evenly, never the longest. With ``drop_last`` as
    many are left out, others in every epoch.

    Price: batch-mates are chosen by length. See ``window``.
    Cost: a permutation and a sort of all samples, on every rank, whatever the world size; nothing
    is communicated. ``len()`` is the same in every epoch because it follows from the number of
    samples alone.

    Learning rate: the token-weighted loss makes the tokens of an optimiser step count the same, on
    all ranks and micro-steps, so nothing is to be scaled. Steps of short samples move the weights
    about as far as others, so short samples weigh more than in random batches; docs/tuning.md has
    the held-out losses.

    Args:
        batch_size: rows of every batch.
        window: samples that are sorted together; None sorts all. Larger ones wait less and repeat
            batch-mates more. On a mixture of 44,561 chat and instruction samples (mean 268 tokens,
            longest 11,546), 8 ranks, 16 rows: wall efficiency by tokens / attention, and share of
            batch-mates that meet again in the next epoch: 1024: .846 / .771, 1 %; 4096: .888 /
            .812, 5 %; None: .907 / .834, 19 %. Its longest sample alone wastes .08 / .16.
        cost: what is balanced, see ``make_cost``: ``'attention'`` (length + length^2 / 12288),
            ``'tokens'``, or a dict.
        accumulate: micro-steps of an optimiser step: their sums are balanced too, and an epoch has
            whole optimiser steps.
        drop_last: leave out samples that do not fill a step.
        exact: repeat samples instead of making some batches a row smaller.
        mixed: where lengths are signed, each step has one modality. ``'once'`` lets one step an
            epoch have both; with ``'repeat'`` every modality fills its own steps.
    """

    batch_size: int
    window: int | None = None
    cost: Any = "attention"
    accumulate: int = 1
    drop_last: bool = False
    exact: bool = False
    mixed: str = "once"

    def __post_init__(self) -> None:
        _check(self, positive_keys=("batch_size",), optional_keys=("window",))

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
        sizes = checked_sizes(lengths, self.cost)
        rng = epoch_rng(seed, epoch)
        kinds = kinds_of(lengths)
        if self.drop_last:
            needs = [max(1, len(members) // self.batch_size) for members in kinds]
        else:
            needs = [-(-len(members) // self.batch_size) for members in kinds]
        # Smaller batches can fill any number of steps; exact ones would need repeats.
        rooms = needs if self.exact else [len(members) for members in kinds]
        counts = share_steps(needs, rooms, world_size, num_steps=num_steps, **_rules(self))
        if counts is None:
            raise _too_few_steps(self, num_steps)
        batches = [
            fixed_batches(members, sizes, count, self.batch_size, self.window, self.exact, rng)
            for members, count in zip(kinds, counts, strict=True)
        ]
        return dealt(batches, lengths, self.cost, world_size, self.accumulate, rng)

    def fingerprint(self) -> str:
        """16 hex digits over all options."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]

    def notes(self, lengths: NDArray[Any]) -> list[str]:
        """What is worth a line in the log."""
        return _notes(self, len(lengths))


@dataclass(frozen=True)
class TokenBudget:
    """Batches of as many samples as fit ``max_tokens`` with padding, in steps of equal cost.

    Random windows are sorted by length and cut into batches whose rows x longest is at most
    ``max_tokens``: many short samples or few long ones, but the same work and memory. Long samples,
    of which fewer than 16 fill a batch, are sorted over eight windows together. Batches of like
    cost make a step, the costliest step comes first and all others are shuffled. Every rank has the
    same number of steps and every sample is drawn exactly once: batches are cut to a whole number
    of steps, equally full, a little smaller than the budget. Only where there are fewer samples
    than batches in these steps are some repeated, spread over lengths, never the longest.

    Price: batch-mates are chosen by length, and the number of rows varies. See ``window``.
    Cost: a permutation and a sort of all samples, and some ten passes over the batches, on every
    rank, whatever the world size; nothing is communicated.
    Source: batches by tokens as in fairseq's ``max_tokens``; the dealing to steps is our own.

    ``len()`` is the same in every epoch: epoch 0 fixes the number of steps, with a few batches to
    spare, since random windows take now more batches, now fewer. A later epoch cuts smaller batches
    where it would need fewer; where it would need more (not once in 7,200 epochs of five real
    sets), it doubles its windows until they fit, at the latest when one holds all samples, which
    takes the fewest batches possible.

    Learning rate: steps have about equally many tokens, and the token-weighted loss makes each of
    them count the same, so nothing is to be scaled for the varying number of rows. A budget above
    the tokens of the batches before makes fewer and larger steps, as any larger batch size does.

    Args:
        max_tokens: rows x longest of a batch, at most; no sample may be longer. What fits the
            memory at ``batch_size`` rows of the longest sample fits here.
        window: samples that are sorted together; None sorts all. Larger ones pad less and repeat
            batch-mates more. On a mixture of 44,561 chat and instruction samples (mean 268 tokens,
            longest 11,546), 8 ranks, budget 11,546: wall efficiency by tokens / attention, and
            share of batch-mates that meet again in the next epoch: 256: .848 / .850, 0.5 %; 1024:
            .942 / .945, 2 %; 4096: .977 / .979, 7 %; 16384: .987 / .988, 20 %; None: .990 / .991,
            42 %. The share grows as window / samples; a set that one window holds is cut elsewhere
            in every epoch, but meets about half of its mates again.
        max_batch_size: rows, at most.
        cost: what is balanced, see ``make_cost``: ``'attention'`` (length + length^2 / 12288),
            ``'tokens'``, or a dict.
        accumulate: micro-steps of an optimiser step: their sums are balanced too, and an epoch has
            whole optimiser steps.
        drop_last: leave out the batches that do not fill a step, others in every epoch, instead of
            cutting more and smaller ones.
        mixed: where lengths are signed, each step has one modality. A modality of fewer samples
            than ranks shares one step an epoch with another (``'once'``), or is repeated to fill
            its own (``'repeat'``).
    """

    max_tokens: int
    window: int | None = 4096
    max_batch_size: int | None = None
    cost: Any = "attention"
    accumulate: int = 1
    drop_last: bool = False
    mixed: str = "once"

    def __post_init__(self) -> None:
        _check(self, positive_keys=("max_tokens",), optional_keys=("window", "max_batch_size"))

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
        sizes = checked_sizes(lengths, self.cost)
        self._refuse_overlong(sizes)
        limits = Limits(self.max_tokens, self.max_batch_size or len(sizes))
        kinds = kinds_of(lengths)
        # Consecutive epochs are about half a batch apart: the golden ratio.
        shift = (0.618034 * epoch + 0.754878 * seed) % 1
        for window, part in _attempts(self.window, len(sizes), shift):
            rng = epoch_rng(seed, epoch)
            cut = [count_batches(members, sizes, limits, window, part, rng) for members in kinds]
            spare = num_steps is None and not self.drop_last
            needs = [_need(windows, spare) for windows in cut]
            rooms = [len(members) for members in kinds]
            counts = share_steps(needs, rooms, world_size, num_steps=num_steps, **_rules(self))
            if counts is not None:
                break
        else:
            raise _too_few_steps(self, num_steps)
        batches = [
            cut_batches(windows, count, limits, rng)
            for windows, count in zip(cut, counts, strict=True)
        ]
        return dealt(batches, lengths, self.cost, world_size, self.accumulate, rng)

    def fingerprint(self) -> str:
        """16 hex digits over all options."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]

    def notes(self, lengths: NDArray[Any]) -> list[str]:
        """What is worth a line in the log."""
        return _notes(self, len(lengths))

    def _refuse_overlong(self, sizes: NDArray[Any]) -> None:
        overlong = np.flatnonzero(sizes > self.max_tokens)
        if len(overlong):
            row = int(overlong[0])
            others = f" ({len(overlong)} such samples)" if len(overlong) > 1 else ""
            raise ValueError(
                f"max_tokens={self.max_tokens} is less than the {int(sizes[row])} tokens of sample "
                f"{row}{others}: raise max_tokens, or shorten or leave out such samples"
            )


def _check(plan: Any, positive_keys: tuple[str, ...], optional_keys: tuple[str, ...]) -> None:
    """Check and normalise the options of a plan, so that its repr is one line of plain values."""
    for key in (*positive_keys, "accumulate"):
        positive(key, getattr(plan, key))
        object.__setattr__(plan, key, int(getattr(plan, key)))
    for key in optional_keys:
        positive(key, getattr(plan, key), optional=True)
        if getattr(plan, key) is not None:
            object.__setattr__(plan, key, int(getattr(plan, key)))
    if plan.mixed not in ("once", "repeat"):
        raise ValueError(f"mixed must be 'once' or 'repeat', got {plan.mixed!r}")
    object.__setattr__(plan, "drop_last", bool(plan.drop_last))
    object.__setattr__(plan, "cost", make_cost(plan.cost))


def _notes(plan: Any, num_samples: int) -> list[str]:
    if plan.window is None or plan.window < num_samples:
        return []
    return [
        f"{type(plan).__name__}: window={plan.window} holds all {num_samples} samples, so batches "
        f"of like length meet again in every epoch; a window of {max(1, num_samples // 8)} mixes "
        "them more and pads more."
    ]


def _rules(plan: Any) -> dict[str, Any]:
    return {
        "accumulate": plan.accumulate,
        "mixed": plan.mixed,
        "drop_last": plan.drop_last,
    }


def _attempts(
    window: int | None, num_samples: int, shift: float
) -> Iterator[tuple[int | None, float | None]]:
    """Windows to try, and a shift or none: ever fewer batches."""
    while window is not None and window < num_samples:
        yield window, shift
        window *= 2
    yield None, shift
    yield None, None


def _need(windows: Windows, spare: bool) -> int:
    """Batches that the windows take, and a few to spare for windows of later epochs."""
    count, number = int(windows.counts.sum()), len(windows.counts)
    if not spare or number == 1:
        return count
    # Each window's last batch is rounded up, by .3 batches rms: four sigma and one.
    return min(count + 1 + int(1.2 * number**0.5), max(count, len(windows.order)))


def _too_few_steps(plan: Any, num_steps: int | None) -> ValueError:
    return ValueError(f"num_steps={num_steps} is too few for every sample under {plan}")
