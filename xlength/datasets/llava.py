"""``LLaVADataset``: images and text for vision-language models of transformers."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from mmengine.logging import print_log
from numpy.typing import NDArray
from torch.utils.data import Dataset

from xlength.datasets.chat_text import ChatText
from xlength.datasets.hashing import tokenizer_hash
from xlength.datasets.image_sizes import ImageError, load_image, read_image_size
from xlength.datasets.image_text import ImageTextEncoder
from xlength.datasets.json_rows import JsonRows, RowError, file_fingerprint
from xlength.datasets.measured import (
    BROKEN,
    IMAGE,
    OVERLONG,
    LengthReader,
    Measured,
    measure_rows,
)
from xlength.datasets.measured_cache import cached
from xlength.datasets.measured_report import refuse, refused, report
from xlength.datasets.template_text import TemplateText
from xlength.losses import IGNORE_INDEX
from xlength.registry import DATASETS, register
from xlength.runtime.build import build

_VERSION = 4
_PROCESSOR_SETTINGS = (
    "patch_size",
    "vision_feature_select_strategy",
    "num_additional_image_tokens",
    "image_seq_length",
    "num_image_tokens",
    "vision_aspect_ratio",
    "images_kwargs",
)
_POLICIES = {
    "broken_row": ("error", "skip"),
    "missing_image": ("error", "skip"),
    "overlong": ("error", "truncate", "drop"),
}


@register(DATASETS)
class LLaVADataset(Dataset[dict[str, Any]]):
    """Conversations with images, in LLaVA's or OpenAI's format, for the processor of any family of
    transformers.

    Reads JSON or JSONL: see ``read_conversation`` for the rows. Images are opened when a sample is
    used, in the loader's workers. Lengths are exact: the image tokens are what the processor will
    make of the image's size, which comes from ``width`` and ``height`` of the row or from the
    file's header.

    Cost: at the first start every row is rendered and tokenised once, on all cores, and headers are
        read where sizes
    are not given; the result is cached. Later starts read the cache and hash the data file. A row
    is parsed and tokenised again whenever it is used (well under a millisecond; the image costs
    more).

    Args:
        data_path: a ``.json`` or ``.jsonl`` file.
        data: rows as dicts, in place of ``data_path``.
        image_folder: put before relative image paths.
        processor: a transformers processor of images and text, or a dict that builds one, such as
            ``dict(type='AutoProcessor.from_pretrained', pretrained_model_name_or_path=...)``.
            Without torchvision some need ``images_only_processor``.
        max_length: tokens, image tokens included; None means no limit.
        overlong: what happens to a longer sample. ``'truncate'`` (or ``'truncate_text'``) cuts it
            at its end, never inside an image: an image that does not fit goes out whole. ``'drop'``
            leaves the sample out; ``'error'`` stops. Each is counted.
        missing_image: an image that is missing, broken or refused by the processor: ``'error'``
            stops and names row and path, ``'skip'`` leaves the sample out. An image that breaks
            after the measurement (a truncated file has a good header) is replaced by a blank one of
            its size and the sample's labels are masked, so that the plan of the epoch holds;
            counted in a warning.
        broken_row: a row that is no JSON, has no or an empty conversation, or another number of
            ``<image>`` marks than images: ``'error'`` or ``'skip'``.
        chat_template: jinja, in place of the processor's own.
        template: one of XTuner's prompt templates (a dict with ``INSTRUCTION``), in place of a chat
            template.
        image_first: move the image of a message with a single one before its text, as LLaVA and
            XTuner do.
        pad_image_to_square: pad with the processor's mean colour first, as LLaVA-1.5 was trained.
        cache_dir: of the lengths; below the cache folder of ``datasets`` if None.
        remeasure: measure again although the cache has lengths (images were replaced).
        num_proc: processes for the measurement; None takes all cores.

    Attributes:
        length: (n,) int64 tokens of each sample.
        modality_length: (n,) int64, the same, negative where a sample is text only.
        image_tokens: (n,) int64, how many of them are of images: the vision tower's work.

    Raises:
        ValueError: an option or a row is wrong; files, lines and paths are named.
    """

    def __init__(
        self,
        data_path: str | None = None,
        image_folder: str = "",
        processor: Any = None,
        max_length: int | None = None,
        overlong: str = "truncate",
        missing_image: str = "error",
        broken_row: str = "error",
        data: Iterable[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        template: Any = None,
        image_first: bool = False,
        pad_image_to_square: bool = False,
        cache_dir: str | None = None,
        remeasure: bool = False,
        num_proc: int | None = None,
    ) -> None:
        overlong = {"truncate_text": "truncate"}.get(overlong, overlong)
        policies = {BROKEN: broken_row, IMAGE: missing_image, OVERLONG: overlong}
        _check_options(data_path, data, processor, max_length, policies)
        self.missing_image, self._replaced = missing_image, 0
        self.processor = build(processor)
        chat = _chat(self.processor, chat_template, template)
        self.encoder = ImageTextEncoder(self.processor, chat, max_length, pad_image_to_square)
        self.reader = LengthReader(self.encoder, image_folder, image_first, overlong)
        self.rows, measured = self._measured(
            str(data_path) if data is None else JsonRows(data),
            Path(cache_dir) if cache_dir else _default_cache(),
            policies,
            num_proc,
            time.time() if remeasure else 0.0,
        )
        self._rows_of_samples = measured.rows
        self.modality_length = measured.lengths
        self.length, self.image_tokens = np.abs(measured.lengths), measured.image_tokens
        report(self.rows, measured)

    def _measured(
        self,
        source: str | JsonRows,
        folder: Path,
        policies: Mapping[str, str],
        num_proc: int | None,
        not_before: float,
    ) -> tuple[JsonRows, Measured]:
        """The rows and their lengths, measured or from the cache."""

        def measure() -> tuple[Measured, NDArray[np.int64]]:
            self.encoder.tokens.check()
            rows = JsonRows(source) if isinstance(source, str) else source
            measured = measure_rows(rows, self.reader, num_proc, "Measuring images and text")
            refuse(rows, measured, policies)
            return measured, rows.spans

        def good(measured: Measured) -> bool:
            return not refused(measured, policies)

        data = file_fingerprint(source) if isinstance(source, str) else source.fingerprint()
        path = folder / f"image-text-lengths-{self._fingerprint(data)}.npz"
        measured, spans = cached(path, measure, good, not_before)
        return (JsonRows(source, spans) if isinstance(source, str) else source), measured

    def __len__(self) -> int:
        return len(self._rows_of_samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Sample ``index``; see ``ImageTextEncoder.encode``.

        Raises:
            ValueError: an image is missing or broken, or no longer what was measured; names row and
                path.
        """
        row = int(self._rows_of_samples[index])
        try:
            conversation = self.reader.conversation(self.rows[row])
            images, whole = [], True
            for source, known in zip(conversation.images, conversation.sizes, strict=True):
                image, good = self._image(source, row)
                whole &= good
                if known is not None and known != (image.height, image.width):
                    raise ImageError(
                        f"{source}: the row says {known[1]} x {known[0]} pixels, the image has "
                        f"{image.width} x {image.height}"
                    )
                images.append(image)
            sample = self.encoder.encode(conversation, images)
        except (ImageError, RowError) as error:
            raise ValueError(f"{self.rows.where(row)}: {error}") from error
        made, measured = len(sample["input_ids"]), int(self.length[index])
        if made != measured:
            raise ValueError(
                f"{self.rows.where(row)}: {made} tokens, but {measured} were measured; have its "
                f"images changed ({conversation.images})? Measure again with remeasure=True"
            )
        if not whole:
            sample["labels"] = sample["labels"].new_full(sample["labels"].shape, IGNORE_INDEX)
        return sample

    def _image(self, source: str, row: int) -> tuple[Any, bool]:
        """The image, and True; or with ``missing_image='skip'`` a blank one in place of a broken
        one, and False."""
        try:
            return load_image(source), True
        except ImageError as error:
            if self.missing_image == "error":
                raise
            from PIL import Image

            height, width = read_image_size(source)
            self._replaced += 1
            print_log(
                f"{self.rows.where(row)}: {error}. Its sample is not trained; it is number "
                f"{self._replaced} of this worker.",
                "current",
                level=logging.WARNING,
            )
            return Image.new("RGB", (width, height)), False

    def _fingerprint(self, data: str) -> str:
        """What the lengths depend on, as 16 hex digits."""
        import transformers

        reader, encoder = self.reader, self.encoder
        options = {
            "version": [_VERSION, transformers.__version__],
            "data": data,
            "processor": _settings(self.processor),
            "chat": [type(encoder.chat).__name__, encoder.chat.fingerprint()],
            "folder": os.path.abspath(reader.image_folder) if reader.image_folder else "",
            "options": [encoder.max_length, reader.overlong, reader.image_first],
            "square": encoder.pad_to_square,
        }
        text = json.dumps(options, sort_keys=True, default=str)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _chat(processor: Any, chat_template: str | None, template: Any) -> Any:
    if template is None:
        return ChatText(processor, chat_template)
    if chat_template is not None:
        raise ValueError("chat_template and template are both given, only one can be used")
    return TemplateText(processor, template)


def _check_options(
    data_path: Any, data: Any, processor: Any, max_length: int | None, policies: Mapping[str, str]
) -> None:
    for value, (name, allowed) in zip(policies.values(), _POLICIES.items(), strict=True):
        if value not in allowed:
            raise ValueError(f"{name} must be one of {allowed}, got {value!r}")
    if (data_path is None) == (data is None):
        raise ValueError("LLaVADataset needs data_path or data, one of them")
    if processor is None:
        raise ValueError("LLaVADataset needs a processor")
    if max_length is not None and max_length < 1:
        raise ValueError(f"max_length must be at least 1, got {max_length}")


def _default_cache() -> Path:
    from datasets import config

    return Path(config.HF_DATASETS_CACHE) / "xlength"


def _settings(processor: Any) -> str:
    digest = tokenizer_hash(processor.tokenizer)
    images = processor.image_processor.to_dict()
    own = {name: getattr(processor, name, None) for name in _PROCESSOR_SETTINGS}
    kinds = [type(processor).__name__, type(processor.image_processor).__name__]
    return json.dumps([kinds, digest, images, own], sort_keys=True, default=str)
