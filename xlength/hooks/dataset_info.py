"""``DatasetInfoHook``: what the model is about to see."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from mmengine.hooks import Hook

from xlength.lengths import get_lengths
from xlength.registry import HOOKS, register
from xlength.runtime.build import build
from xlength.runtime.loaders import sampler_of
from xlength.samplers.check import accumulative_counts_of, check_batch_size

IMAGE_TOKEN_INDEX = -200
IMAGE_TOKEN = "<image>"


@register(HOOKS)
class DatasetInfoHook(Hook):
    """Logs, before the first step, the number of samples, the first one as text, their lengths and
    the sampler or plan that orders them.

    Cost: one sample and, of the lengths, one pass.

    Args:
        tokenizer: a tokenizer or a dict of one; None shows token numbers.
        is_intern_repo_dataset: negative token numbers mean tokens without a label.
    """

    def __init__(self, tokenizer: Any = None, is_intern_repo_dataset: bool = False) -> None:
        self.tokenizer = build(tokenizer)
        self.is_intern_repo_dataset = is_intern_repo_dataset

    def before_train(self, runner: Any) -> None:
        """Describe the training data and, if there are any, the validation data."""
        check_batch_size(runner.train_dataloader, accumulative_counts_of(runner))
        self._describe(runner, runner.train_dataloader, "train")
        if runner.val_loop is not None:
            self._describe(runner, runner.val_dataloader, "eval")

    def before_val(self, runner: Any) -> None:
        """Describe the validation data, where nothing is trained."""
        if runner.message_hub.get_info("loop_stage") != "train":
            self._describe(runner, runner.val_dataloader, "eval")

    def before_test(self, runner: Any) -> None:
        """Describe the test data."""
        self._describe(runner, runner.test_dataloader, "test")

    def _describe(self, runner: Any, loader: Any, mode: str) -> None:
        dataset, log = loader.dataset, runner.logger.info
        try:
            log(f"Num {mode} samples {len(dataset)}")
        except TypeError:
            log(f"Num {mode} samples: not known, {type(dataset).__name__} is a stream")
        if not hasattr(dataset, "__getitem__"):
            return
        sample = dataset[0]
        log(f"{mode} example:")
        for key, prefix in (
            ("input_ids", ""),
            ("chosen_ids", "chosen: "),
            ("rejected_ids", "rejected: "),
        ):
            if key in sample:
                log(prefix + self.decode(sample[key]))
        sampler, _ = sampler_of(loader)
        log(f"{mode} lengths in tokens: {length_summary(dataset, sampler)}")
        log(f"{mode} order: {describe_sampler(sampler)}")

    def decode(self, input_ids: Iterable[int]) -> str:
        """The text of a sample, with ``<image>`` where an image comes."""
        ids = [int(i) for i in input_ids]
        if self.is_intern_repo_dataset:
            ids = [abs(i) for i in ids]
        if self.tokenizer is None:
            return str(ids)
        parts: list[list[int]] = [[]]
        for token in ids:
            if token == IMAGE_TOKEN_INDEX:
                parts.append([])
            else:
                parts[-1].append(token)
        return IMAGE_TOKEN.join(self.tokenizer.decode(part) for part in parts)


def length_summary(dataset: Any, sampler: Any) -> str:
    """Number, quantiles and sum of a data set's lengths, or why they are not known."""
    lengths = getattr(sampler, "length", None)
    if not isinstance(lengths, np.ndarray):
        try:
            lengths = get_lengths(dataset, getattr(sampler, "length_property", "length"))
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            return f"not known ({error})"
    sizes = np.abs(lengths if lengths.ndim == 1 else lengths[:, 0])
    low, median, high, top = np.quantile(sizes, [0, 0.5, 0.9, 1])
    return (
        f"n {len(sizes)}, min {low:.0f}, median {median:.0f}, 90 % {high:.0f}, max {top:.0f}, "
        f"total {int(sizes.sum())}"
    )


def describe_sampler(sampler: Any) -> str:
    """A sampler's name with its plan or its options."""
    name = type(sampler).__name__
    plan = getattr(sampler, "plan", None)
    if plan is not None:
        return f"{name} of {plan!r}"
    options = ("per_device_batch_size", "length_property", "shuffle", "seed")
    known = {key: getattr(sampler, key) for key in options if hasattr(sampler, key)}
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in known.items())})"
