"""Positions of packed samples in models that give images positions in several dimensions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def rope_owner(model: Any) -> Any:
    """The part of a Qwen-VL model that makes such positions (``get_rope_index``); else None."""
    parts = (model, getattr(model, "model", None))
    return next((part for part in parts if hasattr(part, "get_rope_index")), None)


def packed_rope_positions(owner: Any, data: Mapping[str, Any], borders: Tensor) -> Tensor:
    """Positions of every sample as if it were alone.

    Args:
        owner: from ``rope_owner``.
        data: the batch: ``input_ids``, ``position_ids`` (rows, length), restarting; and with images
            ``mm_token_type_ids`` (rows, length) and ``image_grid_thw`` (images, 3).
        borders: (segments + 1,) where samples begin and end in the flattened rows.

    Returns:
        (4, rows, length): position in the sample, by which the mask is made, then time, height and
        width.
    """
    text = data["position_ids"]
    if data.get("image_grid_thw") is None or data.get("mm_token_type_ids") is None:
        return text.expand(4, *text.shape)
    lengths = borders.diff().long()
    places = torch.arange(int(lengths.max()), device=lengths.device)
    real = places < lengths[:, None]  # one row a sample, padded
    ids, kinds = (
        torch.zeros(real.shape, dtype=data[key].dtype, device=real.device).masked_scatter(
            real, data[key].flatten()
        )
        for key in ("input_ids", "mm_token_type_ids")
    )
    positions, _ = owner.get_rope_index(
        ids,
        mm_token_type_ids=kinds,
        image_grid_thw=data["image_grid_thw"],
        attention_mask=real.long(),
    )
    flat = positions[:, real].view(3, *text.shape)
    return torch.cat([text[None], flat.to(text.dtype)])
