"""What ``DataStateHook`` does to continue a run from a saved position, in any loop."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mmengine.dist import get_rank
from mmengine.hooks import IterTimerHook, RuntimeInfoHook
from mmengine.logging import print_log

from xlength.datasets.stream_state import merge_states
from xlength.loops import TrainLoop
from xlength.runtime.loaders import is_stream, loader_from, sampler_of, state_of
from xlength.runtime.position import (
    EpochIterator,
    Position,
    ResumeError,
    batches_of,
    changed_facts,
    loader_facts,
    restore_learning_rates,
)
from xlength.runtime.random_state import restore_random_states, seed_everything
from xlength.runtime.wrappers import unwrapped


class Resume:
    """One resumption of a run.

    Args:
        runner: whose loop is about to begin.
        saved: what the hook published when the checkpoint was written.
        strict: see ``DataStateHook``.
        built_with: the seed that the samplers were built with.
        ready: called when the random states are those of the position.
    """

    def __init__(
        self,
        runner: Any,
        saved: Mapping[str, Any],
        strict: bool,
        built_with: int | None,
        ready: Callable[[], None],
    ) -> None:
        self.runner, self.loop, self.loader = runner, runner.train_loop, runner.train_dataloader
        self.saved, self.strict = saved, strict
        self._built_with = built_with
        self._ready = ready
        self._is_prepared = False
        self._anew = False
        self._stream_is_placed = False
        self._is_ours = isinstance(self.loop, TrainLoop)
        self._by_iter = hasattr(self.loop, "dataloader_iterator")
        # A loop that is not ours keeps its count, so it is ahead of the last optimiser step.
        self._ahead = 0 if self._is_ours else self.loop.iter - saved["iter"]

    def begin(self) -> Position:
        """Position everything; returns where that is.

        Raises:
            ResumeError: the position does not fit, and ``strict``.
        """
        self._check_loader()
        epoch, step, left = self._place()
        iteration = self.saved["iter"] if self._is_ours else self.loop.iter
        position = Position(epoch, step, iteration)
        model = unwrapped(self.runner.model)
        weighted = getattr(model, "token_weighted_loss", None)
        if weighted is not None and "loss" in self.saved:
            weighted.restore(*self.saved["loss"], like=next(model.parameters()))
        if self._is_ours:
            self._begin_ours(position, left)
        else:
            self._begin_other(position)
        self._tell_about_schedules()
        return position

    def before_first_iter(self) -> None:
        """In a loop whose iterator is not in our hands: random states, better late than never."""
        self.prepare()

    def waiting_random_states(self) -> Any:
        """This rank's saved random states, as long as they have not been put back."""
        ranks = self.saved.get("ranks") or ()
        if self._is_prepared or get_rank() >= len(ranks):
            return None
        return pickle.loads(ranks[get_rank()])["random"]

    def prepare(self) -> None:
        """Put the random states of this rank back, once."""
        if self._is_prepared:
            return
        self._is_prepared = True
        ranks = self.saved.get("ranks")
        if ranks is None:
            self._warn(
                "The checkpoint has no random states, so dropout and the like draw other numbers."
            )
            seed_everything(self.runner.seed, self.saved["iter"], get_rank())
        elif get_rank() < len(ranks):
            restore_random_states(pickle.loads(ranks[get_rank()])["random"])
        else:  # there are more ranks than before
            seed_everything(self.runner.seed, self.saved["iter"], get_rank())
        self._ready()

    def _check_loader(self) -> None:
        changes = changed_facts(self.saved["loader"], loader_facts(self.loader))
        sampler, _ = sampler_of(self.loader)
        if (self.saved["sampler"] is None) == hasattr(sampler, "left") and sampler is not None:
            was = (self.saved["sampler"] or {}).get("type", "one without a state")
            changes.append(f"the sampler was {was} and is {type(sampler).__name__}")
        packs = self.saved.get("dataset")
        if packs is not None and state_of(self.loader.dataset) not in (None, packs):
            try:
                self.loader.dataset.load_state_dict(packs)
            except (ValueError, KeyError) as error:
                changes.append(f"{type(self.loader.dataset).__name__}: {error}")
        if not changes:
            return
        text = f"the saved position does not fit this run: {'; '.join(changes)}"
        if self.strict:
            raise ResumeError(f"{text}. Restore what was, or begin the epoch anew: {_ANEW}")
        self._warn(f"{text}. Epoch {self.saved['epoch']} starts anew.")
        self._anew = True

    def _place(self) -> tuple[int, int, int | None]:
        """Position the sampler or the stream: (epoch, step, batches left if that is known)."""
        sampler, per_batch = sampler_of(self.loader)
        epoch, step = int(self.saved["epoch"]), int(self.saved["step"]) + self._ahead
        if hasattr(sampler, "left"):
            self._load_sampler()
            step = -(-sampler.state_dict()["step"] // per_batch)
            return sampler.epoch, step, batches_of(sampler.left(), per_batch, self.loader)
        if getattr(sampler, "seed", None) == self._built_with and self._built_with is not None:
            sampler.seed = self.saved["seed"]
        if is_stream(self.loader):
            return self._place_stream(epoch, step)
        num_batches = len(self.loader)
        if step > num_batches:  # only where a loop is ahead
            epoch, step = epoch + 1, step - num_batches
        step = 0 if self._anew else step
        return epoch, step, num_batches - step

    def _load_sampler(self) -> None:
        sampler, per_batch = sampler_of(self.loader)
        state = dict(self.saved["sampler"] or {})
        if not state:
            sampler.set_epoch(self.saved["epoch"])
            return
        same = not state.get("history") and state["world_size"] == sampler.world_size
        if self._ahead and same:
            length = batches_of(len(sampler), per_batch, self.loader)
            step = -(-state["step"] // per_batch) + self._ahead
            if step > length:
                state["epoch"], step = state["epoch"] + 1, step - length
            state["step"] = min(step * per_batch, len(sampler))
        if self._anew:
            state["step"] = 0
        try:
            sampler.load_state_dict(state, self.strict)
        except (ValueError, KeyError) as error:
            raise ResumeError(f"{error}; in a config: {_ANEW}") from error

    def _place_stream(self, epoch: int, step: int) -> tuple[int, int, int | None]:
        dataset = self.loader.dataset
        ranks = self.saved.get("ranks") or []
        states = [pickle.loads(rank)["stream"] for rank in ranks]
        if not (states and states[0] is not None and hasattr(dataset, "state_after")):
            return epoch, step, None
        was, now = states[0]["num_workers"], max(self.loader.num_workers, 1)
        if was != now and not self._anew:
            text = f"the stream was read by {was} workers of every rank and now is by {now}"
            if self.strict:
                raise ResumeError(f"{text}. Restore what was, or begin the epoch anew: {_ANEW}")
            self._warn(f"{text}. Epoch {epoch} starts anew.")
            self._anew = True
        if self._anew:
            dataset.set_epoch(epoch)
            return epoch, 0, None
        try:
            dataset.load_state_dict(merge_states(states), self.strict)
        except (ValueError, KeyError) as error:
            raise ResumeError(f"{error}; in a config: {_ANEW}") from error
        self._stream_is_placed = True
        return epoch, step, None

    def _begin_ours(self, position: Position, left: int | None) -> None:
        loop, runner = self.loop, self.runner
        ahead = loop.iter - position.iter
        if ahead > 0:
            runner.logger.info(
                f"{ahead} micro-steps of an optimiser step that was not finished are done again."
            )
        loop.start_at(
            position.epoch,
            position.step,
            self._rest(position),
            iteration=position.iter,
            left=left,
            prepare=self.prepare,
        )
        if "optimiser" in self.saved:
            restore_learning_rates(runner, self.saved["optimiser"])
        wrapper = runner.optim_wrapper
        if hasattr(wrapper, "initialize_count_status"):  # not where DeepSpeed accumulates
            wrapper.initialize_count_status(runner.model, position.iter, loop.max_iters)
        for hook in runner.hooks:  # they have noted the iteration of the checkpoint
            if isinstance(hook, (IterTimerHook, RuntimeInfoHook)):
                hook.before_train(runner)

    def _rest(self, position: Position) -> Iterable[Any]:
        """What is left of the epoch."""
        sampler, _ = sampler_of(self.loader)
        if hasattr(sampler, "left") or position.step == 0 and not is_stream(self.loader):
            return self.loader
        if not is_stream(self.loader):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(position.epoch)
            return loader_from(self.loader, position.step)
        if self._stream_is_placed or self._anew:
            return self.loader
        return self.loop.read_up_to(position.epoch, position.step)

    def _begin_other(self, position: Position) -> None:
        loop = self.loop
        sampler, _ = sampler_of(self.loader)
        if self._ahead:
            self._warn(
                "The checkpoint was written in the middle of gradient accumulation, and its "
                "gradients are lost: use xlength.TrainLoop, which does those micro-steps again."
            )
        if is_stream(self.loader) and not self._stream_is_placed:
            self._warn(
                f"{type(loop).__name__} reads the stream from its beginning, since it has no saved "
                "position: use xlength.TrainLoop and a stream of xlength."
            )
        elif self._by_iter:
            new = hasattr(loop.dataloader_iterator, "skip_iter")
            passed = 0 if new else loop.iter

            def place() -> Iterable[Any]:
                if hasattr(sampler, "left"):
                    self._load_sampler()  # DistSamplerSeedHook has set epoch 0
                return self._rest(position)

            loop.dataloader_iterator = EpochIterator(
                self.loader, position, place, self.prepare, passed
            )
        elif position.step and not (hasattr(sampler, "left") or is_stream(self.loader)):
            self._warn(
                f"{type(sampler).__name__} keeps no state, so that {type(loop).__name__} begins "
                f"epoch {position.epoch} anew, which repeats {position.step} batches: use "
                "xlength.TrainLoop."
            )

    def _tell_about_schedules(self) -> None:
        was, now = self.saved["max_iters"], self.loop.max_iters
        if was != now and self.runner.param_schedulers:
            self._warn(
                f"The run now has {now} iterations, not {was}. The learning-rate schedules are not "
                "extended: they end where those of the run that is continued do."
            )

    def _warn(self, message: str) -> None:
        print_log(message, "current", logging.WARNING)


_ANEW = "custom_hooks=[dict(type='xlength.DataStateHook', strict=False)]"
