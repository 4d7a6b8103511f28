"""Predicted image tokens against those that the processors make of real images."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from PIL import Image

from tests import families
from xlength.datasets.image_tokens import ImageTokens, expand

SIDES = (1, 3, 27, 28, 29, 55, 56, 97, 111, 224, 336, 447, 448, 500, 671, 900)
EDGES = [(1, 180), (180, 1), (20, 2000), (2000, 20), (337, 336), (672, 336), (1008, 336)]


def made(processor, height: int, width: int, count: int = 1) -> int:
    image = Image.new("RGB", (width, height), (200, 30, 60))
    return expand(processor, [image] * count)["input_ids"].shape[1] // count


@pytest.mark.parametrize("family", families.FAMILIES)
def test_predicted_tokens_are_those_of_the_tiny_processor_over_a_grid_of_sizes(family: str) -> None:
    processor = families.processor(family)
    sizes = np.array(list(product(SIDES, SIDES)) + EDGES)
    counts, refused = ImageTokens(processor)(sizes)
    wrong = []
    for i, (height, width) in enumerate(sizes.tolist()):
        if i in refused:
            with pytest.raises(ValueError):
                made(processor, height, width)
        elif counts[i] != made(processor, height, width):
            wrong.append((height, width))
    assert wrong == []
    if family != "llava":
        assert len(set(counts.tolist())) > 5


@pytest.mark.parametrize("family", families.FAMILIES)
def test_predicted_tokens_are_right_with_the_settings_of_the_checkpoints(family: str) -> None:
    processor = families.processor(family, tiny=False)
    sizes = np.array([(1, 1), (336, 336), (500, 333), (97, 400), (448, 896), (640, 480)])
    counts, refused = ImageTokens(processor)(sizes)
    assert refused == {}
    assert counts.tolist() == [made(processor, h, w) for h, w in sizes.tolist()]


@pytest.mark.long
@pytest.mark.parametrize("family", families.FAMILIES)
def test_predicted_tokens_are_right_over_a_wide_grid_with_the_checkpoints_settings(
    family: str,
) -> None:
    processor = families.processor(family, tiny=False)
    sides = (1, 2, 20, 37, 55, 100, 223, 335, 337, 448, 512, 700, 897, 1024, 1600)
    sizes = np.array([size for size in product(sides, sides) if max(size) <= 150 * min(size)])
    counts, _ = ImageTokens(processor)(sizes)
    assert counts.tolist() == [made(processor, h, w) for h, w in sizes.tolist()]


def test_llava_15_takes_576_tokens_and_internvl_256_a_tile_with_thumbnail() -> None:
    llava = ImageTokens(families.processor("llava", tiny=False))
    assert llava([(10, 20), (3000, 2000)])[0].tolist() == [576, 576]
    internvl = ImageTokens(families.processor("internvl", tiny=False))
    # 1 tile alone; 2 and the thumbnail; 12 and the thumbnail; 2 more for <img> and </img>.
    assert internvl([(448, 448), (448, 896), (1344, 1792)])[0].tolist() == [258, 770, 3330]


@pytest.mark.parametrize("family", families.FAMILIES)
def test_several_images_in_one_sample_take_what_the_processor_makes_of_them(family: str) -> None:
    processor = families.processor(family)
    sizes = [(40, 60), (200, 30), (90, 90)]
    counts, _ = ImageTokens(processor)(sizes, 3)
    images = [Image.new("RGB", (width, height)) for height, width in sizes]
    assert counts.sum() == expand(processor, images)["input_ids"].shape[1]


def test_onevision_counts_images_otherwise_when_there_are_several() -> None:
    tokens = ImageTokens(families.processor("llava_onevision"))
    alone, several = tokens([(90, 90)], 1)[0], tokens([(90, 90)], 2)[0]
    assert alone[0] > several[0] == 5


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_size_that_the_processor_refuses_is_found_among_many(family: str) -> None:
    processor = families.processor(family)
    sizes = [(height, 40) for height in range(20, 120)]
    sizes[17] = (20000, 20)
    sizes[71] = (20, 20000)
    counts, refused = ImageTokens(processor)(sizes)
    assert sorted(refused) == [17, 71]
    assert "aspect ratio" in refused[17]
    assert counts[17] == 0
    assert (np.delete(counts, [17, 71]) > 0).all()


def test_a_processor_whose_settings_contradict_each_other_is_refused() -> None:
    processor = families.processor("llava_next")
    processor.image_processor.size = {"shortest_edge": 56}
    with pytest.raises(ValueError, match="contradict each other"):
        ImageTokens(processor).check()


def test_llava_without_a_center_crop_counts_what_its_size_makes() -> None:
    from transformers import SiglipImageProcessorPil

    processor = families.processor("llava")
    processor.image_processor = SiglipImageProcessorPil(size={"height": 42, "width": 28})
    processor.vision_feature_select_strategy = "full"
    processor.num_additional_image_tokens = 0
    tokens = ImageTokens(processor)
    tokens.check()
    assert tokens([(100, 50)])[0].tolist() == [6]


def test_a_processor_that_offers_no_count_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="processor object does not say"):
        ImageTokens(object())
