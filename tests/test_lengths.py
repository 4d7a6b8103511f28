"""``get_lengths``: every source, every wrapper, every kind of bad length."""

import logging

import numpy as np
import pyarrow as pa
import pytest
import torch
from datasets import Dataset, DatasetDict, concatenate_datasets, load_from_disk
from mmengine.dataset import BaseDataset, ClassBalancedDataset, RepeatDataset
from mmengine.dataset import ConcatDataset as MMConcatDataset
from mmengine.logging import MMLogger
from torch.utils.data import ConcatDataset, IterableDataset, Subset

from xlength import arrow
from xlength.lengths import get_lengths, warn_if_grouping_is_useless

LENGTHS = [5, 9, 4, 1, 7, 8, 6, 2, 3, 11]


class Sized:
    """A data set that has lengths and nothing else."""

    def __init__(self, lengths, size=None):
        self.length = lengths
        self.size = len(lengths) if size is None else size

    def __len__(self):
        return self.size


def rows(lengths=LENGTHS, **columns):
    """A ``datasets.Dataset`` whose row i has ``lengths[i]`` tokens, all of them i."""
    ids = [[row] * length for row, length in enumerate(lengths)]
    return Dataset.from_dict({"input_ids": ids, **columns})


def token_counts(dataset):
    return [len(ids) for ids in dataset["input_ids"]]


SOURCES = {
    "list": LENGTHS,
    "tuple": tuple(LENGTHS),
    "int32 array": np.array(LENGTHS, dtype=np.int32),
    "uint64 array": np.array(LENGTHS, dtype=np.uint64),
    "whole floats": [float(length) for length in LENGTHS],
    "tensor": torch.tensor(LENGTHS),
    "bfloat16 tensor": torch.tensor(LENGTHS, dtype=torch.bfloat16),
    "list of tensors": [torch.tensor(length) for length in LENGTHS],
    "objects": np.array(LENGTHS, dtype=object),
    "arrow": pa.chunked_array([LENGTHS[:3], LENGTHS[3:]]),
    "lazy column": Dataset.from_dict({"length": LENGTHS})["length"],
    "nested lazy column": Dataset.from_dict({"a": [{"b": n} for n in LENGTHS]})["a"]["b"],
    "method": lambda: LENGTHS,
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_lengths_of_any_kind_of_sequence_become_int64(source):
    lengths = get_lengths(Sized(source, size=10))
    assert lengths.dtype == np.int64
    assert lengths.tolist() == LENGTHS


def test_a_memmap_and_a_property_are_read(tmp_path):
    np.save(tmp_path / "lengths.npy", np.array(LENGTHS, dtype=np.int32))

    class OnDisk(Sized):
        @property
        def modality_length(self):
            return -np.load(tmp_path / "lengths.npy", mmap_mode="r")

    lengths = get_lengths(OnDisk(LENGTHS), "modality_length")
    assert lengths.tolist() == [-length for length in LENGTHS]
    assert type(lengths) is np.ndarray


def test_an_error_inside_a_property_comes_out_as_itself():
    class Broken(Sized):
        @property
        def modality_length(self):
            return self.not_there

    with pytest.raises(AttributeError, match="not_there"):
        get_lengths(Broken(LENGTHS), "modality_length")


def test_the_result_is_a_copy_that_does_not_follow_the_source():
    source = np.array(LENGTHS)
    lengths = get_lengths(Sized(source))
    source[:] = 1
    assert lengths.tolist() == LENGTHS


def test_plain_numbers_and_plain_rows_are_data_sets_too():
    assert get_lengths(LENGTHS).tolist() == LENGTHS
    assert get_lengths(np.array(LENGTHS)).tolist() == LENGTHS
    assert get_lengths([{"input_ids": [1] * n} for n in LENGTHS]).tolist() == LENGTHS
    assert get_lengths([{"input_ids": [1], "length": n} for n in LENGTHS]).tolist() == LENGTHS
    assert get_lengths([{"size": n} for n in LENGTHS], "size").tolist() == LENGTHS


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([5, 9, 4, 0, 7, 8, 6, 0, 3, 2], "2 of 10 lengths are zero, the first at row 3"),
        ([5, 9, None, 0, None], "2 of 5 lengths are null, the first at row 2"),
        ([5, float("nan"), 4], "1 of 3 lengths is NaN, the first at row 1"),
        ([5, 4, 2.5, 3.5], r"2 of 4 lengths are not whole, the first \(2.5\) at row 2"),
        ([5, float("inf")], r"1 of 2 lengths is out of range, the first \(inf\) at row 1"),
        ([5, 2**70], r"1 of 2 lengths is out of range, the first \(1180591620717411303424\)"),
        ([5, "7", 4], r"1 of 3 lengths is not numeric, the first \('7'\) at row 1"),
        ([True, False], r"2 of 2 lengths are not numeric, the first \(True\) at row 0"),
        ([[1], [2, 3]], r"2 of 2 lengths are not numeric, the first \(\[1\]\) at row 0"),
        (np.ones((3, 1), dtype=int), r"shape \(3, 1\); it must be one-dimensional"),
        ("abc", "3 of 3 lengths are not numeric"),
        ({1, 2, 3}, None),
        (7, "is 7; it must be a sequence"),
    ],
)
def test_bad_lengths_are_named_with_count_and_first_row(lengths, message):
    size = len(lengths) if hasattr(lengths, "__len__") else 1
    if message is None:
        assert sorted(get_lengths(Sized(lengths, size)).tolist()) == [1, 2, 3]
        return
    with pytest.raises(ValueError, match=message) as error:
        get_lengths(Sized(lengths, size))
    assert "'length'" in str(error.value)


def test_the_message_for_zero_lengths_is_the_documented_one():
    with pytest.raises(ValueError) as error:
        get_lengths(Sized([5, 9, 4, 0, 7, 8, 6, 0, 3, 2]))
    assert str(error.value) == (
        "length_property='length': 2 of 10 lengths are zero, the first at row 3; every length "
        "must be a non-zero whole number of tokens"
    )


@pytest.mark.parametrize("bad", [None, float("nan"), 2.5, "7", 0])
def test_bad_values_in_a_column_are_named(bad):
    values = ["5", bad, "4"] if isinstance(bad, str) else [5, bad, 4]
    with pytest.raises(ValueError, match=r"of 3 lengths (is|are) .* at row [01]"):
        get_lengths(Dataset.from_dict({"length": values}))


def test_null_and_empty_rows_of_input_ids_are_named():
    with pytest.raises(ValueError, match="1 of 3 lengths is null, the first at row 1"):
        get_lengths(Dataset.from_dict({"input_ids": [[1], None, [2, 3]]}))
    with pytest.raises(ValueError, match="1 of 3 lengths is zero, the first at row 2"):
        get_lengths(Dataset.from_dict({"input_ids": [[1], [2, 3], []]}))
    with pytest.raises(ValueError, match="'input_ids' has type string"):
        get_lengths(Dataset.from_dict({"input_ids": ["a", "b"]}))


def test_wrong_counts_streams_and_missing_lengths_are_refused():
    with pytest.raises(ValueError, match="10 lengths for 12 samples"):
        get_lengths(Sized(LENGTHS, size=12))
    with pytest.raises(ValueError, match="no such attribute; it needs a column or attribute"):
        get_lengths(Sized(LENGTHS), "modality_length")
    with pytest.raises(ValueError, match=r"columns \['text'\]"):
        get_lengths(Dataset.from_dict({"text": ["a"]}))
    with pytest.raises(ValueError, match=r"columns \['input_ids'\]"):
        get_lengths(rows(), "modality_length")
    with pytest.raises(ValueError, match="splits .'train', 'test'."):
        get_lengths(DatasetDict(train=rows(), test=rows()))

    class Stream(IterableDataset):
        def __iter__(self):
            yield {}

    with pytest.raises(ValueError, match="not known in advance"):
        get_lengths(Stream())


@pytest.mark.parametrize(
    "empty", [Sized([]), Dataset.from_dict({"length": []}), [], Subset([1], [])]
)
def test_an_empty_data_set_is_refused(empty):
    with pytest.raises(ValueError, match="dataset is empty"):
        get_lengths(empty)


def with_attribute(dataset):
    dataset.length = token_counts(dataset)
    return dataset


def with_column(dataset):
    dataset = dataset.add_column("length", token_counts(dataset))
    dataset.length = dataset["length"]
    return dataset


OPERATIONS = {
    "filter": lambda ds, tmp: ds.filter(lambda row: len(row["input_ids"]) > 3),
    "filter twice": lambda ds, tmp: ds.filter(lambda r: len(r["input_ids"]) > 3).filter(
        lambda r: len(r["input_ids"]) < 9
    ),
    "select": lambda ds, tmp: ds.select([7, 2, 2, 9]),
    "shuffle": lambda ds, tmp: ds.shuffle(seed=1),
    "sort": lambda ds, tmp: ds.add_column("key", [3, 1, 2, 9, 8, 7, 4, 5, 6, 0]).sort("key"),
    "map": lambda ds, tmp: ds.map(lambda row: {"twice": 2 * len(row["input_ids"])}),
    "map that drops rows": lambda ds, tmp: ds.map(
        lambda batch: {key: values[::2] for key, values in batch.items()}, batched=True
    ),
    "split": lambda ds, tmp: ds.train_test_split(0.3, seed=0)["test"],
    "concatenate": lambda ds, tmp: concatenate_datasets([ds.select([1, 2]), ds]),
    "rename": lambda ds, tmp: ds.add_column("x", LENGTHS).rename_column("x", "y"),
    "format": lambda ds, tmp: ds.shuffle(seed=2).with_format("torch"),
    "flatten": lambda ds, tmp: ds.shuffle(seed=3).flatten_indices(),
    "skip and take": lambda ds, tmp: ds.skip(2).take(3),
    "shard": lambda ds, tmp: ds.shard(3, 1),
}


def on_disk(dataset, tmp_path):
    dataset.save_to_disk(tmp_path / "saved")
    return load_from_disk(tmp_path / "saved")


@pytest.mark.parametrize("attach", [with_attribute, with_column, lambda dataset: dataset])
@pytest.mark.parametrize("operation", [*OPERATIONS.values(), on_disk], ids=[*OPERATIONS, "disk"])
def test_lengths_are_never_stale_after_an_operation(operation, attach, tmp_path):
    changed = operation(attach(rows()), tmp_path)
    assert get_lengths(changed).tolist() == token_counts(changed)


def test_an_attribute_that_went_stale_is_refused_where_nothing_tells_the_truth():
    dataset = Dataset.from_dict({"text": [str(row) for row in range(2000)]})
    dataset.length = list(range(1, 2001))
    assert get_lengths(dataset).tolist() == dataset.length
    kept = dataset.filter(lambda row: int(row["text"]) % 3 != 0)
    assert len(kept) == 1333 and len(kept.length) == 2000
    with pytest.raises(ValueError, match="2000 lengths for 1333 samples; .* stale after filter"):
        get_lengths(kept)


def test_wrappers_are_unwrapped_in_index_order():
    inner = rows().shuffle(seed=5)
    counts = token_counts(inner)
    picked = Subset(inner, [9, 0, 0, 4])
    nested = ConcatDataset([ConcatDataset([Sized([3, 2]), picked]), inner])
    expected = [3, 2, *(counts[i] for i in (9, 0, 0, 4)), *counts]
    assert get_lengths(nested).tolist() == expected
    assert [len(nested[i]["input_ids"]) for i in range(2, 16)] == expected[2:]
    assert get_lengths(Subset(nested, [4, 1])).tolist() == [expected[4], 2]


def test_a_subset_may_leave_bad_rows_out_and_names_its_own_rows():
    dataset = Sized([5, 0, 7, None, 6])
    assert get_lengths(Subset(dataset, [4, 0, 2])).tolist() == [6, 5, 7]
    with pytest.raises(ValueError, match="1 of 3 lengths is null, the first at row 2"):
        get_lengths(Subset(dataset, [0, 2, 3]))
    with pytest.raises(ValueError, match="2 of 7 lengths are zero, the first at row 3"):
        get_lengths(ConcatDataset([Sized([1, 2]), Subset(dataset, [0, 1, 1]), Sized([3, 4])]))
    with pytest.raises(ValueError, match="2 lengths for 3 samples"):
        get_lengths(ConcatDataset([Sized([1, 2], size=3), Sized([1])]))


class InMemory(BaseDataset):
    """A real mmengine data set of given lengths; its category is the length's parity."""

    def load_data_list(self):
        return [{"n": n} for n in LENGTHS]

    @property
    def length(self):
        return [self.get_data_info(i)["n"] for i in range(len(self))]

    def get_cat_ids(self, idx):
        return [0 if idx == 3 else 1]


def test_mmengine_wrappers_are_unwrapped():
    def real(wrapped):
        return [wrapped.get_data_info(i)["n"] for i in range(len(wrapped))]

    wrapped = [
        MMConcatDataset([InMemory(lazy_init=True), InMemory()], lazy_init=True),
        RepeatDataset(InMemory(), 3),
        ClassBalancedDataset(InMemory(), oversample_thr=0.5),
    ]
    for dataset in wrapped:
        assert get_lengths(dataset).tolist() == real(dataset)
    assert len(get_lengths(wrapped[2])) > 10, "nothing was repeated: the check is vacuous"


def test_the_slice_that_num_batch_per_epoch_makes_is_unwrapped():
    from mmengine.runner import Runner

    def loader(num_batches):
        return Runner.build_dataloader(
            dict(
                dataset=InMemory(),
                sampler=dict(type="DefaultSampler", shuffle=False),
                batch_size=2,
                num_batch_per_epoch=num_batches,
            )
        )

    assert get_lengths(loader(3).dataset).tolist() == LENGTHS[:6]
    with pytest.raises(ValueError, match="10 lengths for 12 samples; num_batch_per_epoch"):
        get_lengths(loader(6).dataset)


def test_columns_are_read_through_arrow_and_not_row_by_row(monkeypatch):
    """A million rows read one by one take seconds; here any read of a row is an error."""
    dataset = with_column(rows()).shuffle(seed=0)
    ids_only = dataset.remove_columns("length")
    counts = token_counts(dataset)
    column = dataset["length"]

    def refuse(*args, **kwargs):
        raise AssertionError("a row was read")

    monkeypatch.setattr(Dataset, "_getitem", refuse)
    monkeypatch.setattr(Dataset, "__iter__", refuse)
    with pytest.raises(AssertionError, match="a row was read"):
        dataset[0]
    for source in (dataset, ids_only, Sized(column, size=10)):
        assert get_lengths(source).tolist() == counts


def test_sizes_of_lists_do_not_copy_the_lists(monkeypatch):
    dataset = rows().shuffle(seed=0)
    taken = []
    monkeypatch.setattr(arrow, "in_row_order", lambda ds, column: taken.append(column) or column)
    get_lengths(dataset)
    assert pa.types.is_integer(taken[0].type)


@pytest.fixture
def log(caplog):
    logger = MMLogger.get_current_instance()
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.WARNING)
    yield lambda: [record.getMessage() for record in caplog.records]
    logger.removeHandler(caplog.handler)


@pytest.mark.parametrize(
    ("lengths", "name", "messages"),
    [
        ([7, 7, 7], "length", ["all 3 lengths are 7; grouping by length cannot help here"]),
        ([1, 1], "length", ["all 2 lengths are 1; grouping"]),
        ([7, -7, 7], "modality_length", ["all 3 lengths are 7; grouping"]),
        ([3, 7], "modality_length", ["all 2 samples have images (> 0); only one modality"]),
        ([-3, -7], "modality_length", ["all 2 samples are text only (< 0); only one modality"]),
        ([-3, -7], "length", ["all 2 samples are text only (< 0); only one modality"]),
        ([3, 7], "length", []),
        ([3, -7], "modality_length", []),
        ([7], "length", []),
    ],
)
def test_one_warning_where_grouping_cannot_help(lengths, name, messages, log):
    warn_if_grouping_is_useless(np.array(lengths), name)
    assert len(log()) == len(messages)
    for message, logged in zip(messages, log(), strict=True):
        assert message in logged
        assert repr(name) in logged
