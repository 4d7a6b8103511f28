"""The lengths of a config's training data: counted in blocks, read from the cache, or asked for."""

import json

import numpy as np
import pytest
from mmengine.config import Config
from mmengine.registry import DATASETS

from tests.datasets.samples import CHATML, chats, small_tokenizer
from xlength.cli import main


@pytest.fixture
def config(tmp_path):
    small_tokenizer(chat_template=CHATML).save_pretrained(tmp_path / "tokenizer")
    data = tmp_path / "data.jsonl"
    rows = chats(200) + [{"messages": [{"role": "user", "content": "nobody answers"}]}]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "config.py"
    path.write_text(
        "train_dataloader = dict(batch_size=4, dataset=dict(\n"
        "    type='process_hf_dataset', max_length=200, dataset_map_fn='openai_map_fn',\n"
        "    template_map_fn=dict(type='template_map_fn_factory', template='qwen_chat'),\n"
        "    tokenizer=dict(type='AutoTokenizer.from_pretrained',\n"
        f"        pretrained_model_name_or_path={str(tmp_path / 'tokenizer')!r}),\n"
        f"    dataset=dict(type='load_dataset', path='json', data_files={str(data)!r}),\n"
        "    pack_to_max_length=False),\n"
        "    sampler=dict(type='DefaultSampler', shuffle=True))\n"
    )
    return path


def test_a_configs_rows_are_counted_before_training_and_read_from_the_cache_after(
    config, tmp_path, capsys
):
    assert main(["measure", str(config), "-o", str(tmp_path / "a.npy")]) == 0
    printed = capsys.readouterr().out
    assert "1 rows without an answer and left out" in printed
    assert "cut at max_length=200, as training does" in printed
    dataset = DATASETS.build(Config.fromfile(config).train_dataloader.dataset)
    assert np.load(tmp_path / "a.npy").tolist() == list(dataset.length)
    capsys.readouterr()
    assert main(["measure", str(config), "-o", str(tmp_path / "b.npy")]) == 0
    printed = capsys.readouterr().out
    assert "left out" not in printed  # nothing was counted
    assert "cut at max_length=200, as training does" in printed
    assert (tmp_path / "a.npy").read_bytes() == (tmp_path / "b.npy").read_bytes()
    sides = [json.loads((tmp_path / f"{name}.json").read_text()) for name in "ab"]
    assert sides[0]["fingerprint"] == sides[1]["fingerprint"]


def test_options_override_the_configs_own(config, tmp_path):
    option = "train_dataloader.dataset.max_length=30"
    out = tmp_path / "l.npy"
    assert main(["measure", str(config), "-o", str(out), "--cfg-options", option]) == 0
    assert np.load(out).max() == 30


def test_packs_are_measured_as_packs(config, tmp_path):
    option = "train_dataloader.dataset.pack_to_max_length=True"
    out = tmp_path / "l.npy"
    assert main(["measure", str(config), "-o", str(out), "--cfg-options", option]) == 0
    lengths = np.load(out).tolist()
    assert set(lengths[:-1]) == {200} and lengths[-1] <= 200


def test_a_bad_row_of_a_config_is_named_by_file_and_line(config, tmp_path, capsys):
    data = tmp_path / "data.jsonl"
    lines = data.read_text().splitlines()
    lines[50] = '{"messages": [{"role": "robot", "content": "x"}]}'
    data.write_text("\n".join(lines))
    assert main(["measure", str(config), "-o", str(tmp_path / "l.npy")]) == 2
    error = capsys.readouterr().err
    assert f"({data}, line 51)" in error and "robot" in error


def test_the_tokenizer_is_the_configs_own(config, tmp_path, capsys):
    assert main(["measure", str(config), "--tokenizer", "x", "-o", str(tmp_path / "l.npy")]) == 2
    assert "--tokenizer is the config's own" in capsys.readouterr().err
