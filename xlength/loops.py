"""``TrainLoop``: training by epochs or by iterations, from any step on."""

from __future__ import annotations

import bisect
import logging
import math
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

from mmengine.dist import get_rank
from mmengine.logging import print_log
from mmengine.runner import BaseLoop
from mmengine.runner.utils import calc_dynamic_intervals
from torch import nn

from xlength.datasets.stream_end import EqualSteps
from xlength.registry import LOOPS, register
from xlength.runtime.limits import check_limits, check_validation
from xlength.runtime.loaders import (
    EndlessLoader,
    ends_unequally,
    is_stream,
    loader_from,
    num_batches,
    repeat_by_default,
    sampler_of,
    start_sampler_at,
)
from xlength.runtime.position import prepared
from xlength.runtime.random_state import WorkerSeeds, kept_random_states
from xlength.runtime.validation import CUT_VALIDATION
from xlength.runtime.wrappers import announce_last_micro_steps
from xlength.samplers.check import accumulative_counts_of, check_batch_size


@register(LOOPS)
class TrainLoop(BaseLoop):
    """Train for a number of epochs or of iterations, in real epochs either way.

    XTuner's loop by arguments. Unlike it and mmengine's ``IterBasedTrainLoop``, every pass over
    the data calls ``before_train_epoch`` and ``after_train_epoch`` (so ``DistSamplerSeedHook``
    reseeds and schedulers by epoch step), no pass begins with a sleep, the iterator is made after
    the checkpoint was read, and a resumed run starts at its step without loading what was passed:
    the sampler is positioned by its state or, where it keeps none, its indices are drawn and
    passed over; only a stream without state is read again.

    ``batch_idx``, as hooks get it, counts within the epoch where the log processor goes by epoch,
    else over the run. Validation goes by iterations; one that SIGTERM cut off is begun anew when
    the run is resumed, see ``StopHook``.

    Args:
        runner: mmengine's.
        dataloader: a loader or its config. A stream needs no length if ``max_iters`` is given;
            when it ends early, its next epoch begins. One that can repeat for ever does so by
            itself then (``repeat``); the passes of others end at the same step on all ranks, see
            ``EqualSteps``.
        max_iters: iterations (micro-steps) to train for; or
        max_epochs: passes over the data, also a fraction such as 0.5.
        val_begin, val_interval: iterations from which on, and after which, to validate.
        dynamic_intervals: ``[(iteration, interval), ...]``: other intervals from these iterations
            on.

    Raises:
        ValueError: not exactly one of ``max_iters`` and ``max_epochs``, or a number is out of its
            range; no data; ``max_epochs`` for a loader without a length.
    """

    def __init__(
        self,
        runner: Any,
        dataloader: Any,
        max_iters: int | None = None,
        max_epochs: float | None = None,
        val_begin: int = 1,
        val_interval: int = 1000,
        dynamic_intervals: list[tuple[int, int]] | None = None,
    ) -> None:
        check_limits(max_iters, max_epochs)
        check_validation(val_begin, val_interval, dynamic_intervals)
        self.dataloader: Any
        super().__init__(runner, dataloader)
        self._seed_of_build = runner.seed
        self._set_limits(max_iters, max_epochs)
        self._epoch = 0
        self._iter = 0
        self._step = 0
        self._rest: Iterable[Any] | None = None
        self._prepare: Callable[[], None] | None = None
        self._left: int | None = None
        sampler, _ = sampler_of(self.dataloader)
        self._seeds = WorkerSeeds.install(self.dataloader, getattr(sampler, "rank", get_rank()))
        self.stop_training = False
        self.val_begin = val_begin
        self.val_interval = val_interval
        self.dynamic_milestones, self.dynamic_intervals = calc_dynamic_intervals(
            val_interval, dynamic_intervals
        )
        self._equal_steps = EqualSteps() if ends_unequally(self.dataloader) else None
        if hasattr(self.dataloader.dataset, "metainfo"):
            runner.visualizer.dataset_meta = self.dataloader.dataset.metainfo
        check_batch_size(self.dataloader, accumulative_counts_of(runner))

    def _set_limits(self, max_iters: int | None, max_epochs: float | None) -> None:
        if max_iters is not None:
            repeat_by_default(self.dataloader)
        self._epochs_asked = max_epochs
        length = num_batches(self.dataloader)
        if length == 0:
            raise ValueError("the data loader has no batch to train on")
        if max_epochs is not None:
            if length is None:
                raise ValueError(
                    f"max_epochs={max_epochs} needs a data loader with a length; give max_iters "
                    "for a stream"
                )
            max_iters = max(1, round(max_epochs * length))
        assert max_iters is not None
        self._max_iters = int(max_iters)
        if length is None:
            self.dataloader = EndlessLoader(self.dataloader, self._max_iters)
            self._max_epochs = 1
        else:
            if is_stream(self.dataloader):
                self.dataloader = EndlessLoader(self.dataloader, length)
            self._max_epochs = math.ceil(self._max_iters / length)

    @property
    def max_epochs(self) -> int:
        """Epochs of the run, a last partial one included."""
        return self._max_epochs

    @property
    def max_iters(self) -> int:
        """Iterations (micro-steps) of the run."""
        return self._max_iters

    @property
    def epoch(self) -> int:
        """The present epoch, from 0."""
        return self._epoch

    @property
    def iter(self) -> int:
        """Iterations that are finished."""
        return self._iter

    @property
    def step(self) -> int:
        """Batches of the present epoch that are trained on."""
        return self._step

    def start_at(
        self,
        epoch: int,
        step: int,
        batches: Iterable[Any] | None = None,
        *,
        iteration: int | None = None,
        left: int | None = None,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        """Begin in ``epoch`` after its first ``step`` batches; call it before the first one.

        Args:
            epoch: from 0.
            step: batches of the epoch that are trained on already, in any run.
            batches: what is left of the epoch; by default what the data loader yields next, so its
                sampler has been positioned.
            iteration: iterations that are finished; by default those of the checkpoint.
            left: batches that are left of the epoch, where they are not the length less ``step``,
                as on another number of ranks: a run by epochs then has another number of
                iterations.
            prepare: called with the first iterator, see ``prepared``.
        """
        self._epoch, self._step = epoch, step
        self._rest = self.dataloader if batches is None else batches
        self._prepare, self._left = prepare, left
        if iteration is not None:
            self._iter = iteration
        if left is not None and self._epochs_asked is not None:
            length = len(self.dataloader)
            rest = round(self._epochs_asked * length) - (epoch + 1) * length + left
            self._max_iters = self._iter + max(0, rest)

    def run(self) -> nn.Module:
        """Train until the last iteration, or until ``stop_training`` is set."""
        runner = self.runner
        announce_last_micro_steps(runner)
        runner.call_hook("before_train")
        if self._iter > 0 and self._rest is None:
            self._find_position()
        self._validate_again()
        if self._iter >= self._max_iters:
            print_log(
                f"Nothing is left to train: the checkpoint is at iteration {self._iter}, and "
                f"train_cfg asks for {self._max_iters}.",
                "current",
                logging.WARNING,
            )
        while self._iter < self._max_iters and not self.stop_training:
            self._run_epoch()
        runner.call_hook("after_train")
        return runner.model

    def _find_position(self) -> None:
        """Where a resumed run goes on, from its iteration."""
        if is_stream(self.dataloader):
            self.start_at(*self._read_up_to(0, self._iter))
            return
        length = len(self.dataloader)
        epoch, step = self._epoch, self._iter - self._epoch * length
        if not 0 <= step <= length:
            epoch, step = divmod(self._iter, length)
        sampler, _ = sampler_of(self.dataloader)
        if getattr(sampler, "seed", None) == self._seed_of_build:
            sampler.seed = self.runner.seed
        if start_sampler_at(self.dataloader, epoch, step):
            self.start_at(epoch, step)
        else:
            self.start_at(epoch, step, loader_from(self.dataloader, step))

    def read_up_to(self, epoch: int, step: int) -> Iterable[Any]:
        """What a stream gives after ``step`` batches of an epoch, which are read for that."""
        return self._read_up_to(epoch, step)[2]

    def _read_up_to(self, epoch: int, step: int) -> tuple[int, int, Iterable[Any]]:
        """Read a stream from an epoch's beginning, over as many epochs as it takes."""
        print_log(
            f"Reading {step} batches that were trained on before and passing over them: "
            "the training data are a stream without a saved position.",
            "current",
            logging.WARNING,
        )
        while True:
            self._set_epoch_of_dataset(epoch)
            batches = iter(self.dataloader)
            passed = sum(1 for _ in islice(batches, step))
            if passed == step:
                return epoch, step, batches
            if passed == 0:
                raise RuntimeError(f"epoch {epoch} of the training data has no batch")
            epoch, step = epoch + 1, step - passed

    def _set_epoch_of_dataset(self, epoch: int) -> None:
        set_epoch = getattr(self.dataloader.dataset, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)

    def _run_epoch(self) -> None:
        runner = self.runner
        batches, self._rest = self._rest, None
        prepare, self._prepare = self._prepare, None
        left, self._left = self._left, None
        resumed = batches is not None
        if batches is None:
            self._set_epoch_of_dataset(self._epoch)
            batches = self.dataloader
        runner.call_hook("before_train_epoch")
        runner.model.train()
        if self._seeds is not None:
            self._seeds.set(runner.seed, self._epoch, self._step, left)
        if prepare is not None:
            batches = prepared(batches, prepare, self._step == 0)
        if self._equal_steps is not None:
            batches = self._equal_steps.over(batches)
        for batch in batches:
            self._run_iter(batch)
            if self._iter >= self._max_iters or self.stop_training:
                break
        if self._step == 0 and not resumed:
            raise RuntimeError(f"epoch {self._epoch} of the training data has no batch")
        runner.call_hook("after_train_epoch")
        self._epoch += 1
        self._step = 0

    def _run_iter(self, batch: Any) -> None:
        runner = self.runner
        index = self._step if runner.log_processor.by_epoch else self._iter
        runner.call_hook("before_train_iter", batch_idx=index, data_batch=batch)
        outputs = runner.model.train_step(batch, optim_wrapper=runner.optim_wrapper)
        self._step += 1
        runner.call_hook("after_train_iter", batch_idx=index, data_batch=batch, outputs=outputs)
        self._iter += 1
        self._validate_if_due()

    def _validate_if_due(self) -> None:
        position = bisect.bisect(self.dynamic_milestones, self._iter + 1)
        self.val_interval = self.dynamic_intervals[position - 1]
        last = self._iter == self._max_iters
        due = self._iter >= self.val_begin and (self._iter % self.val_interval == 0 or last)
        if self.runner.val_loop is not None and due:
            self._validate()

    def _validate(self) -> None:
        with kept_random_states():
            self.runner.val_loop.run()
        self.runner.model.train()

    def _validate_again(self) -> None:
        """Where a validation was cut off, begin it anew; the iteration says that it is this one."""
        hub = self.runner.message_hub
        cut = self._iter > 0 and hub.get_info(CUT_VALIDATION, 0) == self._iter
        if cut and self.runner.val_loop is not None:
            hub.update_info(CUT_VALIDATION, 0)
            self._validate()
