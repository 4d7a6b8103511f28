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
from typing import Any

EXPORTS: dict[str, str] = {
    "LengthGroupedSampler": "xlength.samplers.length_grouped",
    "LLaVADataset": "xlength.datasets.llava",
    "LengthPoolSortDataset": "xlength.datasets.pool_sort",
    "stream_hf_dataset": "xlength.datasets.process_stream",
    "MAP_FUNC": "xlength.registry",
    "PLANS": "xlength.registry",
    "FixedBatch": "xlength.plan.specs",
    "TokenBudget": "xlength.plan.specs",
    "Packing": "xlength.plan.packing",
    "PlanSampler": "xlength.samplers.plan",
    "PlanBatchSampler": "xlength.samplers.plan",
    "PlanGuardHook": "xlength.hooks.plan_guard",
    "PackedDataset": "xlength.datasets.packed",
    "PackedStream": "xlength.datasets.packed_stream",
    "default_collate_fn": "xlength.collate",
    "LengthConcatDataset": "xlength.datasets.concat",
    "PROMPT_TEMPLATE": "xlength.datasets.templates",
    "alpaca_map_fn": "xlength.datasets.map_fns",
    "default_map_fn": "xlength.datasets.map_fns",
    "oasst1_map_fn": "xlength.datasets.map_fns",
    "openai_map_fn": "xlength.datasets.map_fns",
    "process_hf_dataset": "xlength.datasets.process",
    "template_map_fn_factory": "xlength.datasets.templates",
    "get_lengths": "xlength.lengths",
    "packed_collate_fn": "xlength.collate_packed",
    "SupervisedFinetune": "xlength.models.sft",
    "TrainLoop": "xlength.loops",
    "LengthStatsHook": "xlength.hooks.length_stats",
    "DatasetInfoHook": "xlength.hooks.dataset_info",
    "DataStateHook": "xlength.hooks.data_state",
    "FSDPStrategy": "xlength.strategies",
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
    """Leaves imports to the ordinary finders, and registers after the one that brought mmengine.

    That is mmengine's own, or that of the outermost module of ours which imports it: one that is
    only half executed could not be imported by the others that register.
    """

    def __init__(self) -> None:
        self.searching = False
        self.executing = 0

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        wanted = fullname == "mmengine" or fullname.startswith("xlength.")
        if not wanted or self.searching:
            return None
        self.searching = True
        try:
            spec = find_spec(fullname)
        finally:
            self.searching = False
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenRegister(spec.loader, self)
        return spec


class _ThenRegister(Loader):
    """The ordinary loader of one module, which tells the finder when the module is executed."""

    def __init__(self, loader: Loader, finder: _AfterMmengine) -> None:
        self.loader = loader
        self.finder = finder

    def __getattr__(self, name: str) -> Any:  # get_code and the like, for `python -m`
        return getattr(self.loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self.loader
        self.finder.executing += 1
        try:
            self.loader.exec_module(module)
        finally:
            self.finder.executing -= 1
        done = self.finder.executing == 0 and "mmengine" in sys.modules
        if done and self.finder in sys.meta_path:
            sys.meta_path.remove(self.finder)
            register_all()
