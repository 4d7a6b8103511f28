"""Every config loads; those for text take two steps with a tiny model and tokenizer put in."""

import difflib
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from mmengine.config import Config

from xlength.cli import main
from xlength.plan import Groups, padding_efficiency

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = sorted(
    str(path.relative_to(ROOT))
    for path in ROOT.glob("configs/*/*.py")
    if path.parent.name != "_base_"
)
SFT = [name for name in CONFIGS if name.startswith("configs/sft/")]
QUICKSTART = [name for name in CONFIGS if name.startswith("configs/quickstart/")]
numbers = itertools.count()


def train(config, work_dir, options):
    options = [*options, f"experiment_name=config{next(numbers)}"]
    return main(
        ["train", str(ROOT / config), "--work-dir", str(work_dir), "--cfg-options", *options]
    )


def last_line(work_dir):
    """The last line of the run's JSON log that is about training."""
    (log,) = work_dir.glob("*/vis_data/scalars.json")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [line for line in lines if "loss" in line][-1]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    """A folder with a tiny Llama and a byte-level tokenizer, as ``from_pretrained`` reads them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    vocabulary = special + sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(special)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    folder = tmp_path_factory.mktemp("model")
    fast.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=512,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def chats(tmp_path_factory):
    """A JSONL file of chats, each as ``messages`` and as oasst1's ``text``."""
    rows = []
    for i in range(64):
        question, answer = f"What is {i} + {i}?", f"It is {2 * i}. " * (1 + i % 7)
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
        rows.append({"messages": messages, "text": f"### Human: {question}### Assistant: {answer}"})
    path = tmp_path_factory.mktemp("chats") / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_loads_with_a_sampler_and_a_loop(name):
    config = Config.fromfile(ROOT / name)
    assert "xlength" in config.custom_imports["imports"]
    assert {"train_dataloader", "model", "optim_wrapper", "train_cfg"} <= set(config)
    assert config.train_dataloader.dataset.type


@pytest.mark.parametrize("name", SFT)
def test_a_recipe_takes_two_steps_with_a_tiny_model_put_in(name, model_dir, chats, tmp_path):
    where = "train_dataloader.dataset"
    options = [
        f"model.llm.pretrained_model_name_or_path={model_dir}",
        "model.llm.quantization_config=None",
        "model.llm.dtype=float32",
        "model.lora.r=4",
        f"{where}.tokenizer.pretrained_model_name_or_path={model_dir}",
        f"{where}.dataset.path=json",
        f"{where}.dataset.data_files={chats}",
        f"{where}.max_length=256",
        *(["train_dataloader.sampler.plan.max_length=256"] if "packing" in name else []),
        *(["train_dataloader.sampler.plan.max_tokens=512"] if "budget" in name else []),
        "train_dataloader.num_workers=0",
        "train_cfg._delete_=True",
        "train_cfg.type=TrainLoop",
        "train_cfg.max_iters=2",
        "default_hooks.logger.interval=1",
    ]
    assert train(name, tmp_path, options) == 0
    line = last_line(tmp_path)
    assert line["step"] == 2
    assert line["loss"] > 0
    assert 0 < line["padding_efficiency"] <= 1


@pytest.mark.parametrize("name", [n for n in QUICKSTART if "images" not in n])
def test_the_quickstart_takes_two_steps_on_the_standard_librarys_texts(name, tmp_path):
    shared = tmp_path.parent / "python_docs"  # one preparation for all
    options = [
        f"train_dataloader.dataset.dataset.cache_dir={shared}",
        f"train_dataloader.dataset.tokenizer.cache_dir={shared}",
        "train_dataloader.num_workers=0",
        "train_dataloader.persistent_workers=False",
        "train_cfg.max_iters=2",
        "default_hooks.logger.interval=1",
    ]
    assert train(name, tmp_path, options) == 0
    assert last_line(tmp_path)["step"] == 2


@pytest.mark.parametrize("name", [n for n in CONFIGS if n.endswith("_length_grouped.py")])
def test_a_twin_differs_from_its_neighbour_by_the_sampler_only(name):
    twin = Config.fromfile(ROOT / name)
    neighbour = Config.fromfile(ROOT / name.replace("_length_grouped", ""))
    for config in (twin, neighbour):
        config.train_dataloader.pop("sampler")
    assert twin.to_dict() == neighbour.to_dict()


def test_the_quickstart_twin_differs_by_three_lines():
    texts = [
        (ROOT / f"configs/quickstart/{name}.py").read_text().splitlines()[1:]
        for name in ("default_sampler", "length_grouped")
    ]
    changed = [
        line
        for line in difflib.unified_diff(*texts, n=0, lineterm="")
        if line[0] in "+-" and line[:3] not in ("+++", "---")
    ]
    assert 0 < len([line for line in changed if line[0] == "+"]) <= 3


def test_two_processes_train_the_quickstart_with_equal_steps_and_losses(tmp_path):
    """Under torchrun and gloo; the padding efficiency is also the one that the plan predicts."""
    (tmp_path / "config.py").write_text(
        f"_base_ = [{str(ROOT / 'configs/quickstart/length_grouped.py')!r}]\n"
        "custom_imports = dict(imports=['xlength', 'tests.train_helpers'])\n"
        "custom_hooks = [dict(type='LengthStatsHook'), dict(type='Diary')]\n"
        f"where = {str(tmp_path.parent / 'python_docs')!r}\n"
        "train_dataloader = dict(dataset=dict(\n"
        "    max_dataset_length=400, max_length=512,\n"
        "    dataset=dict(cache_dir=where), tokenizer=dict(cache_dir=where)))\n"
        "train_cfg = dict(_delete_=True, type='TrainLoop', max_epochs=1)\n"
        "model = dict(llm=dict(config=dict(hidden_size=32, num_hidden_layers=1)))\n"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYTHON": sys.executable,
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [ROOT / "tools/dist_train.sh", "config.py", "2", "--work-dir", "two"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    diaries = [json.loads((tmp_path / f"two/diary{rank}.json").read_text()) for rank in (0, 1)]
    losses = [[entry["loss"] for entry in diary["entries"]] for diary in diaries]
    assert len(losses[0]) == len(losses[1]) == 25
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]
    (log,) = (tmp_path / "two").glob("*/*.log")
    logged = float(re.findall(r"Over the run: padding_efficiency (\S+),", log.read_text())[0])
    config = Config.fromfile(tmp_path / "config.py")
    assert logged == pytest.approx(predicted_padding_efficiency(config, 2), abs=0.01)


def predicted_padding_efficiency(config, world_size):
    """Padding efficiency of the first epoch, from the plan of the config's sampler alone."""
    from mmengine.registry import DATA_SAMPLERS, DATASETS

    dataset = DATASETS.build(config.train_dataloader.dataset)
    batches = []
    for rank in range(world_size):
        options = dict(dataset=dataset, seed=0, dp_rank=rank, dp_world_size=world_size)
        sampler = DATA_SAMPLERS.build(config.train_dataloader.sampler, default_args=options)
        batches += Groups.of_size(list(sampler), config.train_dataloader.batch_size).tolist()
    return padding_efficiency(sampler.length, Groups.from_lists(batches))
