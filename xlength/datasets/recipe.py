"""What ``process_hf_dataset`` does to the rows, as one value: resolved, hashed, carried out."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset, Features, Value, is_caching_enabled
from mmengine.logging import print_log
from numpy.typing import NDArray

from xlength.datasets import cache
from xlength.datasets.build import build, find_callable
from xlength.datasets.chat import ChatEncoder
from xlength.datasets.hashing import content_hash
from xlength.datasets.made_columns import made_features, refuse_column
from xlength.datasets.map_fns import openai_map_fn
from xlength.datasets.rows import CONVERSATION, TOKENS, VERDICT, Encoder, RowPass
from xlength.datasets.source import data_files, line_of_row, load_source, refuse_broken_line
from xlength.datasets.templates import is_chat_template
from xlength.datasets.tokenize import TurnEncoder

SEED = 0
"""Of the sample that ``max_dataset_length`` takes and of ``shuffle_before_pack``: fixed, so that
the next start finds the same rows in the cache."""

_VERSION = 2
_ROWS_PER_PROCESS = 1000


@dataclass(frozen=True)
class Recipe:
    """Those arguments of ``process_hf_dataset`` that make its rows; see there."""

    do_dataset_tokenization: bool
    tokenizer: Any
    max_length: int | None
    dataset_map_fn: Any
    template_map_fn: Any
    max_dataset_length: int | None
    split: str | None
    remove_unused_columns: bool
    rename_maps: Sequence[tuple[str, str]]
    input_ids_with_output: bool
    with_image_token: bool
    map_num_proc: int | None
    bad_rows: str


def check(recipe: Recipe) -> None:
    """Raise ValueError for arguments of ``process_hf_dataset`` that are of no use."""
    if recipe.bad_rows not in ("error", "skip"):
        raise ValueError(f"bad_rows={recipe.bad_rows!r} must be 'error' or 'skip'")
    for name in ("max_length", "max_dataset_length"):
        value = getattr(recipe, name)
        if value is not None:
            check_whole(name, value)
    if recipe.do_dataset_tokenization:
        for name in ("tokenizer", "max_length"):
            if getattr(recipe, name) is None:
                raise ValueError(f"do_dataset_tokenization=True needs {name}")


def check_whole(name: str, value: Any) -> None:
    """Raise ValueError for an argument that is no whole number of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}={value!r} must be a whole number of at least 1")


def prepare_rows(dataset: Any, recipe: Recipe) -> Path:
    """Make the folder of prepared rows (see ``xlength.datasets.cache``), or find it."""
    source = load_source(dataset, recipe.split)
    rows, origin = sample_rows(source, recipe.max_dataset_length)
    map_fn, template_fn, encoder, how = resolve(recipe)
    folder = folder_of(source, rows, how)
    if not is_caching_enabled():
        cache.remove(folder)
    if cache.exists(folder):
        print_log(f"process_hf_dataset: rows prepared before, in {folder}", logger="current")
        return folder
    fail_fast = recipe.bad_rows == "error"
    row_pass = row_pass_of(recipe, map_fn, template_fn, encoder, fail_fast)
    features = _choose_columns(rows, row_pass, recipe.remove_unused_columns)
    num_proc = _num_processes(recipe.map_num_proc, len(rows))
    files = data_files(dataset, recipe.split)

    def where(place: int) -> str:
        row = place if origin is None else int(origin[place])
        return f"row {row}{line_of_row(files, row)}"

    def judge(counts: dict[str, Any]) -> dict[str, Any]:
        counts = _name_rows(counts, where)
        malformed = counts["malformed"]
        if malformed["count"] and recipe.bad_rows == "error":
            _refuse(malformed, counts, rows, row_pass)
        if not counts["kept"]:
            raise ValueError(f"dataset: none of its {len(rows)} rows is left: {_losses(counts)}")
        return {"loaded": len(source), "counts": counts, "renames": list(recipe.rename_maps)}

    try:
        cache.write(folder, rows, row_pass, features, num_proc, judge)
    except UnicodeDecodeError as error:
        refuse_broken_line(dataset, error)
        raise ValueError(f"dataset: a string in it is no UTF-8: {error}") from error
    except (pa.ArrowException, TypeError, OverflowError) as error:
        refuse_column(rows, row_pass, features, where, error)
        raise
    return folder


def folder_of(source: Dataset, rows: Dataset, how: list[Any]) -> Path:
    """Where the prepared rows are kept: named by what is read from where, and what is done with it,
    so that it is the same in every process."""
    key = content_hash(_VERSION, source._fingerprint, source.column_names, len(rows), SEED, how)
    return cache.folder_of(key)


def report(state: Mapping[str, Any], recipe: Recipe) -> None:
    """Log rows in and out of each stage, and a warning for what was left out or cut."""
    counts = state["counts"]
    rows = counts["rows"]
    lines = [("load", state["loaded"], state["loaded"])]
    if recipe.max_dataset_length is not None:
        lines.append(("max_dataset_length", state["loaded"], rows))
    usable = rows - counts["malformed"]["count"]
    talking = usable - counts["empty"]["count"]
    if recipe.dataset_map_fn is not None or recipe.template_map_fn is not None:
        lines.append(("map and template", rows, talking))
    if recipe.do_dataset_tokenization:
        lines.append(("tokenise", talking, talking))
    if recipe.input_ids_with_output:
        lines.append(("labels", talking, counts["kept"]))
    for stage, rows_in, rows_out in lines:
        print_log(f"process_hf_dataset: {stage}: {rows_in} -> {rows_out} rows", logger="current")
    print_log(
        f"process_hf_dataset: {counts['kept']} rows with {counts['tokens']} tokens",
        logger="current",
    )
    losses = _losses(counts)
    if losses:
        print_log(f"process_hf_dataset: {losses}", logger="current", level=logging.WARNING)
    lost = counts["lost"]
    if lost["count"]:
        print_log(
            f"process_hf_dataset: not kept: {', '.join(lost['names'])}, which dataset_map_fn makes "
            f"of {lost['count']} rows only, the first is {lost['where']}; make it of all rows, "
            "None where there is nothing, to keep it",
            logger="current",
            level=logging.WARNING,
        )


def _losses(counts: Mapping[str, Any]) -> str:
    texts = {
        "malformed": "malformed and left out",
        "empty": "without a conversation and left out",
        "untrained": "without a trainable label and left out",
        "cut": f"cut at max_length, {counts['cut_tokens']} tokens lost",
    }
    return "; ".join(
        f"{counts[kind]['count']} rows {text}, the first is {counts[kind]['where']}"
        for kind, text in texts.items()
        if counts[kind]["count"]
    )


def sample_rows(source: Dataset, limit: int | None) -> tuple[Dataset, NDArray[np.int64] | None]:
    """The rows to take, and where they stand in the source; None: all of them."""
    if limit is None or limit >= len(source):
        return source, None
    origin = np.sort(np.random.default_rng(SEED).choice(len(source), limit, replace=False))
    return source.select(origin), origin


def resolve(recipe: Recipe) -> tuple[Any, Any, Encoder | None, list[Any]]:
    """Map function, template function, encoder, and what all three depend on."""
    map_fn = template_fn = None
    encoder: Encoder | None = None
    if recipe.dataset_map_fn is not None:
        map_fn = find_callable(recipe.dataset_map_fn, "dataset_map_fn")
    if recipe.template_map_fn is not None:
        given = recipe.template_map_fn
        template_fn = given if callable(given) else None
        if isinstance(given, str):
            template_fn = find_callable(given, "template_map_fn")
        template_fn = template_fn or build(given, "template_map_fn")
    template = getattr(template_fn, "keywords", {}).get("template")
    options: dict[str, Any] = dict(
        max_length=recipe.max_length, with_image_token=recipe.with_image_token
    )
    tokenizer = None
    if recipe.do_dataset_tokenization:
        tokenizer = build(recipe.tokenizer, "tokenizer")
        if is_chat_template(template):
            if not recipe.input_ids_with_output:
                raise ValueError("template 'tokenizer' needs input_ids_with_output=True")
            template_fn = None
            options["messages_column"] = map_fn is None or map_fn is openai_map_fn
            encoder = ChatEncoder(tokenizer, **options)
        else:
            options["input_ids_with_output"] = recipe.input_ids_with_output
            encoder = TurnEncoder(tokenizer, **options)
    how = [
        map_fn,
        template_fn,
        type(encoder).__name__,
        tokenizer,
        options,
        recipe.rename_maps,
        recipe.remove_unused_columns,
        recipe.input_ids_with_output,
        recipe.bad_rows,
    ]
    return map_fn, template_fn, encoder, how


def row_pass_of(
    recipe: Recipe, map_fn: Any, template_fn: Any, encoder: Encoder | None, fail_fast: bool
) -> RowPass:
    """The pass over the rows with what ``resolve`` found, which keeps no column so far."""
    return RowPass(
        map_fn=map_fn,
        template_fn=template_fn,
        renames=dict(recipe.rename_maps),
        encoder=encoder,
        with_labels=recipe.input_ids_with_output,
        keep=[],
        fail_fast=fail_fast,
    )


def _choose_columns(rows: Dataset, row_pass: RowPass, remove_unused: bool) -> Features:
    """Set which columns the pass makes; returns the types of all that are kept."""
    made = made_features(rows, row_pass, remove_unused)
    has_turns = row_pass.map_fn is not None or row_pass.template_fn is not None
    for old in row_pass.renames:
        if (
            old not in made
            and old not in rows.features
            and not (has_turns and old == "conversation")
        ):
            raise ValueError(
                f"rename_maps: there is no column {old!r}; there are {[*rows.features, *made]}"
            )
    made = Features({row_pass.renames.get(name, name): kind for name, kind in made.items()})
    if has_turns:
        made["conversation"] = CONVERSATION
    kept = Features({} if remove_unused else {**rows.features, **made})
    if row_pass.encoder is None:
        for name in TOKENS:
            kind = made.get(name, rows.features.get(name))
            if kind is not None:
                kept[name] = kind
    row_pass.keep_all = not remove_unused
    row_pass.keep = [name for name in made if name in kept and name not in TOKENS] + (
        [name for name in TOKENS if name in made] if row_pass.encoder is None else []
    )
    tokens = TOKENS if row_pass.encoder is not None else {}
    return Features({**kept, **tokens, "length": Value("int64"), **VERDICT})


def _num_processes(limit: int | None, num_rows: int) -> int:
    """Processes to use: no more than cores, and each with enough to do."""
    available = getattr(os, "sched_getaffinity", None)
    cores = len(available(0)) if available else os.cpu_count() or 1
    wanted = limit or 1
    used = max(1, min(wanted, cores, num_rows // _ROWS_PER_PROCESS))
    if used < wanted:
        print_log(
            f"process_hf_dataset: map_num_proc={wanted} clipped to {used} ({cores} cores, "
            f"{num_rows} rows)",
            logger="current",
        )
    return used


def _name_rows(counts: dict[str, Any], where: Callable[[int], str]) -> dict[str, Any]:
    """Say of the first row of each kind where it stands in the source."""
    for kind in ("malformed", "empty", "untrained", "cut", "lost"):
        first = counts[kind]["first"]
        if first is not None:
            counts[kind]["where"] = where(first)
    return counts


def _refuse(
    malformed: Mapping[str, Any], counts: Mapping[str, Any], rows: Dataset, row_pass: RowPass
) -> None:
    """Raise for malformed rows, from what the first of them raised."""
    cause: Exception | None = None
    try:
        row_pass.run(rows[malformed["first"]])
    except Exception as error:
        cause = error
    raise ValueError(
        f"dataset: {malformed['count']} of {counts['rows']} rows are malformed; the first is "
        f"{malformed['where']}: {counts['reasons'][0]} (bad_rows='skip' leaves such rows out)"
    ) from cause
