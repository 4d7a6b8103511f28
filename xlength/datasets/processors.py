"""transformers processors from configs, also where torchvision is missing."""

from __future__ import annotations

from typing import Any

from xlength.runtime.build import build, resolve


def images_only_processor(
    processor_class: Any, image_processor: Any, tokenizer: Any, **options: Any
) -> Any:
    """A processor without its video part, which transformers builds with torchvision only.

    The processors of Qwen-VL, InternVL and LLaVA-OneVision ask for a video processor even where
    there are no videos. This one is the same class with ``video_processor = None``. For a
    checkpoint, give ``image_processor=dict(type='AutoImageProcessor.from_pretrained',
    pretrained_model_name_or_path=..., backend='pil')`` and the tokenizer alike.

    Args:
        processor_class: a class of transformers or its name, such as ``'Qwen2_5_VLProcessor'``.
        image_processor: an image processor, or a dict that builds one.
        tokenizer: a tokenizer, or a dict that builds one.
        options: the class's other arguments.
    """
    processor_class = resolve(processor_class)
    processor = processor_class.__new__(processor_class)
    if "video_processor" in processor_class.__init__.__code__.co_varnames:
        options["video_processor"] = None
    # It refuses None by its type: this check, and nothing else, is passed over while it is being
    # made.
    processor.check_argument_for_proper_class = _accept
    processor.__init__(
        image_processor=build(image_processor), tokenizer=build(tokenizer), **options
    )
    del processor.check_argument_for_proper_class
    return processor


def _accept(name: str, value: Any) -> None:
    pass
