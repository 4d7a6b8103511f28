"""Vision-language models: what is trained, and steps without an image."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from mmengine.logging import print_log
from torch import Tensor, nn

from xlength.models.lora import require_peft
from xlength.runtime.build import build

_PROJECTORS = ("merger", "deepstack_merger_list")
"""Parts of Qwen-VL's vision tower that lead to the language model, as other families' projector."""

_IMAGE_INPUTS = ("image_sizes", "batch_num_images")
"""What some families' ``get_image_features`` take among their keywords."""

_CHANNELS = ("in_channels", "in_chans", "num_channels")


class VisionLanguage:
    """The vision side of a transformers model of images and text.

    Under data parallelism every trained parameter must take part in every step, also where a rank
    has a batch without an image; else the others wait for its gradient for ever. ``prepare`` gives
    such a batch a term of zero that goes through the vision tower and the projector, with a blank
    image: the modules run, so that sharded parameters are gathered on all ranks alike.

    Parameters that no image ever reaches, such as the layers behind ``vision_feature_layer``, are
    frozen: they would not get a gradient either. One blank image, at build, shows which they are.

    Cost: for a batch without an image, one pass of one small image through the tower.

    Args:
        model: a model of ``AutoModelForImageTextToText``, before any wrapping.
        freeze_llm: train no parameter of the language model.
        freeze_visual_encoder: train no parameter of the vision tower; the projector is trained.
        llm_lora: a peft config or a dict of one: adapters in the language model, which is frozen.
        visual_encoder_lora: the same for the vision tower.

    Raises:
        ValueError: the model has no vision tower.
    """

    def __init__(
        self,
        model: Any,
        freeze_llm: bool = False,
        freeze_visual_encoder: bool = False,
        llm_lora: Any = None,
        visual_encoder_lora: Any = None,
    ) -> None:
        if not is_vision_language(model):
            raise ValueError(
                f"{type(model).__name__} has no vision tower: freeze_llm, freeze_visual_encoder, "
                "llm_lora and visual_encoder_lora are for models of images and text"
            )
        self.model = model
        self.tower, self.decoder = model.get_encoder(modality="image"), model.get_decoder()
        if hasattr(model.config, "text_config"):
            model.config.text_config.use_cache = False
        if freeze_llm:
            self.decoder.requires_grad_(False)
            if model.get_output_embeddings() is not None:
                model.get_output_embeddings().requires_grad_(False)
        if freeze_visual_encoder:
            for _, parameter in self._tower_parameters():
                parameter.requires_grad_(False)
        if llm_lora is not None:
            _inject(self.decoder, llm_lora, ())
            if model.get_output_embeddings() is not None:
                model.get_output_embeddings().requires_grad_(False)
        if visual_encoder_lora is not None:
            _inject(self.tower, visual_encoder_lora, _PROJECTORS)
        self.freeze_unreachable()

    def trained(self) -> list[nn.Parameter]:
        """Trained parameters that only images reach."""
        language = {id(p) for p in self.decoder.parameters()}
        head = self.model.get_output_embeddings()
        language |= {id(p) for p in head.parameters()} if head is not None else set()
        return [p for p in self.model.parameters() if p.requires_grad and id(p) not in language]

    def prepare(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], Tensor | None]:
        """The batch for the model, and for one without an image a () zero to add to the loss, which
        depends on every parameter of ``trained``.

        To be called before the model. Where parameters are sharded the vision side runs here, for
        batches with images too, so that all ranks gather the same parameters in the same order.

        Args:
            inputs: arguments of the model.
        """
        if inputs.get("pixel_values") is None:
            return dict(inputs), self.untouched()
        return (self._encoded(inputs) if _is_sharded(self.model) else dict(inputs)), None

    def untouched(self) -> Tensor | None:
        """The zero of ``prepare``; None where nothing needs it."""
        if not (self.trained() and torch.is_grad_enabled()) and not _is_sharded(self.model):
            return None
        return 0.0 * torch.nan_to_num(self._features_of_a_blank_image()).sum()

    def _encoded(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The batch with the features of its images in place of their pixels."""
        forward = inspect.signature(self.model.forward).parameters
        if "mm_encoder_outputs" not in forward:
            raise ValueError(
                f"{type(self.model).__name__} of this transformers cannot take ready features of "
                "images (mm_encoder_outputs), which sharded parameters need: use DDP"
            )
        names = inspect.signature(self.model.get_image_features).parameters
        images = {name: inputs[name] for name in (*names, *_IMAGE_INPUTS) if name in inputs}
        outputs = self.model.get_image_features(**images, return_dict=True)
        rest = {name: value for name, value in inputs.items() if name != "pixel_values"}
        return {**rest, "mm_encoder_outputs": {"image": outputs}}

    def freeze_unreachable(self) -> None:
        """Freeze the trained parameters of the vision side that no image reaches."""
        trained = self.trained()
        if not trained or any(p.device.type == "meta" for p in trained):
            return
        training = self.model.training
        self.model.eval()  # no dropout: the random state stays as it was
        with torch.enable_grad():
            features = self._features_of_a_blank_image()
            gradients = torch.autograd.grad(features.sum(), trained, allow_unused=True)
        self.model.train(training)
        lost = {id(p) for p, g in zip(trained, gradients, strict=True) if g is None}
        names = [name for name, p in self.model.named_parameters() if id(p) in lost]
        for parameter in trained:
            if id(parameter) in lost:
                parameter.requires_grad_(False)
        if names:
            print_log(
                f"{len(names)} parameters of the vision side are frozen, no image reaches them: "
                f"{names[0]}{', ...' if len(names) > 1 else ''}",
                "current",
            )

    def _tower_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self.tower.named_parameters():
            if name.split(".")[0] not in _PROJECTORS:
                yield name, parameter

    def _features_of_a_blank_image(self) -> Tensor:
        """(n,) all features that the language model would get."""
        parameter = next(self.tower.parameters())
        blank = blank_image(self.model, self.tower.dtype, parameter.device)
        outputs = self.model.get_image_features(**blank, return_dict=True)
        features = [outputs.pooler_output, getattr(outputs, "deepstack_features", None)]
        return torch.cat([tensor.float().reshape(-1) for tensor in _tensors(features)])


def vision_language(model: Any, *options: Any) -> VisionLanguage | None:
    """``VisionLanguage(model, *options)``; None for a text model without any option."""
    if not any(options) and not is_vision_language(model):
        return None
    return VisionLanguage(model, *options)


def is_vision_language(model: Any) -> bool:
    """Whether a model takes images, by transformers' conventions."""
    if not (hasattr(model, "get_image_features") and hasattr(model, "get_encoder")):
        return False
    tower = model.get_encoder(modality="image")
    return tower is not model and tower is not getattr(model, "base_model", None)


def blank_image(model: Any, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Arguments of ``get_image_features`` for one black image, small where the family allows it.

    Args:
        model: its ``config`` and the signature of its ``get_image_features`` tell the family.
        dtype: of the pixels.
        device: of all tensors.
    """
    vision: Any = model.config.vision_config
    channels = next((getattr(vision, name) for name in _CHANNELS if hasattr(vision, name)), 3)
    names = inspect.signature(model.get_image_features).parameters
    if "image_grid_thw" in names:
        side = vision.spatial_merge_size
        width = channels * vision.temporal_patch_size * vision.patch_size**2
        pixels = torch.zeros(side * side, width, dtype=dtype, device=device)
        grid = torch.tensor([[1, side, side]], device=device)
        return {"pixel_values": pixels, "image_grid_thw": grid}
    size = vision.image_size
    height, width = size if isinstance(size, list | tuple) else (size, size)
    pinpoints: Any = getattr(model.config, "image_grid_pinpoints", None)
    if not pinpoints:
        return {"pixel_values": torch.zeros(1, channels, height, width, dtype=dtype, device=device)}
    best = min(pinpoints, key=lambda point: point[0] * point[1])
    tiles = 1 + (best[0] // height) * (best[1] // width)
    pixels = torch.zeros(1, tiles, channels, height, width, dtype=dtype, device=device)
    return {"pixel_values": pixels, "image_sizes": torch.tensor([list(best)], device=device)}


def _is_sharded(model: nn.Module) -> bool:
    """Whether ranks hold parts of the parameters (FSDP, ZeRO-3) and gather them to run a module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FullyShardedDataParallel", None)
    if kind is not None and any(isinstance(module, kind) for module in model.modules()):
        return True
    first = next(iter(model.parameters()), None)
    return hasattr(first, "ds_id") or hasattr(first, "to_local")


def _inject(module: nn.Module, lora: Any, skipped: tuple[str, ...]) -> None:
    """Put adapters into a part of a model, which is frozen but for what is ``skipped``."""
    peft = require_peft()
    config = build(lora)
    if not isinstance(config, peft.PeftConfig):
        raise ValueError(f"lora must be a peft config or a dict with a type, got {lora!r}")
    if getattr(config, "target_modules", None) is None:
        config.target_modules = [
            name
            for name, part in module.named_modules()
            if isinstance(part, nn.Linear) and name.split(".")[0] not in skipped
        ]
    kept = [p for n, p in module.named_parameters() if n.split(".")[0] in skipped]
    trained = [parameter for parameter in kept if parameter.requires_grad]
    peft.inject_adapter_in_model(config, module)
    for parameter in trained:
        parameter.requires_grad_(True)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
