"""Real images that every Python machine can have: pages of its standard library's documentation.

Used by ``configs/quickstart/images.py``. Each page is a docstring, drawn as it stands at the size
it takes, so that sizes differ as they do in scanned documents. Nothing is downloaded.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from xlength.datasets.python_docs import python_docs_pairs, python_docs_tokenizer

IMAGE_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
_MARGIN = 12
_QUESTION = "<image>\nWhich part of Python does this page describe?"

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML, with images as Qwen-VL writes them."""


def page_images(cache_dir: str, num_pages: int = 300, num_texts: int = 300) -> str:
    """Draw the pages once, into ``cache_dir/pages_P_T``; takes some seconds.

    Args:
        cache_dir: folder, made where it is missing.
        num_pages: samples with a page: its question is what it describes.
        num_texts: samples without an image: name and signature -> docstring.

    Returns:
        Path of a JSONL file in LLaVA's format; image paths are relative to its folder.
    """
    folder = Path(cache_dir) / f"pages_{num_pages}_{num_texts}"
    if not (folder / "rows.jsonl").exists():
        partial = folder.with_name(f"{folder.name}.{os.getpid()}.part")
        partial.mkdir(parents=True, exist_ok=True)
        rows = _rows(partial, num_pages, num_texts)
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (partial / "rows.jsonl").write_text(text, encoding="utf-8")
        try:
            partial.rename(folder)
        except OSError:  # another rank was first
            shutil.rmtree(partial)
    return str(folder / "rows.jsonl")


def page_dataset(cache_dir: str, num_pages: int = 300, num_texts: int = 300, **options: Any) -> Any:
    """``LLaVADataset`` of the pages.

    Args:
        cache_dir: see ``page_images``; the lengths are kept there too.
        num_pages: see ``page_images``.
        num_texts: see ``page_images``.
        options: of ``LLaVADataset``.
    """
    from xlength.datasets.llava import LLaVADataset

    path = page_images(cache_dir, num_pages, num_texts)
    return LLaVADataset(path, os.path.dirname(path), cache_dir=cache_dir, **options)


def page_tokenizer(cache_dir: str, vocab_size: int = 4096) -> Any:
    """The tokenizer of ``python_docs_tokenizer`` and, behind its tokens, those for images.

    Returns:
        A ``PreTrainedTokenizerFast`` with ``image_token`` and a chat template; ``IMAGE_TOKENS``
        have the ids from ``vocab_size`` on.
    """
    from transformers import PreTrainedTokenizerFast

    plain = python_docs_tokenizer(cache_dir, vocab_size)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain.backend_tokenizer,
        eos_token=plain.eos_token,
        pad_token=plain.pad_token,
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer.add_tokens(IMAGE_TOKENS, special_tokens=True)
    ids = tokenizer.convert_tokens_to_ids(IMAGE_TOKENS)
    if ids != list(range(vocab_size, vocab_size + len(IMAGE_TOKENS))):
        raise ValueError(f"the image tokens got the ids {ids}, not those from {vocab_size} on")
    return tokenizer


def _rows(folder: Path, num_pages: int, num_texts: int) -> list[dict[str, Any]]:
    pairs = [tuple(turn["content"] for turn in row["messages"]) for row in python_docs_pairs()]
    rng = np.random.RandomState(0)
    with_lines = [i for i, (_, text) in enumerate(pairs) if 2 <= text.count("\n") <= 60]
    pages = rng.choice(with_lines, min(num_pages, len(with_lines)), replace=False)
    texts = rng.choice(len(pairs), min(num_texts, len(pairs)), replace=False)
    rows: list[dict[str, Any]] = []
    for number, i in enumerate(pages.tolist()):
        name, text = pairs[i]
        width, height = _draw(text, folder / f"{number:04}.png")
        size = {"image": f"{number:04}.png", "width": width, "height": height}
        rows.append({"id": f"page-{number}", **size, **_turns(_QUESTION, name)})
    for number, i in enumerate(texts.tolist()):
        rows.append({"id": f"text-{number}", "image": None, **_turns(*pairs[i])})
    return rows


def _turns(question: str, answer: str) -> dict[str, Any]:
    said = (("human", question), ("gpt", answer))
    return {"conversations": [{"from": who, "value": value} for who, value in said]}


def _draw(text: str, path: Path) -> tuple[int, int]:
    """Draw black text on a white page that it just fits; returns (width, height) in pixels."""
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError as error:
        raise ImportError("pages are drawn with Pillow: pip install 'xlength[vlm]'") from error
    font = ImageFont.load_default()
    pen = ImageDraw.Draw(Image.new("L", (1, 1)))
    left, top, right, bottom = pen.multiline_textbbox((0, 0), text, font)
    size = int(right - left) + 2 * _MARGIN, int(bottom - top) + 2 * _MARGIN
    page = Image.new("L", size, 255)
    ImageDraw.Draw(page).multiline_text((_MARGIN - left, _MARGIN - top), text, 0, font)
    page.save(path)
    return size
