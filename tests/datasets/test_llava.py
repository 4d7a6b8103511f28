"""``LLaVADataset``: formats, labels, lengths, against what the processor makes of the same rows."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile
from torch.utils.data import ConcatDataset, DataLoader

from tests import families
from xlength import default_collate_fn, get_lengths
from xlength.datasets.llava import LLaVADataset
from xlength.datasets.templates import template_map_fn_factory
from xlength.datasets.tokenize import TurnEncoder

SIZES = [(60, 40), (30, 200), (28, 28), (97, 61)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i, (width, height) in enumerate(SIZES):
        Image.new("RGB", (width, height), (60 * i, 200, 30)).save(tmp_path / f"{i}.png")
    return tmp_path


def llava_row(images: Any, question: str = "What is it?", answer: str = "It is red.") -> dict:
    count = len(images) if isinstance(images, list) else int(bool(images))
    row = {
        "id": "a",
        "conversations": [
            {"from": "human", "value": "<image>\n" * count + question},
            {"from": "gpt", "value": answer},
        ],
    }
    return row if images == "absent" else {**row, "image": images}


ROWS = [
    llava_row("0.png"),
    llava_row(["1.png", "2.png"], "Which is larger?"),
    llava_row(None, "Say something."),
    llava_row("", "Say something else."),
    llava_row([], "Say nothing."),
    {"conversations": llava_row("")["conversations"]},
    llava_row("3.png", "And this?", "Blue, " * 9),
]


def make(
    folder: Path, rows: list[dict], family: str = "qwen2_5_vl", **options: Any
) -> LLaVADataset:
    options = {"cache_dir": str(folder / "cache"), "image_folder": str(folder), **options}
    return LLaVADataset(data=rows, processor=families.processor(family), **options)


def spoken(dataset: LLaVADataset, index: int) -> str:
    sample = dataset[index]
    trained = sample["input_ids"][sample["labels"] != -100]
    return str(dataset.processor.tokenizer.decode(trained))


@pytest.mark.parametrize("family", families.FAMILIES)
def test_each_sample_is_what_the_processor_makes_of_the_whole_text(
    folder: Path, family: str
) -> None:
    dataset = make(folder, ROWS, family)
    processor = dataset.processor
    for i, row in enumerate(ROWS):
        images = row.get("image") or []
        images = [images] if isinstance(images, str) else images
        content: list[dict[str, str]] = [{"type": "image"} for _ in images]
        question = row["conversations"][0]["value"].replace("<image>\n", "")
        for k in range(len(images)):
            content.insert(2 * k + 1, {"type": "text", "text": "\n"})
        content.append({"type": "text", "text": question})
        answer = {"type": "text", "text": row["conversations"][1]["value"]}
        messages = [
            {"role": "user", "content": content},
            {"role": "assistant", "content": [answer]},
        ]
        text = processor.apply_chat_template(messages, tokenize=False)
        if family == "internvl":  # its template writes the line end that LLaVA's rows have too
            text = text.replace("<IMG_CONTEXT>\n\n", "<IMG_CONTEXT>\n")
        opened = [Image.open(folder / name) for name in images]
        expected = processor(text=[text], images=[opened] if opened else None, return_tensors="pt")
        sample = dataset[i]
        assert sample["num_images"] == len(images)
        for key, value in expected.items():
            if key == "attention_mask":
                continue
            ours = sample[key]
            if key in ("input_ids", "mm_token_type_ids"):
                ours = ours[None]
            assert torch.equal(ours, torch.as_tensor(value)), (i, key)


@pytest.mark.parametrize("family", families.FAMILIES)
def test_lengths_are_those_of_the_samples_and_the_sign_tells_images_from_text(
    folder: Path, family: str
) -> None:
    dataset = make(folder, ROWS, family)
    real = [len(dataset[i]["input_ids"]) for i in range(len(ROWS))]
    assert dataset.length.dtype == dataset.modality_length.dtype == np.int64
    assert dataset.length.tolist() == real
    signs = [1, 1, -1, -1, -1, -1, 1]
    assert dataset.modality_length.tolist() == [s * n for s, n in zip(signs, real, strict=True)]
    for i, row in enumerate(ROWS):
        assert (dataset.image_tokens[i] > 0) == (signs[i] > 0)
        images = [Image.open(path) for path in dataset.reader.conversation(row).images]
        sizes = [(image.height, image.width) for image in images]
        assert dataset.image_tokens[i] == dataset.encoder.tokens(sizes, len(sizes))[0].sum()
    both = ConcatDataset([dataset, dataset])
    assert get_lengths(both, "modality_length").tolist() == 2 * dataset.modality_length.tolist()


def test_only_what_the_assistant_says_is_trained_up_to_the_end_of_its_turn(folder: Path) -> None:
    row = {
        "image": "0.png",
        "conversations": [
            {"from": "system", "value": "Be brief."},
            {"from": "human", "value": "What is <image> here?"},
            {"from": "gpt", "value": "Red."},
            {"from": "human", "value": "Sure?"},
            {"from": "gpt", "value": "Yes: <b>red</b>.\n"},
        ],
    }
    for family in families.FAMILIES:
        assert spoken(make(folder, [row], family), 0) == (
            "Red.<|im_end|>Yes: <b>red</b>.\n<|im_end|>"
        )


def test_an_image_that_the_assistant_shows_is_not_trained(folder: Path) -> None:
    row = llava_row("0.png", answer="Look: <image> there.")
    row["conversations"][0]["value"] = "Show me."
    for family in families.FAMILIES:
        said = spoken(make(folder, [row], family), 0)
        assert said.startswith("Look: ") and said.endswith(" there.<|im_end|>")
        assert families.IMAGE_TOKENS.get(family, "<image>") not in said


def test_openai_messages_with_image_parts_make_the_same_sample_as_llava_rows(folder: Path) -> None:
    llava = llava_row(["0.png", "1.png"], "Which?")
    llava["conversations"][0]["value"] = "First <image> then <image>"
    answer = {"role": "assistant", "content": "It is red."}
    parts = [
        {"type": "text", "text": "First "},
        {"type": "image_url", "image_url": {"url": "0.png"}},
        {"type": "text", "text": " then "},
        {"type": "image", "path": "1.png"},
    ]
    openai = {"messages": [{"role": "user", "content": parts}, answer]}
    marked = {
        "messages": [{"role": "user", "content": "First <image> then <image>"}, answer],
        "image": ["0.png", "1.png"],
    }
    dataset = make(folder, [llava, openai, marked])
    first = dataset[0]
    for i in (1, 2):
        for key, value in dataset[i].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(first[key])), key


def test_an_image_may_be_a_dict_with_its_path_as_datasets_writes_it(folder: Path) -> None:
    file = {"path": "1.png", "bytes": None}
    dicts = [llava_row(file), llava_row([file, "2.png"])]
    part = {"type": "image", "image": file}
    text = {"type": "text", "text": "What?"}
    answer = {"role": "assistant", "content": "That."}
    dicts.append({"messages": [{"role": "user", "content": [part, text]}, answer]})
    part = {"type": "image", "image": "1.png"}
    paths = [llava_row("1.png"), llava_row(["1.png", "2.png"])]
    paths.append({"messages": [{"role": "user", "content": [part, text]}, answer]})
    one, other = make(folder, dicts), make(folder, paths)
    assert one.modality_length.tolist() == other.modality_length.tolist()
    for i in range(3):
        for name, value in other[i].items():
            assert torch.equal(torch.as_tensor(one[i][name]), torch.as_tensor(value))


def test_an_image_without_a_mark_comes_before_the_first_question(folder: Path) -> None:
    marked, unmarked = llava_row("0.png"), llava_row("0.png")
    unmarked["conversations"][0]["value"] = "What is it?"
    dataset = make(folder, [marked, unmarked])
    assert dataset[0]["input_ids"].tolist() == dataset[1]["input_ids"].tolist()


def test_image_first_moves_the_mark_before_the_text_as_xtuner_does(folder: Path) -> None:
    row, behind = llava_row("0.png"), llava_row("0.png")
    behind["conversations"][0]["value"] = "What is it?\n<image>"
    kept, moved = make(folder, [row, behind]), make(folder, [row, behind], image_first=True)
    assert kept[0]["input_ids"].tolist() != kept[1]["input_ids"].tolist()
    assert moved[0]["input_ids"].tolist() == moved[1]["input_ids"].tolist()


def test_answers_before_the_first_question_are_left_away(folder: Path) -> None:
    row, early = llava_row("0.png"), llava_row("0.png")
    early["conversations"].insert(0, {"from": "gpt", "value": "Hello!"})
    dataset = make(folder, [row, early])
    assert dataset[0]["input_ids"].tolist() == dataset[1]["input_ids"].tolist()


def test_no_image_is_opened_where_the_rows_say_the_sizes(tmp_path: Path) -> None:
    rows = [
        {**llava_row("none.png"), "width": 60, "height": 40},
        {**llava_row(["none.png", "no.png"]), "width": [60, 200], "height": [40, 30]},
    ]
    dataset = make(tmp_path, rows)
    assert (dataset.modality_length > 0).all()
    for i, (width, height) in enumerate([(60, 40), (200, 30)]):
        Image.new("RGB", (width, height)).save(tmp_path / ("none.png", "no.png")[i])
    assert len(dataset[1]["input_ids"]) == dataset.length[1]


def test_a_row_that_lies_about_a_size_is_refused_when_the_image_is_opened(folder: Path) -> None:
    dataset = make(folder, [{**llava_row("0.png"), "width": 61, "height": 40}])
    with pytest.raises(ValueError, match=r"row 0: .*0\.png: the row says 61 x 40.*has 60 x 40"):
        dataset[0]


def test_an_image_that_changed_since_the_measurement_is_named(folder: Path) -> None:
    dataset = make(folder, [llava_row("0.png")])
    Image.new("RGB", (300, 300)).save(folder / "0.png")
    with pytest.raises(ValueError, match=r"row 0: .*were measured.*remeasure=True"):
        dataset[0]
    again = make(folder, [llava_row("0.png")], remeasure=True)
    assert len(again[0]["input_ids"]) == again.length[0]


def test_square_padding_shows_the_processor_a_square(folder: Path) -> None:
    from transformers import LlavaImageProcessorPil

    padded = make(folder, [llava_row("1.png")], "llava", pad_image_to_square=True)
    images = padded.processor.image_processor
    side = {"shortest_edge": 28}
    own = LlavaImageProcessorPil(size=side, crop_size={"height": 28, "width": 28}, do_pad=True)
    assert images.size["shortest_edge"] == own.size["shortest_edge"]
    expected = own(Image.open(folder / "1.png"), return_tensors="pt")["pixel_values"]
    assert torch.allclose(padded[0]["pixel_values"], expected, atol=0.02)
    tiles = make(folder, [llava_row("1.png")], "llava_next", pad_image_to_square=True)
    assert len(tiles[0]["input_ids"]) == tiles.length[0]
    assert tiles.length[0] != make(folder, [llava_row("1.png")], "llava_next").length[0]


def test_a_dataset_survives_pickling_as_spawned_workers_do_it(folder: Path) -> None:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for source in ({"data_path": str(path)}, {"data": ROWS}):
        dataset = LLaVADataset(
            **source,
            image_folder=str(folder),
            processor=families.processor("internvl"),
            cache_dir=str(folder / "cache"),
        )
        copy = pickle.loads(pickle.dumps(dataset))
        assert copy[1]["input_ids"].tolist() == dataset[1]["input_ids"].tolist()
        assert copy.length.tolist() == dataset.length.tolist()


def test_nothing_is_decoded_before_a_sample_is_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("decoded")

    processor = families.processor("qwen2_5_vl")
    monkeypatch.setattr(ImageFile.ImageFile, "load", refuse)
    options = {"image_folder": str(folder), "cache_dir": str(folder)}
    dataset = LLaVADataset(data=ROWS, processor=processor, **options)
    assert len(dataset[2]["input_ids"]) == dataset.length[2]
    with pytest.raises(ValueError, match=r"row 0: .*0\.png: broken image: decoded"):
        dataset[0]


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_workers_make_the_batches_that_this_process_makes(folder: Path, start: str) -> None:
    dataset = make(folder, ROWS, "internvl")
    loaders = [
        DataLoader(
            dataset,
            batch_size=3,
            collate_fn=default_collate_fn,
            num_workers=workers,
            multiprocessing_context=start if workers else None,
        )
        for workers in (0, 2)
    ]
    for here, there in zip(*loaders, strict=True):
        assert here["data"].keys() == there["data"].keys()
        for key, value in here["data"].items():
            assert torch.equal(value, there["data"][key]), key


def test_a_template_without_image_parts_gets_texts_with_the_placeholder(folder: Path) -> None:
    plain = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"
    plain += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    dataset = make(folder, ROWS, "llava", chat_template=plain)
    text = dataset.processor.tokenizer.decode(dataset[0]["input_ids"])
    assert text == "user: " + "<image>" * 4 + "\nWhat is it?\nassistant: It is red.\n"
    assert spoken(dataset, 0) == "It is red."


OPENING = "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}"
OPENING += "<|im_start|>system\nHelp.<|im_end|>\n{% endif %}"


def test_a_template_with_a_system_message_of_its_own_keeps_it(folder: Path) -> None:
    template = families.chat_template("qwen2_5_vl").replace("{% for m in messages %}", OPENING, 1)
    dataset = make(folder, ROWS, "qwen2_5_vl", chat_template=template)
    text = dataset.processor.tokenizer.decode(dataset[0]["input_ids"])
    assert text.startswith(
        "<|im_start|>system\nHelp.<|im_end|>\n<|im_start|>user\n<|vision_start|>"
    )
    assert spoken(dataset, 0) == "It is red.<|im_end|>"


def test_a_template_that_ends_no_answer_is_warned_about(folder: Path, log_lines: list[str]) -> None:
    template = (
        "{% for m in messages %}{{ m['role'].upper() + ': ' }}{% for p in m['content'] %}"
        "{% if p['type'] == 'image' %}{{ '<image>\n' }}{% endif %}{% endfor %}"
        "{% for p in m['content'] %}{% if p['type'] == 'text' %}{{ p['text'] + ' ' }}{% endif %}"
        "{% endfor %}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
    )
    dataset = make(folder, ROWS, "llava", chat_template=template)
    text = dataset.processor.tokenizer.decode(dataset[0]["input_ids"])
    assert text == "USER: " + 4 * "<image>" + "\nWhat is it? ASSISTANT: It is red. "
    assert spoken(dataset, 0) == " It is red."
    assert sum("will not learn to stop" in line for line in log_lines) == 1
    make(folder, ROWS, "llava")
    assert sum("will not learn to stop" in line for line in log_lines) == 1


def test_a_template_that_loses_images_or_rewrites_earlier_turns_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="cannot render an image"):
        make(folder, ROWS, "llava", chat_template="{% for m in messages %}x{% endfor %}")
    rewriting = (
        "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}"
        "{% for p in m['content'] %}{% if p['type'] == 'image' %}{{ '<image>' }}"
        "{% elif loop.last and m['role'] == 'assistant' and messages|length > 2 %}{{ 'cut' }}"
        "{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    )
    row = llava_row("0.png")
    row["conversations"] += row["conversations"]
    row["image"] = ["0.png", "0.png"]
    with pytest.raises(ValueError, match="row 0: the chat template renders earlier answers"):
        make(folder, [row], "llava", chat_template=rewriting)
    assert len(make(folder, ROWS, "llava", chat_template=rewriting)) == len(ROWS)


@pytest.mark.parametrize("name", ["internlm2_chat", "vicuna"])
def test_a_prompt_template_writes_what_process_hf_dataset_writes(folder: Path, name: str) -> None:
    row = {
        "conversations": [
            {"from": "system", "value": "Be brief."},
            {"from": "human", "value": "What is "},
            {"from": "human", "value": "red?"},
            {"from": "gpt", "value": "A colour."},
            {"from": "human", "value": "Sure?"},
            {"from": "gpt", "value": "Yes."},
        ]
    }
    dataset = make(folder, [row], "llava", template=name)
    turns = [
        {"system": "Be brief.", "input": "What is red?", "output": "A colour."},
        {"input": "Sure?", "output": "Yes."},
    ]
    encoder = TurnEncoder(dataset.processor.tokenizer, max_length=1000)
    written = template_map_fn_factory(name)({"conversation": turns})["conversation"]
    ((ids, labels, _),) = encoder.encode([encoder.prepare({}, written)])
    assert dataset[0]["input_ids"].tolist() == ids.tolist()
    assert dataset[0]["labels"].tolist() == labels.tolist()
    assert (dataset[0]["labels"] != -100).sum() > 4


@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_prompt_template_puts_the_images_in_their_places(folder: Path, family: str) -> None:
    rows = [llava_row(["0.png", "1.png"]), llava_row(None)]
    dataset = make(folder, rows, family, template="qwen_chat")
    sample = dataset[0]
    assert len(sample["input_ids"]) == dataset.length[0]
    text = dataset.processor.tokenizer.decode(sample["input_ids"])
    assert text.startswith("<|im_start|>user\n<") and text.endswith("It is red.<|im_end|>\n")
    assert (sample["input_ids"] == dataset.encoder.placeholder).sum() >= 2
    assert spoken(dataset, 0) == "It is red.<|im_end|>"
    late = llava_row("0.png")
    late["conversations"].append({"from": "human", "value": "And <image>?"})
    late["image"] = ["0.png", "1.png"]
    with pytest.raises(ValueError, match="row 0: an image behind the last answer"):
        make(folder, [late], family, template="qwen_chat")


def test_options_that_mean_nothing_are_refused(folder: Path) -> None:
    processor = families.processor("llava")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"data": ROWS, "data_path": "x"}, "data_path or data"),
        ({}, "data_path or data"),
        ({"data": ROWS, "overlong": "cut"}, "overlong must be one of .*'cut'"),
        ({"data": ROWS, "missing_image": "ignore"}, "missing_image must be one of .*'ignore'"),
        ({"data": ROWS, "broken_row": "ignore"}, "broken_row must be one of .*'ignore'"),
        ({"data": ROWS, "max_length": 0}, "max_length must be at least 1, got 0"),
        ({"data": ROWS, "template": "vicunja"}, "did you mean vicuna"),
        ({"data": ROWS, "template": "tokenizer"}, "leave it away"),
        ({"data": ROWS, "template": "vicuna", "chat_template": "x"}, "are both given"),
        ({"data": []}, "data: no rows"),
        ({"data_path": str(folder / "none.json")}, r"none\.json: No such file"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            LLaVADataset(processor=processor, cache_dir=str(folder), **options)
    with pytest.raises(ValueError, match="needs a processor"):
        LLaVADataset(data=ROWS)
