"""Which module holds which public name, and when the components get registered.

Two wishes pull apart: ``import xlength`` must register every component in mmengine, which needs
torch, and ``import xlength.plan`` (which runs ``xlength/__init__.py`` first) must load numpy only.
So the registration waits for mmengine: it runs at once where mmengine is loaded already, and right
after mmengine's own import otherwise, whichever of the two comes first in a program.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

EXPORTS: dict[str, str] = {
    "LengthGroupedSampler": "xlength.samplers.length_grouped",
    "MAP_FUNC": "xlength.registry",
    "PLANS": "xlength.registry",
    "get_lengths": "xlength.lengths",
}


def register_all() -> None:
    """Import every module that holds a public name; each registers its components. Idempotent."""
    for module in sorted(set(EXPORTS.values())):
        import_module(module)


def register_when_mmengine_loads() -> None:
    """Register now if mmengine is loaded, else as soon as its import has finished."""
    mmengine = sys.modules.get("mmengine")
    if mmengine is None:
        sys.meta_path.insert(0, _AfterMmengine())
    elif getattr(mmengine.__spec__, "_initializing", False):
        raise ImportError("xlength was imported from inside mmengine's own import")
    else:
        register_all()


class _AfterMmengine(MetaPathFinder):
    """Lets the ordinary finders import mmengine, or a module of ours that may; then registers.

    Our modules are waited for too: one that is only half executed when it imports mmengine could
    not be imported by the others that register.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        wanted = fullname == "mmengine" or fullname.startswith("xlength.")
        if not wanted or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is None or spec.loader is None:
            sys.meta_path.insert(0, self)
            return spec
        spec.loader = _ThenRegister(spec.loader)
        return spec


class _ThenRegister(Loader):
    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = self.loader
        module.__loader__ = self.loader
        try:
            self.loader.exec_module(module)
        finally:
            if "mmengine" not in sys.modules:
                register_when_mmengine_loads()
        if "mmengine" in sys.modules:
            register_all()
