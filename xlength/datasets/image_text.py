"""One conversation with images -> token ids, labels and pixels; and its length without any
pixel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from xlength.datasets.conversations import Conversation
from xlength.datasets.image_sizes import ImageError, describe
from xlength.datasets.image_tokens import ImageTokens, expand
from xlength.losses import IGNORE_INDEX

Ints = NDArray[np.int64]


class Fitted(NamedTuple):
    """A sample within the limit: its tokens, those of images, whether it was cut, and whether a
    label is left to train."""

    length: int
    image_tokens: int
    cut: bool
    trained: bool


class ImageTextEncoder:
    """Encodes as the processor would encode the whole text, but knows labels and limits the length.

    A sample longer than ``max_length`` is cut at its end; an image that would be cut goes out
    whole, with its pixels and everything behind it.

    Args:
        processor: a transformers processor of images and text, with a fast tokenizer.
        chat: ``ChatText`` or ``TemplateText``.
        max_length: tokens, image tokens included; None means no limit.
        pad_to_square: pad images to squares with the processor's mean colour, as LLaVA-1.5 was
            trained.

    Raises:
        ValueError: the tokenizer is not a fast one, or does not know the processor's placeholder as
            one token.
    """

    def __init__(
        self, processor: Any, chat: Any, max_length: int | None = None, pad_to_square: bool = False
    ) -> None:
        self.processor, self.chat, self.max_length = processor, chat, max_length
        self.pad_to_square = pad_to_square
        self.tokenizer = processor.tokenizer
        self.tokens = ImageTokens(processor)
        if not getattr(self.tokenizer, "is_fast", False):
            raise ValueError(
                f"tokenizer {type(self.tokenizer).__name__} is no fast one: labels need its offsets"
            )
        self.placeholder = int(self.tokenizer.convert_tokens_to_ids(processor.image_token))
        ids = self.tokenizer(processor.image_token, add_special_tokens=False)["input_ids"]
        if ids != [self.placeholder]:
            raise ValueError(
                f"the tokenizer makes {ids} of the processor's placeholder "
                f"{processor.image_token!r}, not one token"
            )

    def text_ids(self, conversation: Conversation) -> tuple[Ints, NDArray[np.bool_]]:
        """(t,) int64 token ids of the text with a placeholder for each image, and (t,) bool, which
        of them are trained; an image never is."""
        ids, trained = self.chat.ids(conversation.messages)
        return ids, trained & (ids != self.placeholder)

    def squared(self, sizes: Any) -> Ints:
        """(k, 2) int64, the sizes that the processor gets to see."""
        seen: Ints = np.asarray(sizes, dtype=np.int64).reshape(-1, 2)
        if self.pad_to_square and len(seen):
            seen = np.repeat(seen.max(axis=1, keepdims=True), 2, axis=1)
        return seen

    def image_counts(self, sizes: Any, names: Sequence[str]) -> Ints:
        """(k,) int64, tokens of the images of one sample.

        Args:
            sizes: (k, 2), height and width.
            names: k, for messages.

        Raises:
            ImageError: the processor refuses a size.
        """
        counts, refused = self.tokens(self.squared(sizes), len(names))
        for i, reason in refused.items():
            height, width = np.asarray(sizes)[i].tolist()
            raise ImageError(
                f"{describe(names[i])}: the processor refuses {width} x {height} pixels: {reason}"
            )
        return counts

    def fit(self, ids: Ints, sizes: Any, names: Sequence[str]) -> tuple[int, Ints]:
        """How much of a text stays within ``max_length``.

        Args:
            ids: (t,) with k placeholders.
            sizes: (k, 2).
            names: k, for messages.

        Returns:
            Text tokens that stay, and (j,) int64 tokens of each of the j <= k images that stay.
        """
        places = np.flatnonzero(ids == self.placeholder)
        sizes = np.asarray(sizes, dtype=np.int64).reshape(-1, 2)
        stop, num_images = len(ids), len(places)
        while True:
            counts = self.image_counts(sizes[:num_images], names[:num_images])
            if self.max_length is None or stop - num_images + int(counts.sum()) <= self.max_length:
                return stop, counts
            widths = np.ones(stop, dtype=np.int64)
            widths[places[:num_images]] = counts
            stop = int(np.searchsorted(np.cumsum(widths), self.max_length, side="right"))
            # Fewer images can mean other counts (LLaVA-OneVision cuts an image that is alone into
            # tiles).
            num_images = int((places[:num_images] < stop).sum())

    def fitted(self, conversation: Conversation, sizes: Any) -> Fitted:
        """What is left of one sample within ``max_length``.

        Args:
            conversation: the sample.
            sizes: (k, 2), height and width of its images.
        """
        ids, trained = self.text_ids(conversation)
        stop, counts = self.fit(ids, sizes, conversation.images)
        image_tokens = int(counts.sum())
        length = stop - len(counts) + image_tokens
        return Fitted(length, image_tokens, stop < len(ids), bool(trained[:stop].any()))

    def encode(self, conversation: Conversation, images: Sequence[Any]) -> dict[str, Any]:
        """One sample for ``default_collate_fn``.

        Args:
            conversation: the sample.
            images: its PIL images, RGB and upright.

        Returns:
            ``input_ids`` and ``labels``, (l,) int64 tensors; ``num_images``; with images what the
            processor makes: ``pixel_values`` and, by family, ``image_grid_thw``, ``image_sizes``,
            ``batch_num_images``, ``num_tiles``; and ``mm_token_type_ids``, (l,), where the
            processor makes them.
        """
        ids, trained = self.text_ids(conversation)
        sizes = np.array([(image.height, image.width) for image in images], dtype=np.int64)
        stop, counts = self.fit(ids, sizes, conversation.images)
        ids, labels = ids[:stop], np.where(trained[:stop], ids[:stop], IGNORE_INDEX)
        sample: dict[str, Any] = {}
        if len(counts):
            sample = self._pixels(images[: len(counts)], counts)
            ids, labels = self._expanded(ids, labels, counts, sample.pop("input_ids")[0].numpy())
        sample = {
            "input_ids": torch.from_numpy(ids),
            "labels": torch.from_numpy(labels),
            "num_images": len(counts),
            **sample,
        }
        if getattr(self.processor, "return_mm_token_type_ids", False):
            kinds = self.processor.create_mm_token_type_ids([ids.tolist()])[0]
            sample["mm_token_type_ids"] = torch.tensor(kinds, dtype=torch.int64)
        return sample

    def _pixels(self, images: Sequence[Any], counts: Ints) -> dict[str, Any]:
        if self.pad_to_square:
            images = [_square(image, self.processor.image_processor.image_mean) for image in images]
        output = dict(expand(self.processor, images))
        made = output["input_ids"].shape[1]
        if made != int(counts.sum()):
            raise ValueError(
                f"the processor made {made} image tokens and had said {counts.tolist()}"
            )
        output.pop("attention_mask", None)
        output.pop("mm_token_type_ids", None)
        if len(output["pixel_values"]) != len(images) and "image_grid_thw" not in output:
            sizes = [(image.height, image.width) for image in images]
            data = self.processor._get_num_multimodal_tokens(image_sizes=sizes)
            output["num_tiles"] = torch.tensor(data["num_image_patches"], dtype=torch.int64)
        return output

    def _expanded(
        self, ids: Ints, labels: Ints, counts: Ints, image_ids: Ints
    ) -> tuple[Ints, Ints]:
        """Put the images' tokens in the place of their placeholders."""
        widths = np.ones(len(ids), dtype=np.int64)
        widths[ids == self.placeholder] = counts
        is_image = np.repeat(ids == self.placeholder, widths)
        wide_ids, wide_labels = np.repeat(ids, widths), np.repeat(labels, widths)
        wide_ids[is_image] = image_ids
        return wide_ids, wide_labels


def _square(image: Any, mean: Sequence[float]) -> Any:
    from PIL import Image

    side = max(image.size)
    if image.size == (side, side):
        return image
    result = Image.new("RGB", (side, side), tuple(int(255 * value) for value in mean))
    result.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return result
