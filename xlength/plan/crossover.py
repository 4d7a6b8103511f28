"""The length at which attention costs as much as the rest of a transformers model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_TWO_MATRICES = frozenset(
    ["bloom", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "mpt", "opt"]
    + ["phi", "starcoder2"]
)
"""Model types whose feed-forward layer has two matrices; all others have three (gate, up, down)."""

_ALIASES = {
    "hidden_size": ("n_embd", "d_model"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_key_value_heads": ("n_head_kv",),
    "intermediate_size": ("n_inner", "ffn_dim"),
    "head_dim": (),
    "vocab_size": (),
    "model_type": (),
    "num_experts_per_tok": (),
    "moe_intermediate_size": (),
}


def crossover_of(config: Any) -> float:
    """Length in tokens at which attention costs as much as all matrices of the model together.

    A token costs two operations per parameter that it meets, and ``4 * heads * head_dim * l`` a
    layer for its scores and sums over l positions, so the crossover is ``parameters / (2 * layers *
    heads * head_dim)`` with parameters = layers x (query, key, value and output projections +
    feed-forward matrices) + output head; of experts, those that a token meets. This is the count of
    Chowdhery et al. 2022 (PaLM), appendix B. It counts the full square: causal kernels skip half of
    it and reach less of a GPU's peak, which roughly cancel. A 7-billion-parameter Llama has 25,200.

    Args:
        config: a transformers config, its dict, or the path of a ``config.json`` or of the folder
            that holds it. Of a multimodal config the language model's part counts.

    Raises:
        ValueError: no such file, or a size is missing in it.
    """
    source = _loaded(config)
    text = _get(source, "text_config")
    source = source if text is None else text
    hidden = _size(source, "hidden_size")
    heads = _size(source, "num_attention_heads")
    layers = _size(source, "num_hidden_layers")
    kv_heads = _find(source, "num_key_value_heads") or heads
    head_dim = _find(source, "head_dim") or hidden // heads
    projections = hidden * head_dim * (2 * heads + 2 * kv_heads)
    parameters = layers * (projections + _feed_forward(source, hidden))
    parameters += hidden * (_find(source, "vocab_size") or 0)
    return round(float(parameters / (2 * layers * heads * head_dim)), 1)


def _feed_forward(source: Any, hidden: int) -> int:
    """Parameters of one feed-forward layer that a token meets."""
    matrices = 2 if _find(source, "model_type") in _TWO_MATRICES else 3
    width = _find(source, "intermediate_size") or (4 * hidden if matrices == 2 else None)
    experts = _find(source, "num_experts_per_tok")
    if experts:
        width = experts * (_find(source, "moe_intermediate_size") or width or 0)
    if not width:
        raise ValueError("cost config lacks intermediate_size, so its crossover is unknown")
    return matrices * hidden * int(width)


def _loaded(config: Any) -> Any:
    if not isinstance(config, (str, Path)):
        return config
    path = Path(config)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(
            f"cost config {str(config)!r} is no config.json and no folder that holds one; "
            "give such a path, or a loaded transformers config"
        )
    return json.loads(path.read_text(encoding="utf-8"))


def _get(source: Any, name: str) -> Any:
    return source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)


def _find(source: Any, name: str) -> Any:
    for alias in (name, *_ALIASES[name]):
        value = _get(source, alias)
        if value is not None:
            return value
    return None


def _size(source: Any, name: str) -> int:
    value = _find(source, name)
    if not value:
        raise ValueError(f"cost config lacks {name}, so its crossover is unknown")
    return int(value)
