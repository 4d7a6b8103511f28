"""Measuring a set of images and text, against the bare tokenizer on the same texts."""

from __future__ import annotations

import json
import tempfile
from argparse import Namespace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from xlength.datasets.image_sizes import load_image, read_image_size
from xlength.datasets.image_tokens import ImageTokens, expand
from xlength.datasets.llava import LLaVADataset
from xlength.datasets.page_images import page_images, page_tokenizer
from xlength.datasets.processors import images_only_processor
from xlength.datasets.python_docs import python_docs_pairs

SECOND_START = 2.0
"""Seconds that the second start may take."""

TIMES_THE_TOKENIZER = 1.3
"""The first start, with sizes known, over the bare tokenizer on the same texts."""


def run(options: Namespace) -> list[dict[str, Any]]:
    """Rows for the first and the second start, for sizes from headers, and for counts that differ.

    The texts are documentation of the standard library, four turns a row, three quarters of them
    with an image; every image has a size of its own. The peer of the first start is
    ``tokenizer(texts)`` on the finished texts, all cores, before it in the same run.
    """
    count = 10_000 if options.quick else 100_000
    with tempfile.TemporaryDirectory() as folder:
        processor = _processor(folder)
        path = _write_rows(Path(folder), count, options.seed)
        return [
            *_starts(folder, path, processor, count),
            _headers(folder, 50 if options.quick else 300),
            _counts(processor, options.seed, 40 if options.quick else 400),
        ]


def _starts(folder: str, path: str, processor: Any, count: int) -> list[dict[str, Any]]:
    def start() -> tuple[float, LLaVADataset]:
        begin = perf_counter()
        dataset = LLaVADataset(path, processor=processor, cache_dir=folder)
        return perf_counter() - begin, dataset

    texts = _texts(path, processor)
    begin = perf_counter()
    ids = processor.tokenizer(texts)["input_ids"]
    peer = perf_counter() - begin
    tokens = sum(map(len, ids))
    del ids
    first, dataset = start()
    second, again = start()
    if not np.array_equal(dataset.length, again.length):
        raise AssertionError("the second start has other lengths, so its time means nothing")
    return [
        {
            "case": f"first start, {count:,} rows, {tokens:,} tokens of text",
            "ours": first,
            "peer": peer,
            "ratio": peer / first,
            "limit": peer * TIMES_THE_TOKENIZER,
            "note": "peer: the bare tokenizer on the finished texts; limit: 1.3 times that",
        },
        {
            "case": f"second start, {count:,} rows",
            "ours": second,
            "limit": SECOND_START,
            "ratio": SECOND_START / second,
            "note": "the lengths come from the cache; the file is hashed",
        },
    ]


def _headers(folder: str, count: int) -> dict[str, Any]:
    rows = Path(page_images(folder, count, 0))
    paths = [str(path) for path in sorted(rows.parent.glob("*.png"))]
    begin = perf_counter()
    sizes = [read_image_size(path) for path in paths]
    ours = perf_counter() - begin
    begin = perf_counter()
    opened = [load_image(path) for path in paths]
    peer = perf_counter() - begin
    if sizes != [(image.height, image.width) for image in opened]:
        raise AssertionError("headers and images have other sizes, so their times mean nothing")
    return {
        "case": f"sizes of {len(paths)} pages from their headers",
        "ours": ours,
        "peer": peer,
        "ratio": peer / ours,
        "note": "peer: decoding the pixels",
    }


def _counts(processor: Any, seed: int, count: int) -> dict[str, Any]:
    from PIL import Image

    sizes = np.random.default_rng(seed).integers(1, 900, (count, 2))
    sizes = sizes[sizes.max(axis=1) <= 190 * sizes.min(axis=1)]
    begin = perf_counter()
    predicted, _ = ImageTokens(processor)(sizes)
    ours = perf_counter() - begin
    begin = perf_counter()
    images = [Image.new("RGB", (width, height)) for height, width in sizes.tolist()]
    real = [expand(processor, [image])["input_ids"].shape[1] for image in images]
    peer = perf_counter() - begin
    return {
        "case": f"tokens of {len(sizes)} images, Qwen2.5-VL",
        "ours": ours,
        "peer": peer,
        "ratio": peer / ours,
        "mismatches": int((predicted != np.array(real)).sum()),
        "note": "peer: the processor on blank images of these sizes",
    }


def _processor(folder: str) -> Any:
    return images_only_processor(
        "Qwen2_5_VLProcessor",
        {"type": "Qwen2VLImageProcessorPil"},
        page_tokenizer(folder, 8192),
    )


def _write_rows(folder: Path, count: int, seed: int) -> str:
    rng = np.random.default_rng(seed)
    pairs = [[turn["content"] for turn in row["messages"]] for row in python_docs_pairs()]
    picked = rng.integers(0, len(pairs), (count, 2)).tolist()
    with_image = rng.random(count) < 0.75
    sizes = rng.integers(28, 2000, (count, 2)).tolist()
    path = folder / "rows.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for (first, second), image, size in zip(picked, with_image, sizes, strict=True):
            said = []
            for i in (first, second):
                said.append({"from": "human", "value": pairs[i][0]})
                said.append({"from": "gpt", "value": pairs[i][1][:1500]})
            row: dict[str, Any] = {"conversations": said}
            if image:
                said[0]["value"] = f"<image>\n{said[0]['value']}"
                row |= {"image": "none.png", "width": size[0], "height": size[1]}
            file.write(json.dumps(row) + "\n")
    return str(path)


def _texts(path: str, processor: Any) -> list[str]:
    from xlength.datasets.chat_text import ChatText
    from xlength.datasets.conversations import read_conversation

    chat = ChatText(processor)
    with open(path, encoding="utf-8") as file:
        return [chat.text(read_conversation(json.loads(line)).messages) for line in file]
