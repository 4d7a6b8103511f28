"""Lengths measured once: in parallel, cached, by one of several processes."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests import families
from xlength.datasets import llava as llava_module
from xlength.datasets import measured as measured_module
from xlength.datasets.llava import LLaVADataset
from xlength.datasets.measured import count_tokens


def rows(count: int = 5000) -> list[dict[str, Any]]:
    rng = np.random.RandomState(0)
    result = []
    for i in range(count):
        k = int(rng.choice([0, 1, 1, 2]))
        row: dict[str, Any] = {
            "conversations": [
                {"from": "human", "value": "<image>\n" * k + "What is it? " * rng.randint(1, 5)},
                {"from": "gpt", "value": f"Number {i}. " * rng.randint(1, 9)},
            ]
        }
        if k:
            row["image"] = [f"{i}_{j}.png" for j in range(k)]
            row["width"] = rng.randint(1, 200, k).tolist()
            row["height"] = rng.randint(2, 200, k).tolist()
        result.append(row)
    return result


def build(folder: Path, data: list[dict[str, Any]], **options: Any) -> LLaVADataset:
    options = {"cache_dir": str(folder), **options}
    return LLaVADataset(data=data, processor=families.processor("qwen2_5_vl"), **options)


def test_several_processes_measure_what_one_measures(tmp_path: Path) -> None:
    data = rows()
    one = build(tmp_path / "one", data, num_proc=1)
    three = build(tmp_path / "three", data, num_proc=3)
    assert np.array_equal(one.modality_length, three.modality_length)
    assert (one.modality_length > 0).any() and (one.modality_length < 0).any()
    again = build(tmp_path / "three", data)
    assert np.array_equal(one.modality_length, again.modality_length)


def test_a_broken_row_in_another_process_is_named_as_in_this_one(tmp_path: Path) -> None:
    data = rows(2000)
    data[1700] = {"conversations": []}
    data[1900] = {"conversations": []}
    for num_proc in (1, 2):
        with pytest.raises(ValueError, match=r"data, row 1700: .* is empty \(and 1 more"):
            build(tmp_path, data, num_proc=num_proc)


def test_tokens_are_counted_as_the_tokenizer_makes_them_whatever_its_state() -> None:
    tokenizer = families.tokenizer("llava")
    texts = ["", "What is it?", "<image> red", "the picture is " * 30]
    expected = [len(ids) for ids in tokenizer(texts)["input_ids"]]
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.backend_tokenizer.enable_padding(length=50)
    for one in (texts, texts[:1]):
        assert count_tokens(tokenizer, one, True).tolist() == expected[: len(one)]


def count_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    real = measured_module.measure_rows

    def counted(found: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(len(found))
        return real(found, *args, **kwargs)

    monkeypatch.setattr(llava_module, "measure_rows", counted)
    return calls


def test_the_second_start_measures_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, data = count_calls(monkeypatch), rows(50)
    first = build(tmp_path, data)
    second = build(tmp_path, data)
    assert calls == [50]
    assert np.array_equal(first.modality_length, second.modality_length)
    build(tmp_path, data, remeasure=True)
    assert calls == [50, 50]


def test_whatever_changes_the_lengths_measures_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, data = count_calls(monkeypatch), rows(20)
    build(tmp_path, data)
    changed = json.loads(json.dumps(data))
    changed[3]["conversations"][1]["value"] += "!"
    build(tmp_path, changed)
    build(tmp_path, data, max_length=60)
    build(tmp_path, data, max_length=60, overlong="drop")
    build(tmp_path, data, image_folder=str(tmp_path))
    build(tmp_path, data, image_first=True)
    build(tmp_path, data, pad_image_to_square=True)
    build(tmp_path, data, chat_template=families.chat_template("qwen2_5_vl") + "\n")
    assert len(calls) == 8
    processor = families.processor("qwen2_5_vl")
    processor.image_processor.size["longest_edge"] = 28 * 28 * 4
    LLaVADataset(data=data, processor=processor, cache_dir=str(tmp_path))
    LLaVADataset(data=data, processor=families.processor("qwen3_vl"), cache_dir=str(tmp_path))
    processor = families.processor("qwen2_5_vl")
    processor.tokenizer.add_tokens(["What is"])
    LLaVADataset(data=data, processor=processor, cache_dir=str(tmp_path))
    assert len(calls) == 11
    build(tmp_path, data)
    assert len(calls) == 11


def test_what_a_policy_let_pass_is_measured_again_under_a_stricter_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, data = count_calls(monkeypatch), rows(20)
    for row in data:
        row.pop("width", None)
    with_images = sum("image" in row for row in data)
    assert len(build(tmp_path, data, missing_image="skip")) == 20 - with_images
    build(tmp_path, data, missing_image="skip")
    assert len(calls) == 1
    for row in data:
        for name in row.get("image", []):
            Image.new("RGB", (30, 30)).save(tmp_path / name)
    with pytest.raises(ValueError, match="row 2: .*missing image .and 12 more"):
        build(tmp_path, data, missing_image="error")
    mended = build(tmp_path, data, missing_image="skip", image_folder=str(tmp_path))
    assert len(mended) == 20


def test_a_damaged_cache_is_measured_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, data = count_calls(monkeypatch), rows(20)
    first = build(tmp_path, data)
    (file,) = tmp_path.glob("*.npz")
    whole = file.read_bytes()
    for content in (b"", whole[: len(whole) // 2], b"no archive"):
        file.write_bytes(content)
        assert np.array_equal(build(tmp_path, data).length, first.length)
    assert len(calls) == 4


def in_a_process(folder: Path, barrier: Any, results: Any, options: dict[str, Any]) -> None:
    def counted(*args: Any, **kwargs: Any) -> Any:
        with open(folder / f"measured-{os.getpid()}", "w"):
            return real(*args, **kwargs)

    real = measured_module.measure_rows
    llava_module.measure_rows = counted  # type: ignore[attr-defined]
    barrier.wait()
    dataset = build(folder, rows(1500), **options)
    results.put((os.getpid(), int(dataset.length.sum())))


@pytest.mark.parametrize("remeasure", [False, True])
def test_of_several_processes_that_start_at_once_one_measures(
    tmp_path: Path, remeasure: bool
) -> None:
    if remeasure:
        build(tmp_path, rows(1500))
        time.sleep(0.1)
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(3), context.Queue()
    args = (tmp_path, barrier, results, {"remeasure": remeasure})
    started = [context.Process(target=in_a_process, args=args) for _ in range(3)]
    for process in started:
        process.start()
    found = [results.get(timeout=120) for _ in started]
    for process in started:
        process.join(timeout=60)
    assert [process.exitcode for process in started] == [0, 0, 0]
    assert len({total for _, total in found}) == 1
    assert len(list(tmp_path.glob("measured-*"))) == 1
    assert list(tmp_path.glob("*.partial*")) == []
