"""``stream_hf_dataset``: from a stream of text to a stream of token ids, labels and lengths."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from datasets import Features, IterableDataset, Value
from mmengine.logging import print_log

from xlength.datasets.build import build
from xlength.datasets.recipe import Recipe, check, check_whole, resolve
from xlength.datasets.rows import EMPTY, KEPT, MALFORMED, TOKENS, RowPass
from xlength.datasets.stream_errors import name_broken_lines, place_of
from xlength.registry import DATASETS, register

_WHY = {EMPTY: "without a conversation"}
_COLUMNS = (*TOKENS, "length")


@register(DATASETS)
def stream_hf_dataset(
    dataset: Any,
    tokenizer: Any,
    max_length: int,
    dataset_map_fn: Any = None,
    template_map_fn: Any = None,
    split: str = "train",
    rename_maps: Sequence[Sequence[str]] = (),
    batch_size: int = 16,
    *,
    bad_rows: str = "error",
) -> IterableDataset:
    """Prepare a stream of text for fine-tuning: map, write with a template, tokenise, leave out.

    ``process_hf_dataset`` for data that are never wholly known. Nothing is read or tokenised before
    training asks for it, in the workers of the loader. Rows without a conversation or without a
    trainable label are left out, those that are too long are cut at their end, and both are logged,
    ever more rarely. To give all ranks samples of like length at the same step, put
    ``LengthPoolSortDataset`` around it::

        train_dataset = dict(
            type='LengthPoolSortDataset', pool_size=512, micro_batch_size=8,
            dataset=dict(
                type='stream_hf_dataset', tokenizer=..., max_length=2048,
                dataset=dict(type='datasets.load_dataset', path='json',
                             data_files='chats/*.jsonl', split='train', streaming=True),
                dataset_map_fn='openai_map_fn',
                template_map_fn=dict(type='template_map_fn_factory', template='qwen_chat')))

    Cost: the tokenizer's, once a pass and reader. ``batch_size`` rows are tokenised at once, so
    that long a sample may be waited for.

    Args:
        dataset: a ``datasets.IterableDataset``, a dict of such, or a config dict of one.
        tokenizer, max_length, dataset_map_fn, template_map_fn, rename_maps, bad_rows: see
            ``process_hf_dataset``; malformed rows raise, or with ``'skip'`` are left out. Broken
            JSON raises all the same: what comes behind it in its file is not read.
        split: of a dict.
        batch_size: rows that are tokenised at once.

    Returns:
        of rows with ``input_ids``, ``labels`` and ``length``; its state and shards are those of the
        stream that it is made from.

    Raises:
        ValueError: an argument or the stream is unusable; while reading, a malformed row.
    """
    for name, value in (("max_length", max_length), ("batch_size", batch_size)):
        check_whole(name, value)
    is_config = isinstance(dataset, Mapping) and "type" in dataset
    stream = (
        dataset if isinstance(dataset, Mapping) and not is_config else build(dataset, "dataset")
    )
    if isinstance(stream, Mapping):
        if split not in stream:
            raise ValueError(f"split={split!r} is none of the data set's splits {list(stream)}")
        stream = stream[split]
    if not isinstance(stream, IterableDataset):
        raise ValueError(
            "dataset must be a stream (load_dataset(..., streaming=True)), got "
            f"{type(stream).__name__}; process_hf_dataset takes data sets that are known"
        )
    recipe = Recipe(
        do_dataset_tokenization=True,
        tokenizer=tokenizer,
        max_length=max_length,
        dataset_map_fn=dataset_map_fn,
        template_map_fn=template_map_fn,
        max_dataset_length=None,
        split=split,
        remove_unused_columns=True,
        rename_maps=[(old, new) for old, new in rename_maps],
        input_ids_with_output=True,
        with_image_token=False,
        map_num_proc=None,
        bad_rows=bad_rows,
    )
    check(recipe)
    files = name_broken_lines(stream)
    map_fn, template_fn, encoder, _ = resolve(recipe)
    row_pass = RowPass(
        map_fn=map_fn,
        template_fn=template_fn,
        renames=dict(recipe.rename_maps),
        encoder=encoder,
        with_labels=True,
        keep=[],
        fail_fast=bad_rows == "error",
    )
    return stream.map(
        _Usable(row_pass, bad_rows, files),
        batched=True,
        batch_size=batch_size,
        remove_columns=_column_names(stream),
        features=Features({**TOKENS, "length": Value("int64")}),
    )


def _column_names(stream: IterableDataset) -> list[str]:
    """Columns of a stream; where they are not known beforehand, those of its first row."""
    if stream.column_names is not None:
        return list(stream.column_names)
    first = next(iter(stream), None)
    if first is None:
        raise ValueError("dataset is empty: the stream has no row")
    return list(first)


class _Usable:
    """Of a batch of rows, the token ids, labels and lengths of those that can be trained on."""

    def __init__(self, row_pass: RowPass, bad_rows: str, files: Sequence[str] = ()) -> None:
        self.row_pass = row_pass
        self.bad_rows = bad_rows
        self.files = files
        self.counts: dict[str, int] = {}

    def __call__(self, batch: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        made = self.row_pass(batch)
        verdicts = made["xlength_verdict"]
        kept = [i for i, verdict in enumerate(verdicts) if verdict == KEPT]
        for i, verdict in enumerate(verdicts):
            if verdict == MALFORMED:
                self._malformed(batch, i, made["xlength_reason"][i])
            elif verdict != KEPT:
                self._count(f"{_WHY.get(verdict, 'without a trainable label')} and left out")
            elif made["xlength_cut"][i]:
                self._count("cut at max_length")
        return {name: [made[name][i] for i in kept] for name in _COLUMNS}

    def _malformed(self, batch: Mapping[str, list[Any]], place: int, reason: str) -> None:
        row = {name: values[place] for name, values in batch.items()}
        text = repr(row)
        text = text if len(text) <= 120 else text[:117] + "..."
        if self.bad_rows == "error":
            self.row_pass.failed = False
            raise ValueError(
                f"dataset: a row is malformed: {reason} (bad_rows='skip' leaves such rows out); "
                f"the row is {text}{place_of(row, self.files)}"
            )
        self._count(f"malformed and left out ({reason})")

    def _count(self, what: str) -> None:
        """Log the first time, and then whenever the count has doubled."""
        count = self.counts[what] = self.counts.get(what, 0) + 1
        if count & (count - 1) == 0:
            print_log(
                f"stream_hf_dataset: {count} rows of this reader so far {what}",
                "current",
                logging.WARNING,
            )
