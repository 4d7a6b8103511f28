"""``DataStateHook``: where a run is in its data, in every checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from mmengine.hooks import Hook
from mmengine.logging import print_log

from xlength.hooks.resume import Resume
from xlength.loops import TrainLoop
from xlength.registry import HOOKS, register
from xlength.runtime.host_group import HostGroup, configured_timeout
from xlength.runtime.loaders import is_stream, sampler_of, state_of
from xlength.runtime.position import (
    EpochIterator,
    Position,
    batches_of,
    gather_to_first,
    is_checkpoint_due,
    learning_rates,
    loader_facts,
    optimiser_has_stepped,
)
from xlength.runtime.random_state import random_states
from xlength.runtime.wrappers import unwrapped
from xlength.samplers.check import accumulative_counts_of

KEY = "data_state"


@register(HOOKS)
class DataStateHook(Hook):
    """Saves in every checkpoint which batches finished optimiser steps have trained on, and lets a
    resumed run continue at the next one, without loading what was passed.

    ``xlength train`` adds it by itself; elsewhere put ``dict(type='xlength.DataStateHook')`` into
    ``custom_hooks``. The state is in mmengine's message hub, so it travels with checkpoints of any
    strategy: position, the sampler's or stream's state, seed of the run, and the random states of
    every rank. What workers have fetched ahead does not count, nor do micro-steps of an optimiser
    step that is not finished: their gradients are in no checkpoint, so they are done again.

    ``TrainLoop`` resumes exactly. mmengine's ``IterBasedTrainLoop`` does too, but in the middle of
    gradient accumulation; ``EpochBasedTrainLoop`` where the sampler keeps a state (all of xlength
    do). Otherwise one warning says what is not exact.

    On another number of ranks, samplers of xlength draw what is left of the epoch; see their
    ``load_state_dict``. Streams refuse it.

    A checkpoint that ``save_best`` writes is as complete, but mmengine leaves the optimiser out.

    Cost: some ten microseconds a step; where a ``CheckpointHook`` is about to save, and before
    every validation, one gathering of about 10 kB a rank over the host's network.

    Args:
        strict: refuse to continue with other data, options or batch size, naming what was and what
            is; False begins the epoch anew instead, with a warning.
    """

    # Behind DistSamplerSeedHook and ParamSchedulerHook, before CheckpointHook.
    priority = 80

    def __init__(self, strict: bool = True) -> None:
        self.strict = strict
        self._resume: Resume | None = None
        self._group: HostGroup | None = None
        self._built_with: int | None = None
        self._in_file: dict[str, Any] | None = None
        self._bases: dict[int, tuple[dict[str, Any], int]] = {}
        self._now = self._consumed = Position()
        self._taken: dict[str, Any] = {"loss": None}
        self._is_lost = False

    def before_run(self, runner: Any) -> None:
        """Note what the samplers were built with."""
        self._built_with = runner.seed

    def after_load_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """Note what is in the file: the message hub may still have what an earlier run left."""
        hub = checkpoint.get("message_hub")
        self._in_file = hub["runtime_info"].get(KEY) if isinstance(hub, dict) else None

    def before_train(self, runner: Any) -> None:
        """Position loop, loader and random states, where the run is resumed."""
        self._group = HostGroup("the position of every rank", configured_timeout(runner))
        saved = runner.message_hub.get_info(KEY)
        if saved != self._in_file:  # nothing was resumed, or weights were loaded only
            saved = None
        self._bases = {}
        self._now = Position(runner.epoch, 0, runner.iter)
        if saved is not None:
            self._resume = Resume(
                runner, saved, self.strict, self._built_with, lambda: self._mark(runner)
            )
            self._now = self._resume.begin()
        elif runner.iter:
            print_log(
                "The checkpoint has no position in the data (DataStateHook was not used), so the "
                "loop finds it by the number of iterations.",
                "current",
                logging.WARNING,
            )
            self._is_lost = isinstance(runner.train_loop, TrainLoop)
            if self._is_lost:
                return
        self._mark(runner)
        self._publish(runner, due=True)

    def before_train_epoch(self, runner: Any) -> None:
        """Note what the sampler's epoch is made of."""
        loop = runner.train_loop
        if isinstance(loop, TrainLoop):
            self._now = Position(loop.epoch, loop.step, loop.iter)
            if self._is_lost:  # the loop has found it now
                self._is_lost = False
                self._mark(runner)
        elif self._resume is None and not hasattr(loop, "dataloader_iterator"):
            self._now = Position(runner.epoch, 0, runner.iter)
        self._note_base(runner)

    def before_train_iter(
        self, runner: Any, batch_idx: int, data_batch: dict[str, Any] | None = None
    ) -> None:
        """Continue the random states in a loop that is not our own."""
        if self._resume is not None:
            self._resume.before_first_iter()
            self._resume = None

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        """Count the batch, if its optimiser step is finished, and publish."""
        self._now = self._count(runner)
        if optimiser_has_stepped(runner):
            self._mark(runner)
        self._publish(runner, due=is_checkpoint_due(runner, by_epoch=False))

    def after_train_epoch(self, runner: Any) -> None:
        """The next position is the beginning of the next epoch."""
        if hasattr(runner.train_loop, "dataloader_iterator"):
            return
        if self._consumed == self._now and self._is_whole(runner):
            self._now = Position(self._now.epoch + 1, 0, self._now.iter)
            self._mark(runner)
        self._publish(runner, due=is_checkpoint_due(runner, by_epoch=True))

    def before_val(self, runner: Any) -> None:
        """Publish all: the best checkpoint is written behind the validation, on rank 0 alone."""
        if self._group is not None and not self._is_lost:
            self._publish(runner, due=True)

    def after_train(self, runner: Any) -> None:
        """A validation that follows is not training's."""
        self._group = None

    def _is_whole(self, runner: Any) -> bool:
        """Whether the epoch that ends now was trained on to its end."""
        loader, position = runner.train_dataloader, self._now
        if is_stream(loader):
            return bool(runner.iter < runner.max_iters)
        _, per_batch = sampler_of(loader)
        _, total = self._bases.get(position.epoch, (None, len(loader) * per_batch))
        return position.step >= batches_of(total, per_batch, loader)

    def _count(self, runner: Any) -> Position:
        """Where the loop is after this batch."""
        loop, iteration = runner.train_loop, runner.iter + 1
        if isinstance(loop, TrainLoop):
            return Position(loop.epoch, loop.step, iteration)
        iterator = getattr(loop, "dataloader_iterator", None)
        if isinstance(iterator, EpochIterator):
            return Position(iterator.epoch, iterator.step, iteration)
        if iterator is not None:
            epoch, step = divmod(iteration - 1, len(runner.train_dataloader))
            return Position(epoch, step + 1, iteration)
        return Position(runner.epoch, self._now.step + 1, iteration)

    def _mark(self, runner: Any) -> None:
        """All up to now is consumed; what the next optimiser step changes is noted."""
        self._consumed = self._now
        weighted = getattr(unwrapped(runner.model), "token_weighted_loss", None)
        self._taken = {"loss": None if weighted is None else weighted.state()}
        if accumulative_counts_of(runner) > 1:
            self._taken |= {"random": random_states(), "optimiser": learning_rates(runner)}

    def _publish(self, runner: Any, due: bool) -> None:
        position, loader = self._consumed, runner.train_dataloader
        state: dict[str, Any] = {
            "version": 1,
            "seed": runner.seed,
            "epoch": position.epoch,
            "step": position.step,
            "iter": position.iter,
            "max_iters": runner.max_iters,
            "loader": loader_facts(loader),
            "sampler": self._sampler_state(loader, position),
            "dataset": None if is_stream(loader) else state_of(loader.dataset),
        }
        if position != self._now:
            state["optimiser"] = self._taken["optimiser"]
        if due:
            loss = self._taken["loss"]
            if loss is not None and loss[0] is not None:
                state["loss"] = [float(number) for number in loss]
            mine = {
                "random": self._random_states(position),
                "stream": self._stream_state(loader, position),
            }
            assert self._group is not None
            ranks = gather_to_first(self._group, mine)
            if ranks is not None:
                state["ranks"] = ranks
        runner.message_hub.update_info(KEY, state)

    def _random_states(self, position: Position) -> Any:
        """Those that the batch after ``position`` is to begin with."""
        if position != self._now:
            return self._taken["random"]
        waiting = None if self._resume is None else self._resume.waiting_random_states()
        return random_states() if waiting is None else waiting

    def _note_base(self, runner: Any) -> None:
        sampler, _ = sampler_of(runner.train_dataloader)
        if not hasattr(sampler, "left"):
            return
        self._bases[sampler.epoch] = sampler.state_dict(0), sampler.epoch_length()
        for epoch in sorted(self._bases)[:-2]:
            del self._bases[epoch]

    def _sampler_state(self, loader: Any, position: Position) -> dict[str, Any] | None:
        sampler, per_batch = sampler_of(loader)
        if not hasattr(sampler, "left"):
            return None
        if position.epoch in self._bases:
            base, total = self._bases[position.epoch]
        else:
            base, total = sampler.state_dict(0), len(sampler)
            if position.epoch != sampler.epoch:
                base.pop("history", None)
        step = min(position.step * per_batch, total)
        return {**base, "epoch": position.epoch, "step": step}

    def _stream_state(self, loader: Any, position: Position) -> Mapping[str, Any] | None:
        if not is_stream(loader) or not hasattr(loader.dataset, "state_after"):
            return None
        return loader.dataset.state_after(
            position.step,
            loader.batch_size,
            loader.num_workers,
            loader.drop_last,
            epoch=position.epoch,
        )
