"""``DatasetInfoHook``: what the model is about to see."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from mmengine.dist import get_rank
from mmengine.hooks import Hook

from xlength.lengths import get_lengths
from xlength.registry import HOOKS, register
from xlength.report.preview import text_of, tokenizer_of
from xlength.runtime.build import build
from xlength.runtime.loaders import is_stream, sampler_of
from xlength.runtime.random_state import kept_random_states
from xlength.samplers.check import accumulative_counts_of, check_batch_size


@register(HOOKS)
class DatasetInfoHook(Hook):
    """Logs, before the first step, the number of samples, the first one as text, their lengths and
    the sampler or plan that orders them.

    Cost, on rank 0: one sample, of the lengths one pass and, where it is the config's, one
    tokenizer.

    Args:
        tokenizer: a tokenizer or a dict of one; by default the config's, and where it has none the
            token numbers are shown.
        is_intern_repo_dataset: negative token numbers mean tokens without a label.
        max_characters: of the text that are shown, half from its beginning and half from its end;
            None shows all.
    """

    def __init__(
        self,
        tokenizer: Any = None,
        is_intern_repo_dataset: bool = False,
        max_characters: int | None = None,
    ) -> None:
        if max_characters is not None and max_characters < 1:
            raise ValueError(f"max_characters must be at least 1, got {max_characters}")
        self.tokenizer = build(tokenizer)
        self.is_intern_repo_dataset = is_intern_repo_dataset
        self.max_characters = max_characters

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
        if get_rank() != 0:
            return
        dataset, log = loader.dataset, runner.logger.info
        try:
            log(f"Num {mode} samples {len(dataset)}")
        except TypeError:
            log(f"Num {mode} samples: not known, {type(dataset).__name__} is a stream")
        if is_stream(loader) or not hasattr(dataset, "__getitem__"):
            return
        with kept_random_states():  # of random augmentation
            sample = dataset[0]
        if self.tokenizer is None:
            self.tokenizer = _tokenizer(runner.cfg, mode, dataset)
        log(f"{mode} example:")
        for key, prefix in (
            ("input_ids", ""),
            ("chosen_ids", "chosen: "),
            ("rejected_ids", "rejected: "),
        ):
            if key in sample:
                log(prefix + self._shortened(self.decode(sample[key])))
        sampler, _ = sampler_of(loader)
        log(f"{mode} lengths in tokens: {length_summary(dataset, sampler)}")
        log(f"{mode} order: {describe_sampler(sampler)}")

    def decode(self, input_ids: Iterable[int]) -> str:
        """The text of a sample, with ``<image>`` where an image comes; see ``text_of``."""
        ids = [int(i) for i in input_ids]
        if self.is_intern_repo_dataset:
            ids = [abs(i) for i in ids]
        if self.tokenizer is None:
            return str(ids)
        return text_of(ids, self.tokenizer.decode)

    def _shortened(self, text: str) -> str:
        most = self.max_characters
        if most is None or len(text) <= most:
            return text
        head, tail = text[: most - most // 2], text[len(text) - most // 2 :]
        return f"{head} [... {len(text) - most:,} characters more ...] {tail}"


def _tokenizer(cfg: Any, mode: str, dataset: Any) -> Any:
    """The config's, None where there is none or it cannot be built here."""
    loader = cfg.get("val_dataloader" if mode == "eval" else f"{mode}_dataloader")
    try:
        return tokenizer_of(cfg, loader, dataset)
    except (OSError, ValueError, ImportError):
        return None


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
