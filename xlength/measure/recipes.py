"""How rows become tokens: chosen on the command line, or taken from a config."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from xlength.commands import InputError
from xlength.datasets.recipe import Recipe, resolve, row_pass_of
from xlength.datasets.templates import PROMPT_TEMPLATE
from xlength.measure.counting import RowCounter

NO_LIMIT = 2**31 - 1

_BY_COLUMNS = (
    ({"messages"}, "openai_map_fn"),
    ({"conversations"}, "wizardlm_map_fn"),
    ({"instruction", "output"}, "alpaca_map_fn"),
    ({"instruction_zh", "output_zh"}, "alpaca_zh_map_fn"),
    ({"system_prompt", "question", "response"}, "openorca_map_fn"),
    ({"question", "response"}, "stack_exchange_map_fn"),
    ({"input", "output"}, "default_map_fn"),
    ({"text"}, "pretrain_map_fn"),
)
"""Columns, and the map function for rows that have them; the first that fits."""

_MEDIA = ("image", "images", "video", "videos", "audio")


@dataclass
class Counting:
    """A way to count, and what it depends on.

    Args:
        counter: for the worker processes.
        how: what a measurement made otherwise would differ in; JSON values.
        side: the same for people, for the side file.
    """

    counter: RowCounter
    how: list[Any]
    side: dict[str, Any]


def from_arguments(
    row: Mapping[str, Any],
    tokenizer: str | None,
    template: str | None,
    map_fn: str | None,
    max_length: int | None,
    bad_rows: str,
) -> Counting:
    """How to count rows like ``row``.

    Args:
        row: the first of the source.
        tokenizer: name or folder; refused for rows with ``length`` or ``input_ids``, unless there
            is a ``map_fn``.
        template: name in ``PROMPT_TEMPLATE``; by default the tokenizer's own.
        map_fn: name in ``MAP_FUNC``; by default by the columns of the row.
        max_length: tokens at which rows are cut.
        bad_rows: see ``count_all``.

    Raises:
        InputError: something is missing or does not exist.
    """
    for column in ("length", "input_ids"):
        if column in row and map_fn is None:
            _refuse_to_count(column, row, tokenizer, template)
            return Counting(RowCounter(None, column), [column], {"column": column})
    if tokenizer is None:
        raise InputError("--tokenizer is needed: the name or folder of a transformers tokenizer")
    map_fn = map_fn or _map_fn_of(row)
    loaded = load_tokenizer(tokenizer)
    if template is None:
        if not getattr(loaded, "chat_template", None) and map_fn != "pretrain_map_fn":
            raise InputError(
                f"the tokenizer {tokenizer} has no chat template: choose one by --template "
                f"({', '.join(name for name in PROMPT_TEMPLATE if name != 'tokenizer')})"
            )
        template = None if map_fn == "pretrain_map_fn" else "tokenizer"
    written = template and dict(type="template_map_fn_factory", template=template)
    recipe = recipe_of(
        dict(
            tokenizer=loaded,
            max_length=max_length or NO_LIMIT,
            dataset_map_fn=map_fn,
            template_map_fn=written,
            bad_rows=bad_rows,
        )
    )
    side = dict(tokenizer=tokenizer, template=template, map_fn=map_fn, max_length=max_length)
    return from_recipe(recipe, side)


def _refuse_to_count(
    column: str, row: Mapping[str, Any], tokenizer: str | None, template: str | None
) -> None:
    """Raise InputError if lengths are known and it is said how to count them."""
    given = {"--tokenizer": tokenizer, "--template": template}
    named = [f"{name} {value}" for name, value in given.items() if value is not None]
    if named:
        fitting = (name for columns, name in _BY_COLUMNS if columns <= set(row))
        raise InputError(
            f"{' and '.join(named)}, but the rows have a column {column!r}, which says their "
            "lengths: leave out the one to take the column, or add --map-fn "
            f"{next(fitting, 'NAME')} to count the text"
        )


def _map_fn_of(row: Mapping[str, Any]) -> str:
    if any(row.get(name) for name in _MEDIA):
        raise InputError(
            "the rows have images: how many tokens an image takes is the processor's business; "
            "give a config with a LLaVADataset as SOURCE"
        )
    for columns, name in _BY_COLUMNS:
        if columns <= set(row):
            return name
    raise InputError(
        f"rows with the columns {', '.join(sorted(row))} are of no known form: choose the map "
        "function by --map-fn, e.g. alpaca_map_fn"
    )


def load_tokenizer(name: str) -> Any:
    """A tokenizer of transformers.

    Raises:
        InputError: there is none of this name.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:
        first = str(error).strip().split("\n")[0] or type(error).__name__
        raise InputError(f"--tokenizer {name}: {first}") from error


def recipe_of(options: Mapping[str, Any]) -> Recipe:
    """The recipe of arguments of ``process_hf_dataset``, with its defaults."""
    from xlength.datasets.process import process_hf_dataset

    parameters = inspect.signature(process_hf_dataset).parameters
    known = {name: p.default for name, p in parameters.items()}
    given = {**known, **options}
    given["rename_maps"] = [(old, new) for old, new in given["rename_maps"]]
    return Recipe(**{name: given[name] for name in Recipe.__dataclass_fields__})


def from_recipe(recipe: Recipe, side: Mapping[str, Any]) -> Counting:
    """Count as ``process_hf_dataset`` would.

    Raises:
        InputError: the recipe names what does not exist.
    """
    from xlength.datasets.hashing import content_hash

    try:
        map_fn, template_fn, encoder, how = resolve(recipe)
    except ValueError as error:
        raise InputError(str(error)) from error
    row_pass = row_pass_of(recipe, map_fn, template_fn, encoder, fail_fast=False)
    return Counting(RowCounter(row_pass), [content_hash(how)], dict(side))


def plain(names: Iterable[str], options: Mapping[str, Any]) -> dict[str, Any]:
    """Some options as JSON values, for the side file."""
    result = {}
    for name in names:
        value = options.get(name)
        simple = isinstance(value, (str, int, float, bool, type(None)))
        result[name] = value if simple else str(getattr(value, "__name__", value))
    return result
