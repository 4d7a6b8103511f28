"""``packed_collate_fn``: samples laid end to end in rows, with their borders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from xlength.collate_images import IMAGE_FACTS, collate_images, is_image_text
from xlength.datasets.token_rows import token_row
from xlength.losses import IGNORE_INDEX
from xlength.registry import FUNCTIONS, register

Ints = NDArray[np.int64]


@dataclass
class Part:
    """Tokens that stay together: one sample, or a pack of several.

    Args:
        input_ids, labels: (t,) int64.
        lengths: (k,) int64, tokens of each sample; their sum is t.
        sample_ids: (k,) int64, which sample each is, or None where that is not known.
    """

    input_ids: Ints
    labels: Ints
    lengths: Ints
    sample_ids: Ints | None


@register(FUNCTIONS)
def packed_collate_fn(
    instances: Sequence[Mapping[str, Any]],
    pad_index: int = 0,
    return_hf_format: bool = False,
    use_varlen_attn: bool = True,
    max_length: int | None = None,
    truncate: bool = False,
    pad_to_multiple_of: int | None = None,
    sequence_parallel_size: int = 1,
) -> dict[str, Any]:
    """Make one row of a pack's samples, or one row of each of several packs.

    Plain samples (as a ``Packing`` plan draws them) go into one row, in order; with ``max_length``
    a new row is begun where the next sample does not fit. Instances with ``cumulative_len`` (items
    of ``PackedDataset``, rows of ``process_hf_dataset(use_varlen_attn=True)``) are packs and make
    one row each.

    Samples of ``LLaVADataset`` bring their images along, see ``collate_images``.

    The first label of every sample is masked, since the token before it belongs to another sample.
    Padding stands at the end of a row and counts as one sample without labels, positions from 0 on.

    Args:
        instances: with ``input_ids`` and ``labels``, equally long sequences of integers.
        pad_index: token to pad with.
        return_hf_format: return the batch alone instead of ``dict(data=batch, data_samples=None)``.
        use_varlen_attn: as in ``default_collate_fn``; here it can only be True.
        max_length: tokens of a row at most, before padding.
        truncate: cut samples to ``max_length`` (as planned with ``overlong='truncate'``) instead of
            refusing them.
        pad_to_multiple_of: pad rows to a multiple of this many tokens.
        sequence_parallel_size: ranks that share a row; its padded length must be a multiple of it.

    Returns:
        ``input_ids``, ``labels``, ``position_ids``: (rows, length) int64; ``cu_seqlens``: (segments
        + 1,) int32, where each sample and each padding begins and ends in the flattened rows;
        ``max_seqlen``: int, the longest of these; ``lengths``: (samples,) int64, tokens of each
        sample without padding; ``sample_ids``: (samples,) int64 where the instances carry it; with
        images what ``collate_images`` makes.

    Raises:
        ValueError: there is no instance; a sample or pack is too long, has no labels or another
            number of them than of tokens, is padded already, or has media in another form; packs
            and samples are mixed; the row's length does not suit ``sequence_parallel_size``.
    """
    if not use_varlen_attn:
        raise ValueError("packed_collate_fn keeps samples apart: use_varlen_attn must be True")
    if not len(instances):
        raise ValueError("instances is empty: a batch needs at least one sample")
    if not isinstance(sequence_parallel_size, int) or sequence_parallel_size < 1:
        raise ValueError(
            "sequence_parallel_size must be a whole number of at least 1, got "
            f"{sequence_parallel_size!r}"
        )
    parts = [_part(i, instance, max_length, truncate) for i, instance in enumerate(instances)]
    packed = ["cumulative_len" in instance for instance in instances]
    if any(packed) != all(packed):
        raise ValueError("packs (with 'cumulative_len') and single samples cannot share a batch")
    rows = [[part] for part in parts] if all(packed) else _fill_rows(parts, max_length)
    width = _width(rows, pad_to_multiple_of, sequence_parallel_size)
    data = _lay_out(rows, width, pad_index)
    if is_image_text(instances):
        data |= _images(instances, rows, data["input_ids"].shape)
        if return_hf_format:
            data = {key: value for key, value in data.items() if key not in IMAGE_FACTS}
    return data if return_hf_format else {"data": data, "data_samples": None}


def _images(
    instances: Sequence[Mapping[str, Any]], rows: list[list[Part]], shape: torch.Size
) -> dict[str, Any]:
    """What ``collate_images`` makes of the samples, one after the other, and the kinds of tokens
    laid in rows as the tokens are."""
    bare = [{k: v for k, v in each.items() if k != "mm_token_type_ids"} for each in instances]
    data = collate_images(bare, shape[1])
    if any("mm_token_type_ids" in instance for instance in instances):
        kinds = torch.zeros(shape, dtype=torch.int64)
        left = iter(instances)
        for i, row in enumerate(rows):
            end = 0
            for part, instance in zip(row, left, strict=False):
                begin, end = end, end + len(part.input_ids)
                if instance.get("mm_token_type_ids") is not None:
                    kinds[i, begin:end] = torch.as_tensor(instance["mm_token_type_ids"])
        data["mm_token_type_ids"] = kinds
    return data


def _part(i: int, instance: Mapping[str, Any], max_length: int | None, truncate: bool) -> Part:
    images = is_image_text([instance])
    ids, labels = token_row(instance, f"instance {i} of the batch", with_media=images)
    if images and "cumulative_len" in instance:
        raise ValueError(f"instance {i} of the batch is a pack with images; give single samples")
    if max_length is not None and len(ids) > max_length:
        if not truncate or images or "cumulative_len" in instance:
            raise ValueError(
                f"instance {i} of the batch has {len(ids)} tokens, more than "
                f"max_length={max_length}"
            )
        ids, labels = ids[:max_length], labels[:max_length]
    sample_ids = instance.get("sample_ids")
    if sample_ids is not None:
        sample_ids = np.asarray(sample_ids, dtype=np.int64).reshape(-1)
    return Part(ids, labels, _lengths(i, instance, len(ids)), sample_ids)


def _lengths(i: int, instance: Mapping[str, Any], size: int) -> Ints:
    if "cumulative_len" not in instance:
        return np.array([size], dtype=np.int64)
    ends = np.asarray(instance["cumulative_len"], dtype=np.int64)
    lengths: Ints = np.diff(ends)
    if len(ends) < 2 or ends[0] != 0 or ends[-1] != size or (lengths < 1).any():
        raise ValueError(
            f"instance {i} of the batch: cumulative_len must rise from 0 to its {size} tokens, got "
            f"{ends.tolist()[:20]}"
        )
    return lengths


def _fill_rows(parts: list[Part], max_length: int | None) -> list[list[Part]]:
    rows: list[list[Part]] = [[]]
    room = max_length
    for part in parts:
        size = len(part.input_ids)
        if room is not None and max_length is not None:
            if size > room:
                rows.append([])
                room = max_length
            room -= size
        rows[-1].append(part)
    return rows


def _width(rows: list[list[Part]], multiple: int | None, sequence_parallel_size: int) -> int:
    width = max(sum(len(part.input_ids) for part in row) for row in rows)
    if multiple is not None:
        if multiple < 1:
            raise ValueError(f"pad_to_multiple_of must be at least 1, got {multiple}")
        width = -(-width // multiple) * multiple
    if width % sequence_parallel_size:
        raise ValueError(
            f"a row of {width} tokens cannot be shared by sequence_parallel_size="
            f"{sequence_parallel_size} ranks; set pad_to_multiple_of to a multiple of it"
        )
    return width


def _lay_out(rows: list[list[Part]], width: int, pad_index: int) -> dict[str, Any]:
    input_ids = np.full((len(rows), width), pad_index, dtype=np.int64)
    labels = np.full((len(rows), width), IGNORE_INDEX, dtype=np.int64)
    segments = []
    for i, row in enumerate(rows):
        filled = sum(len(part.input_ids) for part in row)
        input_ids[i, :filled] = np.concatenate([part.input_ids for part in row])
        labels[i, :filled] = np.concatenate([part.labels for part in row])
        segments += [part.lengths for part in row]
        if filled < width:
            segments.append(np.array([width - filled], dtype=np.int64))
    ends = np.concatenate([[0], np.cumsum(np.concatenate(segments))])
    labels.reshape(-1)[ends[:-1]] = IGNORE_INDEX
    positions = np.arange(ends[-1]) - np.repeat(ends[:-1], np.diff(ends))
    parts = [part for row in rows for part in row]
    data = {
        "input_ids": torch.from_numpy(input_ids),
        "labels": torch.from_numpy(labels),
        "position_ids": torch.from_numpy(positions.reshape(len(rows), width)),
        "cu_seqlens": torch.from_numpy(ends.astype(np.int32)),
        "max_seqlen": int(np.diff(ends).max()),
        "lengths": torch.from_numpy(np.concatenate([part.lengths for part in parts])),
    }
    ids = [part.sample_ids for part in parts if part.sample_ids is not None]
    if len(ids) == len(parts):
        data["sample_ids"] = torch.from_numpy(np.concatenate(ids))
    return data
