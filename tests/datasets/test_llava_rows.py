"""Rows and images that cannot be used, and samples that are too long (hard inputs 19, 33, 34)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests import families
from tests.datasets.test_llava import folder, llava_row, make
from xlength.datasets.llava import LLaVADataset

__all__ = ["folder"]


def from_lines(tmp_path: Path, lines: list[str], end: str = "\n", **options: Any) -> LLaVADataset:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(end.join(lines).encode())
    return LLaVADataset(
        data_path=str(path),
        image_folder=str(tmp_path),
        processor=families.processor("qwen2_5_vl"),
        cache_dir=str(tmp_path / "cache"),
        **options,
    )


PART_WITH_DICT = {"type": "text", "text": {"a": 1}}
PART_WITHOUT_URL = {"type": "image_url", "image_url": {"uri": "a.png"}}


def good(number: int) -> str:
    return json.dumps(llava_row(None, f"Question {number}", "Answer é"), ensure_ascii=False)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"conversations": [{"from": "human", "val', "line 17: broken JSON"),
        ('["a list"]', "line 17: a row must be an object, got list"),
        (
            '{"text": "no messages"}',
            r"line 17: no 'conversations' and no 'messages', only \['text'",
        ),
        ('{"messages": []}', "line 17: 'messages' is empty"),
        ('{"conversations": [{"from": "gpt", "value": "x"}]}', "line 17: 'conversations' is empty"),
        ('{"conversations": [{"from": "alien", "value": "x"}]}', "line 17: unknown role 'alien'"),
        ('{"messages": [{"role": "user", "content": 3}]}', "line 17: the content of a message"),
        (json.dumps({**llava_row(["a", "b"]), "image": "a"}), "line 17: 2 places .* but 1 images"),
        (json.dumps({**llava_row("a"), "image": None}), "line 17: 1 places .* but 0 images"),
        (json.dumps({**llava_row("a"), "width": "7", "height": 8}), "line 17: width and height"),
        (json.dumps({**llava_row("a"), "width": "640", "height": "480"}), "line 17: width and h"),
        (json.dumps(llava_row(397133)), "line 17: an image must be a path, got 397133"),
        (json.dumps(llava_row(0)), "line 17: an image must be a path, got 0"),
        (json.dumps(llava_row([None])), "line 17: an image must be a path, got None"),
        (json.dumps(llava_row({"bytes": "x"})), "line 17: an image must be a path, got {'bytes'"),
        (
            json.dumps({"messages": [{"role": "user", "content": [PART_WITH_DICT]}]}),
            "line 17: the text of a part must be a string, got {'a': 1}",
        ),
        (
            json.dumps({"messages": [{"role": "user", "content": [PART_WITHOUT_URL]}]}),
            "line 17: an image must be a path, got {'uri': 'a.png'}",
        ),
        (
            json.dumps({**llava_row("a"), "width": [7, 8], "height": 8}),
            "line 17: 1 images, but 2 w",
        ),
        (json.dumps(llava_row(None, "cut \ud83d")), "line 17: half a surrogate pair in its text"),
        (json.dumps(llava_row(None, "a <|image_pad|> b")), "line 17: its text has 1 placeholders"),
    ],
)
def test_a_broken_row_is_named_by_file_and_line_or_left_out_and_counted(
    tmp_path: Path, line: str, message: str
) -> None:
    lines = [good(i) for i in range(16)] + [line] + [good(i) for i in range(5)]
    with pytest.raises(ValueError, match=r"rows\.jsonl, " + message):
        from_lines(tmp_path, lines)
    dataset = from_lines(tmp_path, lines, broken_row="skip")
    assert len(dataset) == 21
    texts = [dataset.processor.tokenizer.decode(dataset[i]["input_ids"]) for i in (15, 16)]
    assert "Question 15" in texts[0] and "Question 0" in texts[1]


def test_a_byte_order_mark_crlf_ends_and_blank_lines_lose_no_row(tmp_path: Path) -> None:
    lines = ["\ufeff" + good(0), good(1), "", "   ", good(2), ""]
    for end in ("\r\n", "\n"):
        dataset = from_lines(tmp_path, lines, end)
        assert len(dataset) == 3
        assert "Question 2" in dataset.processor.tokenizer.decode(dataset[2]["input_ids"])
        assert len(from_lines(tmp_path, ["\ufeff", good(0)], end)) == 1
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 5: "):
        from_lines(tmp_path, [*lines[:4], "{", good(3)])


def test_a_json_array_is_read_row_by_row_whatever_its_layout(tmp_path: Path) -> None:
    rows = [llava_row(None, "häßlich 中文 " * i, "ja é") for i in range(6)]
    samples = []
    for i, text in enumerate(
        [
            json.dumps(rows),
            json.dumps(rows, indent=2, ensure_ascii=False),
            "\ufeff" + json.dumps(rows, ensure_ascii=False).replace("}, {", "}  ,\r\n {"),
        ]
    ):
        path = tmp_path / f"{i}.json"
        path.write_bytes(text.encode())
        for _ in range(2):  # the second time the rows are found in the cache
            dataset = LLaVADataset(
                str(path), processor=families.processor("llava"), cache_dir=str(tmp_path)
            )
            samples.append([dataset[k]["input_ids"].tolist() for k in range(6)])
    assert all(one == samples[0] for one in samples)
    path.write_text(json.dumps(rows)[:-30])
    with pytest.raises(ValueError, match=r"2\.json, line 1: broken JSON in row 5"):
        LLaVADataset(str(path), processor=families.processor("llava"))


def odd_images(folder: Path) -> None:
    noise = np.random.RandomState(0).randint(0, 255, (300, 400, 3)).astype(np.uint8)
    Image.fromarray(noise).save(folder / "whole.jpg", quality=95)
    (folder / "cut.jpg").write_bytes((folder / "whole.jpg").read_bytes()[:9000])
    (folder / "text.png").write_text("no image")
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (120, 40), "red").save(folder / "turned.jpg", exif=exif)
    Image.new("CMYK", (120, 40)).save(folder / "cmyk.jpg")
    grey = np.linspace(0, 65535, 4800).astype(np.uint16).reshape(40, 120)
    Image.fromarray(grey).save(folder / "sixteen.png")
    frames = [Image.new("RGB", (120, 40), colour) for colour in ("red", "blue")]
    frames[0].save(folder / "moving.gif", save_all=True, append_images=frames[1:])
    Image.new("RGB", (1, 1)).save(folder / "one.png")
    Image.new("RGB", (20000, 20)).save(folder / "long.png")


GOOD = ["whole.jpg", "turned.jpg", "cmyk.jpg", "sixteen.png", "moving.gif", "one.png"]


@pytest.mark.parametrize("family", families.FAMILIES)
def test_every_odd_image_ends_in_the_right_tokens_or_one_error_naming_row_and_path(
    tmp_path: Path, family: str
) -> None:
    odd_images(tmp_path)
    dataset = make(tmp_path, [llava_row(name) for name in GOOD], family)
    for i in range(len(GOOD)):
        assert len(dataset[i]["input_ids"]) == dataset.length[i]
    if family == "qwen2_5_vl":
        grid = dataset[1]["image_grid_thw"][0].tolist()
        assert grid[1] > grid[2]  # the image lies in the file and stands once it is turned
    rows = [llava_row(None), llava_row("long.png")]
    if family.startswith("qwen"):
        message = r"row 1: .*long\.png: the processor refuses 20000 x 20 pixels: .*aspect ratio"
        with pytest.raises(ValueError, match=message):
            make(tmp_path, rows, family)
    else:
        long = make(tmp_path, rows, family)
        assert len(long[1]["input_ids"]) == long.length[1]
    for name, message in (("none.png", "missing image"), ("text.png", "broken image")):
        with pytest.raises(ValueError, match=rf"data, row 1: .*{name}: {message}"):
            make(tmp_path, [llava_row(None), llava_row(name)], family)
    late = make(tmp_path, [llava_row(None), llava_row("cut.jpg")], family)
    with pytest.raises(ValueError, match=r"data, row 1: .*cut\.jpg: broken image: .*truncated"):
        late[1]


def test_the_error_counts_all_unusable_images_and_names_the_first(folder: Path) -> None:
    rows = [llava_row("0.png"), llava_row("x.png"), llava_row(["1.png", "y.png"])]
    with pytest.raises(ValueError, match=r"row 1: .*x\.png: missing image \(and 1 more like it\)"):
        make(folder, rows)


def test_samples_with_unusable_images_are_left_out_and_counted_when_asked(
    tmp_path: Path, log_lines: list[str]
) -> None:
    odd_images(tmp_path)
    names = ["whole.jpg", "none.png", "text.png", "long.png", "one.png"]
    dataset = make(tmp_path, [llava_row(name) for name in names], missing_image="skip")
    assert len(dataset) == 2
    assert len(dataset[1]["input_ids"]) == dataset.length[1]
    assert "3 rows were left out because of an image; the first: data, row 1" in "\n".join(
        log_lines
    )
    assert "5 rows, 2 samples: 2 with images, 0 text only" in "\n".join(log_lines)


def test_an_image_that_breaks_later_keeps_the_plan_and_trains_nothing(
    tmp_path: Path, log_lines: list[str]
) -> None:
    odd_images(tmp_path)
    dataset = make(tmp_path, [llava_row("cut.jpg"), llava_row("one.png")], missing_image="skip")
    sample = dataset[0]
    assert len(sample["input_ids"]) == dataset.length[0]
    assert (sample["labels"] == -100).all()
    assert (dataset[1]["labels"] != -100).any()
    assert (
        "row 0" in "\n".join(log_lines)
        and "cut.jpg: broken image" in "\n".join(log_lines)
        and "number 1" in "\n".join(log_lines)
    )


@pytest.mark.parametrize("family", families.FAMILIES)
def test_truncation_cuts_text_but_never_an_image(folder: Path, family: str) -> None:
    row = llava_row(["0.png", "1.png"], "Well?", "Red and blue. " * 4)
    row["conversations"][0]["value"] = "One <image> and two <image> now. Well?"
    row["conversations"].insert(0, {"from": "human", "value": "Hi"})
    row["conversations"].insert(1, {"from": "gpt", "value": "Hi!"})
    whole = make(folder, [row], family)[0]
    seen = set()
    for max_length in range(22, len(whole["input_ids"])):
        options = {"max_length": max_length, "overlong": "truncate_text"}
        dataset = make(folder, [row], family, **options)
        sample = dataset[0]
        length, kept = len(sample["input_ids"]), sample["num_images"]
        assert length == dataset.length[0] <= max_length
        assert (sample["labels"] != -100).any()
        # LLaVA-OneVision makes other tokens of an image that is left alone.
        if family != "llava_onevision" or kept == 2:
            assert sample["input_ids"].tolist() == whole["input_ids"][:length].tolist()
        counts, _ = dataset.encoder.tokens([(40, 60), (200, 30)][:kept], kept)
        around = 2 * kept if family == "internvl" else 0
        found = int((sample["input_ids"] == dataset.encoder.placeholder).sum())
        assert found == counts.sum() - around
        assert ("pixel_values" in sample) == bool(kept)
        assert dataset.image_tokens[0] == counts.sum()
        assert np.sign(dataset.modality_length[0]) == (1 if kept else -1)
        seen.add(kept)
    assert seen >= {0, 2}
    assert len(seen) == 3 or family == "llava_onevision"


def test_samples_over_the_limit_stop_the_build_or_are_left_out_as_asked(
    folder: Path, log_lines: list[str]
) -> None:
    rows = [llava_row("0.png"), llava_row(None, "long", "word " * 90), llava_row(None)]
    with pytest.raises(ValueError, match=r"data, row 1: \d+ tokens, more than max_length 60"):
        make(folder, rows, max_length=60, overlong="error")
    dropped = make(folder, rows, max_length=60, overlong="drop")
    assert len(dropped) == 2
    assert "1 rows were left out because they are too long" in "\n".join(log_lines)
    cut = make(folder, rows, max_length=60)
    assert cut.length[1] == len(cut[1]["input_ids"]) == 60
    assert "1 samples were cut to max_length; the first: data, row 1" in "\n".join(log_lines)


def test_rows_without_a_label_to_train_are_left_out_and_counted(
    folder: Path, log_lines: list[str]
) -> None:
    silent = {"messages": [{"role": "user", "content": "Anyone?"}]}
    crowded = llava_row("0.png", "word " * 40)
    dataset = make(folder, [llava_row("0.png"), silent, crowded], max_length=30)
    assert len(dataset) == 1
    assert (
        "2 rows were left out because no label is left to train; the first: data, row 1"
        in "\n".join(log_lines)
    )
    with pytest.raises(ValueError, match="none of 1 rows makes a sample: 1 untrained"):
        make(folder, [silent])


def test_two_images_with_nothing_between_them_are_refused_where_positions_need_it(
    folder: Path,
) -> None:
    bare = families.chat_template("llava").replace("<image>", "<|image_pad|>")
    row = llava_row(["0.png", "1.png"])
    row["conversations"][0]["value"] = "<image><image>What?"
    with pytest.raises(ValueError, match="row 0: two images with nothing between them"):
        make(folder, [row], "qwen2_5_vl", chat_template=bare)
    assert len(make(folder, [row], "llava")) == 1
