import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xlength.collate_packed import packed_collate_fn


def sample(first, length, **more):
    return {"input_ids": list(range(first, first + length)), "labels": [7] * length, **more}


def pack(*lengths):
    total = sum(lengths)
    ends = np.append(0, np.cumsum(lengths)).astype(np.int32)
    return {
        "input_ids": np.arange(1, total + 1),
        "labels": np.full(total, 7),
        "cumulative_len": ends,
        "sample_ids": np.arange(len(lengths)),
    }


def test_samples_are_laid_end_to_end_in_one_row():
    batch = packed_collate_fn([sample(1, 3), sample(11, 1), sample(21, 2)])
    assert batch["data_samples"] is None
    data = batch["data"]
    assert data["input_ids"].tolist() == [[1, 2, 3, 11, 21, 22]]
    assert data["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1]]
    assert data["labels"].tolist() == [[-100, 7, 7, -100, -100, 7]]
    assert data["cu_seqlens"].tolist() == [0, 3, 4, 6] and data["cu_seqlens"].dtype == torch.int32
    assert data["max_seqlen"] == 3 and data["lengths"].tolist() == [3, 1, 2]
    assert "attention_mask" not in data and "sample_ids" not in data


def test_padding_is_one_sample_without_labels_and_not_many_of_length_one():
    data = packed_collate_fn([sample(1, 3), sample(5, 2)], pad_index=99, pad_to_multiple_of=8)[
        "data"
    ]
    assert data["input_ids"].tolist() == [[1, 2, 3, 5, 6, 99, 99, 99]]
    assert data["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert data["labels"].tolist()[0][5:] == [-100] * 3
    assert data["cu_seqlens"].tolist() == [0, 3, 5, 8]
    assert data["lengths"].tolist() == [3, 2]


def test_each_of_several_packs_is_a_row_and_borders_run_through_all_rows():
    data = packed_collate_fn([pack(2, 2), pack(3), pack(1, 1)], return_hf_format=True)
    assert data["input_ids"].tolist() == [[1, 2, 3, 4], [1, 2, 3, 0], [1, 2, 0, 0]]
    assert data["position_ids"].tolist() == [[0, 1, 0, 1], [0, 1, 2, 0], [0, 0, 0, 1]]
    assert data["labels"].tolist() == [
        [-100, 7, -100, 7], [-100, 7, 7, -100], [-100, -100, -100, -100],
    ]  # fmt: skip
    assert data["cu_seqlens"].tolist() == [0, 2, 4, 7, 8, 9, 10, 12]
    assert data["lengths"].tolist() == [2, 2, 3, 1, 1]
    assert data["sample_ids"].tolist() == [0, 1, 0, 0, 1]


def test_samples_of_several_packs_fill_rows_up_to_max_length():
    lengths = [3, 2, 4, 1, 5]
    data = packed_collate_fn([sample(1, n) for n in lengths], max_length=5)["data"]
    assert data["input_ids"].shape == (3, 5)
    assert data["lengths"].tolist() == lengths
    assert data["position_ids"].tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 0], [0, 1, 2, 3, 4]]


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=12),
    st.sampled_from([None, 9, 16]),
    st.sampled_from([None, 4, 7]),
)
@settings(max_examples=150, deadline=None)
def test_every_token_stands_once_in_its_own_segment(lengths, max_length, multiple):
    first = np.cumsum([100] + lengths[:-1])
    instances = [sample(int(f), n) for f, n in zip(first, lengths, strict=True)]
    data = packed_collate_fn(
        instances, pad_index=0, max_length=max_length, pad_to_multiple_of=multiple
    )["data"]
    ids, ends = data["input_ids"].reshape(-1), data["cu_seqlens"].tolist()
    assert ends[-1] == ids.numel() and data["input_ids"].shape[1] % (multiple or 1) == 0
    segments = [ids[a:b].tolist() for a, b in zip(ends, ends[1:], strict=False)]
    real = [segment for segment in segments if segment[0] != 0]
    assert real == [instance["input_ids"] for instance in instances]
    assert all(set(segment) == {0} for segment in segments if segment[0] == 0)
    positions = data["position_ids"].reshape(-1)
    assert (positions == 0).nonzero().flatten().tolist() == ends[:-1]
    assert ((data["labels"] != -100).sum() == sum(n - 1 for n in lengths)).item()
    assert data["max_seqlen"] == max(map(len, segments))


def test_long_samples_are_cut_only_where_that_is_asked_for():
    with pytest.raises(ValueError, match="instance 1 of the batch has 9 tokens.*max_length=5"):
        packed_collate_fn([sample(1, 2), sample(1, 9)], max_length=5)
    data = packed_collate_fn([sample(1, 2), sample(1, 9)], max_length=5, truncate=True)["data"]
    assert data["lengths"].tolist() == [2, 5]


def test_a_row_that_ranks_cannot_share_is_refused():
    with pytest.raises(ValueError, match="row of 5 tokens .* sequence_parallel_size=4"):
        packed_collate_fn([sample(1, 5)], sequence_parallel_size=4)
    data = packed_collate_fn([sample(1, 5)], sequence_parallel_size=4, pad_to_multiple_of=8)["data"]
    assert data["input_ids"].shape == (1, 8)


@pytest.mark.parametrize(
    "instances, options, message",
    [
        ([{"input_ids": [1, 2]}], {}, "instance 0 of the batch has no labels"),
        ([{"input_ids": [1], "labels": [1, 2]}], {}, r"shape \(1,\) and labels of shape \(2,\)"),
        ([sample(1, 2), {"input_ids": [], "labels": []}], {}, "instance 1 .* not empty"),
        ([sample(1, 2, attention_mask=[1, 0])], {}, "padded already"),
        ([sample(1, 2, pixel_values=np.zeros(3))], {}, "'pixel_values': samples with images"),
        ([sample(1, 2), pack(2)], {}, "cannot share a batch"),
        ([{**pack(2, 2), "cumulative_len": [0, 2, 5]}], {}, "rise from 0 to its 4 tokens"),
        ([], {}, "instances is empty"),
        ([sample(1, 2)], {"pad_to_multiple_of": 0}, "at least 1, got 0"),
        ([sample(1, 2)], {"sequence_parallel_size": 0}, "sequence_parallel_size must be .* got 0"),
        ([sample(1, 2)], {"sequence_parallel_size": "2"}, "sequence_parallel_size must .* got '2'"),
        ([sample(1, 2)], {"use_varlen_attn": False}, "use_varlen_attn must be True"),
        ([pack(3, 3)], {"max_length": 5, "truncate": True}, "has 6 tokens"),
    ],
)
def test_what_cannot_be_packed_is_refused_by_name(instances, options, message):
    with pytest.raises(ValueError, match=message):
        packed_collate_fn(instances, **options)


def test_a_mask_of_ones_and_keys_without_a_value_are_accepted():
    data = packed_collate_fn([sample(1, 2, attention_mask=[1, 1], pixel_values=None)])["data"]
    assert data["input_ids"].tolist() == [[1, 2]]


def test_the_function_is_found_under_its_names():
    from mmengine.registry import FUNCTIONS

    import xlength

    assert FUNCTIONS.get("xlength.packed_collate_fn") is xlength.packed_collate_fn
