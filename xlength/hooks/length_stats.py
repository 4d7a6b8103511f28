"""``LengthStatsHook``: how much of the training time is useful, in every log line."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from mmengine.hooks import Hook, LoggerHook
from mmengine.logging import print_log

from xlength.hooks.batch_facts import batch_facts
from xlength.plan.cost import make_cost
from xlength.registry import HOOKS, register
from xlength.runtime.host_group import HostGroup
from xlength.samplers.check import accumulative_counts_of, check_batch_size


@dataclass
class Tally:
    """Sums over some micro-steps."""

    num_tokens: float = 0
    num_padded: float = 0
    seconds: float = 0
    balance: float = 0
    num_balanced: int = 0

    def add(self, other: Tally) -> None:
        self.num_tokens += other.num_tokens
        self.num_padded += other.num_padded
        self.seconds += other.seconds
        self.balance += other.balance
        self.num_balanced += other.num_balanced

    def figures(self) -> dict[str, float]:
        """The numbers to log; tokens and seconds are means over ranks."""
        result = {
            "padding_efficiency": self.num_tokens / max(self.num_padded, 1),
            "tokens_per_second": self.num_tokens / max(self.seconds, 1e-9),
        }
        if self.num_balanced:
            result["rank_balance"] = self.balance / self.num_balanced
        return result


@register(HOOKS)
class LengthStatsHook(Hook):
    """Adds to each line of ``LoggerHook``, and so to every visualiser, over the lines' interval:

    - ``padding_efficiency``: real tokens / padded tokens, of all ranks;
    - ``tokens_per_second``: real tokens per second and rank, loading included, validation not;
    - ``rank_balance`` (several ranks): mean over micro-steps of mean / largest cost over ranks.

    At the end it logs the same over the whole run, and keeps it in the message hub as
    ``length_stats``. All are ratios of sums, not means of ratios. The numbers come from what the
    batches say about themselves, see ``batch_facts``.

    Cost: some microseconds a step on the host and, under several ranks, one gathering of a few
    numbers per line through a group of its own on the host; no synchronisation with a device.

    Args:
        cost: by which ranks are compared: ``'tokens'``, or ``'attention'`` with its options; see
            ``make_cost``.
        interval: iterations between lines; by default ``LoggerHook``'s.
    """

    priority = "NORMAL"

    def __init__(self, cost: Any = "tokens", interval: int | None = None) -> None:
        self.cost = make_cost(cost)
        if interval is not None and interval < 1:
            raise ValueError(f"interval must be at least 1 iteration, got {interval}")
        self.interval = interval
        self._logger: LoggerHook | None = None
        self._group: HostGroup | None = None
        self._run = Tally()
        self._begin_interval()
        self._since = 0.0

    def _begin_interval(self) -> None:
        self._tally = Tally()
        self._costs: list[float] = []

    def before_train(self, runner: Any) -> None:
        """Find the logger and, once, the other ranks."""
        loggers = [hook for hook in runner.hooks if isinstance(hook, LoggerHook)]
        self._logger = loggers[0] if loggers else None
        self._group = HostGroup("rank_balance")
        self._run = Tally()
        self._begin_interval()
        check_batch_size(runner.train_dataloader, accumulative_counts_of(runner))

    def before_train_epoch(self, runner: Any) -> None:
        """Time counts from here."""
        self._since = time.perf_counter()

    def after_val(self, runner: Any) -> None:
        """Time of validation does not count."""
        self._since = time.perf_counter()

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        """Add the batch; at the end of an interval, publish."""
        now = time.perf_counter()
        facts = batch_facts(data_batch, self.cost)
        if facts is None:
            self._warn_once()
        else:
            self._tally.add(Tally(facts.num_tokens, facts.num_padded, now - self._since))
            self._costs.append(facts.cost)
        self._since = now
        if self._is_due(runner, batch_idx):
            tally = self._end_interval()
            for name, value in tally.figures().items() if tally.num_padded else ():
                runner.message_hub.update_scalar(f"train/{name}", value)

    def after_train(self, runner: Any) -> None:
        """Log the run's figures."""
        self._end_interval()
        if self._run.num_padded:
            figures = self._run.figures()
            runner.message_hub.update_info("length_stats", figures, resumed=False)
            text = ", ".join(f"{name} {value:.4f}" for name, value in figures.items())
            runner.logger.info(f"Over the run: {text}")

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

    def _end_interval(self) -> Tally:
        """The interval's sums over all ranks, averaged; added to the run's."""
        tally, costs = self._tally, self._costs
        self._begin_interval()
        assert self._group is not None
        mine = np.array([len(costs), tally.num_tokens, tally.num_padded, tally.seconds])
        sums = self._group.gather(mine)
        if sums is not None and (sums[:, 0] == len(costs)).all():
            tally = Tally(*sums[:, 1:].mean(axis=0))
            every = self._group.gather(np.array(costs))
            if every is not None and len(every) > 1:
                tally.balance = float((every.mean(axis=0) / every.max(axis=0)).sum())
                tally.num_balanced = len(costs)
        self._run.add(tally)
        return tally

    def _warn_once(self) -> None:
        if not getattr(self, "_warned", False):
            self._warned = True
            print_log(
                "LengthStatsHook: the batches have neither lengths, borders of a pack nor an "
                "attention_mask, so there is nothing to report.",
                "current",
                logging.WARNING,
            )
