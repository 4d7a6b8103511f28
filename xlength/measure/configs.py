"""The lengths of a config's training data."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from xlength.commands import InputError

_SHOWN = ("tokenizer", "dataset_map_fn", "template_map_fn", "max_length")


def measure_config(args: argparse.Namespace, out: Path) -> int:
    """Measure ``train_dataloader.dataset``.

    A ``process_hf_dataset`` that was not prepared before is counted in blocks, to be continued when
    killed; any other data set is built as training builds it, and asked for its lengths.
    """
    from xlength.report.configs import parse_options
    from xlength.runtime.config_file import find_config, read_config

    find_config(args.source)  # first: what is no file may have been meant as one of chats

    for name in ("tokenizer", "template", "map_fn"):
        if getattr(args, name) is not None:
            raise InputError(f"--{name.replace('_', '-')} is the config's own: use --cfg-options")
    cfg = read_config(args.source, parse_options(args.cfg_options))
    loader = cfg.get("train_dataloader")
    dataset = loader.get("dataset") if isinstance(loader, Mapping) else None
    if isinstance(dataset, Mapping) and _can_be_counted(dataset):
        return _count(args, out, dataset)
    return _build(args, out, cfg)


def _can_be_counted(dataset: Mapping[str, Any]) -> bool:
    kind = dataset.get("type")
    name = str(getattr(kind, "__name__", kind)).rpartition(".")[2]
    return name == "process_hf_dataset" and not dataset.get("pack_to_max_length", True)


def _count(args: argparse.Namespace, out: Path, dataset: Mapping[str, Any]) -> int:
    from xlength.commands.measure import measure_parts
    from xlength.datasets import cache
    from xlength.datasets.recipe import folder_of, resolve, sample_rows
    from xlength.datasets.source import data_files, line_of_row, load_source
    from xlength.measure.recipes import from_recipe, plain, recipe_of
    from xlength.measure.sources import table_part

    options = {key: dataset[key] for key in dataset if key not in ("type", "dataset")}
    try:
        recipe = recipe_of(options)
        source = load_source(dataset.get("dataset"), recipe.split)
        rows, origin = sample_rows(source, recipe.max_dataset_length)
        prepared = folder_of(source, rows, resolve(recipe)[3])
    except (ValueError, KeyError) as error:
        raise InputError(f"{args.source}, train_dataloader.dataset: {error}") from error
    if cache.exists(prepared):
        lengths = np.asarray(cache.read(prepared)[0]["length"], dtype=np.int64)
        return _write(args, out, lengths, plain(("max_length",), options))
    counting = from_recipe(recipe, plain(_SHOWN, options))
    part = table_part(Path(args.source).name, rows)
    files = data_files(dataset.get("dataset"), recipe.split)

    def where(place: int) -> str:
        row = place if origin is None else int(origin[place])
        return f"row {row}{line_of_row(files, row)}"

    part.where = where
    args.bad_rows = recipe.bad_rows
    return measure_parts(args, out, [part], counting)


def _build(args: argparse.Namespace, out: Path, cfg: Any) -> int:
    from xlength.lengths import get_lengths
    from xlength.report.configs import is_stream, length_property_of, open_config

    loader, dataset = open_config(cfg, args.source)
    if is_stream(dataset):
        raise InputError(
            f"{args.source} trains on a stream, whose lengths are not known: xlength report "
            f"{args.source} --stream reads a sample of it"
        )
    name = length_property_of(loader, dataset)
    try:
        lengths = get_lengths(dataset, name)
    except ValueError as error:
        raise InputError(f"{args.source}: {error}") from error
    two = "modality" in name
    facts = {"length_property": name, "media": two, "two_modalities": two}
    return _write(args, out, lengths, facts)


def _write(args: argparse.Namespace, out: Path, lengths: Any, facts: Mapping[str, Any]) -> int:
    from xlength.commands.measure import assumption, say, write_side_file
    from xlength.measure.journal import write_lengths

    out.parent.mkdir(parents=True, exist_ok=True)
    write_lengths(out, lengths, len(lengths))
    parts = [(Path(args.source).name, len(lengths))]
    write_side_file(out, lengths, parts, {**facts, "source": args.source}, {})
    say(out, lengths, assumption(facts) if "max_length" in facts else "as training has them")
    if facts.get("two_modalities"):
        from xlength.datasets.modality import format_measure, measure

        print(format_measure(measure(lengths)))
    return 0
