"""How many tokens the images of a sample take, from their sizes alone.

transformers' processors say it themselves (``_get_num_multimodal_tokens``, written for serving,
where the prompt is laid out before the pixels come); that is what is called here. Two things are
added: the case of LLaVA-OneVision in which the processor's own answer is another one than what it
    makes (several images in one sample), and a check of one
real image against the answer, so that a processor whose settings contradict each other is refused
at start.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class ImageTokens:
    """Counts the tokens that stand in the input for each image: what one placeholder is expanded
    to.

    Cost: the processor's Python formula once for each distinct size, 2 to 30 microseconds.

    Args:
        processor: a transformers processor of images and text.

    Raises:
        ValueError: the processor offers no count.
    """

    def __init__(self, processor: Any) -> None:
        if not hasattr(processor, "_get_num_multimodal_tokens"):
            raise ValueError(
                f"processor {type(processor).__name__} does not say how many tokens an image takes "
                "(it has no _get_num_multimodal_tokens)"
            )
        self.processor = processor
        self._fixed = _fixed_count(processor)
        self._among_several = _count_among_several(processor)

    def __call__(self, sizes: Any, num_images: Any = 1) -> tuple[Ints, dict[int, str]]:
        """Tokens of each image.

        Args:
            sizes: (k, 2) int, height and width of each image in pixels.
            num_images: (k,) int or int, how many images the sample of each image has.

        Returns:
            (k,) int64 tokens, 0 where the processor refuses the size; and position -> what the
            processor says of it.
        """
        sizes = np.asarray(sizes, dtype=np.int64).reshape(-1, 2)
        if len(sizes) == 0:
            return np.zeros(0, dtype=np.int64), {}
        distinct, where = np.unique(sizes, axis=0, return_inverse=True)
        where = where.reshape(-1)
        counts, refused = self._alone(distinct)
        result = counts[where]
        if self._among_several is not None:
            several = np.broadcast_to(np.asarray(num_images), len(sizes)) > 1
            result = np.where(several, self._among_several, result)
            refused = {} if several.all() else refused
        return result, {
            i: refused[int(where[i])] for i in range(len(sizes)) if int(where[i]) in refused
        }

    def check(self) -> None:
        """Run the processor on one small blank image and compare.

        Raises:
            ValueError: it makes another number of tokens than it says.
        """
        size = (56, 84)
        counts, refused = self(np.array([size]))
        made = _made(self.processor, [size])
        if refused or made != int(counts[0]):
            raise ValueError(
                f"processor {type(self.processor).__name__} makes {made} tokens of an image of "
                f"{size[1]} x {size[0]} pixels, but says {refused.get(0, int(counts[0]))}: its "
                "size, crop_size and patch_size contradict each other"
            )

    def _alone(self, sizes: Ints) -> tuple[Ints, dict[int, str]]:
        if self._fixed is not None:
            return np.full(len(sizes), self._fixed, dtype=np.int64), {}
        try:
            data = self.processor._get_num_multimodal_tokens(image_sizes=sizes.tolist())
            return np.asarray(data["num_image_tokens"], dtype=np.int64), {}
        except ValueError as error:
            if len(sizes) == 1:
                return np.zeros(1, dtype=np.int64), {0: str(error)}
        # One size is refused, and the processor does not say which: halve until it is found.
        half = len(sizes) // 2
        (left, left_bad), (right, right_bad) = self._alone(sizes[:half]), self._alone(sizes[half:])
        bad = left_bad | {half + i: reason for i, reason in right_bad.items()}
        return np.concatenate([left, right]), bad


def _fixed_count(processor: Any) -> int | None:
    """LLaVA's own count supposes a crop; where the image processor does not crop, it is measured on
    one image."""
    images = processor.image_processor
    is_llava = hasattr(processor, "patch_size") and not hasattr(images, "image_grid_pinpoints")
    if not is_llava or getattr(images, "do_center_crop", None):
        return None
    size = dict(getattr(images, "size", None) or {})
    if size.get("height") is None or size.get("width") is None:
        return None
    return _made(processor, [(56, 84)])


def _count_among_several(processor: Any) -> int | None:
    """LLaVA-OneVision cuts only an image that is alone into tiles; its own count takes every image
    for alone."""
    if not hasattr(processor, "vision_aspect_ratio"):
        return None
    return _made(processor, [(56, 84), (84, 56)]) // 2


def _made(processor: Any, sizes: Sequence[tuple[int, int]]) -> int:
    """Tokens that the processor really makes of blank images of these sizes, in one sample."""
    from PIL import Image

    images = [Image.new("RGB", (width, height)) for height, width in sizes]
    output = expand(processor, images)
    return len(output["input_ids"][0])


def expand(processor: Any, images: Sequence[Any]) -> Any:
    """The processor's output for the images of one sample and no text: ``input_ids`` are the
    images' tokens alone.

    Args:
        images: k PIL images, RGB.

    Returns:
        what the processor returns, as tensors; ``input_ids`` is (1, tokens).
    """
    return processor(
        text=[processor.image_token * len(images)],
        images=[list(images)],
        add_special_tokens=False,
        return_tensors="pt",
    )
