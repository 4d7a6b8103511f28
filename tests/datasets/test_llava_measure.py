"""The distribution of lengths by modality, and orders and warnings made of signed lengths."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from torch.utils.data import ConcatDataset

from tests.datasets.test_llava import ROWS, folder, make
from tests.datasets.test_llava_measured import build, rows
from xlength import LengthGroupedSampler
from xlength.datasets.modality import format_measure, measure

__all__ = ["folder"]


def test_the_summary_tells_images_from_text(folder: Path) -> None:
    dataset = make(folder, ROWS)
    summary = measure(ConcatDataset([dataset, dataset]))
    images = dataset.modality_length[dataset.modality_length > 0]
    assert summary["images"]["samples"] == 2 * len(images) == 6
    assert summary["images"]["tokens"] == 2 * images.sum()
    assert (summary["images"]["min"], summary["images"]["max"]) == (images.min(), images.max())
    assert summary["images"]["p50"] == np.sort(images)[1]
    assert summary["text"]["samples"] == 8
    assert summary["all"]["tokens"] == 2 * dataset.length.sum()
    lines = format_measure(summary).splitlines()
    assert [line.split()[0] for line in lines] == ["samples", "images", "text", "all"]
    only_text = measure(make(folder, ROWS[2:5]))
    assert only_text["images"] == {"samples": 0, "tokens": 0}
    assert "-" in format_measure(only_text).splitlines()[1]


@pytest.mark.parametrize("part", ["images", "text"])
def test_one_modality_alone_is_grouped_plainly_with_one_warning(
    tmp_path: Path, part: str, log_lines: list[str]
) -> None:
    data = [row for row in rows(200) if ("image" in row) == (part == "images")]
    dataset = build(tmp_path, data)
    sampler = LengthGroupedSampler(dataset, 4, length_property="modality_length", seed=0)
    order = list(sampler)
    assert set(order) == set(range(len(data)))
    batches = dataset.length[order[: len(order) // 4 * 4]].reshape(-1, 4)
    assert (batches.mean() / batches.max(axis=1).mean()) > 0.85
    assert sum("one modality" in line for line in log_lines) == 1


def test_both_modalities_are_grouped_apart_but_for_few_batches(tmp_path: Path) -> None:
    dataset = build(tmp_path, rows(400))
    sampler = LengthGroupedSampler(dataset, 4, length_property="modality_length", seed=0)
    signs = np.sign(dataset.modality_length)[list(sampler)].reshape(-1, 4)
    mixed = (np.abs(signs.sum(axis=1)) < 4).mean()
    assert 0 < mixed < 0.31
