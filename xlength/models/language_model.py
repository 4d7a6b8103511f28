"""A transformers causal language model from a config, fitted to a tokenizer and a length."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from mmengine.logging import print_log
from torch import nn

from xlength.models.by_sample import register_sdpa_by_sample
from xlength.runtime.build import build


def build_language_model(llm: Any, max_position_embeddings: int | None = None) -> Any:
    """The model that ``llm`` describes (or is), without a cache for generation.

    Raises:
        ValueError: ``llm`` is neither a module nor a dict with a type; ``max_position_embeddings``
            is given for a model that is not loaded by ``from_pretrained``.
    """
    register_sdpa_by_sample()
    if isinstance(llm, Mapping):
        llm = dict(llm)
        if max_position_embeddings is not None:
            llm["config"] = stretched_config(llm, max_position_embeddings)
        llm = build(llm)
    elif max_position_embeddings is not None:
        raise ValueError("max_position_embeddings needs llm=dict(type=....from_pretrained, ...)")
    if not isinstance(llm, nn.Module):
        raise ValueError(f"llm must be a module or a dict with a type that builds one, got {llm!r}")
    config: Any = getattr(llm, "config", None)
    if config is not None:
        config.use_cache = False
    return llm


def stretched_config(llm: Mapping[str, Any], max_position_embeddings: int) -> Any:
    """The pretrained model's config with rotary positions stretched linearly."""
    from transformers import AutoConfig

    path = llm.get("pretrained_model_name_or_path")
    if path is None:
        raise ValueError("max_position_embeddings needs llm=dict(type=....from_pretrained, ...)")
    config = build(llm["config"]) if llm.get("config") is not None else None
    if config is None:
        config = AutoConfig.from_pretrained(
            path, trust_remote_code=llm.get("trust_remote_code", False)
        )
    current = getattr(config, "max_position_embeddings", None)
    if not current or max_position_embeddings <= current:
        print_log(
            f"max_position_embeddings={max_position_embeddings} is within the model's {current}: "
            "nothing to do.",
            "current",
        )
        return config
    factor = float(math.ceil(max_position_embeddings / current))
    print_log(f"Stretched positions from {current} to {max_position_embeddings} tokens.", "current")
    scaling = {"rope_type": "linear", "factor": factor}
    rope = getattr(config, "rope_parameters", None)
    if isinstance(rope, dict):
        config.rope_parameters = {**rope, **scaling}
    else:
        config.rope_scaling = scaling
    return config


def fit_embeddings(llm: Any, tokenizer: Any) -> None:
    """Grow the embeddings to the tokenizer's size; new ones are the mean of the old."""
    tokenizer = build(tokenizer)
    old = llm.get_input_embeddings().weight.shape[0]
    if len(tokenizer) <= old:
        return
    llm.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=64, mean_resizing=False)
    layers = [llm.get_input_embeddings(), llm.get_output_embeddings()]
    with torch.no_grad():
        for layer in {id(layer): layer for layer in layers if layer is not None}.values():
            layer.weight[old:] = layer.weight[:old].mean(dim=0, keepdim=True)
    print_log(f"Resized token embeddings from {old} to {len(tokenizer)}.", "current")
