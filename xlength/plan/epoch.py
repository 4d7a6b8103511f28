"""``EpochPlan``: one epoch as steps x ranks x samples, and the random state it is made with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from xlength.plan.groups import Groups, Ints, fingerprint


@dataclass(frozen=True, eq=False)
class EpochPlan:
    """What every data-parallel rank computes at every step of one epoch.

    Args:
        groups: batches, or packs, of samples.
        steps: (num_steps, world_size) int64; ``steps[s, r]`` is the group that rank r computes at
            step s.
        num_samples: samples of the data set.
        repeated: draws beyond the first of a sample, over all ranks; 0 where nothing is seen twice.
        dropped: samples that are not drawn in this epoch.
        mixed_steps: steps in which ranks have different modalities.
    """

    groups: Groups
    steps: Ints
    num_samples: int
    repeated: int = 0
    dropped: int = 0
    mixed_steps: int = 0

    @classmethod
    def counted(
        cls, groups: Groups, steps: Ints, num_samples: int, kinds: NDArray[Any] | None = None
    ) -> EpochPlan:
        """The plan with its counts taken from what the steps draw.

        Args:
            groups, steps, num_samples: as for the class.
            kinds: (g,) modality of each group, None for one.
        """
        drawn = groups.members if _uses_all(groups, steps) else groups.take(steps.ravel()).members
        seen = np.zeros(num_samples, dtype=np.bool_)
        seen[drawn] = True
        distinct = int(np.count_nonzero(seen))
        mixed = 0
        if kinds is not None and len(steps):
            of_steps = np.asarray(kinds)[steps]
            mixed = int(np.count_nonzero((of_steps != of_steps[:, :1]).any(axis=1)))
        return cls(groups, steps, num_samples, len(drawn) - distinct, num_samples - distinct, mixed)

    @property
    def num_steps(self) -> int:
        """Batches of every rank in the epoch."""
        return len(self.steps)

    @property
    def world_size(self) -> int:
        """Data-parallel ranks."""
        return int(self.steps.shape[1])

    def batches(self, rank: int, start: int = 0) -> Iterator[list[int]]:
        """Lists of sample indices, one per step of this rank, from step ``start`` on."""
        for group in self.steps[start:, rank].tolist():
            yield self.groups[group].tolist()

    def fingerprint(self) -> str:
        """16 hex digits; equal for equal plans on any machine. Cost: sha256 over all indices."""
        return fingerprint(self.groups.offsets, self.groups.members, self.steps)


class Plan(Protocol):
    """How an epoch is planned: what ``PlanSampler`` needs of ``FixedBatch``, ``TokenBudget``, ...

    A plan is a frozen dataclass of options with a one-line ``repr``.
    """

    def build(
        self,
        lengths: NDArray[Any],
        *,
        seed: int,
        epoch: int,
        world_size: int,
        num_steps: int | None = None,
    ) -> EpochPlan:
        """The epoch, a pure function of its arguments and the options.

        Args:
            lengths: (n,) int64 in tokens, signed by modality; or (n, k) for a multimodal cost.
            seed: of the run.
            epoch: from 0.
            world_size: data-parallel ranks.
            num_steps: as many steps as the run's first epoch had, so that ``len()`` stays; None
                where this is the first.
        """
        ...

    def fingerprint(self) -> str:
        """16 hex digits over all options."""
        ...


def epoch_rng(seed: int, epoch: int) -> np.random.RandomState:
    """The random state of one epoch of a run.

    ``RandomState``, whose streams numpy has frozen: the same order with any version of numpy, so
    that a run resumes exactly after an upgrade.
    """
    return np.random.RandomState(np.random.MT19937(np.random.SeedSequence([seed, epoch])))


def _uses_all(groups: Groups, steps: Ints) -> bool:
    """Whether the steps draw every group exactly once."""
    if steps.size != len(groups):
        return False
    used = np.zeros(len(groups), dtype=np.bool_)
    used[steps.ravel()] = True
    return bool(used.all())
