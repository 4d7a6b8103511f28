"""``process_hf_dataset``: from text to token ids, labels and lengths."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from mmengine.logging import print_log

from xlength.datasets import cache
from xlength.datasets.prepare import check_same_everywhere, on_one_rank_per_node
from xlength.datasets.recipe import SEED, Recipe, check, prepare_rows, report
from xlength.lengths import get_lengths
from xlength.plan.groups import fingerprint
from xlength.registry import DATASETS, register

_PACKING = "xlength.datasets.concat_pack"


@register(DATASETS)
def process_hf_dataset(
    dataset: Any,
    do_dataset_tokenization: bool = True,
    tokenizer: Any = None,
    max_length: int | None = None,
    dataset_map_fn: Any = None,
    template_map_fn: Any = None,
    max_dataset_length: int | None = None,
    split: str | None = "train",
    remove_unused_columns: bool = False,
    rename_maps: Sequence[Sequence[str]] = (),
    shuffle_before_pack: bool = True,
    pack_to_max_length: bool = True,
    use_varlen_attn: bool = False,
    input_ids_with_output: bool = True,
    with_image_token: bool = False,
    map_num_proc: int | None = 32,
    *,
    bad_rows: str = "error",
) -> Dataset:
    """Prepare text for fine-tuning: map, write with a template, tokenise, leave out, pack.

    XTuner's arguments, and its token ids and labels. In a config::

        train_dataset = dict(
            type='process_hf_dataset',
            dataset=dict(type='load_dataset', path='json', data_files='chats.jsonl'),
            tokenizer=dict(type='AutoTokenizer.from_pretrained', ...), max_length=2048,
            dataset_map_fn='openai_map_fn',
            template_map_fn=dict(type='template_map_fn_factory', template='qwen_chat'),
            pack_to_max_length=False)

    The rows are mapped, written and tokenised in one pass, in batches, and kept in the cache
    folder of ``datasets`` under a hash of the source, the functions' code, the tokenizer's content
    and the arguments: the next start reads them from there. Rows in and out of each stage are
    logged; what is left out or cut is counted, and the first such row named.

    With several ranks one of each node prepares, and the others wait on the host; see
    ``xlength.datasets.prepare``.

    Cost: once, one call of the tokenizer for 256 rows, on ``map_num_proc`` processes; 8 bytes a
    token on disk. Later starts load the source and map the result: about a second.

    Args:
        dataset: ``datasets.Dataset``, ``DatasetDict``, or a config dict whose ``type`` returns one.
        do_dataset_tokenization: False where the rows have ``input_ids`` and ``labels``.
        tokenizer: of transformers, or a config dict of one.
        max_length: tokens; longer rows are cut at their end.
        dataset_map_fn: row -> ``{'conversation': turns}``; a function, or its name in ``MAP_FUNC``
            or to import. See ``xlength.datasets.map_fns``.
        template_map_fn: writes the turns for a model; a function, its name, or a config dict, as a
            rule of ``template_map_fn_factory``. The template ``tokenizer`` stands for the
            tokenizer's own; it takes the ``messages`` of the rows as they are where
            ``dataset_map_fn`` is None or ``openai_map_fn``.
        max_dataset_length: take this many rows, drawn with a fixed seed, in file order.
        split: of a ``DatasetDict``; None takes all.
        remove_unused_columns: keep only ``input_ids``, ``labels`` and ``length``; always so with
            packing.
        rename_maps: (old, new) names of columns, after map and template.
        shuffle_before_pack: with a fixed seed.
        pack_to_max_length: lay the rows end to end and cut every ``max_length`` tokens.
        use_varlen_attn: packs know the borders of their samples.
        input_ids_with_output: False tokenises the inputs only, for tests; then there are no labels
            to learn.
        with_image_token: put -200 where an input has ``<image>``.
        map_num_proc: worker processes at most; no more than cores, and 1,000 rows each.
        bad_rows: what to do with rows that the map function or the template refuses: ``'error'``
            raises once for all of them, ``'skip'`` leaves them out, counted.

    Returns:
        Memory-mapped, with columns ``input_ids`` and ``labels`` (int32 lists) and ``length``
        (int64); and with ``length`` as an attribute, a list, which XTuner's own sampler insists on.

    Raises:
        ValueError: an argument, the source or rows are unusable, or no row is left.
        NotImplementedError: packing is asked for and not built.
        RuntimeError: the rank that prepares failed (on the others).
    """
    if use_varlen_attn and not pack_to_max_length:
        raise ValueError("use_varlen_attn=True needs pack_to_max_length=True")
    if pack_to_max_length:
        _check_packing(split, max_length)
    if pack_to_max_length and not remove_unused_columns:
        print_log("process_hf_dataset: packing removes unused columns.", logger="current")
        remove_unused_columns = True
    recipe = Recipe(
        do_dataset_tokenization=do_dataset_tokenization,
        tokenizer=tokenizer,
        max_length=max_length,
        dataset_map_fn=dataset_map_fn,
        template_map_fn=template_map_fn,
        max_dataset_length=max_dataset_length,
        split=split,
        remove_unused_columns=remove_unused_columns,
        rename_maps=[(old, new) for old, new in rename_maps],
        input_ids_with_output=input_ids_with_output,
        with_image_token=with_image_token,
        map_num_proc=map_num_proc,
        bad_rows=bad_rows,
    )
    check(recipe)

    def finish(folder: Path) -> Dataset:
        rows, state = cache.read(folder)
        report(state, recipe)
        if pack_to_max_length:
            from xlength.datasets.concat_pack import pack_dataset

            assert max_length is not None
            rows = pack_dataset(
                rows, max_length, use_varlen_attn, shuffle_before_pack, SEED, map_num_proc
            )
        return _with_lengths(rows)

    made: list[Dataset] = []

    def prepare() -> str:
        folder = prepare_rows(dataset, recipe)
        made.append(finish(folder))  # packs are cached too before the others read them
        return str(folder)

    folder = on_one_rank_per_node(prepare)
    result = made[0] if made else finish(Path(folder))
    lengths = np.array(result.length)
    check_same_everywhere(fingerprint(lengths), "the prepared data set")
    return result


def _with_lengths(rows: Dataset) -> Dataset:
    lengths = get_lengths(rows)
    if "length" not in rows.column_names:
        rows = rows.add_column("length", lengths)
    rows.length = lengths.tolist()
    return rows


def _check_packing(split: str | None, max_length: int | None) -> None:
    if split not in ("train", None):
        raise ValueError(f"pack_to_max_length=True is for training: split={split!r}")
    if max_length is None:
        raise ValueError("pack_to_max_length=True needs max_length")
    if find_spec(_PACKING) is None:
        raise NotImplementedError(
            f"pack_to_max_length=True needs concat packing ({_PACKING}), which is not built yet: "
            "set pack_to_max_length=False"
        )
