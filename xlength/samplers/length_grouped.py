"""``LengthGroupedSampler``: XTuner's sampler, index for index, vectorised."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from mmengine.dist import sync_random_seed
from mmengine.logging import print_log
from torch.utils.data import Sampler

from xlength.lengths import get_lengths, warn_if_grouping_is_useless
from xlength.plan.groups import Ints, fingerprint
from xlength.plan.order import default_mega_batch_mult, length_grouped_order
from xlength.registry import DATA_SAMPLERS, register
from xlength.samplers.check import check_who_draws
from xlength.samplers.leftovers import accept_leftovers
from xlength.samplers.parallel import data_parallel_info
from xlength.samplers.state import check_state, history_of, step_of


@register(DATA_SAMPLERS)
class LengthGroupedSampler(Sampler[int]):
    """Batches of like length, modalities apart, in XTuner 0.2's order bit for bit.

    Replaces ``DefaultSampler`` in a config by three lines::

        sampler=dict(
            type='xlength.LengthGroupedSampler', length_property='length',
            per_device_batch_size=batch_size * accumulative_counts)

    A random order (seeded ``seed + epoch``) is cut into mega-batches of ``mega_batch_mult *
    per_device_batch_size * world_size`` samples, each sorted by falling length; see
    ``xlength.plan.length_grouped_order`` for the whole rule. Rank r draws every ``world_size``-th
    index from r on.

    Price: batch-mates are chosen by length, so batches vary less in content than random ones;
    lengths fall through each mega-batch (a saw-tooth in the loss curve); with ``round_up`` the head
    of the order, which begins with the longest sample, is drawn again at the end. The plans of
    ``PlanSampler`` avoid both and waste less time.
    Cost: see ``length_grouped_order``; each epoch's order is made on every rank, nothing is
    communicated.
    Source: InternLM/XTuner 0.2.0, after LLaVA's and Hugging Face's samplers of the same name.

    Args:
        dataset: sized; its lengths are found by ``xlength.get_lengths``.
        per_device_batch_size: samples of one rank that should be of like length: the loader's batch
            size times the accumulated micro-steps.
        length_property: column, attribute or property with one length per sample: ``'length'`` (>
            0) or ``'modality_length'`` (> 0 with images, < 0 text only).
        mega_batch_mult: global batches in a mega-batch; by default 50, or as many as leave four
            mega-batches.
        seed: of the run; None draws one and shares it over the ranks.
        round_up: repeat samples from the head of the order until every rank has the same whole
            number of batches.
        dp_rank, dp_world_size, device_mesh, mesh_dim: data-parallel rank and size where they are
            not the global ones, as under sequence or tensor parallelism, see
            ``data_parallel_info``; ranks of one group then draw the same samples.
        leftovers: keywords that a swapped config leaves behind, such as ``shuffle=True``.

    Raises:
        ValueError: an argument, or a length, is out of its range; the data set is empty.
    """

    def __init__(
        self,
        dataset: Any,
        per_device_batch_size: int,
        length_property: str = "length",
        mega_batch_mult: int | None = None,
        seed: int | None = None,
        round_up: bool = True,
        *,
        dp_rank: int | None = None,
        dp_world_size: int | None = None,
        device_mesh: Any = None,
        mesh_dim: str | Sequence[str] | None = None,
        **leftovers: Any,
    ) -> None:
        print_log("LengthGroupedSampler is used.", logger="current")
        _check_positive("per_device_batch_size", per_device_batch_size)
        if mega_batch_mult is not None:
            _check_positive("mega_batch_mult", mega_batch_mult)
        accept_leftovers("LengthGroupedSampler", leftovers)
        self.rank, self.world_size = data_parallel_info(
            dp_rank, dp_world_size, device_mesh, mesh_dim
        )
        self.dataset = dataset
        self.per_device_batch_size = per_device_batch_size
        self.length_property = length_property
        self.length = get_lengths(dataset, length_property)
        warn_if_grouping_is_useless(self.length, length_property)
        self.seed = int(sync_random_seed() if seed is None else seed)
        self.round_up = round_up
        self.epoch = 0
        self.total_batch_size = per_device_batch_size * self.world_size
        self.mega_batch_mult = mega_batch_mult
        self.group_batch_size = self._window(self.world_size)
        self._set_sizes()
        self._fingerprint = fingerprint(self.length)
        self._history: list[tuple[int, int]] = []
        self._epoch_offset = 0
        self._start = 0
        self._yielded = 0
        print_log(
            "LengthGroupedSampler construction is complete, "
            f"and the selected attribute is {length_property}",
            logger="current",
        )

    def _window(self, world_size: int) -> int:
        """Samples in a mega-batch of so many ranks."""
        total = self.per_device_batch_size * world_size
        mult = self.mega_batch_mult
        return (default_mega_batch_mult(len(self.length), total) if mult is None else mult) * total

    def _set_sizes(self) -> None:
        num_samples = len(self.length)
        if self.round_up:
            batches = -(-num_samples // self.total_batch_size)
            self.num_samples = batches * self.per_device_batch_size
            self.total_size = self.num_samples * self.world_size
        else:
            self.num_samples = max(0, -((self.rank - num_samples) // self.world_size))
            self.total_size = num_samples

    def order(self, epoch: int) -> Ints:
        """(total_size,) int64: the indices that all ranks together draw in an epoch, in turn.

        Of an epoch that another number of ranks began: those that are left, rounded up likewise.
        """
        permute = permutations(self.seed + epoch)
        history = self._history if epoch == self.epoch else []
        window = self._window(history[0][0]) if history else self.group_batch_size
        order = length_grouped_order(self.length, window, permute)
        # Ranks draw in turn, so what they have drawn is the beginning.
        order = order[sum(ranks * step for ranks, step in history) :]
        if not self.round_up or not len(order):
            return order
        total = -(-len(order) // self.total_batch_size) * self.total_batch_size
        return np.resize(order, total) if total > len(order) else order

    def __iter__(self) -> Iterator[int]:
        """Indices of this rank, from the loaded position on, else from the start of the epoch."""
        check_who_draws(self)
        mine = self.order(self.epoch)[self.rank :: self.world_size]
        start, self._start = self._start, 0
        self._yielded = start
        for index in mine[start:].tolist():
            self._yielded += 1
            yield index

    def __len__(self) -> int:
        """Samples of this rank in a whole epoch, also after ``load_state_dict``."""
        return self.num_samples

    def left(self) -> int:
        """Samples that the next iterator gives: fewer than ``len()`` after ``load_state_dict``."""
        return self.epoch_length() - self._start

    def epoch_length(self) -> int:
        """Samples of this rank in the present epoch; not ``len()`` where other numbers of ranks
        began it: then those since the last change."""
        size = len(self.order(self.epoch)) if self._history else self.total_size
        return len(range(self.rank, size, self.world_size))

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch's order. A loaded position is kept only if it belongs to this epoch."""
        epoch += self._epoch_offset
        if epoch != self.epoch:
            self._start = self._yielded = 0
            self._history = []
        self.epoch = epoch

    def skip(self, num_samples: int) -> None:
        """Continue after ``num_samples`` of this rank, counted over all epochs of the run.

        ``onedl-mmengine``'s ``IterBasedTrainLoop`` calls this when it resumes, and from then on
        counts epochs from 0 again: ``set_epoch(1)`` then means the next one. It counts whole
        batches, so that the position is exact where the batch size divides ``len()``, as with
        ``round_up``; otherwise there is a warning.
        """
        if self.num_samples % self.per_device_batch_size:
            print_log(
                f"skip: an epoch has {self.num_samples} samples on this rank, no multiple of the "
                f"batch size {self.per_device_batch_size}, so that the position after its first "
                "epoch is not exact. Use DataStateHook, or round_up=True.",
                "current",
                logging.WARNING,
            )
        epoch, start = divmod(num_samples, max(1, self.num_samples))
        self._epoch_offset, self._history = 0, []
        self.set_epoch(epoch)
        self._start = self._yielded = start
        self._epoch_offset = epoch

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        """What is needed to continue: plain values only.

        Args:
            step: samples of the epoch that this rank has consumed; by default those that were drawn
                from the last iterator, which counts what workers have fetched ahead.
        """
        state = {
            "version": 1,
            "type": "LengthGroupedSampler",
            "seed": self.seed,
            "epoch": self.epoch,
            "step": self._yielded if step is None else int(step),
            "world_size": self.world_size,
            "fingerprint": self._fingerprint,
            "options": {
                "per_device_batch_size": self.per_device_batch_size,
                "mega_batch_mult": self.mega_batch_mult,
                "length_property": self.length_property,
                "round_up": self.round_up,
            },
        }
        if self._history:
            state["history"] = [list(stretch) for stretch in self._history]
        return state

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Continue at the state's epoch and step, with its seed.

        A state of another world size is continued too: the new ranks draw in turn what is left of
        the epoch's order (rounded up from its head where ``round_up`` asks for that), and ``step``
        counts from here; later epochs are those of a run that began with this world size.

        Raises:
            ValueError: the state belongs to other lengths or options (``strict=True``). With
                ``strict=False`` the epoch is started anew and a warning says why.
        """
        self._history, self._epoch_offset = [], 0
        fits = check_state(state, self.state_dict(0), strict)
        self.seed, self.epoch = int(state["seed"]), int(state["epoch"])
        self._start = self._yielded = 0
        if fits:
            self._history = history_of(state, self.world_size)
            if state["world_size"] == self.world_size:
                step = step_of(state, self.epoch_length(), uneven=not self.round_up)
                self._start = self._yielded = step


def permutations(seed: int) -> Callable[[int], Ints]:
    """torch's permutations of so many numbers, one after the other from one generator."""
    generator = torch.Generator()
    generator.manual_seed(seed)

    def permute(count: int) -> Ints:
        return torch.randperm(count, generator=generator).numpy()

    return permute


def _check_positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
