"""Objects from nested config dicts whose ``type`` is a callable or the name of one."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

_NAMESPACES = ("transformers", "peft", "torch", "xlength")


def build(config: Any) -> Any:
    """Call what ``type`` names with the other keys as arguments, inner dicts first.

    Values without a ``type`` are kept (dicts and lists are walked, not altered in place), so an
    object that is already built passes through.

    Args:
        config: e.g. ``dict(type='AutoModelForCausalLM.from_config',
            config=dict(type='LlamaConfig', ...))``; ``type`` may also be the callable itself, as
            in a lazy config.

    Raises:
        ValueError: a name that cannot be resolved.
    """
    if isinstance(config, Mapping):
        built = {key: build(value) for key, value in config.items() if key != "type"}
        if "type" not in config:
            return built
        called = resolve(config["type"])
        return called(**built)
    if isinstance(config, (list, tuple)):
        return type(config)(build(value) for value in config)
    return config


def resolve(name: Any) -> Callable[..., Any]:
    """The callable that ``name`` means; a callable means itself.

    A name is a dotted path (``transformers.AutoTokenizer.from_pretrained``), or one that starts
    inside transformers, peft, torch or xlength (``AutoTokenizer.from_pretrained``,
    ``LoraConfig``), or one that is registered in one of mmengine's registries.

    Raises:
        ValueError: there is no such thing; names what comes close.
    """
    if callable(name):
        return name
    if not isinstance(name, str):
        raise ValueError(f"type must be a callable or the name of one, got {name!r}")
    found = _from_registries(name)
    if found is None:
        found = _from_path(name)
    if callable(found):
        return found
    close = _close_names(name)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"type {name!r} is neither registered nor importable{hint}")


def _from_registries(name: str) -> Any:
    from mmengine import registry as mm

    for registry in (mm.MODELS, mm.FUNCTIONS, mm.DATASETS, mm.TRANSFORMS):
        plain = name.rpartition(".")[2] if name.startswith("xlength.") else name
        found = registry.module_dict.get(plain)
        if found is not None:
            return found
    return None


def _from_path(name: str) -> Any:
    head, *rest = name.split(".")
    for namespace in _NAMESPACES:
        if namespace != head:
            found = _attribute(namespace, [head, *rest])
            if found is not None:
                return found
    return _attribute(head, rest)


def _attribute(module_name: str, path: list[str]) -> Any:
    """The attribute at ``path``, submodules imported on the way; None where there is none."""
    try:
        found: Any = import_module(module_name)
    except ImportError:
        return None
    for part in path:
        parent = found
        found = getattr(parent, part, None)
        if found is None and isinstance(parent, ModuleType):
            try:
                found = import_module(f"{parent.__name__}.{part}")
            except ImportError:
                return None
        if found is None:
            return None
    return found


def _close_names(name: str) -> list[str]:
    head, _, rest = name.partition(".")
    names: set[str] = set()
    for namespace in _NAMESPACES:
        try:
            names.update(dir(import_module(namespace)))
        except ImportError:
            continue
    return [
        f"{close}.{rest}" if rest else close for close in difflib.get_close_matches(head, names, 3)
    ]
