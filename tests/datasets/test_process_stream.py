"""``stream_hf_dataset``: the tokens of ``process_hf_dataset``, lazily, from any position."""

import json
from itertools import islice

import pytest
from datasets import Dataset, IterableDataset, load_dataset

from tests.datasets.samples import chats, small_tokenizer
from xlength import (
    LengthPoolSortDataset,
    openai_map_fn,
    process_hf_dataset,
    stream_hf_dataset,
    template_map_fn_factory,
)

ROWS = [row for row in chats(70) if any(m["content"].strip() for m in row["messages"])]


def options(**more):
    return dict(
        tokenizer=small_tokenizer(),
        max_length=60,
        dataset_map_fn=openai_map_fn,
        template_map_fn=template_map_fn_factory("qwen_chat"),
        **more,
    )


def shards(folder, rows, count=3):
    for shard in range(count):
        lines = [json.dumps(row) + "\n" for row in rows[shard::count]]
        (folder / f"part{shard}.jsonl").write_text("".join(lines))
    return sorted(str(path) for path in folder.glob("*.jsonl"))


def stream_of(folder, rows=ROWS, **more):
    config = dict(
        type="load_dataset",
        path="json",
        data_files=shards(folder, rows),
        split="train",
        streaming=True,
    )
    return stream_hf_dataset(config, **options(**more))


def tokens_of(rows):
    return [(list(row["input_ids"]), list(row["labels"]), row["length"]) for row in rows]


def test_the_tokens_are_those_of_process_hf_dataset(tmp_path):
    stream = stream_of(tmp_path)
    assert isinstance(stream, IterableDataset)
    files = sorted(str(path) for path in tmp_path.glob("*.jsonl"))
    known = process_hf_dataset(
        load_dataset("json", data_files=files, split="train"),
        **options(),
        remove_unused_columns=True,
        pack_to_max_length=False,
    )
    expected = tokens_of(known)
    assert tokens_of(stream) == expected
    assert len(expected) > 50
    assert max(length for _, _, length in expected) == 60


def test_nothing_is_tokenised_before_it_is_asked_for_and_shards_stay_apart(tmp_path):
    calls = []

    def noting(row):
        calls.append(row)
        return openai_map_fn(row)

    settings = {**options(batch_size=4), "dataset_map_fn": noting}
    rows = load_dataset("json", data_files=shards(tmp_path, ROWS), split="train", streaming=True)
    stream = stream_hf_dataset({"train": rows}, **settings)
    assert calls == []
    next(iter(stream))
    assert len(calls) <= 4
    assert stream.num_shards == 3


def test_a_pool_of_the_stream_continues_after_any_sample(tmp_path):
    def make():
        return LengthPoolSortDataset(stream_of(tmp_path), 16)

    order = tokens_of(make())
    for position in (1, 16, 37):
        running = make()
        list(islice(running, position))
        resumed = make()
        resumed.load_state_dict(running.state_dict())
        assert tokens_of(resumed) == order[position:]


def test_a_malformed_row_is_refused_with_its_text_or_left_out_and_counted(tmp_path, log_lines):
    rows = [*ROWS[:10], {"messages": [{"role": "user"}]}, *ROWS[10:20]]
    with pytest.raises(ValueError, match=r"a row is malformed: .*the row is .*'user'"):
        list(stream_of(tmp_path, rows))
    kept = list(stream_of(tmp_path, rows, bad_rows="skip"))
    assert len(kept) == len(list(stream_of(tmp_path, [*ROWS[:20]])))
    assert any("1 rows of this reader so far malformed and left out" in s for s in log_lines)


@pytest.mark.parametrize("given", ["config", "stream", "shuffled stream"])
def test_a_row_that_cannot_be_read_or_used_is_named_by_file_and_line(given, tmp_path):
    rows = [{**row, "more": "x"} for row in ROWS[:20]]
    paths = [tmp_path / "good.jsonl", tmp_path / "bad.jsonl"]
    paths[0].write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = dict(
        path="json", data_files=[str(path) for path in paths], split="train", streaming=True
    )

    def read(**more):
        stream = (
            dict(type="load_dataset", **config) if given == "config" else load_dataset(**config)
        )
        if given == "shuffled stream":
            stream = stream.shuffle(seed=0, buffer_size=4)
        return list(stream_hf_dataset(stream, **options(**more)))

    alien = {"messages": [{"role": "alien", "content": "x"}]}
    lines = [json.dumps(row) for row in [*ROWS[:7], alien, *ROWS[8:12]]]
    paths[1].write_text("\n".join(lines))
    with pytest.raises(ValueError, match=rf"unknown role .* \({paths[1]}, line 8\)$"):
        read()
    kept = len(read(bad_rows="skip"))
    paths[1].write_text("\n".join([*lines[:7], *lines[8:]]))
    assert kept == len(read())
    paths[1].write_text("\n".join([*lines[:7], '{"messages": [{', *lines[8:]]))
    for bad_rows in ("error", "skip"):
        with pytest.raises(
            ValueError, match=rf"dataset: {paths[1]}, line 8, is broken: .*leave out"
        ):
            read(bad_rows=bad_rows)


def test_rows_that_teach_nothing_are_left_out_and_logged_ever_more_rarely(tmp_path, log_lines):
    silent = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]}
    settings = options()
    settings["template_map_fn"] = None
    settings["dataset_map_fn"] = lambda row: {
        "conversation": [
            {"input": m["content"], "output": m["content"], "output_with_loss": False}
            for m in row["messages"]
        ]
    }
    rows = Dataset.from_list([silent] * 9).to_iterable_dataset()
    assert list(stream_hf_dataset(rows, **settings)) == []
    told = [line for line in log_lines if "without a trainable label and left out" in line]
    assert [int(line.split()[1]) for line in told] == [1, 2, 4, 8]


@pytest.mark.parametrize(
    ("dataset", "more", "message"),
    [
        (Dataset.from_list(ROWS[:3]), {}, "dataset must be a stream .* got Dataset"),
        ({"test": None}, dict(split="train"), "split='train' is none of"),
        (Dataset.from_list(ROWS[:3]).to_iterable_dataset(), dict(bad_rows="no"), "bad_rows='no'"),
    ],
)
def test_bad_arguments_are_refused_by_name(dataset, more, message):
    with pytest.raises(ValueError, match=message):
        stream_hf_dataset(dataset, **options(**more))


@pytest.mark.parametrize("name", ["max_length", "batch_size"])
@pytest.mark.parametrize("value", [0, -5, None, "100", True])
def test_a_length_or_batch_of_no_use_is_refused_before_anything_is_read(name, value):
    rule = f"{name}={value!r} must be a whole number of at least 1"
    with pytest.raises(ValueError, match=rule):
        stream_hf_dataset(
            Dataset.from_list(ROWS).to_iterable_dataset(), **{**options(), name: value}
        )
