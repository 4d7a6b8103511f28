"""``LengthStatsHook``: how much of the training time is useful, in every log line."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from mmengine.dist import get_rank
from mmengine.hooks import Hook, LoggerHook
from mmengine.logging import print_log

from xlength.hooks.batch_facts import batch_facts
from xlength.hooks.prediction import predict
from xlength.loops import TrainLoop
from xlength.plan.cost import make_cost
from xlength.registry import HOOKS, register
from xlength.runtime.host_group import HostGroup, configured_timeout
from xlength.runtime.loaders import is_stream
from xlength.samplers.check import accumulative_counts_of, check_batch_size

APART = 0.02
"""Difference between predicted and measured that is worth a warning."""


@dataclass
class Tally:
    """Sums over some micro-steps; tokens, costs and seconds are means over ranks."""

    num_tokens: float = 0
    num_padded: float = 0
    useful_cost: float = 0
    seconds: float = 0
    balance: float = 0
    num_balanced: int = 0
    slowest_cost: float = 0

    def add(self, other: Tally) -> None:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def figures(self) -> dict[str, float]:
        """The numbers to log."""
        result = {
            "padding_efficiency": self.num_tokens / max(self.num_padded, 1),
            "tokens_per_second": self.num_tokens / max(self.seconds, 1e-9),
        }
        if self.slowest_cost:
            result["wall_efficiency"] = self.useful_cost / self.slowest_cost
        if self.num_balanced:
            result["rank_balance"] = self.balance / self.num_balanced
        return result


@register(HOOKS)
class LengthStatsHook(Hook):
    """Adds to each line of ``LoggerHook``, and so to every visualiser, over the lines' interval:

    - ``padding_efficiency``: real tokens / padded tokens, of all ranks;
    - ``tokens_per_second``: real tokens per second and rank, loading included, validation not;
    - ``wall_efficiency``: cost of the real samples / (ranks x sum over micro-steps of the slowest
      rank's cost); a sample that is drawn twice counts twice, since batches do not tell;
    - ``rank_balance`` (several ranks): mean over micro-steps of mean / largest cost over ranks.

    At the end of an epoch it logs the same over the steps of the epoch that this run took, each
    beside what the sampler's plan predicts (``xlength report`` shows the same), and warns once
    where the two part by more than 0.02. At the end it logs the same over the whole run (a resumed
    one: since it was resumed), and keeps it in the message hub as ``length_stats``. All are ratios
    of sums, not means of ratios. The numbers come from what the batches say about themselves, see
    ``batch_facts``.

    Cost: some microseconds a step on the host and, under several ranks, one gathering of a few
    numbers per line through a group of its own on the host; no synchronisation with a device. The
    prediction makes the epoch's order once more on rank 0, or reads the plan that is there.

    Args:
        cost: by which ranks are compared: ``'attention'`` or ``'tokens'``, with its options; see
            ``make_cost``. Not ``'multimodal'``: batches do not tell of patches.
        interval: iterations between lines; by default ``LoggerHook``'s.
    """

    priority = "NORMAL"

    def __init__(self, cost: Any = "attention", interval: int | None = None) -> None:
        self.cost = make_cost(cost)
        if self.cost.weights is not None:
            raise ValueError(
                f"cost={self.cost} counts several columns of lengths, but batches tell only one, "
                "that of tokens: give 'attention' or 'tokens', or either as a dict with its options"
            )
        if interval is not None and interval < 1:
            raise ValueError(f"interval must be at least 1 iteration, got {interval}")
        self.interval = interval
        self._logger: LoggerHook | None = None
        self._group: HostGroup | None = None
        self._since = 0.0
        self._warned: set[str] = set()
        self._begin()

    def _begin(self) -> None:
        self._run, self._epoch, self._line, self._now = Tally(), Tally(), Tally(), Tally()
        self._costs: list[float] = []
        self._start: int | None = 0
        self._steps = 0
        self._since_iter: int | None = None

    def before_train(self, runner: Any) -> None:
        """Find the logger and, once, the other ranks."""
        loggers = [hook for hook in runner.hooks if isinstance(hook, LoggerHook)]
        self._logger = loggers[0] if loggers else None
        self._group = HostGroup("rank_balance", configured_timeout(runner))
        self._begin()
        check_batch_size(runner.train_dataloader, accumulative_counts_of(runner))

    def before_train_epoch(self, runner: Any) -> None:
        """Time, and the epoch's figures, count from here."""
        self._since = time.perf_counter()
        self._epoch, self._steps = Tally(), 0
        self._start = _first_step(runner)
        if self._since_iter is None:
            self._since_iter = runner.iter

    def after_val(self, runner: Any) -> None:
        """Time of validation does not count."""
        self._since = time.perf_counter()

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        """Add the batch; at the end of an interval, publish."""
        now = time.perf_counter()
        facts = batch_facts(data_batch, self.cost)
        self._steps += 1
        if facts is None:
            self._warn_once(
                "the batches have neither lengths, borders of a pack nor an attention_mask, so "
                "there is nothing to report"
            )
        else:
            self._now.add(
                Tally(facts.num_tokens, facts.num_padded, facts.useful_cost, now - self._since)
            )
            self._costs.append(facts.cost)
        self._since = now
        if self._is_due(runner, batch_idx):
            self._gather()
            line, self._line = self._line, Tally()
            for name, value in line.figures().items() if line.num_padded else ():
                runner.message_hub.update_scalar(f"train/{name}", value)

    def after_train_epoch(self, runner: Any) -> None:
        """Log the epoch's figures beside what the plan predicts."""
        self._gather()
        if self._start is None or not self._epoch.num_padded or get_rank() != 0:
            return
        measured = self._epoch.figures()
        found = predict(runner.train_dataloader, self._start, self._steps, self.cost)
        predicted = {name: value for name, value in (found or {}).items() if name in measured}
        texts = [
            f"{name} {value:.4f}"
            + (f" (predicted {predicted[name]:.4f})" if name in predicted else "")
            for name, value in measured.items()
        ]
        runner.logger.info(f"Over {_stretch(runner, self._steps)}: {', '.join(texts)}")
        scalars = {f"epoch/{name}": value for name, value in measured.items()}
        scalars |= {f"epoch/predicted_{name}": value for name, value in predicted.items()}
        runner.visualizer.add_scalars(scalars, step=runner.iter)
        apart = [n for n, value in predicted.items() if abs(value - measured[n]) > APART]
        if apart:
            self._warn_once(
                f"{' and '.join(apart)} of this epoch part from the plan's prediction by more than "
                f"{APART}: look for samples that are skipped or cut after their lengths were "
                "measured, for workers that return other samples than asked for, and for a collate "
                "function that pads or packs otherwise"
            )

    def after_train(self, runner: Any) -> None:
        """Log the run's figures."""
        self._gather()
        if self._run.num_padded:
            figures = self._run.figures()
            runner.message_hub.update_info("length_stats", figures, resumed=False)
            text = ", ".join(f"{name} {value:.4f}" for name, value in figures.items())
            since = f" since iteration {self._since_iter}" if self._since_iter else ""
            runner.logger.info(f"Over the run{since}: {text}")

    def _is_due(self, runner: Any, batch_idx: int) -> bool:
        """Whether ``LoggerHook``, which comes next, writes a line now."""
        if self.interval is not None or self._logger is None:
            return self.every_n_inner_iters(batch_idx, self.interval or 10)
        logger = self._logger
        if self.every_n_inner_iters(batch_idx, logger.interval):
            return True
        loader = runner.train_dataloader
        short = not logger.ignore_last or len(loader) <= logger.interval
        return short and self.end_of_epoch(loader, batch_idx)

    def _gather(self) -> None:
        """Add what came since the last time, over all ranks, to line, epoch and run."""
        tally, costs = self._now, np.array(self._costs)
        self._now, self._costs = Tally(), []
        assert self._group is not None
        mine = [len(costs), tally.num_tokens, tally.num_padded, tally.useful_cost, tally.seconds]
        sums = self._group.gather(np.array(mine))
        if sums is not None and (sums[:, 0] == len(costs)).all():
            tally = Tally(*sums[:, 1:].mean(axis=0))
            every = self._group.gather(costs)
            if every is not None and len(costs):
                slowest = every.max(axis=0)
                tally.slowest_cost = float(slowest.sum())
                if len(every) > 1:
                    tally.balance = float((every.mean(axis=0) / slowest).sum())
                    tally.num_balanced = len(costs)
        for sums_of in (self._line, self._epoch, self._run):
            sums_of.add(tally)

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            print_log(f"LengthStatsHook: {message}.", "current", logging.WARNING)


def _stretch(runner: Any, steps: int) -> str:
    """Which part of the present epoch ``steps`` batches are; of a stream's pass only how many."""
    epoch, loader = f"epoch {runner.epoch + 1}", runner.train_dataloader
    if is_stream(loader):
        return f"{steps:,} steps of {epoch}"
    return epoch if steps == len(loader) else f"{steps:,} of the {len(loader):,} steps of {epoch}"


def _first_step(runner: Any) -> int | None:
    """Batches of the epoch that an earlier run trained on; None where the loop has no epochs."""
    loop = getattr(runner, "train_loop", None)
    if hasattr(loop, "dataloader_iterator"):
        return None
    return loop.step if isinstance(loop, TrainLoop) else 0
