"""The registration rule, and the registries of our own.

A component of xlength can be named in four ways: ``type='xlength.X'`` in any config, also without
``custom_imports`` (mmengine imports this module by itself when it meets the scope); the plain
``type='X'`` after ``custom_imports = dict(imports=['xlength'])`` (in configs of strings only:
mmengine passes over ``custom_imports`` where a config imports its types); the class object; and
``default_scope = 'xlength'``. Nothing that another library registered is ever replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from mmengine import registry as mm
from mmengine.registry import Registry

T = TypeVar("T", bound=Callable[..., Any])


def _child(root: Registry) -> Registry:
    return Registry(root.name, parent=root, scope="xlength")


DATA_SAMPLERS = _child(mm.DATA_SAMPLERS)
DATASETS = _child(mm.DATASETS)
FUNCTIONS = _child(mm.FUNCTIONS)
HOOKS = _child(mm.HOOKS)
LOOPS = _child(mm.LOOPS)
MODELS = _child(mm.MODELS)
STRATEGIES = _child(mm.STRATEGIES)

PLANS = Registry("plan", scope="xlength")
"""How an epoch is cut into steps: ``FixedBatch``, ``TokenBudget``, ``Packing``."""

MAP_FUNC = Registry("map_fn", scope="xlength")
"""Functions that turn a row of a data set into ``{'conversation': [...]}``."""


def register(registry: Registry) -> Callable[[T], T]:
    """Register a class or function under its own name, here and in mmengine's registry.

    In mmengine's registry the plain name is taken only where it is free, so importing xlength
    neither replaces another library's component nor fails on its name; ``xlength.NAME`` always
    means ours.
    """

    def decorator(component: T) -> T:
        name = component.__name__
        registry.register_module(name=name, module=component, force=True)
        root = registry.parent
        if root is not None and name not in root.module_dict:
            root.register_module(name=name, module=component)
        return component

    return decorator
