"""Mistakes in a config that can be seen before anything is built: misspelt types and keys."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mmengine import registry as mm
from mmengine.registry import DefaultScope, Registry
from mmengine.runner import FlexibleRunner, Runner
from torch.utils.data import DataLoader

from xlength.commands import InputError

_GIVEN = {
    "dataset": (),
    "sampler": ("dataset", "seed"),
    "batch_sampler": ("sampler", "batch_size"),
    "collate_fn": (),
    "hook": ("priority",),
    "scheduler": ("convert_to_iter_based", "epoch_length", "optimizer"),
    "loop": ("runner", "dataloader", "evaluator"),
    "optimizer": ("params",),
    "optim_wrapper": ("constructor", "paramwise_cfg", "optimizer"),
    "model": ("data_preprocessor",),
}
"""Keys of each kind of component that mmengine takes out or puts in."""

_LOADER_KEYS = ("dataset", "num_batch_per_epoch", "disable_subprocess_warning")
_NEEDED = ("model", "work_dir", "train_dataloader", "train_cfg", "optim_wrapper")

_MORE_SETTINGS = {"model_wrapper_cfg", "runner_type", "auto_scale_lr", "custom_imports"}
"""Read by mmengine from the config itself, not as arguments of the runner."""

Slot = tuple[str, Any, Registry, str]
"""Where a component stands in the config, the component, its registry and its kind."""


def check_config(cfg: Any) -> None:
    """Check the names of types and keys, as far as they can be known without building.

    Cost: milliseconds, besides the import of what lazy configs name.

    Raises:
        InputError: one is unknown; names the key and what comes close.
    """
    _check_top_level(cfg)
    with DefaultScope.overwrite_default_scope(cfg.get("default_scope", "mmengine")):
        for path, component, registry, kind in _slots(cfg):
            _check_component(path, component, registry, kind)
    for name in ("train_dataloader", "val_dataloader", "test_dataloader"):
        loader = cfg.get(name)
        if isinstance(loader, Mapping):
            known = [*inspect.signature(DataLoader.__init__).parameters, *_LOADER_KEYS]
            _check_keys(name, loader, known, "DataLoader")
            if "sampler" not in loader:
                raise InputError(
                    f"{name} lacks the key 'sampler'; sampler=None would read in the order of the "
                    "data, the same on every rank"
                )
            _check_plan(name, loader)
            _check_files(name, loader)


def _check_plan(name: str, loader: Mapping[str, Any]) -> None:
    """The plan's options, before data are prepared for it, and the batch sampler it needs."""
    from xlength.samplers.plans import build_plan

    sampler = loader["sampler"]
    if not isinstance(sampler, Mapping) or "plan" not in sampler:
        return
    try:
        build_plan(sampler["plan"])
    except ValueError as error:
        raise InputError(f"{name}.sampler.plan: {error}") from error
    if loader.get("batch_sampler") is None:
        raise InputError(
            f"{name}.sampler has a plan of whole batches, so {name} needs the line "
            "batch_sampler=dict(type='xlength.PlanBatchSampler')"
        )


def _check_files(name: str, loader: Mapping[str, Any]) -> None:
    """The data's files, before a model is loaded."""
    from xlength.datasets.source import refuse_empty_files

    try:
        refuse_empty_files(loader.get("dataset"))
    except ValueError as error:
        raise InputError(f"{name}.{error}") from error


def known_settings() -> set[str]:
    """Top-level keys of a config that mmengine or xlength reads."""
    known = set(inspect.signature(Runner.__init__).parameters)
    known |= set(inspect.signature(FlexibleRunner.__init__).parameters)
    return known - {"self", "cfg"} | _MORE_SETTINGS


def _check_top_level(cfg: Any) -> None:
    """A key that mmengine reads is missing, and another one looks like it."""
    known = known_settings()
    for key in cfg:
        if key not in known and isinstance(cfg.get(key), (Mapping, list)):
            close = difflib.get_close_matches(key, known - set(cfg), 1, 0.88)
            if close:
                raise InputError(f"unknown key {key!r} in the config; did you mean {close[0]!r}?")
    missing = [key for key in _NEEDED if cfg.get(key) is None]
    if missing:
        raise InputError(f"the config lacks {', '.join(missing)}")


def _slots(cfg: Any) -> Iterator[Slot]:
    yield "model", cfg.get("model"), mm.MODELS, "model"
    for part in ("train", "val", "test"):
        yield f"{part}_cfg", cfg.get(f"{part}_cfg"), mm.LOOPS, "loop"
        loader = cfg.get(f"{part}_dataloader")
        if isinstance(loader, Mapping):
            path = f"{part}_dataloader"
            yield f"{path}.dataset", loader.get("dataset"), mm.DATASETS, "dataset"
            yield f"{path}.sampler", loader.get("sampler"), mm.DATA_SAMPLERS, "sampler"
            batch_sampler = loader.get("batch_sampler")
            yield f"{path}.batch_sampler", batch_sampler, mm.DATA_SAMPLERS, "batch_sampler"
            yield f"{path}.collate_fn", loader.get("collate_fn"), mm.FUNCTIONS, "collate_fn"
    wrapper = cfg.get("optim_wrapper")
    yield "optim_wrapper", wrapper, mm.OPTIM_WRAPPERS, "optim_wrapper"
    if isinstance(wrapper, Mapping):
        yield "optim_wrapper.optimizer", wrapper.get("optimizer"), mm.OPTIMIZERS, "optimizer"
    for path, hook in _items("default_hooks", cfg.get("default_hooks")):
        yield path, hook, mm.HOOKS, "hook"
    for path, hook in _items("custom_hooks", cfg.get("custom_hooks")):
        yield path, hook, mm.HOOKS, "hook"
    for path, scheduler in _items("param_scheduler", cfg.get("param_scheduler")):
        yield path, scheduler, mm.PARAM_SCHEDULERS, "scheduler"


def _items(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        if "type" in value:
            yield path, value
        else:
            for key in value:
                yield f"{path}.{key}", value[key]
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield f"{path}[{i}]", item


def _check_component(path: str, component: Any, registry: Registry, kind: str) -> None:
    if not isinstance(component, Mapping) or "type" not in component:
        return
    name = found = component["type"]
    if isinstance(name, str):
        found = registry.get(name)
        if found is None:
            names = [key for entry in _family(registry) for key in entry.module_dict]
            raise InputError(f"unknown type {path}.type = {name!r}{did_you_mean(name, names)}")
    what = getattr(name, "__name__", str(name))
    if kind != "collate_fn":  # its first argument is the batch
        given = {*component, *_GIVEN[kind]}
        for name in required_of(found):
            if name not in given:
                hint = did_you_mean(name, given, "instead there is")
                raise InputError(f"{path} lacks the key {name!r} of {what}{hint}")
    parameters = parameters_of(found)
    if parameters is not None:
        _check_keys(path, component, [*parameters, *_GIVEN[kind]], what)


def _family(registry: Registry) -> Iterator[Registry]:
    """The registry, its ancestors, and all their descendants."""
    root = registry
    while root.parent is not None:
        root = root.parent
    stack = [root]
    while stack:
        entry = stack.pop()
        yield entry
        stack += list(entry.children.values())


def parameters_of(component: Any) -> list[str] | None:
    """Names of the arguments of a class or function; None where it takes any, or does not tell."""
    parameters = _signature(component)
    if not parameters or any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return [p.name for p in parameters]


def required_of(component: Any) -> list[str]:
    """Names of the arguments that a class or function cannot be called without."""
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        p.name for p in _signature(component) if p.default is p.empty and p.kind not in variable
    ]


def _signature(component: Any) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(component).parameters.values())
    except (TypeError, ValueError):
        return []


def _check_keys(path: str, config: Mapping[str, Any], known: Iterable[str], what: str) -> None:
    known = [*known, "type", "_scope_"]
    for key in config:
        if key not in known:
            raise InputError(f"unknown key {path}.{key} of {what}{did_you_mean(key, known)}")


def did_you_mean(name: str, known: Iterable[str], ask: str = "did you mean") -> str:
    """A hint at the names that come closest, or nothing."""
    close = difflib.get_close_matches(name, sorted(set(known)), 2)
    end = "?" if ask.startswith("did") else ""
    return f"; {ask} {' or '.join(repr(c) for c in close)}{end}" if close else ""
