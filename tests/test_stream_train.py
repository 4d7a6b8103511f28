"""Streams under TrainLoop: real runs on JSONL shards through ``datasets``, one and two ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from mmengine.config import Config

from tests import test_configs
from xlength.cli import main

ROOT = Path(__file__).resolve().parents[1]
chats, model_dir = test_configs.chats, test_configs.model_dir  # fixtures

CONFIG = """
custom_imports = dict(imports=["xlength", "tests.train_helpers"])
default_scope = "mmengine"
model = dict(
    type="SupervisedFinetune",
    use_activation_checkpointing=False,
    llm=dict(
        type="transformers.AutoModelForCausalLM.from_config",
        config=dict(
            type="transformers.LlamaConfig", vocab_size=1024, hidden_size=16, intermediate_size=32,
            num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=256,
        ),
    ),
)
train_dataloader = dict(
    batch_size=4,
    num_workers=2,
    persistent_workers=True,
    sampler=None,
    collate_fn=dict(type="default_collate_fn"),
    dataset=dict(
        type="LengthPoolSortDataset",
        pool_size=32,
        micro_batch_size=4,
        dataset=dict(
            type="datasets.load_dataset", path="json", data_files={files!r}, split="train",
            streaming=True,
        ),
        {options}
    ),
)
train_cfg = dict(type="TrainLoop", {limit})
optim_wrapper = dict(type="OptimWrapper", optimizer=dict(type="SGD", lr=0.1))
param_scheduler = [
    dict(type="LinearLR", start_factor=0.1, by_epoch=False, end=10),
    dict(type="CosineAnnealingLR", by_epoch=False, begin=10, T_max=100),
]
default_hooks = dict(
    logger=dict(type="LoggerHook", interval=7, log_metric_by_epoch=False),
    checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=1000),
)
custom_hooks = [dict(type="Diary"), dict(type="LengthStatsHook")]
log_processor = dict(by_epoch=False)
randomness = dict(seed=0)
"""


def write_shards(folder, sizes):
    """JSONL files of token ids; the first of a row says which row it is. Returns their lengths."""
    lengths = np.random.RandomState(0).randint(4, 120, sum(sizes))
    rows = iter(enumerate(lengths.tolist()))
    for shard, size in enumerate(sizes):
        with open(folder / f"part{shard}.jsonl", "w") as file:
            for i, length in (next(rows) for _ in range(size)):
                ids = [i, *((7 * i + 3 * j) % 1000 + 1 for j in range(1, length))]
                file.write(json.dumps({"input_ids": ids, "labels": ids}) + "\n")
    return lengths, sorted(str(path) for path in folder.glob("*.jsonl"))


def write_config(folder, files, limit, options=""):
    path = folder / "config.py"
    text = CONFIG.replace("{files!r}", repr(files))
    path.write_text(text.replace("{options}", options).replace("{limit}", limit))
    return path


def run_two_ranks(config):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [ROOT / "tools/dist_train.sh", config.name, "2", "--work-dir", "two"],
        cwd=config.parent,
        env={**environment, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    diaries = [json.loads((config.parent / f"two/diary{rank}.json").read_text()) for rank in (0, 1)]
    batches = [[entry["samples"] for entry in diary["entries"]] for diary in diaries]
    return batches, done.stdout + done.stderr


def test_two_ranks_with_two_workers_repeat_their_shards_and_meet_like_lengths(tmp_path):
    """The shards are unequal, so the ranks' passes end at different steps; nobody notices."""
    lengths, files = write_shards(tmp_path, [64, 70, 66, 90])
    (first, second), _ = run_two_ranks(write_config(tmp_path, files, "max_iters=60"))
    assert len(first) == len(second) == 60
    own = [{row for batch in batches for row in batch} for batches in (first, second)]
    assert not own[0] & own[1]
    assert own[0] | own[1] <= set(range(290))
    costs = np.array([[lengths[b].max() for b in batches] for batches in (first, second)])
    assert costs.max(axis=0).mean() / costs.mean() < 1.1
    shifted = np.maximum(costs[0, 1:], costs[1, :-1]).mean() / costs.mean()
    assert shifted > 1.15
    for batches in (first, second):
        spread = [np.ptp(lengths[batch]) for batch in batches]
        assert np.mean(spread) < 30  # of 115; a pool of 32 holds 8 batches


def test_single_passes_of_unequal_ranks_end_at_the_same_step_and_the_next_one_begins(tmp_path):
    """Rank 0 has 130 rows and rank 1 160: its last batches are left out, with a warning."""
    _, files = write_shards(tmp_path, [64, 70, 66, 90])
    config = write_config(tmp_path, files, "max_iters=70", "repeat=False")
    (first, second), log = run_two_ranks(config)
    assert len(first) == len(second) == 70
    pass_of_rank0 = [row for batch in first[:33] for row in batch]
    assert sorted(pass_of_rank0) == [*range(64), *range(134, 200)]
    for start in (0, 33):  # `datasets` deals the shards anew in the second pass
        both = [row for batch in first[start:][:33] + second[start:][:33] for row in batch]
        assert len(both) == len(set(both)) > 250
    assert first[:33] != first[33:66]
    assert "The pass ends after 33 steps on all ranks, since ranks [0] have no more data" in log


@pytest.mark.parametrize("num_workers", [0, 2])
def test_epochs_of_a_stream_of_known_size_are_whole(num_workers, tmp_path):
    """131 rows in two shards: with two workers each has an incomplete last batch of its own."""
    _, files = write_shards(tmp_path, [65, 66])
    options = "num_samples=[65, 66]"
    config = write_config(tmp_path, files, "max_epochs=2", options)
    arguments = [
        f"train_dataloader.num_workers={num_workers}",
        f"train_dataloader.persistent_workers={num_workers > 0}",
        f"experiment_name=stream{num_workers}",
    ]
    work_dir = tmp_path / "one"
    arguments = ["--work-dir", str(work_dir), "--cfg-options", *arguments]
    assert main(["train", str(config), *arguments]) == 0
    entries = json.loads((work_dir / "diary0.json").read_text())["entries"]
    batches = [entry["samples"] for entry in entries]
    half = len(batches) // 2
    for epoch in (batches[:half], batches[half:]):
        rows = [row for batch in epoch for row in batch]
        assert len(rows) == len(set(rows)) == 130  # the smaller shard's size from both
    assert batches[:half] != batches[half:]


STREAMS = sorted(path.name for path in ROOT.glob("configs/stream/python_docs_*.py"))


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_config_takes_four_steps(name, tmp_path):
    shared = tmp_path.parent / "python_docs"
    where = "train_dataloader.dataset.dataset"
    options = [
        f"{where}.dataset.data_files.cache_dir={shared}",
        f"{where}.tokenizer.cache_dir={shared}",
        f"{where}.max_length=128",
        "train_dataloader.num_workers=0",
        "train_dataloader.persistent_workers=False",
        "train_cfg.max_iters=4",
        "default_hooks.logger.interval=2",
        "model.llm.config.hidden_size=32",
        "model.llm.config.num_hidden_layers=1",
        f"experiment_name={name[:-3]}",
    ]
    config = str(ROOT / "configs/stream" / name)
    assert main(["train", config, "--work-dir", str(tmp_path), "--cfg-options", *options]) == 0
    (log,) = tmp_path.glob("*/vis_data/scalars.json")
    line = [json.loads(text) for text in log.read_text().splitlines() if '"loss"' in text][-1]
    assert line["step"] == 4
    assert line["padding_efficiency"] > (0.9 if "no_pool" not in name else 0)


def test_the_recipe_for_your_own_chats_takes_two_steps_with_a_tiny_model(
    model_dir, chats, tmp_path
):
    where = "train_dataloader.dataset.dataset"
    options = [
        f"model.llm.pretrained_model_name_or_path={model_dir}",
        "model.llm.dtype=float32",
        "model.lora.r=4",
        f"{where}.tokenizer.pretrained_model_name_or_path={model_dir}",
        f"{where}.dataset.data_files={chats}",
        f"{where}.max_length=256",
        "train_dataloader.dataset.pool_size=16",
        "train_dataloader.num_workers=0",
        "train_cfg.max_iters=2",
        "default_hooks.logger.interval=1",
        "experiment_name=recipe",
    ]
    config = str(ROOT / "configs/stream/qwen3_8b_lora_messages_8k_pool.py")
    assert main(["train", config, "--work-dir", str(tmp_path), "--cfg-options", *options]) == 0
    (log,) = tmp_path.glob("*/vis_data/scalars.json")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["step"] for line in lines if line.get("loss", 0) > 0] == [1, 2]


def test_mmengines_own_loop_runs_a_stream_of_known_size_in_another_order_each_pass(tmp_path):
    _, files = write_shards(tmp_path, [12, 12])
    config = write_config(tmp_path, files, "", "num_samples=24")
    text = config.read_text().replace(
        'type="TrainLoop", ', 'type="IterBasedTrainLoop", max_iters=14'
    )
    config.write_text(text)
    work_dir = tmp_path / "one"
    arguments = ["--work-dir", str(work_dir), "--cfg-options", "experiment_name=stock"]
    arguments += ["train_dataloader.num_workers=0", "train_dataloader.persistent_workers=False"]
    assert main(["train", str(config), *arguments]) == 0
    entries = json.loads((work_dir / "diary0.json").read_text())["entries"]
    rows = [row for entry in entries for row in entry["samples"]]
    assert sorted(rows[:24]) == sorted(rows[24:48]) == list(range(24))
    assert rows[:24] != rows[24:48]


def test_stream_configs_differ_by_the_order_only():
    def without_order(name):
        config = Config.fromfile(ROOT / "configs/stream" / name).to_dict()
        dataset = config["train_dataloader"]["dataset"]
        config["train_dataloader"]["dataset"] = dataset["dataset"]
        return config

    assert without_order(STREAMS[0]) == without_order(STREAMS[1]) == without_order(STREAMS[2])
