"""What a batch says about itself: how much of it is real, and what it costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from xlength.plan.cost import Cost


@dataclass(frozen=True)
class BatchFacts:
    """One micro-step of one rank.

    Args:
        num_tokens: real tokens.
        num_padded: tokens that are computed, padding included.
        cost: of computing them, in units of one token's cost without attention.
        useful_cost: of the real samples alone.
    """

    num_tokens: int
    num_padded: int
    cost: float
    useful_cost: float


def batch_facts(batch: Any, cost: Cost) -> BatchFacts | None:
    """Facts of a batch as hooks get it: xlength's or XTuner's, padded or packed.

    Real tokens are known from ``lengths``, else from the borders of a pack (``cu_seqlens``,
    ``cumulative_len``), else from ``attention_mask``.

    Args:
        batch: as the data loader made it, on the host.
        cost: of a sample.

    Returns:
        None for a batch that does not say.
    """
    data = batch.get("data", batch) if isinstance(batch, Mapping) else None
    if not isinstance(data, Mapping):
        return None
    borders = _borders(data)
    lengths = _lengths(data, borders)
    if lengths is None or len(lengths) == 0:
        return None
    useful = float(cost.of(lengths).sum())
    ids = data.get("input_ids")
    num_computed = int(ids.numel()) if isinstance(ids, torch.Tensor) else 0
    if borders is not None:
        segments = np.concatenate([np.diff(ends) for ends in borders])
        num_padded = max(num_computed, int(lengths.sum()))
        return BatchFacts(int(lengths.sum()), num_padded, float(cost.of(segments).sum()), useful)
    rows = len(lengths)
    width = max(-(-num_computed // rows), int(lengths.max()))
    padded_cost = rows * float(cost.of(np.array([width]))[0])
    return BatchFacts(int(lengths.sum()), rows * width, padded_cost, useful)


def _borders(data: Mapping[str, Any]) -> list[NDArray[np.int64]] | None:
    """Borders of the samples of each pack, None where the batch is no pack."""
    borders = data.get("cu_seqlens")
    if borders is None:
        borders = data.get("cumulative_len")
    if borders is None:
        return None
    if not isinstance(borders, (list, tuple)):
        borders = [borders]
    return [_array(ends) for ends in borders]


def _lengths(
    data: Mapping[str, Any], borders: list[NDArray[np.int64]] | None
) -> NDArray[np.int64] | None:
    """Real tokens of each sample."""
    if data.get("lengths") is not None:
        return np.abs(_array(data["lengths"]))
    if borders is not None:
        return np.concatenate([np.diff(ends) for ends in borders])
    mask = data.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.ndim == 2:
        return _array(mask.sum(dim=1))
    return None


def _array(values: Any) -> NDArray[np.int64]:
    if isinstance(values, torch.Tensor):
        values = values.cpu().numpy()
    return np.asarray(values, dtype=np.int64).reshape(-1)
