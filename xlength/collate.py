"""``default_collate_fn``: samples padded to the longest of the batch, in XTuner's form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from xlength.collate_images import IMAGE_FACTS, collate_images, is_image_text
from xlength.losses import IGNORE_INDEX
from xlength.registry import FUNCTIONS, register

Instances = Sequence[Mapping[str, Any]]


@register(FUNCTIONS)
def default_collate_fn(
    instances: Instances,
    pad_index: int = 0,
    return_hf_format: bool = False,
    use_varlen_attn: bool = False,
    *,
    with_lengths: bool = True,
) -> dict[str, Any]:
    """Pad the samples of a batch on the right to its longest.

    What is padding is told by ``attention_mask``, which is made of the lengths and not of the
    tokens: a pad token may well be the end-of-sequence token.

    XTuner's arguments and batch, and ``lengths`` besides: facts of a batch travel with it. XTuner's
    own ``SupervisedFinetune`` hands every key to the language model, so inside XTuner write
    ``collate_fn=dict(type='xlength.default_collate_fn', with_lengths=False)``.

    Cost: one copy of the tokens.

    Args:
        instances: with ``input_ids`` and ``labels``, (l,) integers as list, ndarray or tensor, and
            ``pixel_values`` where there are images.
        pad_index: token to pad ``input_ids`` with; labels are padded with -100.
        return_hf_format: return the batch alone instead of ``dict(data=batch, data_samples=None)``;
            it then carries no ``lengths``, since it goes to a model as it is.
        use_varlen_attn: the only instance is a pack with ``cumulative_len`` (from 0 to its length)
            and ``position_ids``; the first label of each of its samples is masked, since the token
            before it belongs to another one. See also ``packed_collate_fn``.
        with_lengths: put ``lengths`` in the batch.

    Returns:
        ``input_ids``, ``labels``, ``position_ids``: (n, l) int64; ``attention_mask``: (n, l) bool;
        ``lengths``: (n,) int64, tokens of each sample; ``pixel_values``: (n, ...) where all shapes
        are equal, else a list; for samples of ``LLaVADataset`` what ``collate_images`` makes. For a
        pack ``cumulative_len``, a list of one (k + 1,) int32 tensor, and ``max_seqlen``, int,
        instead of ``attention_mask``, and the lengths of its k samples.

    Raises:
        ValueError: there is no instance; one lacks a key, is empty or not 1-d, or has another
            number of labels than of tokens; a pack is not alone or has images.
    """
    if not instances:
        raise ValueError("instances is empty: a batch needs at least one sample")
    ids = [_row(instances, i, "input_ids") for i in range(len(instances))]
    labels = [_row(instances, i, "labels") for i in range(len(instances))]
    for i, (row, targets) in enumerate(zip(ids, labels, strict=True)):
        if len(row) != len(targets) or not len(row):
            raise ValueError(
                f"instance {i} of the batch has {len(row)} input_ids and {len(targets)} labels; "
                "there must be as many labels as tokens, and at least one"
            )
    data: dict[str, Any] = {"input_ids": _pad(ids, pad_index), "labels": _pad(labels, IGNORE_INDEX)}
    lengths = torch.tensor([len(row) for row in ids])
    if use_varlen_attn:
        lengths = _add_borders(data, instances)
    else:
        positions = torch.arange(data["input_ids"].shape[1])
        data["attention_mask"] = positions < lengths[:, None]
        data["position_ids"] = positions.repeat(len(ids), 1)
    if is_image_text(instances):
        data.update(collate_images(instances, data["input_ids"].shape[1]))
        if "mm_token_type_ids" in data:  # positions in two dimensions: the model makes them
            data.pop("position_ids")
    elif _has_images(instances):
        data["pixel_values"] = _pixel_values(instances)
    if return_hf_format:
        return {key: value for key, value in data.items() if key not in IMAGE_FACTS}
    if with_lengths:
        data["lengths"] = lengths
    return {"data": data, "data_samples": None}


def _row(instances: Instances, i: int, key: str) -> Tensor:
    value = instances[i].get(key)
    if value is None:
        raise ValueError(f"instance {i} of the batch has no {key!r}; it has {sorted(instances[i])}")
    row = torch.as_tensor(value).long()
    if row.ndim != 1:
        raise ValueError(
            f"instance {i} of the batch: {key!r} must be 1-d, got shape {list(row.shape)}"
        )
    return row


def _pad(rows: Sequence[Tensor], value: int) -> Tensor:
    """(l_i,) each -> (n, longest)."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=value)


def _add_borders(data: dict[str, Any], instances: Instances) -> Tensor:
    """Put the borders of the samples of a pack in the batch; returns their lengths, (k,) int64."""
    if len(instances) != 1:
        raise ValueError(
            f"use_varlen_attn=True takes packs one by one: the batch size must be 1, got "
            f"{len(instances)}"
        )
    if _has_images(instances):
        raise ValueError("use_varlen_attn=True: packs with pixel_values are not supported")
    borders = _row(instances, 0, "cumulative_len").int()
    lengths = borders.diff().long()
    size = data["input_ids"].shape[1]
    if len(borders) < 2 or borders[0] != 0 or borders[-1] != size or (lengths < 0).any():
        raise ValueError(
            f"instance 0 of the batch: cumulative_len must rise from 0 to its {size} tokens, got "
            f"{borders.tolist()[:20]}"
        )
    data["cumulative_len"] = [borders]
    data["position_ids"] = _row(instances, 0, "position_ids")[None]
    data["max_seqlen"] = int(lengths.max())
    inner = borders[1:-1].long()
    data["labels"][0, inner[inner < size]] = IGNORE_INDEX
    return lengths


def _has_images(instances: Instances) -> bool:
    return any(instance.get("pixel_values") is not None for instance in instances)


def _pixel_values(instances: Instances) -> Tensor | list[Tensor]:
    """(n, ...), or a list where the shapes differ."""
    values = [instance.get("pixel_values") for instance in instances]
    missing = [i for i, value in enumerate(values) if value is None]
    if missing:
        raise ValueError(
            f"instance {missing[0]} of the batch has no pixel_values and others have; give it a "
            "blank image, or keep the kinds apart by modality_length"
        )
    images = [torch.as_tensor(value) for value in values]
    equal = all(image.shape == images[0].shape for image in images)
    return torch.stack(images) if equal else images
