"""The images of a batch: what ``default_collate_fn`` adds for the samples of ``LLaVADataset``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Instances = Sequence[Mapping[str, Any]]

NUM_IMAGES = "num_images"
IMAGE_FACTS = frozenset({NUM_IMAGES, "num_tiles"})
"""What says something about the images of a batch and is no argument of a model."""

_JOINED = ("image_grid_thw", "image_sizes", "batch_num_images", "num_tiles")


def is_image_text(instances: Instances) -> bool:
    """Whether the samples say how many images they have, as those of ``LLaVADataset`` do."""
    return any(instance.get(NUM_IMAGES) is not None for instance in instances)


def collate_images(instances: Instances, length: int) -> dict[str, Any]:
    """Join the images of all samples of a batch along their first dimension.

    That is the form in which transformers' models take them: the images (LLaVA), the tiles
    (InternVL) or the patches (Qwen-VL) of all samples one after the other, in the order of their
    placeholders. Where images have different numbers of tiles (LLaVA-NeXT, LLaVA-OneVision), the
    missing ones are zeros, which the model passes over. Text-only samples add nothing.

    Args:
        instances: with ``num_images``, int, and, where it is not 0, ``pixel_values``, (k, ...).
        length: columns of the padded batch.

    Returns:
        ``num_images``: (n,) int64. With images ``pixel_values``, a list where shapes cannot be
        joined, and what the samples have of ``image_grid_thw`` (images, 3), ``image_sizes``
        (images, 2), ``batch_num_images`` (samples with images,), ``num_tiles`` (images,).
        ``mm_token_type_ids``: (n, length), where samples have them.

    Raises:
        ValueError: a sample has images and no pixels, or lacks what another one has.
    """
    with_images = [i for i, instance in enumerate(instances) if instance.get(NUM_IMAGES)]
    counts = [int(instance.get(NUM_IMAGES) or 0) for instance in instances]
    data: dict[str, Any] = {NUM_IMAGES: torch.tensor(counts)}
    if with_images:
        data["pixel_values"] = _pixels([_value(instances, i, "pixel_values") for i in with_images])
        for key in _JOINED:
            if any(key in instances[i] for i in with_images):
                data[key] = torch.cat([_joined(instances, i, key) for i in with_images])
    if any("mm_token_type_ids" in instance for instance in instances):
        data["mm_token_type_ids"] = _kinds(instances, length)
    return data


def _joined(instances: Instances, i: int, key: str) -> Tensor:
    if key == "num_tiles" and key not in instances[i]:  # each of its images is one tile
        return torch.ones(int(instances[i][NUM_IMAGES]), dtype=torch.int64)
    return _value(instances, i, key)


def _value(instances: Instances, i: int, key: str) -> Tensor:
    value = instances[i].get(key)
    if value is None:
        raise ValueError(
            f"instance {i} of the batch has {instances[i][NUM_IMAGES]} images and no {key!r}; "
            f"it has {sorted(instances[i])}"
        )
    return torch.as_tensor(value)


def _pixels(values: Sequence[Tensor]) -> Tensor | list[Tensor]:
    shapes = {value.shape[1:] for value in values}
    if len(shapes) == 1:
        return torch.cat(list(values))
    tiles = {value.shape[2:] for value in values if value.ndim == 5}
    if len(tiles) != 1 or any(value.ndim != 5 for value in values):
        return list(values)
    most = max(value.shape[1] for value in values)
    result = values[0].new_zeros(sum(map(len, values)), most, *tiles.pop())
    start = 0
    for value in values:
        result[start : start + len(value), : value.shape[1]] = value
        start += len(value)
    return result


def _kinds(instances: Instances, length: int) -> Tensor:
    result = torch.zeros(len(instances), length, dtype=torch.int64)
    for i, instance in enumerate(instances):
        kinds = instance.get("mm_token_type_ids")
        if kinds is not None:
            result[i, : len(kinds)] = torch.as_tensor(kinds)
    return result
