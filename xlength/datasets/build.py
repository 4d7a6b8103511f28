"""Objects and functions that a config names: found in registries, in other libraries, or given."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mmengine.utils.misc import get_object_from_string

from xlength.registry import DATASETS, MAP_FUNC

_SHORT = {
    "load_dataset": "datasets.load_dataset",
    "load_from_disk": "datasets.load_from_disk",
    "AutoTokenizer.from_pretrained": "transformers.AutoTokenizer.from_pretrained",
}
"""Names that configs write without their library."""


def build(config: Any, what: str) -> Any:
    """Call the ``type`` of a config dict with its other entries; anything else is returned as is.

    Args:
        config: an object, or a dict with ``type``: a function or class, or the name of one.
        what: the parameter that it comes from, for errors.

    Raises:
        ValueError: there is no ``type``, it is unknown, or the call fails.
    """
    if hasattr(config, "build") and type(config).__module__ == "mmengine.config.lazy":
        config = config.build()
    if not isinstance(config, Mapping):
        return config
    options = {key: config[key] for key in config}  # a lazy config builds its values here
    if "type" not in options:
        raise ValueError(f"{what}: the config {options} needs a 'type'")
    function = find_callable(options.pop("type"), what)
    options = {key: _nested(value, what) for key, value in options.items()}
    try:
        return function(**options)
    except (NotImplementedError, RuntimeError):
        raise
    except Exception as error:
        ours = str(getattr(function, "__module__", "")).startswith("xlength.")
        if isinstance(error, ValueError) and ours:
            raise ValueError(f"{what}: {error}") from error
        name = getattr(function, "__name__", str(function))
        text = ", ".join(f"{key}={_short(value)}" for key, value in options.items())
        reason = str(error).strip().splitlines() or [""]
        raise ValueError(
            f"{what}: {name}({text}) failed: {type(error).__name__}: {reason[0]}"
        ) from error


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _nested(value: Any, what: str) -> Any:
    return build(value, what) if isinstance(value, Mapping) and "type" in value else value


def find_callable(name: Any, what: str) -> Callable[..., Any]:
    """A function or class: itself, or found by its name.

    A name is looked up in ``MAP_FUNC`` (XTuner's too, where XTuner is loaded: its tools put the
    functions of a config there and leave a string), in ``DATASETS``, and then imported.

    Raises:
        ValueError: it cannot be called, or there is none of this name.
    """
    if callable(name):
        found: Callable[..., Any] = name
        return found
    if not isinstance(name, str):
        raise ValueError(f"{what}: {name!r} is neither a function nor the name of one")
    for known in _registered():
        if name.removeprefix("xlength.") in known:
            return known[name.removeprefix("xlength.")]
    path = _SHORT.get(name, name)
    if "." in path and all(part.isidentifier() for part in path.split(".")):
        imported = get_object_from_string(path) or DATASETS.get(path)
        if callable(imported):
            return imported
    names: Iterable[str] = [key for known in _registered() for key in known]
    near = difflib.get_close_matches(name, [*names, *_SHORT], n=3)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise ValueError(f"{what}: {name!r} is in no registry and cannot be imported{hint}")


def _registered() -> list[dict[str, Any]]:
    result = [MAP_FUNC.module_dict, DATASETS.module_dict]
    xtuner = sys.modules.get("xtuner.registry")
    if xtuner is not None:
        result += [xtuner.MAP_FUNC.module_dict, xtuner.BUILDER.module_dict]
    if DATASETS.parent is not None:
        result.append(DATASETS.parent.module_dict)
    return result
