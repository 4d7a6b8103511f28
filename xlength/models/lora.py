"""LoRA through peft: wrap the language model, and keep checkpoints to what is trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from xlength.runtime.build import build


def require_peft() -> Any:
    """The peft module.

    Raises:
        ImportError: it is not installed; says how to.
    """
    try:
        import peft
    except ImportError as error:
        raise ImportError(
            "lora= needs peft, which is not installed: pip install 'xlength[lora]'"
        ) from error
    return peft


def add_lora(llm: nn.Module, lora: Any, activation_checkpointing: bool) -> nn.Module:
    """Wrap ``llm`` in a peft model whose adapters alone are trained.

    Args:
        llm: a transformers model. One loaded in 4 or 8 bits is prepared as peft asks for.
        lora: a ``peft.LoraConfig``, or a dict with ``type=LoraConfig``. Without ``target_modules``
            all linear layers but the output layer get an adapter.
        activation_checkpointing: whether it is on.
    """
    peft = require_peft()
    config = build(lora)
    if not isinstance(config, peft.PeftConfig):
        raise ValueError(f"lora must be a peft config or a dict with a type, got {lora!r}")
    if getattr(config, "target_modules", None) is None:
        config.target_modules = "all-linear"
    if getattr(llm, "is_loaded_in_4bit", False) or getattr(llm, "is_loaded_in_8bit", False):
        llm = peft.prepare_model_for_kbit_training(llm, activation_checkpointing)
    return peft.get_peft_model(llm, config)


def keep_trained(module: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a state dict of ``module`` that belong to trained parameters."""
    trained = trained_names(module)
    return {name: value for name, value in state.items() if name in trained}


def trained_names(module: nn.Module) -> set[str]:
    """Names, as in the state dict, of the parameters that are trained."""
    named = module.named_parameters(remove_duplicate=False)
    return {name for name, p in named if p.requires_grad}
