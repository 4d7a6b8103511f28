"""Preparing chat rows by ``process_hf_dataset`` against one ``encode`` call a turn, row by row."""

from __future__ import annotations

import gzip
import json
import os
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset, load_dataset

from xlength.datasets.map_fns import openai_map_fn
from xlength.datasets.process import process_hf_dataset
from xlength.datasets.python_docs import python_docs_pairs
from xlength.datasets.templates import template_map_fn_factory
from xlength.losses import IGNORE_INDEX

MAX_LENGTH = 2048
_VOCABULARY = 8000
_TEMPLATE = template_map_fn_factory("qwen_chat")


def run(options: Namespace) -> list[dict[str, Any]]:
    """Rows in seconds: on one core, on all, against XTuner's passes, and a second start.

    The rows are those of ``options.data`` (JSONL with ``messages``, may be gzipped), else the
    documentation of Python's standard library; the tokenizer is a byte-level BPE trained on them.
    """
    with tempfile.TemporaryDirectory() as folder, _own_cache(Path(folder)):
        path = _write_rows(options, Path(folder))
        rows = load_dataset("json", data_files=str(path), split="train")
        tokenizer = _train_tokenizer(rows)
        cores = os.cpu_count() or 1
        with _threads(False):
            by_turn, expected = _timed(lambda: _one_encode_a_turn(rows, tokenizer))
            passes, _ = _timed(lambda: _xtuner_passes(rows, tokenizer))
            one, made = _timed(lambda: _ours(rows, tokenizer, 1))
        if made["input_ids"][:] != expected["input_ids"][:]:
            raise AssertionError("the tokens differ, so the times mean nothing")
        # Keep other arguments, so that nothing of the run before is found in the cache.
        with _threads(True):
            every, _ = _timed(lambda: _ours(rows, tokenizer, cores, max_length=MAX_LENGTH + 1))
        again, _ = _timed(lambda: _ours(rows, tokenizer, cores))
    case = f"{len(rows):,} rows, {sum(made.length):,} tokens"
    peer = "peer: one encode call a turn, row by row, in one process"
    return [
        _row(f"{case}, one process", one, by_turn, peer),
        _row(f"{case}, {cores} cores", every, by_turn, peer),
        _row(f"{case}, one process", one, passes, "peer: the same in XTuner's six passes"),
        _row(f"{case}, second start", again, one, "peer: the first start"),
    ]


def _row(case: str, ours: float, peer: float, note: str) -> dict[str, Any]:
    return {"case": case, "ours": ours, "peer": peer, "ratio": peer / ours, "note": note}


def _timed(call: Any) -> tuple[float, Any]:
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def _ours(rows: Dataset, tokenizer: Any, num_proc: int, max_length: int = MAX_LENGTH) -> Dataset:
    return process_hf_dataset(
        rows,
        tokenizer=tokenizer,
        max_length=max_length,
        dataset_map_fn=openai_map_fn,
        template_map_fn=_TEMPLATE,
        remove_unused_columns=True,
        pack_to_max_length=False,
        map_num_proc=num_proc,
    )


def _one_encode_a_turn(rows: Dataset, tokenizer: Any) -> Dataset:
    """Map function, template and tokens of one row at a time, in one pass."""

    def encode(row: dict[str, Any]) -> dict[str, Any]:
        return _encoded(_TEMPLATE(openai_map_fn(row)), tokenizer)

    return rows.map(encode, remove_columns=rows.column_names, load_from_cache_file=False)


def _xtuner_passes(rows: Dataset, tokenizer: Any) -> Dataset:
    """A pass each for map function, template, empty rows, tokens, untrained rows and lengths."""
    options: dict[str, Any] = {"load_from_cache_file": False}
    rows = rows.map(openai_map_fn, **options).map(_TEMPLATE, **options)
    rows = rows.filter(lambda row: len(row["conversation"]) > 0, **options)
    rows = rows.map(
        lambda row: _encoded(row, tokenizer), remove_columns=rows.column_names, **options
    )
    rows = rows.filter(lambda row: any(label >= 0 for label in row["labels"]), **options)
    return rows.map(lambda row: {"length": len(row["input_ids"])}, **options)


def _encoded(row: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    ids: list[int] = []
    labels: list[int] = []
    for turn in row["conversation"]:
        for key in ("input", "output", "sep"):
            tokens = tokenizer.encode(turn[key], add_special_tokens=False)
            ids += tokens
            labels += tokens if key == "output" else [IGNORE_INDEX] * len(tokens)
    return {"input_ids": ids[:MAX_LENGTH], "labels": labels[:MAX_LENGTH]}


def _write_rows(options: Namespace, folder: Path) -> Path:
    path = folder / "rows.jsonl"
    given = getattr(options, "data", None)
    if given:
        opener: Any = gzip.open if str(given).endswith(".gz") else open
        with opener(given, "rb") as file:
            lines = file.read().decode("utf-8-sig").split("\n")
        rows = [{"messages": json.loads(line)["messages"]} for line in lines if line.strip()]
    else:
        rows = python_docs_pairs()
    rows = rows[:2000] if options.quick else rows
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def _train_tokenizer(rows: Dataset) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (message["content"] for row in rows for message in row["messages"])
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")


@contextmanager
def _own_cache(folder: Path) -> Iterator[None]:
    """Nothing of an earlier run is found, and nothing stays."""
    before = datasets.config.HF_DATASETS_CACHE
    datasets.config.HF_DATASETS_CACHE = folder / "cache"
    try:
        yield
    finally:
        datasets.config.HF_DATASETS_CACHE = before


@contextmanager
def _threads(wanted: bool) -> Iterator[None]:
    """Whether the tokenizer uses threads of its own."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if wanted else "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before
