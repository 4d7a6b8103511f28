"""xlength measure: the lengths that training would see, from any kind of source."""

import gzip
import json

import datasets
import numpy as np
import pytest

from tests.datasets.samples import CHATML, chats, small_tokenizer
from xlength.cli import main
from xlength.datasets.process import process_hf_dataset
from xlength.plan.groups import fingerprint


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    small_tokenizer(chat_template=CHATML).save_pretrained(folder)
    return str(folder)


def jsonl(path, rows, ends="\n"):
    path.write_bytes("".join(json.dumps(row) + ends for row in rows).encode())
    return path


def measure(source, out, *options):
    return main(["measure", str(source), "-o", str(out), *map(str, options)])


def prepared(rows, tokenizer, max_length=2**31 - 1, map_fn="openai_map_fn", template="tokenizer"):
    """Lengths as training makes them."""
    result = process_hf_dataset(
        datasets.Dataset.from_list(rows),
        tokenizer=dict(
            type="AutoTokenizer.from_pretrained", pretrained_model_name_or_path=tokenizer
        ),
        max_length=max_length,
        dataset_map_fn=map_fn,
        template_map_fn=template and dict(type="template_map_fn_factory", template=template),
        pack_to_max_length=False,
        map_num_proc=1,
    )
    return list(result.length)


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "json", "parquet", "saved", "split"])
def test_every_kind_of_source_gives_the_lengths_of_training(kind, tokenizer, tmp_path):
    rows = chats(300)
    path = tmp_path / f"data.{kind}"
    options = []
    if kind == "jsonl":
        jsonl(path, rows)
        options = ["--block-bytes", 1000]
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress("".join(json.dumps(r) + "\n" for r in rows).encode()))
        options = ["--block-bytes", 1000]
    elif kind == "json":
        path.write_text(json.dumps(rows, indent=1, ensure_ascii=False), encoding="utf-8")
        options = ["--block-bytes", 1000]
    elif kind == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(str(path))
    elif kind == "saved":
        datasets.Dataset.from_list(rows).save_to_disk(path)
    else:
        both = {"train": datasets.Dataset.from_list(chats(3, seed=9))}
        both["test"] = datasets.Dataset.from_list(rows)
        datasets.DatasetDict(both).save_to_disk(path)
        options = ["--split", "test"]
    out = tmp_path / "out/lengths.npy"
    assert measure(path, out, "--tokenizer", tokenizer, *options) == 0
    lengths = np.load(out)
    assert lengths.dtype == np.int32
    assert lengths.tolist() == prepared(rows, tokenizer)
    assert sorted(file.name for file in out.parent.iterdir()) == ["lengths.json", "lengths.npy"]


@pytest.mark.parametrize(
    ("row", "map_fn", "template"),
    [
        ({"instruction": "add", "input": "1 2", "output": "it is 3"}, "alpaca_map_fn", "qwen_chat"),
        ({"text": "the quick brown fox"}, "pretrain_map_fn", None),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b c"}]},
            "wizardlm_map_fn",
            "llama3_chat",
        ),
    ],
)
def test_the_form_of_the_rows_is_recognised(row, map_fn, template, tokenizer, tmp_path):
    path = jsonl(tmp_path / "data.jsonl", [row] * 3)
    options = ["--template", template] if template else []
    assert measure(path, tmp_path / "l.npy", "--tokenizer", tokenizer, *options) == 0
    expected = prepared([row] * 3, tokenizer, map_fn=map_fn, template=template)
    assert np.load(tmp_path / "l.npy").tolist() == expected
    assert json.loads((tmp_path / "l.json").read_text())["map_fn"] == map_fn


def test_a_folder_of_files_is_measured_in_order_and_its_parts_are_named(tokenizer, tmp_path):
    data = tmp_path / "data"
    (data / "more").mkdir(parents=True)
    jsonl(data / "a.jsonl", chats(20, 1))
    datasets.Dataset.from_list(chats(30, 2)).to_parquet(str(data / "b.parquet"))
    jsonl(data / "more/c.jsonl", chats(10, 3))
    (data / "notes.txt").write_text("not measured")
    assert measure(data, tmp_path / "l.npy", "--tokenizer", tokenizer) == 0
    expected = prepared(chats(20, 1) + chats(30, 2) + chats(10, 3), tokenizer)
    assert np.load(tmp_path / "l.npy").tolist() == expected
    side = json.loads((tmp_path / "l.json").read_text())
    names = [(part["name"], part["num_samples"]) for part in side["parts"]]
    assert names == [("a.jsonl", 20), ("b.parquet", 30), ("more/c.jsonl", 10)]


def test_the_side_file_says_what_was_measured_and_how(tokenizer, tmp_path):
    path = jsonl(tmp_path / "data.jsonl", chats(50))
    options = ["--tokenizer", tokenizer, "--template", "qwen_chat", "--max-length", 40]
    assert measure(path, tmp_path / "l.npy", *options) == 0
    lengths = np.load(tmp_path / "l.npy").astype(np.int64)
    expected = prepared(chats(50), tokenizer, max_length=40, template="qwen_chat")
    assert lengths.tolist() == expected and max(expected) == 40
    side = json.loads((tmp_path / "l.json").read_text())
    assert side["fingerprint"] == fingerprint(lengths)  # the one that samplers check
    assert side["num_tokens"] == sum(expected) and side["num_samples"] == len(expected)
    assert (side["tokenizer"], side["template"], side["max_length"]) == (
        tokenizer,
        "qwen_chat",
        40,
    )
    assert side["rows"]["cut"] == sum(length == 40 for length in expected) > 0


@pytest.mark.parametrize(("ends", "mark"), [("\n", b""), ("\r\n", b"\xef\xbb\xbf"), ("\n\n", b"")])
def test_marks_line_ends_and_blank_lines_lose_no_row(ends, mark, tokenizer, tmp_path):
    path = jsonl(tmp_path / "data.jsonl", chats(60), ends)
    path.write_bytes(mark + path.read_bytes().rstrip())
    assert measure(path, tmp_path / "l.npy", "--tokenizer", tokenizer, "--block-bytes", 700) == 0
    assert np.load(tmp_path / "l.npy").tolist() == prepared(chats(60), tokenizer)


def test_the_output_says_whether_the_lengths_are_cut_as_training_cuts(tokenizer, tmp_path, capsys):
    path = jsonl(tmp_path / "data.jsonl", chats(50))
    assert measure(path, tmp_path / "a.npy", "--tokenizer", tokenizer) == 0
    assert "lengths before cutting: training cuts at its max_length" in capsys.readouterr().out
    assert measure(path, tmp_path / "b.npy", "--tokenizer", tokenizer, "--max-length", 40) == 0
    printed = capsys.readouterr().out
    assert "cut at max_length=40, as training does" in printed and "before" not in printed
    known = jsonl(tmp_path / "lengths.jsonl", [{"length": 7}, {"length": 9}])
    assert measure(known, tmp_path / "c.npy") == 0
    assert "read from the column 'length', nothing is cut" in capsys.readouterr().out
    assert measure(known, tmp_path / "d.npy", "--max-length", 8) == 2
    assert "have their lengths already" in capsys.readouterr().err


def test_rows_that_are_measured_or_tokenised_already_need_no_tokenizer(tmp_path):
    table = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3], [4], [5, 6]]})
    table.save_to_disk(tmp_path / "ids")
    assert measure(tmp_path / "ids", tmp_path / "a.npy") == 0
    assert np.load(tmp_path / "a.npy").tolist() == [3, 1, 2]
    path = jsonl(tmp_path / "lengths.jsonl", [{"length": 7}, {"length": -9}])
    assert measure(path, tmp_path / "b.npy") == 0
    assert np.load(tmp_path / "b.npy").tolist() == [7, -9]


def test_a_bad_row_is_named_by_file_and_line_or_left_out_and_counted(tokenizer, tmp_path, capsys):
    rows = [json.dumps(row) for row in chats(90)]
    rows[70] = '{"messages": [{"role": "us'
    rows[80] = '{"messages": [{"role": "robot", "content": "x"}]}'
    rows[85] = '{"messages": []}'
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(rows[:5]) + "\n\n" + "\n".join(rows[5:]))  # a blank line too
    options = ["--tokenizer", tokenizer, "--template", "qwen_chat", "--block-bytes", 600]
    assert measure(path, tmp_path / "l.npy", *options) == 2
    problem = "broken JSON: Invalid control character at character 26"
    assert f"{path}, line 72: {problem}" in capsys.readouterr().err
    assert measure(path, tmp_path / "l.npy", *options, "--bad-rows", "skip") == 0
    good = [row for i, row in enumerate(chats(90)) if i not in (70, 80, 85)]
    assert np.load(tmp_path / "l.npy").tolist() == prepared(good, tokenizer, template="qwen_chat")
    out = capsys.readouterr().out
    assert "2 rows malformed and left out" in out and "line 72" in out
    assert "1 rows without an answer and left out" in out and "line 87" in out


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("", [], "is empty"),
        ('{"messages": []}\n', [], "--tokenizer is needed"),
        ('{"messages": []}\n', ["--tokenizer", "/no/such/folder"], "--tokenizer /no/such/folder"),
        ('{"odd": 1}\n', ["--tokenizer", "{tokenizer}"], "no known form"),
        ('{"image": "a.png", "conversations": []}\n', ["--tokenizer", "x"], "LLaVADataset"),
        (
            '{"messages": []}\n',
            ["--tokenizer", "{tokenizer}", "--template", "qwen_chta"],
            "qwen_chat",
        ),
        ('{"messages": []}\n', ["--tokenizer", "{tokenizer}"], "no row of"),
        ("not json\n", ["--tokenizer", "{tokenizer}"], "has no row that can be read; the first:"),
        ("\n \n", ["--tokenizer", "{tokenizer}"], "has no row"),
    ],
)
def test_what_cannot_be_measured_ends_with_one_line(
    content, options, message, tokenizer, tmp_path, capsys
):
    path = tmp_path / "data.jsonl"
    path.write_text(content)
    options = [option.format(tokenizer=tokenizer) for option in options]
    assert measure(path, tmp_path / "l.npy", *options) == 2
    error = capsys.readouterr().err.strip()
    assert message in error.split("\n")[-1]
    assert not (tmp_path / "l.npy").exists()


def test_a_missing_source_is_looked_for_among_the_configs(tmp_path, capsys):
    assert measure(tmp_path / "nothing.jsonl", tmp_path / "l.npy") == 2
    assert "nothing.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["array", "lines", "part", "other", "list"])
def test_the_side_file_is_never_written_over_data(kind, tmp_path, capsys):
    rows = [{"input_ids": [1, 2, 3]}] * 5
    data = jsonl(tmp_path / "chats.json", rows)
    source = tmp_path if kind == "part" else data
    if kind == "array":
        data.write_text(json.dumps(rows))
    elif kind in ("other", "list"):
        source = jsonl(tmp_path / "others.jsonl", rows)
        data.write_text('["format", "request"]' if kind == "list" else '{"format": 1}')
    before = data.read_bytes()
    assert measure(source, tmp_path / "chats.npy") == 2
    said = capsys.readouterr().err
    assert f"would write {data}" in said and "choose another -o" in said
    assert data.read_bytes() == before
    assert not (tmp_path / "chats.npy").exists()


def test_a_tokenizer_for_rows_whose_lengths_are_known_is_refused(tokenizer, tmp_path, capsys):
    path = jsonl(tmp_path / "data.jsonl", [{**row, "length": 100_000} for row in chats(20)])
    assert measure(path, tmp_path / "a.npy") == 0
    assert "'length'" in capsys.readouterr().out
    assert np.load(tmp_path / "a.npy").tolist() == [100_000] * 20
    for options in (("--tokenizer", tokenizer), ("--template", "qwen_chat")):
        assert measure(path, tmp_path / "b.npy", *options) == 2
        said = capsys.readouterr().err
        assert " ".join(options) in said and "'length'" in said
        assert "--map-fn openai_map_fn" in said
    options = ("--tokenizer", tokenizer, "--map-fn", "openai_map_fn")
    assert measure(path, tmp_path / "c.npy", *options) == 0
    assert np.load(tmp_path / "c.npy").tolist() == prepared(chats(20), tokenizer)


@pytest.mark.parametrize("half", [b"\\ud83d", b"\\uDE00", b"\xed\xa0\xbd"])
def test_half_a_surrogate_pair_is_a_row_that_can_be_left_out(half, tokenizer, tmp_path, capsys):
    rows = chats(20)
    rows[3] = {"messages": [*rows[3]["messages"], {"role": "assistant", "content": "cut HALF"}]}
    rows[5]["messages"][0]["content"] += " whole \U0001f600 and \\\\ud83d"
    path = jsonl(tmp_path / "data.jsonl", rows)
    path.write_bytes(path.read_bytes().replace(b"HALF", half))
    assert measure(path, tmp_path / "a.npy", "--tokenizer", tokenizer) == 2
    assert f"{path}, line 4: half a surrogate pair" in capsys.readouterr().err
    assert measure(path, tmp_path / "a.npy", "--tokenizer", tokenizer, "--bad-rows", "skip") == 0
    assert "1 rows malformed and left out (the first: " in capsys.readouterr().out
    assert np.load(tmp_path / "a.npy").tolist() == prepared(rows[:3] + rows[4:], tokenizer)


def test_a_compressed_array_is_refused_with_what_to_do(tmp_path, capsys):
    path = tmp_path / "data.json.gz"
    for text in (json.dumps(chats(20), indent=1), "\ufeff \n" + json.dumps(chats(20))):
        path.write_bytes(gzip.compress(text.encode()))
        for bad_rows in ("error", "skip"):
            assert measure(path, tmp_path / "l.npy", "--bad-rows", bad_rows) == 2
            said = capsys.readouterr().err
            assert f"{path}: it holds a JSON array" in said and "gunzip it first" in said
