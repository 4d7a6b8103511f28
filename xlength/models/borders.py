"""Attention borders: the samples of a pack must not see each other, whatever computes attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from xlength.models.rope_positions import packed_rope_positions, rope_owner
from xlength.models.vlm import is_vision_language

Borders = Callable[[nn.Module, Mapping[str, Any], Tensor], dict[str, Any]]

_CU_SEQLENS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")

_chosen: WeakKeyDictionary[nn.Module, Borders] = WeakKeyDictionary()


def attention_inputs(llm: nn.Module, data: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the model that keep the samples of a packed batch apart; none for other batches.

    Flash attention gets ``cu_seqlens``. For ``sdpa``, ``eager`` and ``flex_attention`` transformers
    makes the mask from ``position_ids`` that restart at each sample (since 4.53, where neither an
    ``attention_mask`` nor a cache is given); where a model does not, a block-diagonal mask is made
    here. That the model really keeps samples apart is tried out at its first packed batch.

    Cost: at the first packed batch four passes over eight tokens; for a mask made here rows x
    length^2 bytes.

    Args:
        llm: a causal language model of transformers, bare or wrapped by peft.
        data: the batch: ``cu_seqlens`` as ``packed_collate_fn`` makes it, or ``cumulative_len``, a
            list with one tensor, as ``default_collate_fn(use_varlen_attn=True)`` does; and
            ``input_ids`` and ``position_ids``, (rows, length).

    Returns:
        Keyword arguments to add to the batch's own, or to put in their place.

    Raises:
        ValueError: this model, or its attention implementation, would let samples see each other;
            the batch has a padding mask or no position ids besides its borders.
    """
    borders = batch_borders(data)
    if borders is None:
        return {}
    if data.get("attention_mask") is not None:
        raise ValueError("a packed batch has borders, it must not have an attention_mask too")
    if data.get("position_ids") is None:
        raise ValueError("a packed batch needs position_ids that restart at each sample")
    if llm not in _chosen:
        _chosen[llm] = _choose(llm, data["input_ids"].device)
    return _inputs(llm, _chosen[llm], data, borders)


def batch_borders(data: Mapping[str, Any]) -> Tensor | None:
    """(segments + 1,) int32, where samples begin and end in the flattened rows; None: unpacked."""
    if data.get("cu_seqlens") is not None:
        borders = data["cu_seqlens"]
    elif data.get("cumulative_len") is not None:
        cumulative = data["cumulative_len"]
        if len(cumulative) != 1:
            raise ValueError(
                f"cumulative_len has {len(cumulative)} rows: default_collate_fn packs one row a "
                "batch; use packed_collate_fn for several"
            )
        borders = cumulative[0]
    else:
        return None
    rows, length = data["input_ids"].shape
    if int(borders[-1]) != rows * length:
        raise ValueError(
            f"the borders end at {int(borders[-1])}, but the batch has {rows} x {length} tokens"
        )
    return torch.as_tensor(borders, dtype=torch.int32, device=data["input_ids"].device)


def _inputs(
    llm: nn.Module, way: Borders, data: Mapping[str, Any], borders: Tensor
) -> dict[str, Any]:
    inputs = way(llm, data, borders)
    owner = rope_owner(base_model(llm))
    if owner is not None:
        inputs["position_ids"] = packed_rope_positions(owner, data, borders)
    return inputs


def _by_cu_seqlens(llm: nn.Module, data: Mapping[str, Any], borders: Tensor) -> dict[str, Any]:
    longest = data.get("max_seqlen")
    longest = int(borders.diff().max()) if longest is None else int(longest)
    values = (borders, borders, longest, longest)
    return {**dict(zip(_CU_SEQLENS, values, strict=True)), "use_cache": False}


def _by_position_ids(llm: nn.Module, data: Mapping[str, Any], borders: Tensor) -> dict[str, Any]:
    return {"use_cache": False}


def _by_mask(llm: nn.Module, data: Mapping[str, Any], borders: Tensor) -> dict[str, Any]:
    mask = block_causal_mask(borders, *data["input_ids"].shape)
    if attention_of(llm) == "eager":
        dtype = next(llm.parameters()).dtype
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
    return {"attention_mask": mask, "use_cache": False}


def block_causal_mask(borders: Tensor, rows: int, length: int) -> Tensor:
    """(rows, 1, length, length) bool: a token sees itself and those before it in its segment."""
    starts = torch.zeros(rows * length, dtype=torch.int64, device=borders.device)
    starts[borders[:-1].long()] = 1
    segment = starts.cumsum(0).view(rows, 1, length)
    same = segment.transpose(1, 2) == segment
    return (same & same.new_ones(length, length).tril()).unsqueeze(1)


def attention_of(llm: nn.Module) -> str:
    """Name of the attention implementation of the language model."""
    return str(getattr(text_config(llm), "_attn_implementation", None))


def text_config(llm: nn.Module) -> Any:
    """The config of the language model, also where it is a part of the model's."""
    config = base_model(llm).config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def base_model(llm: Any) -> Any:
    """The transformers model inside a peft wrapper, or the model itself."""
    return llm.get_base_model() if hasattr(llm, "get_base_model") else llm


def _choose(llm: nn.Module, device: torch.device) -> Borders:
    """The first way of giving borders under which a sample does not see its pack-mate."""
    _keep_from_vision(base_model(llm))
    name, attention = type(base_model(llm)).__name__, attention_of(llm)
    reasons = []
    modes = {module: module.training for module in llm.modules()}
    llm.eval()
    try:
        probe = Probe(llm, device)
        for way in _ways(llm, attention):
            reason = _leak(llm, way, probe)
            if reason is None:
                return way
            reasons.append(reason)
    finally:
        for module, mode in modes.items():
            module.training = mode
    if not reasons:
        reasons = ["nothing is known of how it takes a mask"]
    raise ValueError(
        f"{name} with attn_implementation={attention!r} cannot keep the samples of a pack apart "
        f"({'; '.join(reasons)}). Do not pack for it, or load it with another attn_implementation: "
        "'flash_attention_2', 'sdpa', 'eager'"
    )


def _keep_from_vision(model: Any) -> None:
    """Keep the borders of texts out of the vision tower, to which some models hand all keywords."""
    if is_vision_language(model):
        tower = model.get_encoder(modality="image")
        tower.register_forward_pre_hook(_without_borders, with_kwargs=True)


def _without_borders(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    return args, {key: value for key, value in kwargs.items() if key not in _CU_SEQLENS}


def _ways(llm: nn.Module, attention: str) -> list[Borders]:
    try:
        from transformers import masking_utils
    except ImportError:  # before 4.53
        makers: Mapping[str, Any] = {}
        flash = None
    else:
        makers = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
        flash = masking_utils.flash_attention_mask
    ways: list[Borders] = []
    if attention in makers and makers[attention] is flash:
        return [_by_cu_seqlens]
    if attention in makers:
        ways.append(_by_position_ids)
    if attention in ("sdpa", "eager") and not _slides(llm):
        ways.append(_by_mask)
    return ways


def _slides(llm: nn.Module) -> bool:
    """Whether some layers see a window only, which a mask made here would not respect."""
    return getattr(text_config(llm), "sliding_window", None) is not None


@torch.no_grad()
def _leak(llm: nn.Module, way: Borders, probe: Probe) -> str | None:
    """How a sample's logits depend on its pack-mate when borders are given this way; None: not."""
    try:
        first, second = (
            llm(**{**data, **_inputs(llm, way, data, probe.borders)}).logits[0, 3:]
            for data in probe.batches
        )
    except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        return f"{way.__name__[1:]} fails: {type(error).__name__}: {str(error).splitlines()[0]}"
    change = _change(first, second)
    if change <= probe.tolerance:
        return None
    return f"{way.__name__[1:]}: a sample's logits change by {change:.1%} with its pack-mate"


class Probe:
    """Two packs of two samples, of which the second is the same in both.

    Args:
        llm: the model, in evaluation mode.
        device: of its inputs.
    """

    @torch.no_grad()
    def __init__(self, llm: nn.Module, device: torch.device) -> None:
        special = _special_tokens(base_model(llm).config)
        usable = [i for i in range(1, text_config(llm).vocab_size) if i not in special][:8]
        ids = torch.tensor([(usable * 8)[:8]], device=device)
        other = torch.cat([ids[:, 3:6], ids[:, 3:]], dim=1)
        positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]], device=device)
        self.batches = [{"input_ids": each, "position_ids": positions} for each in (ids, other)]
        self.borders = torch.tensor([0, 3, 8], dtype=torch.int32, device=device)
        # Without borders the second sample does see the first; that is how much a leak shows.
        first, second = (
            llm(input_ids=each, use_cache=False).logits[0, 3:] for each in (ids, other)
        )
        exact = first.dtype in (torch.float32, torch.float64)
        self.tolerance = 2e-5 if exact else 0.05 * _change(first, second)


def _special_tokens(config: Any) -> set[int]:
    """Tokens that stand for images and the like, which a text cannot have."""
    return {
        value
        for name, value in vars(config).items()
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, int)
    }


def _change(first: Tensor, second: Tensor) -> float:
    """Largest difference, relative to the largest value; infinite where something is no number."""
    change = (first - second).abs().max() / first.abs().max().clamp(min=1e-12)
    return float(torch.nan_to_num(change.float(), nan=float("inf")))
