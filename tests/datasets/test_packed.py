import pickle

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from xlength.collate import default_collate_fn
from xlength.collate_packed import packed_collate_fn
from xlength.datasets.packed import PackedDataset
from xlength.lengths import get_lengths


class Rows:
    """A plain map-style data set: row i holds the tokens i * 1000 + position."""

    def __init__(self, lengths):
        self.length = list(map(int, lengths))
        self.reads = []

    def __len__(self):
        return len(self.length)

    def __getitem__(self, i):
        self.reads.append(i)
        ids = [i * 1000 + k for k in range(self.length[i])]
        return {"input_ids": ids, "labels": [t + 1 for t in ids], "length": self.length[i]}


def random_lengths(n=120, seed=0, high=90):
    return np.random.default_rng(seed).integers(1, high, n)


def hf(rows):
    return datasets.Dataset.from_list([rows[i] for i in range(len(rows))])


def spans(packed):
    """Every (sample, start, stop), read from the tokens of the packs themselves."""
    result = []
    for i in range(len(packed)):
        item = packed[i]
        ends = item["cumulative_len"]
        for k, sample in enumerate(item["sample_ids"]):
            ids = item["input_ids"][ends[k] : ends[k + 1]]
            assert (np.diff(ids) == 1).all() and (ids // 1000 == sample).all()
            assert ids[0] % 1000 == item["starts"][k]
            result.append((int(sample), int(ids[0] % 1000), int(ids[-1] % 1000) + 1))
    return sorted(result)


@pytest.mark.parametrize("make", [Rows, lambda lengths: hf(Rows(lengths))], ids=["rows", "hf"])
@pytest.mark.parametrize("strategy", ["best_fit", "next_fit", "concat"])
def test_every_token_of_every_sample_is_in_one_pack(make, strategy):
    lengths = random_lengths()
    packed = PackedDataset(make(lengths), 100, strategy)
    covered = np.zeros((len(lengths), 100), dtype=int)
    for sample, start, stop in spans(packed):
        covered[sample, start:stop] += 1
    assert (covered == (np.arange(100) < lengths[:, None])).all()
    sizes = [len(packed[i]["input_ids"]) for i in range(len(packed))]
    assert sizes == packed.length.tolist() == get_lengths(packed).tolist() and max(sizes) <= 100


def test_an_item_holds_its_pack_with_borders():
    packed = PackedDataset(Rows([3, 2]), 5)
    (item,) = (packed[i] for i in range(len(packed)))
    assert item["input_ids"].tolist() == [0, 1, 2, 1000, 1001]
    assert item["labels"].tolist() == [-100, 2, 3, -100, 1002]
    assert item["position_ids"].tolist() == [0, 1, 2, 0, 1]
    assert item["cumulative_len"].tolist() == [0, 3, 5] and item["cumulative_len"].dtype == np.int32
    assert item["sample_ids"].tolist() == [0, 1] and item["starts"].tolist() == [0, 0]
    assert {item[key].dtype for key in ("input_ids", "labels", "position_ids")} == {np.dtype("i8")}


def test_xtuners_batch_of_one_pack_stays_available():
    packed = PackedDataset(Rows([3, 2]), 5)
    data = default_collate_fn([packed[0]], use_varlen_attn=True)["data"]
    assert data["input_ids"].tolist() == [[0, 1, 2, 1000, 1001]]
    assert data["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert [ends.tolist() for ends in data["cumulative_len"]] == [[0, 3, 5]]
    assert data["max_seqlen"] == 3


def test_nothing_is_read_before_an_item_is_asked_for():
    rows = Rows(random_lengths())
    packed = PackedDataset(rows, 100)
    assert rows.reads == []
    item = packed[3]
    assert rows.reads == item["sample_ids"].tolist()


def test_the_seed_decides_the_packs():
    def samples(seed):
        packed = PackedDataset(Rows(random_lengths()), 100, seed=seed)
        return [packed[i]["sample_ids"].tolist() for i in range(len(packed))]

    assert samples(0) == samples(0) != samples(1)


def test_overlong_samples_follow_the_policy_and_are_reported():
    lengths = [4, 9, 3, 12]
    with pytest.raises(ValueError, match="2 samples .* max_length=5.* row 1 with 9 tokens"):
        PackedDataset(Rows(lengths), 5)
    split = PackedDataset(Rows(lengths), 5, overlong="split")
    assert spans(split) == [
        (0, 0, 4),
        (1, 0, 5),
        (1, 5, 9),
        (2, 0, 3),
        (3, 0, 5),
        (3, 5, 10),
        (3, 10, 12),
    ]
    cut = PackedDataset(Rows(lengths), 5, overlong="truncate")
    assert spans(cut) == [(0, 0, 4), (1, 0, 5), (2, 0, 3), (3, 0, 5)]
    kept = PackedDataset(Rows(lengths), 5, overlong="drop")
    assert spans(kept) == [(0, 0, 4), (2, 0, 3)]


def test_a_prompt_that_fills_max_length_is_left_out_and_reported(log_lines):
    rows = [
        {"input_ids": [i] * n, "labels": [-100] * masked + [i] * (n - masked)}
        for i, (n, masked) in enumerate([(4, 1), (8, 6), (8, 2), (3, 0), (9, 5)])
    ]
    packed = PackedDataset(rows, 5, overlong="truncate")
    kept = sorted(s for i in range(len(packed)) for s in packed[i]["sample_ids"].tolist())
    assert kept == [0, 2, 3]
    for i in range(len(packed)):
        item = packed[i]
        assert {*item["input_ids"]} == {*item["sample_ids"]}
    text = "\n".join(log_lines)
    assert "2 samples are left out" in text and "first is row 1" in text
    assert "1 samples are longer than max_length=5 (the first is row 2 with 8 tokens)" in text


def test_a_start_says_what_is_packed_and_what_packing_cannot_win(log_lines):
    PackedDataset(Rows([60] * 9 + [80]), 100)
    text = "\n".join(log_lines)
    assert "10 samples -> 10 packs of at most 100 tokens by best_fit; 620 tokens fill 62.0%" in text
    assert "no two of them share a pack" in text


def write_into_plan(worker):
    packed = torch.utils.data.get_worker_info().dataset
    packed.length[0] = -7


@pytest.mark.parametrize(
    ("make", "context"),
    [(Rows, "fork"), (lambda lengths: hf(Rows(lengths)), "spawn")],
    ids=["rows-fork", "hf-spawn"],
)
def test_workers_yield_the_same_packs_and_spawned_ones_share_the_plan(make, context):
    packed = PackedDataset(make(random_lengths(60)), 80, overlong="split")
    expected = [packed_collate_fn([packed[i]])["data"] for i in range(len(packed))]
    loader = DataLoader(
        packed,
        num_workers=1 if context == "spawn" else 2,
        collate_fn=packed_collate_fn,
        multiprocessing_context=context,
        worker_init_fn=write_into_plan if context == "spawn" else None,
    )
    batches = [batch["data"] for batch in loader]
    assert len(batches) == len(expected)
    for got, wanted in zip(batches, expected, strict=True):
        for key in ("input_ids", "labels", "position_ids", "cu_seqlens", "sample_ids"):
            assert torch.equal(got[key], wanted[key])
    assert (int(packed.length[0]) == -7) == (context == "spawn")


def test_a_pickled_copy_reads_the_same_packs():
    packed = PackedDataset(Rows(random_lengths()), 50, overlong="split")
    copy = pickle.loads(pickle.dumps(packed))
    assert spans(copy) == spans(packed) and copy.length.tolist() == packed.length.tolist()


def test_several_packs_make_several_rows():
    packed = PackedDataset(Rows(random_lengths()), 100)
    loader = DataLoader(packed, 4, collate_fn=packed_collate_fn)
    rows = [row.tolist() for batch in loader for row in batch["data"]["input_ids"]]
    assert len(rows) == len(packed)
    assert sum(int((np.array(row) > 0).sum()) for row in rows) >= sum(random_lengths()) - 1


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Rows([]), "dataset is empty"),
        (lambda: hf(Rows([2, 3])).remove_columns("labels"), r"no column \['labels'\]"),
        (lambda: hf(Rows([2, 3])).add_column("pixel_values", [[1], [2]]), "'pixel_values'"),
    ],
)
def test_a_data_set_that_cannot_be_packed_is_refused_at_the_start(make, message):
    with pytest.raises(ValueError, match=message):
        PackedDataset(make(), 10)


def test_stale_lengths_and_unusable_rows_are_named_when_they_are_read():
    rows = Rows([5, 6])
    packed = PackedDataset(rows, 20)
    rows.length[1] = 4
    with pytest.raises(ValueError, match="row 1 has 4 tokens, but its length says 6"):
        packed[0]
    images = [{"input_ids": [1], "labels": [1], "pixel_values": [0.0], "length": 1}]
    with pytest.raises(ValueError, match="row 0 has 'pixel_values'"):
        PackedDataset(images, 4)[0]
