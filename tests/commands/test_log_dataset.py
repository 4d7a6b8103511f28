"""xlength log-dataset: what a config trains on, readable."""

import json

import numpy as np
import pytest

from tests.datasets.samples import small_tokenizer
from xlength.cli import main
from xlength.report.preview import Span, spans_of, steps_of


@pytest.fixture
def config(tmp_path):
    """A config on a JSONL file of chats, with a LengthGroupedSampler."""
    small_tokenizer().save_pretrained(tmp_path / "tokenizer")
    rows = [
        [
            {"role": "user", "content": f"question {i}"},
            {"role": "assistant", "content": "the quick brown fox " * (1 + i % 5)},
        ]
        for i in range(40)
    ]
    lines = [json.dumps({"messages": messages}) for messages in rows]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    path = tmp_path / "config.py"
    path.write_text(
        f"tokenizer = dict(type='AutoTokenizer.from_pretrained',\n"
        f"    pretrained_model_name_or_path={str(tmp_path / 'tokenizer')!r})\n"
        "train_dataloader = dict(\n"
        "    batch_size=4,\n"
        "    dataset=dict(\n"
        "        type='process_hf_dataset', tokenizer=tokenizer, max_length=200,\n"
        "        dataset=dict(type='load_dataset', path='json',\n"
        f"                     data_files={str(tmp_path / 'chats.jsonl')!r}),\n"
        "        dataset_map_fn='openai_map_fn',\n"
        "        template_map_fn=dict(type='template_map_fn_factory', template='qwen_chat'),\n"
        "        pack_to_max_length=False),\n"
        "    sampler=dict(type='LengthGroupedSampler', per_device_batch_size=4),\n"
        "    collate_fn=dict(type='default_collate_fn'))\n"
    )
    return path


def test_samples_are_shown_as_text_with_what_is_trained_marked(config, capsys):
    assert main(["log-dataset", str(config), "--num-samples", "2"]) == 0
    out = capsys.readouterr().out
    assert "sample 1:" in out and "sample 2:" not in out
    assert "<|im_start|>user\nquestion 1<|im_end|>\n<|im_start|>assistant\n[[the quick" in out
    assert "<|im_end|>]]" in out


def test_a_stream_inside_a_pool_is_shown_as_text_too(config, capsys):
    # The tokenizer is the inner data set's only: no variable of the config has this name.
    inner = config.read_text().split("dataset=dict(\n", 1)[1].split("        pack_to_max", 1)[0]
    inner = inner.replace("process_hf_dataset", "stream_hf_dataset")
    inner = inner.replace("type='load_dataset'", "type='datasets.load_dataset'")
    inner = inner.replace("path='json',", "path='json', split='train', streaming=True,")
    tokenizer = config.read_text().split("train_dataloader", 1)[0]
    config.write_text(
        f"made_with{tokenizer.removeprefix('tokenizer')}"
        "train_dataloader = dict(\n"
        "    batch_size=4,\n"
        "    dataset=dict(type='LengthPoolSortDataset', pool_size=8, dataset=dict(\n"
        f"{inner.replace('tokenizer=tokenizer', 'tokenizer=made_with')})),\n"
        "    collate_fn=dict(type='default_collate_fn'))\n"
    )
    assert main(["log-dataset", str(config), "--num-samples", "1"]) == 0
    assert "<|im_start|>assistant\n[[the quick" in capsys.readouterr().out


def test_masked_text_hides_the_question(config, capsys):
    assert main(["log-dataset", str(config), "--show", "masked_text", "--num-samples", "1"]) == 0
    out = capsys.readouterr().out
    assert "question 0" not in out and "...[[the quick brown fox" in out


def test_labels_and_ids_are_shown_as_numbers(config, capsys):
    assert main(["log-dataset", str(config), "--show", "all", "--num-samples", "1"]) == 0
    out = capsys.readouterr().out
    assert "labels: [-100, -100" in out and "input_ids: [" in out


def test_the_first_steps_are_those_of_the_sampler_on_each_rank(config, capsys):
    from xlength.report.configs import open_config, strategy_of_config
    from xlength.runtime.config_file import read_config
    from xlength.samplers.length_grouped import LengthGroupedSampler

    assert main(["log-dataset", str(config), "--world-size", "3", "--steps", "2"]) == 0
    out = capsys.readouterr().out
    assert "the first of 4 steps on 3 ranks" in out
    loader, dataset = open_config(read_config(str(config)), "")
    cells = list(
        steps_of(
            strategy_of_config(loader, dataset, 3, 0).build(0, None), *[np.array(dataset.length), 2]
        )
    )
    for rank in range(3):
        sampler = LengthGroupedSampler(dataset, 4, seed=0, dp_rank=rank, dp_world_size=3)
        drawn = list(sampler)
        for step in (0, 1):
            batch = drawn[4 * step : 4 * step + 4]
            longest = max(dataset.length[i] for i in batch)
            shown = " ".join(f"#{i}" for i in batch)
            assert cells[step][rank] == f"4 x {longest}\n{shown}"
            assert shown in out


def test_spans_split_where_training_begins_and_runs_of_one_token_are_counted():
    sample = {
        "input_ids": [5, 9, 9, 9, 9, 9, 9, 9, 9, 9, 6, -200, 7],
        "labels": [-100] * 11 + [-100, 7],
    }

    def decode(ids):
        return "".join(f"<{i}>" for i in ids)

    assert spans_of(sample, decode) == [
        Span("<5><9>(x 9)<6><image>", False),
        Span("<7>", True),
    ]
    assert spans_of({"input_ids": [3, 4]}, decode) == [Span("<3><4>", False)]


def test_a_config_without_training_data_and_wrong_numbers_are_refused(tmp_path, config, capsys):
    empty = tmp_path / "empty.py"
    empty.write_text("a = 1\n")
    assert main(["log-dataset", str(empty)]) == 2
    assert "no train_dataloader" in capsys.readouterr().err
    assert main(["log-dataset", str(config), "--steps", "0"]) == 2
    assert "must be at least 1" in capsys.readouterr().err
