"""``PlanSampler`` and ``PlanBatchSampler``: an epoch's plan, read by one rank."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mmengine.dist import sync_random_seed
from mmengine.logging import print_log
from torch.utils.data import Sampler

from xlength.lengths import get_lengths, warn_if_grouping_is_useless
from xlength.plan.epoch import EpochPlan
from xlength.plan.groups import fingerprint
from xlength.plan.remainder import Stretch, continued_plan
from xlength.registry import DATA_SAMPLERS, register
from xlength.samplers.columns import get_columns
from xlength.samplers.leftovers import accept_leftovers
from xlength.samplers.parallel import data_parallel_info
from xlength.samplers.plans import build_plan
from xlength.samplers.state import check_state, history_of, step_of

_PASTE = "batch_sampler=dict(type='xlength.PlanBatchSampler')"


@register(DATA_SAMPLERS)
class PlanSampler(Sampler[list[int]]):
    """Whole batches for every rank, planned together so that no rank waits for another.

    In a config, with the batch sampler that reads it (mmengine asks for ``batch_size`` beside a
    batch sampler; the plan decides)::

        train_dataloader = dict(
            batch_size=1,
            sampler=dict(
                type='xlength.PlanSampler',
                plan=dict(type='xlength.TokenBudget', max_tokens=16384)),
            batch_sampler=dict(type='xlength.PlanBatchSampler'),
            ...)

    Every rank makes the whole plan of an epoch, a pure function of lengths, seed, epoch, world size
    and the plan's options, and reads its own column: nothing is communicated, neither here nor in
    ``len()`` and ``set_epoch()``. ``PlanGuardHook`` checks that all ranks have the same.

    ``len()`` is the number of batches of this rank in any epoch, the same on all ranks and for all
    seeds: that of epoch 0 under seed 0. Other epochs are planned to this number.

    Cost: one plan when it is built and one at the start of each epoch, see the plan's docstring;
    16 bytes a sample are kept.

    Args:
        dataset: sized; its lengths are found by ``xlength.get_lengths``.
        plan: ``FixedBatch``, ``TokenBudget``, ``Packing``, or a dict of one with ``type``.
        length_property: column, attribute or property with one length per sample: ``'length'``
            (> 0) or ``'modality_length'`` (> 0 with images, < 0 text only). For a cost of several
            columns the name of an (n, k) attribute, or k names.
        seed: of the run; None draws one and shares it over the ranks.
        dp_rank, dp_world_size, device_mesh, mesh_dim: data-parallel rank and size where they are
            not the global ones, see ``data_parallel_info``.
        leftovers: keywords that a swapped config leaves behind, such as ``shuffle=True``.

    Raises:
        ValueError: an option, or a length, is out of its range; the data set is empty.
    """

    def __init__(
        self,
        dataset: Any,
        plan: Any,
        length_property: str | Sequence[str] = "length",
        seed: int | None = None,
        *,
        dp_rank: int | None = None,
        dp_world_size: int | None = None,
        device_mesh: Any = None,
        mesh_dim: str | Sequence[str] | None = None,
        **leftovers: Any,
    ) -> None:
        leftovers.pop("round_up", None)  # steps are equal on all ranks in any case
        accept_leftovers("PlanSampler", leftovers)
        self.rank, self.world_size = data_parallel_info(
            dp_rank, dp_world_size, device_mesh, mesh_dim
        )
        self.dataset = dataset
        self.plan = build_plan(plan)
        self.length_property = length_property
        self.length = self._lengths()
        self.seed = int(sync_random_seed() if seed is None else seed)
        self.epoch = 0
        self._fingerprint = fingerprint(self.length)
        self._start = 0
        self._yielded = 0
        self._history: list[Stretch] = []
        self._planned: tuple[Any, EpochPlan] | None = None
        first = self.plan.build(self.length, seed=0, epoch=0, world_size=self.world_size)
        self.num_steps = first.num_steps
        if self.seed == 0:
            self._planned = ((0, 0, ()), first)
        self._log(first)

    def _lengths(self) -> Any:
        weights = getattr(getattr(self.plan, "cost", None), "weights", None)
        if weights is not None:
            return get_columns(self.dataset, self.length_property, len(weights))
        if not isinstance(self.length_property, str):
            raise ValueError(
                f"length_property={self.length_property!r} names several columns, but the cost "
                f"{self.plan.cost} of the plan has no weights for them"
            )
        lengths = get_lengths(self.dataset, self.length_property)
        warn_if_grouping_is_useless(lengths, self.length_property)
        return lengths

    def _log(self, first: EpochPlan) -> None:
        print_log(
            f"PlanSampler: {self.plan} over {first.num_samples} samples: {first.num_steps} steps "
            f"an epoch on each of {first.world_size} ranks; {first.repeated} samples repeated, "
            f"{first.dropped} dropped, {first.mixed_steps} steps of mixed modality in an epoch",
            logger="current",
        )
        notes = getattr(self.plan, "notes", None)
        for note in notes(self.length) if notes else ():
            print_log(note, logger="current")

    def epoch_plan(self, epoch: int | None = None) -> EpochPlan:
        """The plan of an epoch, by default the present one, whose plan is kept."""
        epoch = self.epoch if epoch is None else int(epoch)
        history = self._history if epoch == self.epoch else []
        key = (self.seed, epoch, tuple(history))
        if self._planned is not None and self._planned[0] == key:
            return self._planned[1]
        plan = continued_plan(
            self.plan,
            self.length,
            history,
            seed=self.seed,
            epoch=epoch,
            world_size=self.world_size,
            num_steps=self.num_steps,
        )
        if epoch == self.epoch:
            self._planned = (key, plan)
        return plan

    def batches(self) -> Iterator[list[int]]:
        """This rank's batches, from the loaded position on, else from the start of the epoch."""
        plan = self.epoch_plan()
        self._yielded, self._start = self._start, 0
        for batch in plan.batches(self.rank, self._yielded):
            self._yielded += 1
            yield batch

    def __iter__(self) -> Iterator[list[int]]:
        raise ValueError(
            "PlanSampler gives whole batches, which the loader cannot take from sampler alone: "
            f"add {_PASTE} to the dataloader"
        )

    def __len__(self) -> int:
        """Batches of this rank in a whole epoch, also after ``load_state_dict``."""
        return self.num_steps

    def left(self) -> int:
        """Batches that the next iterator gives: fewer than ``len()`` after ``load_state_dict``."""
        return self.epoch_length() - self._start

    def epoch_length(self) -> int:
        """Batches of the present epoch; not ``len()`` where other numbers of ranks began it: then
        those since the last change."""
        return self.epoch_plan().num_steps if self._history else self.num_steps

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch. A loaded position is kept only if it belongs to this epoch."""
        if epoch != self.epoch:
            self._start = self._yielded = 0
            self._history = []
        self.epoch = epoch

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        """What is needed to continue: plain values only.

        Args:
            step: batches of the epoch that this rank has consumed; by default those that were drawn
                from the last iterator, which counts what workers have fetched ahead.
        """
        state = {
            "version": 1,
            "type": "PlanSampler",
            "seed": self.seed,
            "epoch": self.epoch,
            "step": self._yielded if step is None else int(step),
            "world_size": self.world_size,
            "fingerprint": self._fingerprint,
            "options": {"plan": repr(self.plan), "length_property": _plain(self.length_property)},
        }
        if self._history:
            state["history"] = [list(stretch) for stretch in self._history]
        return state

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Continue at the state's epoch and step, with its seed.

        A state of another world size is continued too: every sample that is left of the epoch is
        drawn exactly once, grouped into other steps (see ``continued_plan``), of which ``step``
        counts from here; later epochs are those of a run that began with this world size.

        Raises:
            ValueError: the state belongs to other lengths or options (``strict=True``). With
                ``strict=False`` the epoch is started anew and a warning says why.
        """
        self._history = []
        fits = check_state(state, self.state_dict(0), strict)
        self.seed, self.epoch = int(state["seed"]), int(state["epoch"])
        self._start = self._yielded = 0
        if fits:
            self._history = history_of(state, self.world_size)
            if state["world_size"] == self.world_size:
                self._start = self._yielded = step_of(state, self.epoch_length())


@register(DATA_SAMPLERS)
class PlanBatchSampler(Sampler[list[int]]):
    """The batches of a ``PlanSampler``, for the loader's ``batch_sampler``.

    It only reads: epoch, seed and position are the sampler's, which ``DistSamplerSeedHook`` reaches
    through ``.sampler``.

    Args:
        sampler: a ``PlanSampler``.
        batch_size: the loader's, which mmengine passes on. The plan decides, so that 1 and None
            mean nothing. Another number is warned about where the plan has batches of varying
            size, and refused where it is not the number of the plan's own rows.
        drop_last: as for torch's; the plan's own option decides.

    Raises:
        ValueError: the sampler has no plan, or the batch sizes contradict each other.
    """

    def __init__(
        self, sampler: Any, batch_size: int | None = None, drop_last: bool = False
    ) -> None:
        if not isinstance(sampler, PlanSampler):
            raise ValueError(
                f"PlanBatchSampler reads a PlanSampler, got {type(sampler).__name__}: use "
                "sampler=dict(type='xlength.PlanSampler', plan=...)"
            )
        plan = sampler.plan
        rows = getattr(plan, "batch_size", getattr(plan, "packs_per_batch", None))
        if rows is not None and batch_size not in (None, 1, rows):
            raise ValueError(
                f"the data loader's batch_size is {batch_size}, but the plan has batches of {rows} "
                f"rows ({plan}); make them equal, or batch_size=1 or None to let the plan decide"
            )
        if rows is None and batch_size not in (None, 1):
            print_log(
                f"The data loader's batch_size={batch_size} has no effect: the plan "
                f"({type(plan).__name__}) decides how many samples a batch has. Make it 1.",
                logger="current",
                level=logging.WARNING,
            )
        if drop_last and not getattr(plan, "drop_last", False):
            raise ValueError("drop_last=True belongs into the plan: plan=dict(..., drop_last=True)")
        self.sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        return self.sampler.batches()

    def __len__(self) -> int:
        return len(self.sampler)

    def set_epoch(self, epoch: int) -> None:
        """As the sampler's, for loops that look here."""
        self.sampler.set_epoch(epoch)

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        """The sampler's."""
        return self.sampler.state_dict(step)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """The sampler's."""
        self.sampler.load_state_dict(state, strict)


def _plain(names: str | Sequence[str]) -> str | list[str]:
    return names if isinstance(names, str) else list(names)
