"""Which exceptions, while a run is being built, are mistakes in its config, and what they say."""

from __future__ import annotations

import dis
import re
from collections.abc import Iterator, Mapping
from types import FrameType, TracebackType
from typing import Any

from xlength.runtime.config_check import did_you_mean, parameters_of

_UNEXPECTED = re.compile(r"([\w.<>]+)\(\) got an unexpected keyword argument '(\w+)'")
_MISSING = re.compile(r"([\w.<>]+)\(\) missing \d+ required [\w-]+ arguments?: (.*)")
_BUILDERS = ("mmengine.", "xlength.")
_RAISE = dis.opmap["RAISE_VARARGS"]
_NO_FILE = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)


def explain(error: BaseException, cfg: Any) -> str | None:
    """Say what is wrong in the config, in one line.

    To be asked only about errors from before the first step. An error is the config's where a file
    that it names is missing, where a component was called with arguments that it does not have, or
    where xlength's or mmengine's own checks refused a value; an error from anywhere deeper is a
    crash.

    Args:
        error: as caught.
        cfg: the config.

    Returns:
        None for a crash.
    """
    message = " ".join(str(error).split())
    frame = _innermost(error)
    module = str(frame.f_globals.get("__name__", "")) if frame is not None else ""
    unexpected = _UNEXPECTED.search(message)
    if isinstance(error, TypeError) and unexpected is not None:
        owner, key = unexpected.groups()
        paths = _paths_of(cfg, key)
        if paths:
            return f"unknown key {paths[0]} of {_short(owner)}{_hint(key, frame)}"
    if isinstance(error, _NO_FILE) or (isinstance(error, OSError) and error.errno is None):
        return message  # transformers and datasets raise plain OSErrors about models and data
    if not module.startswith(_BUILDERS) or not message:
        return None
    missing = _MISSING.search(message)
    if isinstance(error, TypeError) and missing is not None:
        return f"the config of {_short(missing[1])} lacks {missing[2]}"
    if isinstance(error, KeyError):
        return _explain_key(frame, message)
    if isinstance(error, ModuleNotFoundError):
        return f"{message} (imported by {module})"
    return message if _is_raised(error) else None


def _explain_key(frame: FrameType | None, message: str) -> str:
    if " is not in the " in message and frame is not None:
        name = frame.f_locals.get("obj_type")
        registry = frame.f_locals.get("registry")
        if isinstance(name, str) and registry is not None:
            return f"unknown type {name!r}{did_you_mean(name, registry.module_dict)}"
    asked_by = "" if frame is None else f" (asked for by {frame.f_code.co_name})"
    return f"the key {message} is missing{asked_by}"


def _innermost(error: BaseException) -> FrameType | None:
    step = _last_step(error)
    return None if step is None else step.tb_frame


def _last_step(error: BaseException) -> TracebackType | None:
    step = error.__traceback__
    while step is not None and step.tb_next is not None:
        step = step.tb_next
    return step


def _is_raised(error: BaseException) -> bool:
    """Whether a ``raise`` or an ``assert`` made the error, not an operation that failed."""
    step = _last_step(error)
    return step is not None and step.tb_frame.f_code.co_code[step.tb_lasti] == _RAISE


def _hint(key: str, frame: FrameType | None) -> str:
    """Arguments of what was called that come close to ``key``."""
    local = frame.f_locals if frame is not None else {}
    called = local.get("obj_cls") or local.get("called")
    known = parameters_of(called) if called is not None else None
    return did_you_mean(key, known) if known else ""


def _short(owner: str) -> str:
    return owner.removesuffix(".__init__").rpartition(".")[2]


def _paths_of(cfg: Any, key: str) -> list[str]:
    """Where ``key`` stands in the config."""
    return [path for path, name in _walk(cfg, "") if name == key]


def _walk(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) or hasattr(value, "_cfg_dict"):
        for key in value:
            inner = f"{path}.{key}" if path else str(key)
            yield inner, key
            yield from _walk(value[key], inner)
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _walk(item, f"{path}[{i}]")
