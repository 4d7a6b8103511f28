"""What a config trains on, and how its sampler orders it."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from xlength.commands import InputError
from xlength.plan.groups import Ints
from xlength.report.measures import Strategy
from xlength.report.sources import Source


def from_config(
    config: str,
    options: Mapping[str, Any] | None,
    world_size: int,
    seed: int,
    stream_samples: int | None = None,
) -> Source:
    """The lengths of a config's training data, and its sampler as a strategy.

    The data set is built as training builds it, which may tokenise it (once, cached).

    Args:
        config: file or name.
        options: settings that override the config's.
        world_size: data-parallel ranks.
        seed: of the sampler.
        stream_samples: how many samples of a stream to read for their lengths; None refuses one.

    Raises:
        InputError: it has no training data that can be indexed, or a mistake.
    """
    from xlength.lengths import get_lengths
    from xlength.runtime.config_file import read_config

    cfg = read_config(config, options)
    loader, dataset = open_config(cfg, config)
    if is_stream(dataset):
        if stream_samples is None:
            raise InputError(
                f"{config} trains on a stream ({type(dataset).__name__}), for which nothing can be "
                "planned: add --stream to see which pool it needs"
            )
        lengths, is_pool = _read_stream(dataset, stream_samples)
        source = Source(Path(cfg.filename).name, lengths, pool=is_pool)
        source.batch_size = _int(loader.get("batch_size"))
        return source
    name = length_property_of(loader, dataset)
    source = Source(Path(cfg.filename).name, get_lengths(dataset, name), length_property=name)
    source.two_modalities = "modality" in name
    source.media = source.two_modalities or hasattr(dataset, "modality_length")
    source.batch_size = _int(loader.get("batch_size"))
    if _has_packs(dataset):
        _look_into_packs(source, dataset)
    else:
        sampler = _sampler(loader, dataset, world_size, seed)
        source.strategy = _strategy(sampler, loader, dataset, world_size)
        _compare_at(source, getattr(sampler, "plan", None))
    wrapper = cfg.get("optim_wrapper") or {}
    source.accumulate = _int(wrapper.get("accumulative_counts")) or 1
    if not assigns_loader(Path(cfg.filename)):
        source.merge = list(loader)
    return source


def _compare_at(source: Source, plan: Any) -> None:
    """Compare other strategies at what a plan allows in a batch."""
    if plan is None:
        return
    mean = float(np.abs(source.lengths).mean())
    limit = getattr(plan, "max_tokens", getattr(plan, "max_length", None))
    fitting = 1 if limit is None else max(1, round(limit / mean))
    source.batch_size = getattr(plan, "batch_size", fitting)
    source.max_tokens = limit


def _has_packs(dataset: Any) -> bool:
    columns = getattr(dataset, "column_names", None) or ()
    return hasattr(dataset, "packs") or "cumulative_len" in columns


def _look_into_packs(source: Source, dataset: Any) -> None:
    """Compare strategies on the samples in packs that are ready, where they are known."""
    packs = source.lengths
    source.packs = True
    fill = float(packs.mean()) / float(packs.max())
    source.notes.append(
        f"this config trains on {len(packs):,} ready packs of up to {int(packs.max()):,} tokens, "
        f"{fill:.1%} full"
    )
    samples = getattr(dataset, "sample_lengths", None)
    if samples is None:
        source.notes[-1] += (
            "; what is in them is not known here, so the strategies below batch whole packs: add "
            "--cfg-options train_dataloader.dataset.pack_to_max_length=False to compare on samples"
        )
        return
    source.lengths = np.asarray(samples, dtype=np.int64)
    source.max_tokens = int(packs.max())
    source.batch_size = max(1, round(float(packs.mean()) / float(source.lengths.mean())))
    source.notes[-1] += (
        f"; the strategies below batch the {len(samples):,} samples in them. To take one, give the "
        "loader the samples (the data set inside) and a plan; Packing makes other packs each epoch"
    )


def is_stream(dataset: Any) -> bool:
    """Whether it can only be read from its beginning."""
    from torch.utils.data import IterableDataset

    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")


def _read_stream(dataset: Any, count: int) -> tuple[Ints, bool]:
    """Lengths of the first samples of a stream, and whether a pool sorts it already."""
    from xlength.datasets.pool_key import SampleCost
    from xlength.datasets.pool_sort import LengthPoolSortDataset
    from xlength.plan.cost import TOKENS

    is_pool = isinstance(dataset, LengthPoolSortDataset)
    cost = dataset.cost if is_pool else SampleCost("length", TOKENS)
    inner = dataset.dataset if is_pool else dataset
    try:
        samples = islice(iter(inner() if callable(inner) else inner), count)
        lengths = [cost.length(sample, i) for i, sample in enumerate(samples)]
    except (ValueError, OSError) as error:
        raise InputError(f"the stream cannot be read: {error}") from error
    return np.array(lengths, dtype=np.int64), is_pool


def parse_options(pairs: Sequence[str] | None) -> dict[str, Any]:
    """The pairs of ``--cfg-options``, values read as mmengine reads them."""
    from mmengine.config import DictAction

    read = DictAction(["--cfg-options"], "options", nargs="+")
    found = argparse.Namespace(options={})
    for pair in pairs or ():
        if "=" not in pair:
            raise InputError(f"--cfg-options takes KEY=VALUE, got {pair!r}")
        try:
            read(argparse.ArgumentParser(), found, [pair])
        except AssertionError as error:  # of brackets
            raise InputError(f"--cfg-options {pair}: {error}") from error
    return dict(found.options)


def open_config(cfg: Any, name: str) -> tuple[Mapping[str, Any], Any]:
    """The ``train_dataloader`` of a config, and its data set, built as training builds it.

    Raises:
        InputError: there is none, or it cannot be built.
    """
    from mmengine.registry import DATASETS, DefaultScope

    from xlength.datasets.source import refuse_empty_files

    loader = cfg.get("train_dataloader")
    if not isinstance(loader, Mapping) or loader.get("dataset") is None:
        raise InputError(f"{name} has no train_dataloader with a dataset")
    dataset = loader["dataset"]
    if not isinstance(dataset, Mapping):
        return loader, dataset
    with DefaultScope.overwrite_default_scope(cfg.get("default_scope", "mmengine")):
        try:
            refuse_empty_files(dataset)
            return loader, DATASETS.build(dataset)
        except (ValueError, OSError, KeyError) as error:
            raise InputError(f"{name}, train_dataloader.dataset: {error}") from error


def assigns_loader(file: Path) -> bool:
    """Whether a config file itself assigns ``train_dataloader``, not only its ``_base_``."""
    try:
        body = ast.parse(file.read_text(encoding="utf-8")).body
    except (OSError, SyntaxError):
        return False
    targets = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    return any(isinstance(t, ast.Name) and t.id == "train_dataloader" for t in targets)


def length_property_of(loader: Any, dataset: Any) -> str:
    """Where the sampler of a config finds the lengths."""
    given = (loader.get("sampler") or {}).get("length_property")
    if isinstance(given, str):
        return given
    return "modality_length" if hasattr(dataset, "modality_length") else "length"


def strategy_of_config(
    loader: Mapping[str, Any], dataset: Any, world_size: int, seed: int
) -> Strategy | None:
    """The sampler of a ``train_dataloader``, as on the first of ``world_size`` ranks.

    None where its order is not known beforehand.
    """
    sampler = _sampler(loader, dataset, world_size, seed)
    return _strategy(sampler, loader, dataset, world_size)


def _sampler(loader: Mapping[str, Any], dataset: Any, world_size: int, seed: int) -> Any:
    from mmengine.registry import DATA_SAMPLERS

    sampler = dict(loader.get("sampler") or {})
    kind = sampler.get("type")
    cls = DATA_SAMPLERS.get(kind) if isinstance(kind, str) else kind
    if cls is None or is_stream(dataset):
        return None
    if sampler.get("seed") is None:
        sampler["seed"] = seed
    if str(getattr(cls, "__module__", "")).startswith("xlength."):
        sampler.setdefault("dp_rank", 0)
        sampler.setdefault("dp_world_size", world_size)
    try:
        return DATA_SAMPLERS.build({**sampler, "type": kind}, default_args=dict(dataset=dataset))
    except ValueError as error:
        raise InputError(f"train_dataloader.sampler: {error}") from error


def _strategy(
    sampler: Any, loader: Mapping[str, Any], dataset: Any, world_size: int
) -> Strategy | None:
    from xlength.report.samplers import strategy_of

    if sampler is None:
        return None
    collate = (loader.get("collate_fn") or {}).get("type", "")
    packed = "packed_collate_fn" in str(getattr(collate, "__name__", collate))
    batch_size = None if loader.get("batch_sampler") else _int(loader.get("batch_size"))
    return strategy_of(sampler, batch_size, len(dataset), world_size, packed)


def _int(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
