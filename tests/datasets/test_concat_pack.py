import hashlib
import json
from pathlib import Path

import datasets
import numpy as np
import pytest

from xlength.collate import default_collate_fn
from xlength.collate_packed import packed_collate_fn
from xlength.datasets import concat_pack
from xlength.datasets.concat_pack import pack_dataset

CASES = [
    # (samples, max_length, seed, packs without the tail, its tokens, digests); XTuner 0.2.0.
    (
        3,
        16,
        19,
        7,
        2,
        "db188d0dc3e35f10",
        "0fb6b30519189aec",
        "6efe5056cc5c4454",
        "39a4297982046338",
    ),
    (
        20,
        32,
        52,
        20,
        30,
        "e3686ea88274b8d9",
        "8b54e699b4760815",
        "dce28007fc4e83ab",
        "26277d8af7cde401",
    ),
    (
        200,
        64,
        264,
        112,
        45,
        "d7559c82fde8419e",
        "b210a8905674839c",
        "6feee5693c253b47",
        "84da4579b1c55edb",
    ),
]
NAMES = ("input_ids", "labels", "cumulative_len", "position_ids")


def rows_of(n, seed):
    rng = np.random.RandomState(seed)
    rows = []
    for length in rng.randint(1, 70, n):
        ids = rng.randint(0, 1000, length).tolist()
        half = len(ids) // 2
        rows.append({"input_ids": ids, "labels": [-100] * half + ids[half:]})
    return rows


def tokens(dataset, name="input_ids"):
    return [token for row in dataset[name] for token in row]


def on_disk(rows, path):
    datasets.Dataset.from_list(rows).save_to_disk(path)
    return datasets.load_from_disk(path)


@pytest.mark.parametrize("use_varlen_attn", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-samples")
def test_packs_are_those_of_xtuner_and_the_tail_is_kept(case, use_varlen_attn):
    n, max_length, seed, packs, tail, *digests = case
    source = datasets.Dataset.from_list(rows_of(n, seed))
    result = pack_dataset(source, max_length, use_varlen_attn, shuffle_before_pack=False)
    names = NAMES if use_varlen_attn else NAMES[:2]
    assert result.column_names == list(names)
    assert len(result) == packs + 1
    for name, digest in zip(names, digests, strict=False):
        rows = list(result[name])[:packs]
        assert hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16] == digest, name
        assert tokens(result, "labels") == tokens(source, "labels")
    last = result[packs]
    assert len(last["input_ids"]) == len(last["labels"]) == tail
    if use_varlen_attn:
        assert last["cumulative_len"][-1] == tail == len(last["position_ids"])


def test_cases_of_the_shared_folder_agree():
    path = Path(__file__).parents[3] / "shared/cases/concat_pack.json"
    if not path.exists():
        pytest.skip("the shared cases are not here")
    for case in json.loads(path.read_text()):
        source = datasets.Dataset.from_list(rows_of(case["n"], case["seed"]))
        result = pack_dataset(source, case["max_length"], case["use_varlen_attn"], False)
        for name, rows in case.get("rows_full", {}).items():
            assert list(result[name])[: case["rows"]] == rows


def test_six_rows_of_two_tokens_pack_across_batches(monkeypatch):
    monkeypatch.setattr(concat_pack, "_TOKENS_PER_BATCH", 4)
    rows = [{"input_ids": [2 * i + 1, 2 * i + 2], "labels": [0, 1]} for i in range(6)]
    result = pack_dataset(datasets.Dataset.from_list(rows), 4, shuffle_before_pack=False)
    assert list(result["input_ids"]) == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]


@pytest.mark.parametrize("num_processes", [1, 3])
@pytest.mark.parametrize("shuffled", [False, True])
def test_no_token_is_lost_whatever_the_number_of_processes(
    monkeypatch, tmp_path, num_processes, shuffled
):
    rng = np.random.default_rng(0)
    rows = []
    for i, length in enumerate(rng.integers(1, 120, 300)):
        rows.append({"input_ids": [i * 1000 + k for k in range(length)], "labels": [i] * length})
    monkeypatch.setattr(concat_pack, "_TOKENS_PER_PROCESS", 6000 if num_processes > 1 else 10**9)
    monkeypatch.setattr(concat_pack, "_TOKENS_PER_BATCH", 1500)
    source = on_disk(rows, str(tmp_path / "data"))
    result = pack_dataset(source, 256, True, shuffled, map_num_proc=num_processes)
    if num_processes > 1:
        assert len(result.cache_files) == num_processes
    assert (tokens(result) == tokens(source)) is not shuffled
    assert sorted(tokens(result)) == sorted(tokens(source))
    assert [t // 1000 for t in tokens(result)] == tokens(result, "labels")
    sizes = [len(row) for row in result["input_ids"]]
    assert set(sizes[:-1]) == {256} and 0 < sizes[-1] <= 256
    flat = np.array(tokens(result))
    positions = np.array(tokens(result, "position_ids"))
    starts = np.append(True, np.diff(flat) != 1) | (np.arange(len(flat)) % 256 == 0)
    assert (positions == 0).tolist() == starts.tolist()
    for row in result:
        ends = row["cumulative_len"]
        assert ends[0] == 0 and ends[-1] == len(row["input_ids"])
        assert [row["position_ids"][e] for e in ends[:-1]] == [0] * (len(ends) - 1)


def test_a_thousand_rows_with_32_processes_asked_for_leave_one_short_pack():
    rng = np.random.default_rng(1)
    rows = [{"input_ids": [7] * n, "labels": [7] * n} for n in rng.integers(10, 400, 1000)]
    source = datasets.Dataset.from_list(rows)
    result = pack_dataset(source, 2048, map_num_proc=32)
    sizes = np.array([len(row) for row in result["input_ids"]])
    assert sizes.sum() == len(tokens(source)) and (sizes != 2048).sum() <= 1


def test_the_shuffle_is_seeded_and_a_second_start_reads_the_cache(tmp_path, monkeypatch):
    source = on_disk(rows_of(50, 0), str(tmp_path / "data"))
    first = pack_dataset(source, 64, seed=3)
    assert first.cache_files
    other = pack_dataset(source, 64, seed=4)
    assert tokens(other) != tokens(first) and sorted(tokens(other)) == sorted(tokens(first))

    def refuse(self, batch):
        raise AssertionError("copied again")

    monkeypatch.setattr(concat_pack._CopyPacks, "__call__", refuse)
    again = pack_dataset(datasets.load_from_disk(str(tmp_path / "data")), 64, seed=3)
    assert tokens(again) == tokens(first) and again._fingerprint == first._fingerprint


def test_selected_and_concatenated_rows_are_packed_in_their_order():
    source = datasets.Dataset.from_list(rows_of(40, 5))
    chosen = source.select([30, 2, 2, 11])
    both = datasets.concatenate_datasets([chosen, source.select(range(5))])
    for dataset in (chosen, both, source.shuffle(seed=0)):
        assert tokens(pack_dataset(dataset, 16, False, False)) == tokens(dataset)


def test_types_are_kept_and_empty_rows_are_passed_over():
    features = datasets.Features(
        {
            "input_ids": datasets.List(datasets.Value("uint16")),
            "labels": datasets.List(datasets.Value("int64")),
        }
    )
    rows = {"input_ids": [[], [1, 2], [], [3]], "labels": [[], [1, 2], [], [3]]}
    result = pack_dataset(datasets.Dataset.from_dict(rows, features=features), 2, False, False)
    assert list(result["input_ids"]) == [[1, 2], [3]] and result.features == features


def test_packs_keep_what_the_collate_functions_need_and_nothing_else():
    source = datasets.Dataset.from_list(
        [{**row, "text": "?", "length": 1} for row in rows_of(9, 2)]
    )
    packs = pack_dataset(source, 64, True)
    assert packs.column_names == list(NAMES)
    batch = default_collate_fn([packs[0]], use_varlen_attn=True)["data"]
    assert batch["cumulative_len"][0].tolist() == packs[0]["cumulative_len"]
    batch = packed_collate_fn([packs[0], packs[1]])["data"]
    assert batch["lengths"].sum() == 128 and batch["input_ids"].shape == (2, 64)


@pytest.mark.parametrize(
    "columns, message",
    [
        ({"ids": [[1]]}, "no column 'input_ids'"),
        ({"input_ids": [[1], [2, 3]], "labels": [[1], [2]]}, "row 1 has 2 input_ids and 1 labels"),
        (
            {"input_ids": [[1], None], "labels": [[1], [2]]},
            "'input_ids': 1 rows are null, first row 1",
        ),
        ({"input_ids": [[], []], "labels": [[], []]}, "2 rows, all of them empty"),
        ({"input_ids": [3], "labels": [[2]]}, "'input_ids' has type int32; it must be lists"),
    ],
)
def test_rows_that_cannot_be_packed_are_refused_by_name(columns, message):
    with pytest.raises(ValueError, match=message):
        pack_dataset(datasets.Dataset.from_dict(columns), 4)
