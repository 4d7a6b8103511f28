"""The mean loss per token of a whole optimiser step, over its ranks, micro-steps and samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from mmengine.dist import all_reduce, get_world_size
from torch import Tensor

IGNORE_INDEX = -100


def count_predicted(labels: Tensor) -> Tensor:
    """Number of tokens that a causal model is trained to predict: the first of a row is not.

    Args:
        labels: (rows, length) int64, ``-100`` where no loss is wanted.

    Returns:
        () int64, on the labels' device.
    """
    return (labels[:, 1:] != IGNORE_INDEX).sum()


class TokenWeightedLoss:
    """Weighs each micro-step so that the optimiser sees the mean over all tokens of its step.

    Averaging per rank and per micro-step, as DDP and mmengine's ``OptimWrapper`` do, weighs the
    tokens of short batches more, and grouping by length makes that bias larger. Here the gradient
    that reaches clipping and the optimiser is::

        sum of the token losses of all ranks and micro-steps / number of those tokens

    The number is not known before the last micro-step, so gradients are accumulated with the
    weight of the step before, which all ranks share, and corrected in place: at the last micro-step
    only, where ``is_last`` says which one that is (``TrainLoop`` sets it), else at every one. Both
    are exact, with loss scaling and clipping as well, under any training loop and for a last,
    shorter accumulation window, because a window begins where the gradients have been cleared. It
    counts on gradients being averaged over the ranks and on the loss being divided by the number of
    micro-steps in the window, which is what mmengine's wrappers do.

    Cost: one all-reduce of two numbers per optimiser step (per micro-step without ``is_last``), and
    with accumulation one pass over the gradients per correction. Gradients in a 16-bit type are
    rounded once more by each correction.

    Not covered: DeepSpeed, which keeps accumulated gradients to itself. There each micro-step is
    the exact mean over the tokens of all ranks, but micro-steps of one window weigh alike
    (``can_correct = False``).
    """

    def __init__(self) -> None:
        self.is_last: Callable[[], bool] | None = None
        self.can_correct = True
        self._micro_steps = 0
        self._loss_sum: Tensor | None = None
        self._num_tokens: Tensor | None = None
        self._weight: Tensor | None = None
        self._reported: Tensor | None = None

    def __call__(
        self, loss: Tensor, num_tokens: Tensor, parameters: Iterable[torch.nn.Parameter]
    ) -> tuple[Tensor, Tensor]:
        """Weigh one micro-step; to be called once for each, between its forward and its backward.

        Args:
            loss: () float, this rank's mean over ``num_tokens`` tokens (not a number where there
                are none).
            num_tokens: () int64.
            parameters: those that are trained.

        Returns:
            The loss to go backward from, and the loss to report: the mean per token over all ranks
            of the last finished optimiser step (in the first one, of its first micro-step), equal
            on all ranks.
        """
        gradients = [p.grad for p in parameters if p.grad is not None] if self.can_correct else []
        if not gradients or self._weight is None:
            self._micro_steps, self._loss_sum, self._num_tokens = 0, None, None
        loss = torch.where(num_tokens > 0, loss, torch.zeros_like(loss))
        self._add(loss, num_tokens)
        last = self.is_last() if self.is_last is not None and self.can_correct else True
        if self._weight is None or last:
            weight = self._exact_weight()
            if gradients and self._weight is not None:
                _multiply(gradients, weight / self._weight)
            self._weight = weight
        assert self._reported is not None
        return loss * (num_tokens * self._weight).to(loss.dtype), self._reported

    def state(self) -> tuple[Tensor | None, Tensor | None]:
        """What the next optimiser step takes over from the last one; see ``restore``."""
        return self._weight, self._reported

    def restore(self, weight: float, reported: float, like: Tensor) -> None:
        """Continue from the numbers of ``state``, so that a resumed run rounds as the first did.

        Args:
            weight, reported: as numbers.
            like: a parameter; gives the device.
        """
        self._weight = torch.tensor(weight, dtype=_wide(like), device=like.device)
        self._reported = torch.tensor(reported, dtype=torch.float32, device=like.device)

    def _add(self, loss: Tensor, num_tokens: Tensor) -> None:
        loss_sum = loss.detach().to(_wide(loss)) * num_tokens
        self._loss_sum = loss_sum if self._loss_sum is None else self._loss_sum + loss_sum
        self._num_tokens = num_tokens if self._num_tokens is None else self._num_tokens + num_tokens
        self._micro_steps += 1

    def _exact_weight(self) -> Tensor:
        """The weight of a token's loss, given that this micro-step is the window's last."""
        assert self._loss_sum is not None and self._num_tokens is not None
        totals = torch.stack([self._loss_sum, self._num_tokens.to(self._loss_sum.dtype)])
        all_reduce(totals)
        tokens = totals[1].clamp(min=1)
        self._reported = (totals[0] / tokens).float()
        return get_world_size() * self._micro_steps / tokens


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.device.type == "mps" else torch.float64


def _multiply(gradients: list[Tensor], factor: Tensor) -> None:
    """Scale in place, shard by shard where gradients are sharded, wherever they are kept."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        by_device.setdefault(local.device, []).append(local)
    with torch.no_grad():
        for device, tensors in by_device.items():
            torch._foreach_mul_(tensors, factor.to(device))
