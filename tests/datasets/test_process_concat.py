"""``LengthConcatDataset``: several sources, one after the other, with their lengths."""

import pickle

import pytest
from datasets import Dataset
from mmengine.registry import DATASETS
from torch.utils.data import ConcatDataset

from tests.datasets.samples import chats, small_tokenizer
from xlength import LengthConcatDataset, LengthGroupedSampler, get_lengths


class Images:
    """A source with two length properties."""

    def __init__(self, sizes):
        self.length = sizes
        self.modality_length = [-size if size % 2 else size for size in sizes]

    def __len__(self):
        return len(self.length)

    def __getitem__(self, index):
        return self.length[index]


def source(count, seed):
    return dict(
        type="process_hf_dataset",
        dataset=Dataset.from_list(chats(count, seed)),
        tokenizer=small_tokenizer(),
        max_length=100,
        dataset_map_fn="openai_map_fn",
        pack_to_max_length=False,
    )


@pytest.mark.parametrize("name", ["LengthConcatDataset", "xlength.LengthConcatDataset"])
def test_configs_and_objects_are_joined_with_their_lengths(name):
    built = DATASETS.build(source(7, seed=1))
    both = DATASETS.build(dict(type=name, datasets=[source(5, seed=0), built]))
    assert isinstance(both, ConcatDataset) and len(both) == 12
    assert both[5] == built[0]
    expected = [len(both[i]["input_ids"]) for i in range(12)]
    assert both.length == expected == get_lengths(both).tolist()
    assert type(both.length) is list
    assert repr(both) == "LengthConcatDataset of 12 samples: Dataset, Dataset"


def test_every_length_property_that_all_sources_have_is_joined():
    both = LengthConcatDataset([Images([3, 4]), Images([5])])
    assert both.modality_length == [-3, 4, -5] and both.length == [3, 4, 5]
    assert get_lengths(both, "modality_length").tolist() == [-3, 4, -5]
    assert pickle.loads(pickle.dumps(both)).length == [3, 4, 5]
    mixed = LengthConcatDataset([Images([3, 4]), [{"input_ids": [1]}]])
    assert mixed.length == [3, 4, 1]
    assert not hasattr(mixed, "modality_length") and not hasattr(mixed, "metainfo")
    with pytest.raises(AttributeError, match="no 'modality_length': .*needs a column or attribute"):
        mixed.modality_length  # noqa: B018


def test_a_sampler_groups_over_all_sources():
    both = LengthConcatDataset([Images(list(range(1, 40))), Images(list(range(40, 1, -1)))])
    sampler = LengthGroupedSampler(both, 4, seed=0)
    assert sorted(set(sampler)) == list(range(78))
    mixed = LengthGroupedSampler(both, 4, "modality_length", seed=0)
    assert sorted(set(mixed)) == list(range(78))


@pytest.mark.parametrize(
    ("datasets", "message"),
    [
        ([], r"datasets must be a list .* got \[\]"),
        (dict(type="x"), "datasets must be a list"),
        ([Images([1]), Images([])], r"datasets\[1\] \(Images\) is empty"),
        ([dict(type="NoSuchDataset")], r"datasets\[0\]: 'NoSuchDataset' is in no registry"),
        ([dict(source(1, 0), max_length=0)], r"datasets\[0\]: max_length=0 must be"),
    ],
)
def test_unusable_sources_are_named(datasets, message):
    with pytest.raises(ValueError, match=message):
        LengthConcatDataset(datasets)
