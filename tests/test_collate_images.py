"""Batches of images and text, against what transformers' processors make of the same batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests import families
from tests.datasets.test_llava import ROWS, folder, make
from xlength import default_collate_fn
from xlength.models.inputs import model_inputs

__all__ = ["folder"]


@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_mixed_batch_is_the_processors_own_batch_padded_on_the_right(
    folder: Path, family: str
) -> None:
    dataset = make(folder, ROWS, family)
    processor = dataset.processor
    batch = default_collate_fn([dataset[i] for i in range(len(ROWS))])["data"]
    conversations = [dataset.reader.conversation(row) for row in ROWS]
    texts = [dataset.encoder.chat.text(one.messages) for one in conversations]
    images = [[Image.open(name) for name in one.images] for one in conversations]
    if family == "internvl":  # its processor takes no sample without images beside others
        images = [one for one in images if one]
    expected = processor(
        text=texts, images=images, padding=True, padding_side="right", return_tensors="pt"
    )
    expected["attention_mask"] = expected["attention_mask"].bool()
    for key, value in expected.items():
        if key == "batch_num_images":
            value = torch.as_tensor(value).reshape(-1)
        assert torch.equal(batch[key], torch.as_tensor(value)), key
    assert set(model_inputs(batch)) - set(expected) <= {"labels", "position_ids"}
    assert batch["num_images"].tolist() == [1, 2, 0, 0, 0, 0, 1]
    assert (batch["labels"][~batch["attention_mask"]] == -100).all()
    assert ("position_ids" in batch) == (not family.startswith("qwen"))


@pytest.mark.parametrize("family", families.FAMILIES)
def test_the_loss_of_a_mixed_batch_is_that_of_its_samples_alone(folder: Path, family: str) -> None:
    torch.manual_seed(0)
    model = families.model(family).eval()
    dataset = make(folder, ROWS, family)
    samples = [dataset[i] for i in range(len(ROWS))]

    def loss_of(batch: list[Any]) -> tuple[float, int]:
        data = default_collate_fn(batch)["data"]
        count = int((data["labels"][:, 1:] != -100).sum())
        with torch.no_grad():
            return float(model(**model_inputs(data)).loss), count

    together, count = loss_of(samples)
    alone = [loss_of([sample]) for sample in samples]
    assert sum(n for _, n in alone) == count
    assert sum(loss * n for loss, n in alone) / count == pytest.approx(together, abs=2e-5)


def test_text_only_batches_have_no_pixels(folder: Path) -> None:
    dataset = make(folder, ROWS, "qwen2_5_vl")
    batch = default_collate_fn([dataset[2], dataset[3]])["data"]
    assert "pixel_values" not in batch and "image_grid_thw" not in batch
    assert batch["num_images"].tolist() == [0, 0]
    assert not batch["mm_token_type_ids"].any()
    flat = default_collate_fn([dataset[0], dataset[3]], return_hf_format=True)
    assert "num_images" not in flat and "lengths" not in flat and "pixel_values" in flat


def test_tiles_of_different_numbers_are_padded_and_counted(folder: Path) -> None:
    following = make(folder, ROWS, "llava_next")
    batch = default_collate_fn([following[0], following[1], following[6]])["data"]
    tiles = [following[i]["pixel_values"].shape[1] for i in (0, 1, 6)]
    assert len(set(tiles)) > 1
    assert batch["pixel_values"].shape[:2] == (4, max(tiles))
    assert not batch["pixel_values"][0, tiles[0] :].any()
    cut = make(folder, ROWS, "internvl")
    batch = default_collate_fn([cut[0], cut[1]])["data"]
    assert batch["num_tiles"].sum() == len(batch["pixel_values"])
    assert batch["num_tiles"].shape == (3,)


def test_equal_shapes_are_stacked_and_others_listed_for_samples_of_xtuner() -> None:
    tokens = {"input_ids": [1, 2], "labels": [1, 2]}
    images = [torch.ones(3, 4, 4), torch.zeros(3, 4, 4), torch.zeros(3, 4, 5)]
    samples = [{**tokens, "pixel_values": image} for image in images]
    stacked = default_collate_fn(samples[:2])["data"]["pixel_values"]
    assert stacked.shape == (2, 3, 4, 4)
    listed = default_collate_fn(samples)["data"]["pixel_values"]
    assert [image.shape for image in listed] == [image.shape for image in images]


def test_images_that_cannot_be_joined_are_listed() -> None:
    tokens = {"input_ids": [1, 2], "labels": [1, 2], "num_images": 1}
    samples = [{**tokens, "pixel_values": torch.zeros(1, 3, side, side)} for side in (4, 5)]
    assert isinstance(default_collate_fn(samples)["data"]["pixel_values"], list)


def test_a_sample_whose_pixels_got_lost_is_named() -> None:
    tokens = {"input_ids": [1, 2], "labels": [1, 2]}
    samples = [{**tokens, "num_images": 0}, {**tokens, "num_images": 2}]
    with pytest.raises(ValueError, match="instance 1 of the batch has 2 images and no 'pixel_v"):
        default_collate_fn(samples)
