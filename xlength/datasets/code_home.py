"""Which code belongs together: what a hash of a function looks into, and what it takes by name."""

from __future__ import annotations

import dis
import functools
import hashlib
import importlib.util
import os
import sys
import sysconfig
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def home_of(value: Any) -> str:
    """Where a function or class is at home; see ``home_of_module``."""
    return home_of_module(str(getattr(value, "__module__", None) or ""))


def home_of_module(name: str) -> str:
    """The top-level package of a module; for a script, or a file beside it, their folder."""
    top = name.partition(".")[0]
    place = _place_of(top)
    if place is None or not place.endswith(".py") or is_installed(top):
        return top
    return _folder(place)


def is_installed(home: str) -> bool:
    """Whether this is a package of Python or one that was installed, which is changed by its
    version only; False for one whose folder is on the path, or that is installed to be edited."""
    if home == "__main__" or os.path.isabs(home):
        return False
    place = _place_of(home)
    return place is None or _is_installed_folder(_folder(place))


def _place_of(top: str) -> str | None:
    """The file of a top-level module, or the folder of a package, imported or not."""
    loaded = sys.modules.get(top)
    if loaded is not None:
        folders, file = getattr(loaded, "__path__", None), getattr(loaded, "__file__", None)
    else:
        spec = _spec_of(top)
        folders = getattr(spec, "submodule_search_locations", None)
        file = getattr(spec, "origin", None)
    return next(iter(folders or ()), None) or _existing(file)


@functools.cache
def _folder(file: str) -> str:
    return str(Path(file).resolve().parent)


@functools.cache
def _is_installed_folder(folder: str) -> bool:
    standard = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")}
    return Path(folder).name in ("site-packages", "dist-packages") or Path(folder) in standard


def imported_sources(function: types.FunctionType) -> list[tuple[str, bytes]]:
    """(name, hash of the source) of the modules at the function's home that it imports itself."""
    home = home_of(function)
    package = function.__globals__.get("__package__") or ""
    found: dict[str, bytes] = {}
    if is_installed(home):
        return []
    for level, name, parts in _imports(function.__code__):
        try:
            module = importlib.util.resolve_name("." * level + name, package)
        except ImportError:
            continue
        if home_of_module(module) != home:
            continue
        for candidate in (module, *(f"{module}.{part}" for part in parts)):
            file = _file_of(candidate)
            if file is not None:
                found[candidate] = hashlib.sha256(Path(file).read_bytes()).digest()
    return sorted(found.items())


def _imports(code: types.CodeType) -> Iterator[tuple[int, str, tuple[str, ...]]]:
    """(dots before it, module, names taken from it) of each import in the code, also in functions
    defined in it."""
    before: list[Any] = [None, None]
    for step in dis.get_instructions(code):
        if step.opname == "IMPORT_NAME":
            level, names = before
            yield level or 0, str(step.argval), names or ()
        if step.opname != "EXTENDED_ARG":
            before = [before[1], step.argval]
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _imports(const)


def _file_of(module: str) -> str | None:
    """The source of a module, imported or not."""
    loaded = sys.modules.get(module)
    if loaded is not None:
        return _existing(getattr(loaded, "__file__", None))
    return _existing(getattr(_spec_of(module), "origin", None))


def _spec_of(module: str) -> Any:
    try:
        return importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError):  # no module, or one that is broken
        return None


def _existing(file: str | None) -> str | None:
    return file if file and Path(file).is_file() else None
