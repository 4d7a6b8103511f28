"""``default_collate_fn``: XTuner's batch, and the lengths."""

import functools

import numpy as np
import pytest
import torch
from datasets import Dataset
from mmengine.registry import FUNCTIONS
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from xlength import default_collate_fn
from xlength.losses import IGNORE_INDEX


def sample(*ids, **extra):
    return {"input_ids": list(ids), "labels": [-100, *ids[1:]], **extra}


BATCH = [sample(5, 6, 7), sample(8), sample(9, 2)]


def test_samples_are_padded_on_the_right_to_the_longest():
    batch = default_collate_fn(BATCH, pad_index=3)
    data = batch["data"]
    assert batch["data_samples"] is None
    assert data["input_ids"].tolist() == [[5, 6, 7], [8, 3, 3], [9, 2, 3]]
    assert data["labels"].tolist() == [[-100, 6, 7], [-100] * 3, [-100, 2, -100]]
    assert data["attention_mask"].tolist() == [
        [True] * 3,
        [True, False, False],
        [True, True, False],
    ]
    assert data["position_ids"].tolist() == [[0, 1, 2]] * 3
    assert data["lengths"].tolist() == [3, 1, 2]
    kinds = {key: value.dtype for key, value in data.items()}
    assert kinds.pop("attention_mask") == torch.bool
    assert set(kinds.values()) == {torch.int64}


def test_a_pad_token_inside_a_sample_is_no_padding():
    data = default_collate_fn([sample(2, 4, 2), sample(4)], pad_index=2)["data"]
    assert data["attention_mask"].tolist() == [[True, True, True], [True, False, False]]


def test_the_keys_are_those_of_xtuner_and_lengths_can_be_left_out():
    keys = {"input_ids", "labels", "attention_mask", "position_ids"}
    assert set(default_collate_fn(BATCH)["data"]) == keys | {"lengths"}
    assert set(default_collate_fn(BATCH, with_lengths=False)["data"]) == keys
    assert set(default_collate_fn(BATCH, return_hf_format=True)) == keys


def test_a_model_takes_the_batch_and_padding_does_not_change_the_loss():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=11,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    model = LlamaForCausalLM(config).double().eval()
    with torch.no_grad():
        batch = model(**default_collate_fn(BATCH, return_hf_format=True)).loss
        alone = [model(**default_collate_fn([row], return_hf_format=True)).loss for row in BATCH]
    tokens = [2, 0, 1]
    expected = sum(loss * n for loss, n in zip(alone, tokens, strict=True) if n) / sum(tokens)
    torch.testing.assert_close(batch, expected)


@pytest.mark.parametrize(
    "convert", [np.array, torch.tensor, tuple, functools.partial(np.array, dtype="i4")]
)
def test_any_kind_of_sequence_gives_the_same_batch(convert):
    rows = [{key: convert(value) for key, value in row.items()} for row in BATCH]
    expected = default_collate_fn(BATCH)["data"]
    for key, value in default_collate_fn(rows)["data"].items():
        assert torch.equal(value, expected[key]), key


def test_it_works_in_a_loader_over_a_datasets_dataset_with_workers():
    dataset = Dataset.from_list(BATCH)
    loader = DataLoader(dataset, batch_size=3, collate_fn=default_collate_fn, num_workers=1)
    (batch,) = loader
    assert batch["data"]["lengths"].tolist() == [3, 1, 2]


PACK = {
    "input_ids": [5, 6, 7, 8, 9],
    "labels": [5, 6, 7, 8, 9],
    "cumulative_len": [0, 2, 5],
    "position_ids": [0, 1, 0, 1, 2],
}


def test_a_pack_brings_its_borders_instead_of_a_mask():
    data = default_collate_fn([PACK], use_varlen_attn=True)["data"]
    assert set(data) == {*PACK, "max_seqlen", "lengths"}
    assert data["input_ids"].tolist() == [PACK["input_ids"]]
    assert data["position_ids"].tolist() == [PACK["position_ids"]]
    assert [borders.tolist() for borders in data["cumulative_len"]] == [[0, 2, 5]]
    assert data["cumulative_len"][0].dtype == torch.int32
    assert data["max_seqlen"] == 3 and isinstance(data["max_seqlen"], int)
    assert data["lengths"].tolist() == [2, 3]
    # The first token of a sample is not to be predicted from another sample's last.
    assert data["labels"].tolist() == [[5, 6, IGNORE_INDEX, 8, 9]]
    empty_last = {**PACK, "cumulative_len": [0, 2, 5, 5]}
    labels = default_collate_fn([empty_last], use_varlen_attn=True)["data"]["labels"]
    assert labels.tolist() == data["labels"].tolist()


def test_images_of_one_shape_are_stacked_and_others_listed():
    def images(*shapes):
        return [sample(1, 2, pixel_values=np.ones(shape, dtype="f4")) for shape in shapes]

    stacked = default_collate_fn(images((3, 4, 4), (3, 4, 4)))["data"]["pixel_values"]
    assert stacked.shape == (2, 3, 4, 4)
    listed = default_collate_fn(images((3, 4, 4), (3, 2, 4)))["data"]["pixel_values"]
    assert [list(image.shape) for image in listed] == [[3, 4, 4], [3, 2, 4]]
    assert "pixel_values" not in default_collate_fn([sample(1, pixel_values=None)])["data"]


@pytest.mark.parametrize(
    ("instances", "options", "message"),
    [
        ([], {}, "instances is empty"),
        ([sample(1), {"labels": [1]}], {}, r"instance 1 of the batch has no 'input_ids'"),
        ([{"input_ids": [1]}], {}, "instance 0 of the batch has no 'labels'"),
        ([{"input_ids": [1, 2], "labels": [1]}], {}, "has 2 input_ids and 1 labels"),
        ([{"input_ids": [], "labels": []}], {}, "at least one"),
        ([{"input_ids": [[1]], "labels": [[1]]}], {}, r"must be 1-d, got shape \[1, 1\]"),
        ([PACK, PACK], {"use_varlen_attn": True}, "batch size must be 1, got 2"),
        ([sample(1)], {"use_varlen_attn": True}, "has no 'cumulative_len'"),
        (
            [{**PACK, "cumulative_len": [0, 2, 4]}],
            {"use_varlen_attn": True},
            "rise from 0 to its 5",
        ),
        ([sample(1), sample(1, pixel_values=[1.0])], {}, "instance 0 .* has no pixel_values"),
        ([{**PACK, "pixel_values": [1.0]}], {"use_varlen_attn": True}, "pixel_values are not"),
    ],
)
def test_bad_instances_are_named(instances, options, message):
    with pytest.raises(ValueError, match=message):
        default_collate_fn(instances, **options)


@pytest.mark.parametrize("name", ["default_collate_fn", "xlength.default_collate_fn"])
def test_a_config_can_name_it(name):
    assert FUNCTIONS.get(name) is default_collate_fn
