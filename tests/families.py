"""Processors and models of the vision-language families, made without a download."""

from __future__ import annotations

from typing import Any

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from xlength.datasets.processors import images_only_processor

FAMILIES = ("llava", "llava_next", "llava_onevision", "internvl", "qwen2_5_vl", "qwen3_vl")
IMAGE_TOKENS = {
    "internvl": "<IMG_CONTEXT>",
    "qwen2_5_vl": "<|image_pad|>",
    "qwen3_vl": "<|image_pad|>",
}
IMAGE_TEXT = {
    "internvl": "<IMG_CONTEXT>\n",
    "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen3_vl": "<|vision_start|><|image_pad|><|vision_end|>",
}
NAMED_TOKENS = {
    "internvl": {
        "context_image_token": "<IMG_CONTEXT>",
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "video_token": "<video>",
    },
    "qwen2_5_vl": {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
    "qwen3_vl": {
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "vision_start_token": "<|vision_start|>",
        "vision_end_token": "<|vision_end|>",
    },
}
VOCAB_SIZE = 512


def chat_template(family: str) -> str:
    """ChatML, images as the family writes them."""
    image = IMAGE_TEXT.get(family, "<image>").replace("\n", "\\n")
    return (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
        "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}"
        "{% if p['type'] == 'image' %}{{ '" + image + "' }}{% else %}{{ p['text'] }}{% endif %}"
        "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def tokenizer(family: str) -> Any:
    """A byte-level BPE of 512 tokens."""
    names = NAMED_TOKENS.get(family, {"image_token": "<image>", "video_token": "<video>"})
    special = ["<pad>", "<|im_start|>", "<|im_end|>", *names.values()]
    if family == "qwen2_5_vl":
        special += ["<|vision_start|>", "<|vision_end|>"]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = "What is the colour of this picture? The picture is red, green, blue. user assistant"
    backend.train_from_iterator([text] * 4, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        extra_special_tokens=names,
    )


def processor(family: str, tiny: bool = True) -> Any:
    """The family's processor; with its checkpoints' settings, or tiny for the tiny models."""
    text = {"tokenizer": tokenizer(family), "chat_template": chat_template(family)}
    clip = {"patch_size": 14, "num_additional_image_tokens": 1}
    clip["vision_feature_select_strategy"] = "default"
    side = 28 if tiny else 336
    square = {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}}
    if family == "llava":
        images = transformers.CLIPImageProcessorPil(**square)
        return images_only_processor("LlavaProcessor", images, **text, **clip)
    if family == "llava_next":
        pins = {"image_grid_pinpoints": pinpoints(28)} if tiny else {}
        images = transformers.LlavaNextImageProcessorPil(**square, **pins)
        return images_only_processor("LlavaNextProcessor", images, **text, **clip)
    if family == "llava_onevision":
        pins = {"image_grid_pinpoints": pinpoints(28), "size": {"height": 28, "width": 28}}
        images = transformers.LlavaOnevisionImageProcessorPil(**(pins if tiny else {}))
        more = {"num_image_tokens": 4 if tiny else 729, "vision_feature_select_strategy": "full"}
        return images_only_processor("LlavaOnevisionProcessor", images, **text, **more)
    if family == "internvl":
        side = 28 if tiny else 448
        images = transformers.GotOcr2ImageProcessorPil(size={"height": side, "width": side})
        seq = 1 if tiny else 256
        return images_only_processor("InternVLProcessor", images, **text, image_seq_length=seq)
    pixels = {"min_pixels": 28 * 28, "max_pixels": 28 * 28 * 16} if tiny else {}
    if family == "qwen2_5_vl":
        images = transformers.Qwen2VLImageProcessorPil(**pixels)
        return images_only_processor("Qwen2_5_VLProcessor", images, **text)
    pixels = pixels or {"min_pixels": 65536, "max_pixels": 16777216}
    images = transformers.Qwen2VLImageProcessorPil(patch_size=16, **pixels)
    return images_only_processor("Qwen3VLProcessor", images, **text)


def pinpoints(side: int) -> list[list[int]]:
    """The tile grids of LLaVA-NeXT for tiles of ``side``."""
    return [[side, 2 * side], [2 * side, side], [2 * side, 2 * side], [3 * side, side]]


def config(family: str) -> Any:
    """A config of some ten thousand parameters, to go with the tiny processor."""
    names = tokenizer(family)
    image_token_id = names.convert_tokens_to_ids(IMAGE_TOKENS.get(family, "<image>"))
    text = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    if family in ("llava", "llava_next", "llava_onevision"):
        kind = "siglip_vision_model" if family == "llava_onevision" else "clip_vision_model"
        settings: dict[str, Any] = {
            "vision_config": {"model_type": kind, **vision},
            "text_config": {"model_type": "llama", **text},
            "image_token_index": image_token_id,
            "image_token_id": image_token_id,
        }
        if family != "llava":
            settings["image_grid_pinpoints"] = pinpoints(28)
        name = {"llava": "Llava", "llava_next": "LlavaNext"}.get(family, "LlavaOnevision")
        if family == "llava_onevision":
            settings["text_config"]["model_type"] = "qwen2"
        return getattr(transformers, f"{name}Config")(**settings)
    if family == "internvl":
        vision = {**vision, "image_size": [28, 28], "patch_size": [14, 14]}
        return transformers.InternVLConfig(
            vision_config=vision,
            text_config={"model_type": "qwen2", **text},
            image_token_id=image_token_id,
            image_seq_length=1,
        )
    ids = {
        "image_token_id": image_token_id,
        "video_token_id": names.convert_tokens_to_ids("<|video_pad|>"),
        "vision_start_token_id": names.convert_tokens_to_ids("<|vision_start|>"),
        "vision_end_token_id": names.convert_tokens_to_ids("<|vision_end|>"),
    }
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    tower = {"hidden_size": 32, "intermediate_size": 64, "depth": 2, "num_heads": 2}
    tower |= {"out_hidden_size": 32, "spatial_merge_size": 2}
    if family == "qwen2_5_vl":
        tower |= {"patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]}
        return transformers.Qwen2_5_VLConfig(
            vision_config=tower, text_config={**text, "rope_parameters": rope}, **ids
        )
    tower |= {"patch_size": 16, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}
    return transformers.Qwen3VLConfig(
        vision_config=tower, text_config={**text, "head_dim": 16, "rope_parameters": rope}, **ids
    )


def model(family: str) -> Any:
    """A tiny model with random weights."""
    return transformers.AutoModelForImageTextToText.from_config(config(family))
