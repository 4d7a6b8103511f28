"""``attn_implementation='sdpa_by_sample'``: exact attention of packs without flash attention."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

NAME = "sdpa_by_sample"


def register_sdpa_by_sample() -> None:
    """Make this ``attn_implementation`` known to transformers (4.53 or newer). Idempotent."""
    try:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    except ImportError:
        return
    ALL_ATTENTION_FUNCTIONS.register(NAME, sdpa_by_sample)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, flash_attention_mask)


def sdpa_by_sample(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of each sample by itself, one call of torch's SDPA a sample.

    The samples of a pack cost the sum of their squared lengths, as under flash attention, and no
    mask of the whole row is made: on a CPU several times faster than ``sdpa`` where samples are
    short. Padded rows are cut to their length likewise.

    Price: with very many very short samples on a GPU the calls cost more than they save.

    Args:
        module: the attention layer.
        query: (rows, heads, length, head size).
        key, value: (rows, key heads, length, head size).
        attention_mask: (rows, length), True for tokens, padding at the right; None for none.
        dropout, scaling: as in torch.
        sliding_window: tokens that a token sees, itself included; None for all before it.
        cu_seq_lens_q: (segments + 1,) borders of the samples in the flattened rows.
        is_causal: by default what the module says; vision towers are not.

    Returns:
        (rows, length, heads, head size), and None.
    """
    rows, _, length, _ = query.shape
    if key.shape[2] != length:
        raise ValueError(f"{NAME} is for training: it does not take a cache")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    borders = _borders(rows, length, attention_mask, cu_seq_lens_q)
    flat = [tensor.transpose(1, 2).flatten(0, 1).transpose(0, 1) for tensor in (query, key, value)]
    options: dict[str, Any] = {
        "dropout_p": dropout,
        "scale": scaling,
        "enable_gqa": key.shape[1] != query.shape[1],
    }
    parts = []
    for begin, end in pairwise(borders):
        q, k, v = (tensor[None, :, begin:end] for tensor in flat)
        mask = _window(end - begin, sliding_window if causal else None, query.device)
        part = scaled_dot_product_attention(
            q, k, v, mask, is_causal=causal and mask is None, **options
        )
        parts.append(part)
    out = torch.cat(parts, dim=2)[0].transpose(0, 1)
    return out.unflatten(0, (rows, length)), None


def _borders(
    rows: int, length: int, attention_mask: Tensor | None, cu_seq_lens: Tensor | None
) -> list[int]:
    """Where samples, or runs of padding, begin and end in the flattened rows."""
    if cu_seq_lens is not None:
        return [int(border) for border in cu_seq_lens.tolist()]
    if attention_mask is None:
        return list(range(0, rows * length + 1, length))
    mask = attention_mask.bool()
    changes = torch.ones_like(mask)
    changes[:, 1:] = mask[:, 1:] != mask[:, :-1]
    starts: list[int] = changes.flatten().nonzero().flatten().tolist()
    return [*starts, rows * length]


def _window(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """(length, length) bool, True where a token sees another; None where it sees all before it."""
    if window is None or window >= length:
        return None
    places = torch.arange(length, device=device)
    distance = places[:, None] - places[None, :]
    return (distance >= 0) & (distance < window)
