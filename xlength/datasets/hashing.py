"""Hashes of what a prepared data set depends on: equal in every process, other where it matters.

``datasets`` hashes what pickles, and a fast tokenizer pickles differently after its first use;
functions of installed modules it takes by name only. Here a tokenizer is hashed by what it does,
and a function by its code and by what the code refers to, as far as it is the user's own.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import re
import sys
import tempfile
import types
import uuid
from collections.abc import Mapping
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import numpy as np
from mmengine.logging import print_log

from xlength.datasets.code_home import home_of, home_of_module, imported_sources, is_installed


def content_hash(*values: Any) -> str:
    """32 hex digits over values: plain ones, containers, arrays, functions, partials, tokenizers.

    A function is hashed by its byte code, constants, defaults, closure, and the globals it names.
    Other functions, and what it names of modules, of its own top-level package (for a script: of
    the files beside it) likewise; classes of it by all their members; what it imports from there
    itself, by the text of the file; all of other packages by name. Of a package that is installed,
    not edited, functions and methods count, constants of modules and classes do not. So the hash
    changes with the minor version of Python. What cannot be hashed gets a hash of its own each
    time, and a log line.
    """
    digest = hashlib.sha256()
    for value in values:
        digest.update(_Describer().describe(value))
    return digest.hexdigest()[:32]


_BUILTIN = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    types.WrapperDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    np.ufunc,
)


class _Describer:
    """Describes one value as bytes, each object in it once."""

    def __init__(self) -> None:
        # Objects are kept alive, so that their ids stay their own.
        self.known: dict[int, tuple[Any, bytes]] = {}
        self.homes: set[str] = set()
        """Of the functions and objects so far: classes from there are described by their members,
        others by name."""

    def describe(self, value: Any) -> bytes:
        if id(value) in self.known:
            return self.known[id(value)][1]
        self.known[id(value)] = value, b"<inside itself>"
        digest = hashlib.sha256()
        for part in self._parts(value):
            data = part if isinstance(part, bytes) else self.describe(part)
            digest.update(len(data).to_bytes(8, "little") + data)
        self.known[id(value)] = value, digest.digest()
        return digest.digest()

    def _parts(self, value: Any) -> list[Any]:
        """Bytes, and values to describe in turn."""
        if value is None or value is Ellipsis or isinstance(value, bool | int | float | str):
            return [repr(value).encode("utf-8", "surrogatepass")]
        if isinstance(value, bytes | bytearray | PurePath | Enum):
            return [repr(value).encode()]
        if isinstance(value, Mapping):
            # Order counts: it can change what a function makes of the mapping.
            return [b"mapping", *(part for pair in value.items() for part in pair)]
        if isinstance(value, list | tuple):
            return [b"list" if isinstance(value, list) else b"tuple", *value]
        if isinstance(value, set | frozenset):
            return [b"set", *sorted(self.describe(item) for item in value)]
        if isinstance(value, np.ndarray | np.generic):
            array = np.asarray(value)
            if array.dtype.hasobject:
                return [b"array", array.tolist()]
            return [b"array", str(array.dtype), array.shape, array.tobytes()]
        if isinstance(value, re.Pattern):
            return [b"pattern", value.pattern, value.flags]
        if _is_tokenizer(value):
            return [b"tokenizer", tokenizer_hash(value)]
        return self._callable_parts(value)

    def _callable_parts(self, value: Any) -> list[Any]:
        if isinstance(value, functools.partial):
            return [b"partial", value.func, value.args, value.keywords]
        if isinstance(value, types.FunctionType):
            return self._function_parts(value)
        if isinstance(value, types.MethodType):
            return [b"method", value.__func__, value.__self__]
        if isinstance(value, types.CodeType):
            return self._code_parts(value)
        if isinstance(value, types.ModuleType):
            return [b"module", value.__name__]
        if isinstance(value, type):
            return [b"class", _name(value), *(_members(value) if self._is_own(value) else ())]
        if isinstance(value, staticmethod | classmethod):
            return [type(value).__name__.encode(), value.__func__]
        if isinstance(value, property):
            return [b"property", value.fget, value.fset, value.fdel]
        if isinstance(value, functools.cached_property):
            return [b"property", value.func]
        if isinstance(value, logging.Logger):  # refers to all others
            return [b"logger", value.name]
        if isinstance(value, _BUILTIN):
            return [b"builtin", _name(value)]
        return self._object_parts(value)

    def _function_parts(self, function: types.FunctionType) -> list[Any]:
        cells = [cell.cell_contents for cell in function.__closure__ or () if _filled(cell)]
        home = home_of(function)
        self.homes.add(home)
        names = _names(function.__code__)
        return [
            b"function",
            function.__code__,
            function.__defaults__,
            function.__kwdefaults__,
            cells,
            _used(names, function.__globals__, home, set()),
            imported_sources(function),
        ]

    def _is_own(self, cls: type) -> bool:
        return home_of(cls) in self.homes

    def _code_parts(self, code: types.CodeType) -> list[Any]:
        return [b"code", code.co_code, code.co_consts, code.co_names, code.co_varnames]

    def _object_parts(self, value: Any) -> list[Any]:
        """An object with state, such as an instance with ``__call__``."""
        if hasattr(value, "__dict__") and type(value).__module__ not in ("builtins", "torch"):
            self.homes.add(home_of(type(value)))
            return [b"object", type(value), vars(value)]
        try:
            from datasets.fingerprint import Hasher

            return [b"pickle", Hasher.hash(value)]
        except Exception as error:
            print_log(
                f"{type(value).__name__} object cannot be hashed ({error}): what is made with it "
                "is not found in the cache by the next start",
                logger="current",
            )
            return [uuid.uuid4().bytes]


def tokenizer_hash(tokenizer: Any) -> str:
    """32 hex digits over what a tokenizer makes of text; the same before and after its use.

    A fast tokenizer is described by its own JSON, without the padding and truncation of the last
    call; a slow one by its vocabulary and the vocabulary files that it saves. The chat template and
    the special tokens count too. Cost: writing that JSON, about 80 ms for a vocabulary of 150,000.
    """
    digest = hashlib.sha256(_name(type(tokenizer)).encode())
    if getattr(tokenizer, "is_fast", False):
        digest.update(_without_last_call(tokenizer.backend_tokenizer.to_str()).encode())
    else:
        digest.update(json.dumps(sorted(tokenizer.get_vocab().items())).encode())
        digest.update(_saved_vocabulary(tokenizer))
    for name in ("chat_template", "special_tokens_map", "split_special_tokens"):
        digest.update(repr(getattr(tokenizer, name, None)).encode())
    return digest.hexdigest()[:32]


def _without_last_call(state: str) -> str:
    """The JSON of a fast tokenizer without how it truncates and pads; reads no more of it than
    these, since the vocabulary makes it long."""
    decode = json.JSONDecoder().raw_decode
    for name in ("truncation", "padding"):
        key = f'"{name}":'
        start = state.find(key)
        if start >= 0:
            _, end = decode(state, start + len(key))
            state = state[:start] + state[end:]
    return state


def _saved_vocabulary(tokenizer: Any) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        try:
            tokenizer.save_vocabulary(folder)
        except NotImplementedError:
            return b""
        files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        return b"".join(hashlib.sha256(path.read_bytes()).digest() for path in files)


def _is_tokenizer(value: Any) -> bool:
    base = getattr(sys.modules.get("transformers"), "PreTrainedTokenizerBase", None)
    return base is not None and isinstance(value, base)


def _filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:  # a variable that has not been set yet
        return False
    return True


def _names(code: types.CodeType) -> set[str]:
    """Names that the code, and functions defined in it, look up."""
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return set(code.co_names).union(*(_names(const) for const in inner))


def _used(
    names: set[str], namespace: Mapping[str, Any], home: str, seen: set[str]
) -> list[tuple[str, Any]]:
    """(name, value) of what is named of a namespace, and of modules in it that are at home."""
    used: list[tuple[str, Any]] = []
    for name in sorted(names & set(namespace)):
        value = namespace[name]
        if isinstance(value, types.FunctionType | type) and home_of(value) != home:
            value = _name(value)
        used.append((name, value))
        if not isinstance(value, types.ModuleType) or value.__name__ in seen:
            continue
        if home_of_module(value.__name__) == home and not is_installed(home):
            seen.add(value.__name__)
            used.append((value.__name__, _used(names, vars(value), home, seen)))
    return used


def _members(cls: type) -> list[Any]:
    """(name, value) of what a class and its bases at the same home define, methods and constants,
    without what every class has; of an installed one its methods."""
    home = home_of(cls)
    installed = is_installed(home)
    bases = [base for base in cls.__mro__ if base is not object and home_of(base) == home]
    return [
        (name, value)
        for base in bases
        for name, value in sorted(vars(base).items())
        if isinstance(value, types.FunctionType) or not (installed or _is_common(name))
    ]


def _is_common(name: str) -> bool:
    return name == "_abc_impl" or (name.startswith("__") and name.endswith("__"))


def _name(value: Any) -> str:
    module = getattr(value, "__module__", "")
    return f"{module}.{getattr(value, '__qualname__', getattr(value, '__name__', repr(value)))}"
