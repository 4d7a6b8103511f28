"""xlength: length-aware data loading for MMEngine / XTuner training of LLMs and VLMs.

Importing this package registers every component in mmengine's registries, so that
``custom_imports = dict(imports=['xlength'])`` is all a config needs. ``xlength.plan`` is numpy
only: while mmengine has not been imported, nothing heavy is loaded here, and the registration runs
as soon as it is.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from xlength._lazy import EXPORTS, register_when_mmengine_loads

__version__ = "0.1.0"
__all__ = ["__version__", *EXPORTS]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in EXPORTS:
        raise AttributeError(f"module 'xlength' has no attribute {name!r}")
    value = getattr(import_module(EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *EXPORTS})


register_when_mmengine_loads()
