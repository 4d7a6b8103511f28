"""``process_hf_dataset``: sources, columns, what is left out, what is logged, what is refused."""

import functools
import gzip
import json

import datasets
import numpy as np
import pytest
from datasets import Dataset, DatasetDict, load_dataset
from mmengine.config import Config, ConfigDict
from mmengine.registry import DATASETS

import xlength.datasets.process as front_door
from tests.datasets.samples import chats, small_tokenizer
from xlength import (
    MAP_FUNC,
    get_lengths,
    openai_map_fn,
    process_hf_dataset,
    template_map_fn_factory,
)
from xlength.datasets.source import all_data_files

CHATML = dict(dataset_map_fn="openai_map_fn", template_map_fn=template_map_fn_factory("qwen_chat"))


def process(dataset, tokenizer=None, max_length=1000, **options):
    options = {**CHATML, "pack_to_max_length": False, **options}
    if isinstance(dataset, list):
        dataset = Dataset.from_list(dataset)
    return process_hf_dataset(
        dataset, tokenizer=tokenizer or small_tokenizer(), max_length=max_length, **options
    )


def write(path, rows, ends="\n", mark=b""):
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_bytes(mark + "".join(line + ends for line in lines).encode())
    return dict(type=load_dataset, path="json", data_files=str(path))


def row(question, answer):
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    }


# Sources


def test_all_kinds_of_source_give_the_same_tokens(tmp_path):
    rows = chats(30)
    plain = Dataset.from_list(rows)
    expected = process(plain)["input_ids"][:]
    config = write(tmp_path / "a.jsonl", rows)
    path = config["data_files"]
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    plain.save_to_disk(tmp_path / "saved")
    sources = {
        "split of a dict": DatasetDict(train=plain, test=plain.select([1])),
        "function": config,
        "config dict of mmengine": ConfigDict(config),
        "name": dict(type="load_dataset", path="json", data_files=path),
        "full name": dict(type="datasets.load_dataset", path="json", data_files=path),
        "split": dict(type=load_dataset, path="json", data_files={"train": path}, split="train"),
        "compressed": dict(type=load_dataset, path="json", data_files=str(tmp_path / "b.jsonl.gz")),
        "saved": dict(type="datasets.load_from_disk", dataset_path=str(tmp_path / "saved")),
    }
    for name, source in sources.items():
        assert process(source)["input_ids"][:] == expected, name


def test_split_chooses_and_none_takes_all():
    rows = chats(6)
    splits = DatasetDict(train=Dataset.from_list(rows[:4]), test=Dataset.from_list(rows[4:]))
    assert len(process(splits)) == 4
    assert len(process(splits, split="test")) == 2
    assert process(splits, split=None)["input_ids"][:] == process(rows)["input_ids"][:]
    with pytest.raises(ValueError, match=r"split='dev' is none of .* \['train', 'test'\]"):
        process(splits, split="dev")


@pytest.mark.parametrize(
    "name", ["process_hf_dataset", "xlength.process_hf_dataset", process_hf_dataset]
)
def test_a_config_can_name_it_with_everything_in_it_named(name, tmp_path):
    rows = chats(12)
    small_tokenizer().save_pretrained(tmp_path / "tokenizer")
    config = dict(
        type=name,
        dataset=write(tmp_path / "a.jsonl", rows) | dict(type="load_dataset"),
        tokenizer=dict(
            type="transformers.AutoTokenizer.from_pretrained",
            pretrained_model_name_or_path=str(tmp_path / "tokenizer"),
            padding_side="right",
        ),
        max_length=1000,
        dataset_map_fn="xlength.openai_map_fn",
        template_map_fn=dict(type="template_map_fn_factory", template="qwen_chat"),
        pack_to_max_length=False,
    )
    assert DATASETS.build(config)["input_ids"][:] == process(rows)["input_ids"][:]


def test_a_lazy_config_with_functions_works_and_again_after_it_was_dumped(tmp_path):
    write(tmp_path / "a.jsonl", chats(12))
    small_tokenizer().save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "config.py").write_text(f"""
from datasets import load_dataset
from transformers import AutoTokenizer
from xlength.datasets.map_fns import openai_map_fn
from xlength.datasets.process import process_hf_dataset
from xlength.datasets.templates import PROMPT_TEMPLATE, template_map_fn_factory
train_dataset = dict(
    type=process_hf_dataset,
    dataset=dict(type=load_dataset, path='json', data_files={str(tmp_path / "a.jsonl")!r}),
    tokenizer=dict(type=AutoTokenizer.from_pretrained,
                   pretrained_model_name_or_path={str(tmp_path / "tokenizer")!r}),
    max_length=1000, dataset_map_fn=openai_map_fn,
    template_map_fn=dict(type=template_map_fn_factory, template=PROMPT_TEMPLATE.qwen_chat),
    pack_to_max_length=False)
""")
    config = Config.fromfile(tmp_path / "config.py")
    config.dump(tmp_path / "dumped.py")
    expected = process(chats(12))["input_ids"][:]
    for path in ("config.py", "dumped.py"):
        dataset = DATASETS.build(Config.fromfile(tmp_path / path).train_dataset)
        assert dataset["input_ids"][:] == expected, path


def shouting_map_fn(example):
    conversation = openai_map_fn(example)["conversation"]
    return {"conversation": [{**turn, "input": turn["input"].upper()} for turn in conversation]}


def test_a_map_function_may_be_a_function_a_lambda_a_path_or_a_registered_name():
    rows = chats(8)
    expected = process(rows, dataset_map_fn=shouting_map_fn)["input_ids"][:]
    assert expected != process(rows)["input_ids"][:]
    name = str(shouting_map_fn)  # what XTuner's tools leave in a config for a function
    MAP_FUNC.register_module(name=name, module=shouting_map_fn, force=True)
    for given in (
        lambda example: shouting_map_fn(example),
        functools.partial(shouting_map_fn),
        f"{__name__}.shouting_map_fn",
        name,
    ):
        assert process(rows, dataset_map_fn=given)["input_ids"][:] == expected
    with pytest.raises(ValueError, match="'open_ai_map_fn' is in no .* did you mean openai_map_fn"):
        process(rows, dataset_map_fn="open_ai_map_fn")


def test_messages_whose_keys_and_types_differ_from_row_to_row_are_read(tmp_path):
    rows = chats(30)
    rows[3]["messages"][0] |= {"name": "Ann", "extra": {"a": [1, "2"]}}
    rows[7]["messages"][-1] |= {"loss": True, "extra": 5}
    source = write(tmp_path / "a.jsonl", rows)
    dataset = process(source)
    assert dataset["input_ids"][:] == process(chats(30))["input_ids"][:]
    assert dataset[7]["messages"][-1]["extra"] == 5


# Columns


def test_columns_types_and_lengths():
    rows = [{**chat, "source": f"s{i}"} for i, chat in enumerate(chats(20))]
    dataset = process(rows)
    assert set(dataset.column_names) == {
        *("messages", "source", "conversation"),
        *("input_ids", "labels", "length"),
    }
    assert dataset["source"][:] == [f"s{i}" for i in range(20)]
    assert dataset[0]["conversation"][0]["input"].startswith("<|im_start|>")
    assert dataset.features["input_ids"].feature.dtype == "int32"
    assert dataset.features["length"].dtype == "int64"
    assert type(dataset.length) is list and dataset.length == dataset["length"][:]
    assert get_lengths(dataset).tolist() == [len(ids) for ids in dataset["input_ids"]]
    bare = process(rows, remove_unused_columns=True)
    assert bare.column_names == ["input_ids", "labels", "length"]
    assert bare["input_ids"][:] == dataset["input_ids"][:]


def test_columns_that_the_map_function_makes_stay_and_can_be_renamed():
    def map_fn(example):
        return {**openai_map_fn(example), "turns": len(example["messages"]), "tags": ["a", "b"]}

    dataset = process(chats(5), dataset_map_fn=map_fn, rename_maps=[["tags", "labels_of_row"]])
    assert dataset["turns"][:] == [len(chat["messages"]) for chat in chats(5)]
    assert dataset["labels_of_row"][0] == ["a", "b"] and "tags" not in dataset.column_names


def test_a_renamed_source_column_can_be_the_conversation():
    rows = [{"chat": [{"input": "a", "output": "b c"}], "id": i} for i in range(3)]
    options = dict(dataset_map_fn=None, template_map_fn=None)
    dataset = process(rows, rename_maps=[("chat", "conversation"), ("id", "key")], **options)
    assert set(dataset.column_names) == {"conversation", "key", "input_ids", "labels", "length"}
    assert dataset["key"][:] == [0, 1, 2]
    with pytest.raises(ValueError, match="rename_maps: there is no column 'chats'"):
        process(rows, rename_maps=[("chats", "conversation")], **options)


def test_rows_that_are_tokenised_already_get_lengths_and_lose_untrained_rows(log_lines):
    rows = [
        {"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "id": 0},
        {"input_ids": [5, 6], "labels": [-100, -100], "id": 1},
        {"input_ids": [5, 6], "labels": [5, 6], "id": 2},
    ]
    dataset = process_hf_dataset(
        Dataset.from_list(rows), do_dataset_tokenization=False, pack_to_max_length=False
    )
    assert dataset["id"][:] == [0, 2]
    assert dataset.length == [3, 2] and dataset["labels"][:] == [[-100, 6, 7], [5, 6]]
    assert any("1 rows without a trainable label" in line and "row 1" in line for line in log_lines)


# Rows left out, cut, or sampled


def test_a_prompt_that_fills_max_length_is_left_out_counted_and_named(log_lines):
    rows = [row("fox " * (300 if i in (3, 7) else 2), "dogs over") for i in range(10)]
    dataset = process(rows, max_length=100)
    assert len(dataset) == 8 and all(max(labels) >= 0 for labels in dataset["labels"])
    (line,) = [line for line in log_lines if "trainable" in line]
    assert "2 rows without a trainable label and left out, the first is row 3" in line


def test_each_stage_logs_rows_in_and_out_and_what_was_cut(log_lines):
    rows = chats(10) + [row("fox", "dogs " * 300), {"messages": []}, row("fox " * 300, "dogs")]
    process(rows, max_length=200)
    text = "\n".join(log_lines)
    for line in (
        "load: 13 -> 13 rows",
        "map and template: 13 -> 12 rows",
        "tokenise: 12 -> 12 rows",
        "labels: 12 -> 11 rows",
        "1 rows without a conversation and left out, the first is row 11",
        "1 rows without a trainable label and left out, the first is row 12",
        "1 rows cut at max_length",
        "the first is row 10",
    ):
        assert line in text, line


def test_a_row_whose_only_label_is_never_predicted_is_left_out():
    rows = [{"conversation": [{"output": "", "input": ""}]}, {"conversation": [{"output": "a b"}]}]
    dataset = process(rows, dataset_map_fn=None, template_map_fn=None)
    assert dataset.length == [len(small_tokenizer().encode("a b", add_special_tokens=False)) + 1]


def test_max_dataset_length_takes_the_same_rows_at_every_start_and_names_rows_of_the_source(
    log_lines,
):
    rows = chats(200)
    first = process(rows, max_dataset_length=50)
    again = process(rows, max_dataset_length=50)
    numbers = [int(chat[-2]["content"].split()[0]) for chat in first["messages"]]
    assert len(first) == 50 and numbers == sorted(set(numbers)) and max(numbers) > 150
    assert again["input_ids"][:] == first["input_ids"][:]
    assert len(process(rows, max_dataset_length=1000)) == 200
    assert "process_hf_dataset: max_dataset_length: 200 -> 50 rows" in log_lines
    bad = numbers[20]
    rows[bad] = {"messages": [{"role": "alien", "content": "x"}]}
    with pytest.raises(ValueError, match=f"the first is row {bad}: unknown role 'alien'"):
        process(rows, max_dataset_length=50)


# Malformed rows


BAD_ROWS = {
    "no messages": ({"text": "x"}, "'messages' is None"),
    "no such role": ({"messages": [{"role": "alien", "content": "x"}]}, "unknown role 'alien'"),
    "no content": ({"messages": [{"role": "user"}]}, "message 0: 'role' and 'content' must be"),
    "null content": (
        {"messages": [{"role": "user", "content": None}]},
        "message 0: 'role' and 'content' must be strings",
    ),
}


@pytest.mark.parametrize(("bad", "reason"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_malformed_rows_are_counted_and_the_first_named_by_file_and_line(
    bad, reason, tmp_path, log_lines
):
    rows = chats(30)
    rows[16] = rows[20] = bad
    source = write(tmp_path / "a.jsonl", rows)
    with pytest.raises(ValueError) as error:
        process(source)
    message = str(error.value)
    assert "2 of 30 rows are malformed; the first is row 16" in message
    assert f"({tmp_path / 'a.jsonl'}, line 17)" in message and reason in message
    assert isinstance(error.value.__cause__, ValueError)
    kept = process(source, bad_rows="skip")
    good = [chat for i, chat in enumerate(rows) if i not in (16, 20)]
    assert kept["input_ids"][:] == process(good)["input_ids"][:]
    assert any("2 rows malformed and left out, the first is row 16" in line for line in log_lines)


def test_a_broken_line_is_named_by_file_and_line(tmp_path):
    good = chats(30)
    broken = {
        "cut off": ('{"messages": [{"role": "us', "Unterminated string starting at character 23"),
        "control character": ('{"messages": "\t"}', "Invalid control character at character 14"),
        "no object": ("[1, 2]", "a row must be an object, got list"),
        "no JSON": ("hello", "Expecting value at character 0"),
        "half a surrogate pair": ('{"messages": "\\ud83d"}', "half a surrogate pair in its text"),
    }
    for name, (line, reason) in broken.items():
        paths = [tmp_path / f"{name} {i}.jsonl" for i in range(2)]
        write(paths[0], good)
        write(paths[1], [*good[:16], line, *good[17:]], ends="\r\n")
        source = dict(type=load_dataset, path="json", data_files=[str(path) for path in paths])
        with pytest.raises(ValueError) as error:
            process(source)
        message = str(error.value)
        assert f"{paths[1]}, line 17, is broken: {reason}" in message and "\n" not in message


def test_a_malformed_row_is_named_in_the_file_of_its_split(tmp_path):
    good, alien = chats(9), {"messages": [{"role": "alien", "content": "x"}]}
    train = write(tmp_path / "train.jsonl", good)
    path = write(tmp_path / "val.jsonl", [*good[:2], alien, *good[3:]])["data_files"]
    files = dict(train=train["data_files"], validation=path)
    cases = [
        (dict(data_files=files), "validation", rf"row 2 \({path}, line 3\): "),
        (dict(data_files=files, split="validation"), "train", rf"row 2 \({path}, line 3\): "),
        (dict(data_files=files), None, rf"row 11 \({path}, line 3\): "),
        (dict(data_files=files, split="all"), "train", rf"row 11 \({path}, line 3\): "),
        (dict(data_files=path, split="train[1:]"), "train", "row 1: "),
        (dict(data_files=files, split="train+validation"), "train", "row 11: "),
    ]
    for config, split, place in cases:
        with pytest.raises(ValueError, match=place):
            process({**train, **config}, split=split)


def test_a_broken_line_is_named_whichever_split_it_is_in(tmp_path):
    train = write(tmp_path / "train.jsonl", chats(5))
    path = write(tmp_path / "val.jsonl", [*chats(2), "{"])["data_files"]
    source = {**train, "data_files": dict(train=train["data_files"], validation=path)}
    with pytest.raises(ValueError, match=rf"{path}, line 3, is broken"):
        process(source)


def test_files_that_a_config_dict_makes_are_left_to_it():
    made = dict(type="python_docs_files", max_files=3)
    assert all_data_files(dict(type=load_dataset, path="json", data_files=made)) == []


@pytest.mark.parametrize("content", ["", "\n\n", "[]"])
def test_files_without_a_row_are_named(content, tmp_path):
    (tmp_path / "none.jsonl").write_text(content)
    none = str(tmp_path / "none.jsonl")
    source = dict(type=load_dataset, path="json", data_files=[none])
    with pytest.raises(ValueError, match=r"dataset: .*none.jsonl is empty: it has no row$"):
        process(source)
    source["data_files"] = [none, none]
    with pytest.raises(ValueError, match=r"no row, as are the 1 other files of it"):
        process(source)
    source["data_files"] = [none, write(tmp_path / "a.jsonl", chats(5))["data_files"]]
    if content:  # which the datasets library cannot read beside others
        with pytest.raises(ValueError, match=r"none.jsonl is empty: leave it out$"):
            process(source)
    else:
        assert len(process(source)) == len(process(chats(5)))


def test_bytes_that_are_no_text_are_named_by_file_and_line(tmp_path):
    source = write(tmp_path / "a.jsonl", chats(3))
    with open(tmp_path / "a.jsonl", "ab") as file:
        file.write(b'{"messages": [{"role": "user", "content": "\xff"}]}\n')
    with pytest.raises(ValueError, match=r"a.jsonl, line 4, is broken: no UTF-8 at byte 43"):
        process(source)


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("ends", ["\n", "\r\n", "\n\n"])
def test_byte_order_marks_line_ends_and_blank_lines_lose_no_row(ends, mark, tmp_path):
    rows = chats(30)
    source = write(tmp_path / "a.jsonl", rows, ends, mark)
    assert process(source)["input_ids"][:] == process(rows)["input_ids"][:]
    rows[16] = {"messages": [{"role": "alien", "content": "x"}]}
    source = write(tmp_path / "b.jsonl", rows, ends, mark)
    line = 33 if ends == "\n\n" else 17
    with pytest.raises(ValueError, match=rf"row 16 \(.*b.jsonl, line {line}\)"):
        process(source)


def test_an_error_in_a_map_function_is_the_cause_of_ours():
    def broken(example):
        return {"conversation": example["nothing"]}

    with pytest.raises(ValueError, match="5 of 5 rows are malformed; .* KeyError") as error:
        process(chats(5), dataset_map_fn=broken)
    assert isinstance(error.value.__cause__, KeyError)


def test_no_row_is_lost_at_the_borders_of_worker_processes(monkeypatch, log_lines):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(3)), raising=False)
    rows = chats(3200)
    rows[3100] = {"messages": []}
    dataset = process(rows, map_num_proc=32)
    assert any("map_num_proc=32 clipped to 3 (3 cores, 3200 rows)" in line for line in log_lines)
    expected = [i for i in range(3200) if i != 3100]
    assert [int(chat[-2]["content"].split()[0]) for chat in dataset["messages"]] == expected


# Arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(tokenizer=None), "do_dataset_tokenization=True needs tokenizer"),
        (dict(max_length=None), "do_dataset_tokenization=True needs max_length"),
        (dict(max_length=0), "max_length=0 must be a whole number of at least 1"),
        (dict(max_dataset_length=0), "max_dataset_length=0 must be"),
        (dict(bad_rows="drop"), "bad_rows='drop' must be 'error' or 'skip'"),
        (dict(use_varlen_attn=True), "use_varlen_attn=True needs pack_to_max_length=True"),
        (dict(pack_to_max_length=True, split="test"), "split='test'"),
        (dict(dataset=[1, 2]), "dataset must be a datasets.Dataset, .* got list"),
        (dict(dataset=Dataset.from_list([])), "dataset is empty"),
        (dict(dataset=dict(path="json")), "dataset: the config .* needs a 'type'"),
        (dict(dataset=dict(type="load_datasets")), "'load_datasets' .* did you mean load_dataset"),
        (
            dict(dataset=dict(type=load_dataset, path="json", data_files="nowhere.jsonl")),
            r"dataset: load_dataset\(path='json', data_files='nowhere.jsonl'\) failed: FileNot",
        ),
        (
            dict(
                tokenizer=dict(
                    type="AutoTokenizer.from_pretrained", pretrained_model_name_or_path="/no"
                )
            ),
            "tokenizer: from_pretrained.* failed",
        ),
        (
            dict(template_map_fn=dict(type="template_map_fn_factory", template="qwen_chatt")),
            "template='qwen_chatt' .* did you mean qwen_chat",
        ),
        (dict(max_length=1), "none of its 3 rows is left: 3 rows without a trainable label"),
    ],
)
def test_bad_arguments_are_named(options, message):
    options = {
        **dict(dataset=Dataset.from_list(chats(3)), tokenizer=small_tokenizer(), max_length=100),
        **CHATML,
        **dict(pack_to_max_length=False),
        **options,
    }
    with pytest.raises(ValueError, match=message):
        process_hf_dataset(**options)


def test_packing_is_on_by_default_and_says_so_where_it_is_not_built(monkeypatch):
    monkeypatch.setattr(front_door, "_PACKING", "xlength.datasets.not_there")
    with pytest.raises(NotImplementedError, match="set pack_to_max_length=False"):
        process_hf_dataset(Dataset.from_list(chats(3)), tokenizer=small_tokenizer(), max_length=64)


@pytest.mark.parametrize("use_varlen_attn", [False, True])
def test_packs_hold_the_tokens_of_all_rows_and_have_lengths(use_varlen_attn):
    rows = process(chats(40))
    packs = process(chats(40), None, 64, pack_to_max_length=True, use_varlen_attn=use_varlen_attn)
    cut = process(chats(40), None, 64)
    assert sum(packs.length) == sum(cut.length) < sum(rows.length)
    assert set(packs.length[:-1]) == {64}
    assert packs["length"][:] == packs.length == [len(ids) for ids in packs["input_ids"]]
    assert ("cumulative_len" in packs.column_names) == use_varlen_attn
    flat = sorted(np.concatenate(packs["input_ids"][:]).tolist())
    assert flat == sorted(np.concatenate(cut["input_ids"][:]).tolist())


def test_a_stale_folder_that_was_deleted_in_part_is_made_anew():
    first = process(chats(7, seed=9))
    folder = front_door.cache.folder_of(first._fingerprint)
    assert front_door.cache.exists(folder) and folder.is_relative_to(
        datasets.config.HF_DATASETS_CACHE
    )
    (folder / "state.json").unlink()
    assert process(chats(7, seed=9))["input_ids"][:] == first["input_ids"][:]
    assert front_door.cache.exists(folder)
    assert not [path for path in folder.parent.iterdir() if path.name.startswith(".")]
