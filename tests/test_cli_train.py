"""``xlength train``: whole runs, resuming, two processes, and every mistake's one line."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from xlength.cli import main

numbers = itertools.count()
ROOT = Path(__file__).resolve().parents[1]

CONFIG = """
custom_imports = dict(imports=['xlength', 'tests.train_helpers'])
model = dict(
    type='SupervisedFinetune',
    llm=dict(
        type='AutoModelForCausalLM.from_config',
        config=dict(
            type='LlamaConfig', hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, vocab_size=128)))
train_dataloader = dict(
    batch_size=4,
    dataset=dict(type='TinyText', length=[3 + (7 * i) % 23 for i in range(22)]),
    sampler=dict(type='LengthGroupedSampler', per_device_batch_size=4),
    collate_fn=dict(type='tiny_collate'))
train_cfg = dict(type='TrainLoop', max_epochs=2)
optim_wrapper = dict(type='OptimWrapper', optimizer=dict(type='AdamW', lr=1e-3))
param_scheduler = [dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=3)]
default_hooks = dict(
    logger=dict(type='LoggerHook', interval=2),
    checkpoint=dict(type='CheckpointHook', by_epoch=False, interval=4))
custom_hooks = [dict(type='LengthStatsHook'), dict(type='Diary')]
log_processor = dict(by_epoch=False)
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder to run in, with the config ``config.py``."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.py").write_text(CONFIG)
    return tmp_path


def train(config, *arguments, options=()):
    """The exit code of ``xlength train`` in this process, as an experiment of its own."""
    name = f"experiment_name=run{next(numbers)}"
    return main(["train", config, *arguments, "--cfg-options", name, *options])


def shell(command, **options):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHON": sys.executable}
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=300, **options)


def diary(work_dir, rank=0):
    return json.loads(Path(work_dir, f"diary{rank}.json").read_text())


def test_a_run_ends_with_0_and_leaves_its_config_log_and_checkpoints(here):
    assert train("config.py", "--seed", "3") == 0
    work_dir = here / "work_dirs/config"
    assert (work_dir / "config.py").is_file()
    assert {file.name for file in work_dir.glob("*.pth")} == {
        "iter_4.pth",
        "iter_8.pth",
        "iter_12.pth",
    }
    log = next(work_dir.glob("*/*.log")).read_text()
    assert "Iter(train) [12/12]" in log and "padding_efficiency" in log
    assert diary(work_dir)["seed"] == 3


@pytest.mark.parametrize("runner", [[], ["--cfg-options", "runner_type=FlexibleRunner"]])
def test_the_console_shows_the_run_and_the_log_file_the_dumps_too(runner, here):
    command = [sys.executable, ROOT / "tools/train.py", "config.py", "--work-dir", "run", *runner]
    result = shell(command)
    assert result.returncode == 0, result.stderr[-2000:]
    [file] = here.glob("run/*/*.log")
    log, shown = file.read_text(), result.stdout
    for dump in ("System environment:", "Config:", "Hooks will be executed"):
        assert dump in log and dump not in shown
    assert "1 rank on " in shown and f"seed {diary('run')['seed']}; environment, config" in shown
    assert str(file) in shown
    assert shown.index("LengthGroupedSampler is used.") < shown.index("Iter(train) [12/12]")
    assert "the selected attribute is length" in shown
    assert shown.count("\n") < 30


@pytest.mark.parametrize("resume", [["--resume"], ["--resume", "{}/iter_4.pth"]])
def test_a_resumed_run_goes_on_where_the_first_stopped(resume, here):
    """Also with a seed that nobody chose, and with today's torch."""
    assert train("config.py", "--work-dir", "whole") == 0
    whole = diary("whole")
    seed, options = str(whole["seed"]), ["train_cfg.max_epochs=1"]
    assert train("config.py", "--work-dir", "cut", "--seed", seed, options=options) == 0
    assert not Path("cut/iter_8.pth").exists()
    resume = [part.format("cut") for part in resume]
    assert train("config.py", "--work-dir", "cut", *resume) == 0
    rest = diary("cut")
    assert rest["seed"] == whole["seed"]
    assert rest["entries"] == whole["entries"][len(whole["entries"]) - len(rest["entries"]) :]
    assert len(rest["entries"]) == (6 if resume == ["--resume"] else 8)


def test_options_override_the_config(here):
    options = ["train_cfg.max_epochs=0.5", "model.use_activation_checkpointing=False"]
    assert train("config.py", options=options) == 0
    assert len(diary("work_dirs/config")["entries"]) == 3


def test_resuming_before_the_first_checkpoint_begins_with_the_weights_of_the_config(here):
    shape = (128, 32)
    torch.save({"state_dict": {"llm.lm_head.weight": torch.full(shape, 0.5)}}, "weights.pth")
    options = ["load_from=weights.pth", "train_cfg.max_epochs=0.1"]
    assert train("config.py", "--resume", options=options) == 0
    state = torch.load("work_dirs/config/iter_1.pth", weights_only=False)["state_dict"]
    assert torch.allclose(state["llm.lm_head.weight"], torch.full(shape, 0.5), atol=0.01)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without an accelerator")
def test_mixed_precision_without_an_accelerator_is_warned_about(here, log_lines):
    short = ["train_cfg.max_epochs=0.2"]
    assert train("config.py", "--amp", options=short) == 0
    wrapper = ["optim_wrapper.type=AmpOptimWrapper", "optim_wrapper.dtype=float16"]
    assert train("config.py", options=[*short, *wrapper]) == 0
    assert sum("Mixed precision needs an accelerator" in line for line in log_lines) >= 1


LAZY = """
from mmengine.hooks import CheckpointHook, DistSamplerSeedHook, LoggerHook
from mmengine.optim import AmpOptimWrapper, CosineAnnealingLR, LinearLR
from peft import LoraConfig
from torch.optim import AdamW
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.tiny import TinyText, collate
from xlength import DatasetInfoHook, LengthGroupedSampler, SupervisedFinetune, TrainLoop

max_epochs = 2
batch_size = 2
accumulative_counts = 2
warmup_ratio = 0.25
model = dict(
    type=SupervisedFinetune,
    use_varlen_attn=False,
    llm=dict(
        type=AutoModelForCausalLM.from_config,
        config=dict(
            type=LlamaConfig, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, vocab_size=128)),
    lora=dict(type=LoraConfig, r=8, lora_alpha=16, lora_dropout=0.1, bias='none',
              task_type='CAUSAL_LM'))
train_dataloader = dict(
    batch_size=batch_size,
    num_workers=0,
    dataset=dict(type=TinyText, length=[3 + (7 * i) % 23 for i in range(22)]),
    sampler=dict(type=LengthGroupedSampler, length_property='length',
                 per_device_batch_size=batch_size * accumulative_counts),
    collate_fn=dict(type=collate))
optim_wrapper = dict(
    type=AmpOptimWrapper,
    optimizer=dict(type=AdamW, lr=2e-4, betas=(0.9, 0.999), weight_decay=0),
    clip_grad=dict(max_norm=1, error_if_nonfinite=False),
    accumulative_counts=accumulative_counts, loss_scale='dynamic', dtype='float16')
param_scheduler = [
    dict(type=LinearLR, start_factor=1e-5, by_epoch=True, begin=0, end=warmup_ratio * max_epochs,
         convert_to_iter_based=True),
    dict(type=CosineAnnealingLR, eta_min=0.0, by_epoch=True, begin=warmup_ratio * max_epochs,
         end=max_epochs, convert_to_iter_based=True)]
train_cfg = dict(type=TrainLoop, max_epochs=max_epochs)
custom_hooks = [dict(type=DatasetInfoHook, tokenizer=None)]
default_hooks = dict(
    logger=dict(type=LoggerHook, log_metric_by_epoch=False, interval=10),
    checkpoint=dict(type=CheckpointHook, by_epoch=False, interval=5, max_keep_ckpts=2),
    sampler_seed=dict(type=DistSamplerSeedHook))
env_cfg = dict(cudnn_benchmark=False, mp_cfg=dict(mp_start_method='fork', opencv_num_threads=0),
               dist_cfg=dict(backend='nccl'))
visualizer = None
log_level = 'INFO'
load_from = None
resume = False
randomness = dict(seed=None, deterministic=False)
log_processor = dict(by_epoch=False)
"""


def test_a_config_written_like_xtuners_runs_and_resumes(here):
    (here / "lazy.py").write_text(LAZY)
    assert train("lazy.py") == 0
    assert train("work_dirs/lazy/lazy.py", "--work-dir", "again") == 0  # as it was dumped
    assert train("lazy.py", "--resume", "work_dirs/lazy/iter_20.pth") == 0
    state = torch.load("again/iter_24.pth", weights_only=False)["state_dict"]
    assert state and all("lora_" in name for name in state)


def test_two_processes_take_equal_steps_with_equal_losses(here):
    command = [ROOT / "tools/dist_train.sh", "config.py", "2", "--work-dir", "two", "--seed", "1"]
    result = shell(command)
    assert result.returncode == 0, result.stderr[-2000:]
    first, second = diary("two", 0), diary("two", 1)
    assert first["wrapper"] == "MMDistributedDataParallel"
    assert len(first["entries"]) == len(second["entries"]) == 6
    assert [e["loss"] for e in first["entries"]] == [e["loss"] for e in second["entries"]]
    for epoch in (slice(0, 3), slice(3, 6)):
        drawn = [
            i for e in first["entries"][epoch] + second["entries"][epoch] for i in e["samples"]
        ]
        assert set(drawn) == set(range(22))
    assert first["entries"][0]["samples"] != second["entries"][0]["samples"]
    log = next(Path("two").glob("*/*.log")).read_text()
    assert "rank_balance" in log


def test_a_crash_on_one_of_two_ranks_is_not_a_success_and_ends_the_other(here):
    crash = CONFIG.replace("dict(type='Diary')", "dict(type='Crash', rank=1, at=2)")
    (here / "crash.py").write_text(crash)
    result = shell([ROOT / "tools/dist_train.sh", "crash.py", "2", "--work-dir", "crash"])
    assert result.returncode != 0
    assert "RuntimeError: a failure on rank 1" in result.stderr


def test_a_crash_keeps_its_traceback_and_ends_with_1(here, capsys):
    crash = CONFIG.replace("dict(type='Diary')", "dict(type='Crash', rank=0, at=2)")
    (here / "crash.py").write_text(crash)
    assert train("crash.py") == 1
    error = capsys.readouterr().err
    assert "Traceback" in error and "RuntimeError: a failure on rank 0" in error


def test_the_tool_is_the_command_and_a_mistake_is_one_line(here):
    result = shell([sys.executable, ROOT / "tools/train.py", "confg.py"])
    assert result.returncode == 2
    assert result.stderr == (
        "xlength: error: there is no config 'confg.py', neither a file nor a name; did you mean "
        "'config.py'?\n"
    )


MISTAKES = {
    "SupervisedFinetune": (
        "SupervisedFinetun",
        "unknown type model.type = 'SupervisedFinetun'; did you mean 'SupervisedFinetune'?",
    ),
    "LengthGroupedSampler": (
        "LengthGroupSampler",
        "unknown type train_dataloader.sampler.type = 'LengthGroupSampler'",
    ),
    "tiny_collate": (
        "tiny_colate",
        "unknown type train_dataloader.collate_fn.type = 'tiny_colate'",
    ),
    "AutoModelForCausalLM.from": (
        "AutoModelForCausalM.from",
        "type 'AutoModelForCausalM.from_config' is neither registered nor importable; did you mean "
        "'AutoModelForCausalLM.from_config'?",
    ),
    "LlamaConfig": ("LlamaConfg", "type 'LlamaConfg' is neither"),
    "train_dataloader = ": (
        "train_dataloder = ",
        "unknown key 'train_dataloder' in the config; did you mean 'train_dataloader'?",
    ),
    "train_cfg = ": ("my_cfg = ", "the config lacks train_cfg"),
    "    batch_size=4,": (
        "    batchsize=4,",
        "unknown key train_dataloader.batchsize of DataLoader; did you mean 'batch_size'",
    ),
    "per_device_batch_size=4": (
        "per_device_batchsize=4",
        "train_dataloader.sampler lacks the key 'per_device_batch_size' of LengthGroupedSampler; "
        "instead there is 'per_device_batchsize'",
    ),
    "    sampler=dict": ("    samplr=dict", "unknown key train_dataloader.samplr of DataLoader"),
    "    sampler=dict(type='LengthGroupedSampler', per_device_batch_size=4),": (
        "",
        "train_dataloader lacks the key 'sampler'",
    ),
    "max_epochs=2": (
        "max_epoch=2",
        "unknown key train_cfg.max_epoch of TrainLoop; did you mean 'max_epochs'?",
    ),
    "dict(type='LengthStatsHook')": (
        "dict(type='LengthStatsHook', intervall=3)",
        "unknown key custom_hooks[0].intervall of LengthStatsHook; did you mean 'interval'?",
    ),
    "lr=1e-3": ("lrr=1e-3", "unknown key optim_wrapper.optimizer.lrr of AdamW; did you mean 'lr'?"),
    "begin=0, end=3": ("begin=0, ende=3", "unknown key param_scheduler[0].ende"),
    "    llm=dict(": ("    lorra=None, llm=dict(", "unknown key model.lorra of SupervisedFinetune"),
    "vocab_size=128)": (
        "vocab_size=128), attn_implementatio='sdpa'",
        "unknown key model.llm.attn_implementatio",
    ),
    "length=[3 + (7 * i) % 23 for i in range(22)]": ("length=[]", "dataset is empty"),
    "batch_size=4)": (
        "batch_size=0)",
        "per_device_batch_size must be a whole number of at least 1",
    ),
    "dict(type='OptimWrapper'": ("dict(type='OptimWrapper'(", "SyntaxError"),
    "'tests.train_helpers'": ("'tests.no_helpers'", "Failed to import custom modules"),
    "dict(type='LengthGroupedSampler', per_device_batch_size=4)": (
        "dict(type='PlanSampler', plan=dict(type='TokenBudget', max_token=99))",
        "train_dataloader.sampler.plan: unknown key of TokenBudget",
    ),
    "type='LengthGroupedSampler', per_device_batch_size=4": (
        "type='PlanSampler', plan=dict(type='TokenBudget', max_tokens=99)",
        "needs the line batch_sampler=dict(type='xlength.PlanBatchSampler')",
    ),
    "dict(type='TrainLoop', max_epochs=2)": (
        "dict(type='TrainLoop', max_epochs=2, val_interval=0)",
        "val_interval must be a whole number of at least 1, got 0",
    ),
    "range(22)": ("rang(22)", "config mistake.py, line 12: NameError: name 'rang' is not defined"),
}


@pytest.mark.parametrize("right", MISTAKES)
def test_a_mistake_in_a_config_ends_with_2_and_one_line(right, here, capsys):
    wrong, message = MISTAKES[right]
    assert right in CONFIG
    (here / "mistake.py").write_text(CONFIG.replace(right, wrong, 1))
    code = train("mistake.py")
    error = capsys.readouterr().err
    assert code == 2
    assert message in error
    assert error.count("\n") == 1 and "Traceback" not in error


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("spare=3", "'spare' is a variable of the config file, already used"),
        ("train_dataloder.batch_size=2", "no such setting; did you mean 'train_dataloader'"),
    ],
)
def test_an_option_that_nothing_reads_ends_with_2(option, message, here, capsys):
    (here / "config.py").write_text(CONFIG + "spare = 2\n")
    assert train("config.py", options=[option]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "\n \n", "[ ]\n"])
def test_data_files_without_a_row_are_named_before_a_model_is_loaded(content, here, capsys):
    (here / "chats.jsonl").write_text(content)
    source = "dict(type='load_dataset', path='json', data_files='chats.jsonl', {})"
    for dataset in (
        f"dict(type='process_hf_dataset', dataset={source.format('')})",
        "dict(type='LengthPoolSortDataset', pool_size=8, dataset=dict(type='stream_hf_dataset', "
        f"tokenizer=None, max_length=9, dataset={source.format('streaming=True')}))",
    ):
        text = CONFIG.replace("dict(type='TinyText', length=", f"{dataset} or dict(length=")
        (here / "empty.py").write_text(text.replace("AutoModelForCausalLM", "NoSuchModel"))
        assert train("empty.py") == 2
        assert capsys.readouterr().err == (
            "xlength: error: empty.py: train_dataloader.dataset: chats.jsonl is empty: it has no "
            "row\n"
        )
        assert main(["log-dataset", "empty.py"]) == 2
        error = capsys.readouterr().err
        assert "chats.jsonl is empty: it has no row" in error and error.count("\n") == 1


def test_a_work_dir_that_cannot_be_made_is_named(here, capsys):
    assert train("config.py", "--work-dir", "config.py") == 2
    assert "work_dir config.py: cannot make this folder" in capsys.readouterr().err


def test_wrong_paths_end_with_2_and_one_line(here, capsys):
    hub = (
        "dict(type='AutoModelForCausalLM.from_pretrained', pretrained_model_name_or_path='./nope')"
    )
    config = CONFIG.replace("llm=dict(", f"llm={hub}, data_preprocessor=None and dict(", 1)
    data = "dict(type=load_dataset, path='json', data_files='nope.jsonl', split='train')"
    dataset = CONFIG.replace("dict(type='TinyText'", f"{data} or dict(type='TinyText'", 1)
    (here / "model.py").write_text(config)
    (here / "data.py").write_text(f"from datasets import load_dataset\n{dataset}")
    for arguments, message in [
        (["model.py"], "nope"),
        (["data.py"], "nope.jsonl"),
        (["nope/config.py"], "there is no config 'nope/config.py'"),
        (["config.py", "--resume", "nope.pth"], "there is no checkpoint 'nope.pth'"),
    ]:
        assert train(*arguments) == 2, arguments
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, error


def test_foreign_weights_that_hold_more_than_tensors_are_refused(here, capsys):
    torch.save({"state_dict": {}, "meta": Path("x")}, "foreign.pth")
    assert train("config.py", options=["load_from=foreign.pth"]) == 2
    error = capsys.readouterr().err
    assert "holds more than weights" in error and "--resume" in error
    torch.save({"state_dict": {"llm.lm_head.weight": torch.zeros(128, 32)}}, "weights.pth")
    options = ["load_from=weights.pth", "train_cfg.max_epochs=0.1"]
    assert train("config.py", options=options) == 0


def test_the_front_door_knows_its_commands(capsys):
    assert main(["--help"]) == 0
    help_text = capsys.readouterr().out
    assert all(name in help_text for name in ("train", "measure", "report", "bench", "list-cfg"))
    assert main(["trian"]) == 2
    assert "unknown command 'trian'; did you mean 'train'?" in capsys.readouterr().err
    assert main([]) == 2
    code = "import sys, xlength.cli; sys.exit('torch' in sys.modules or 'mmengine' in sys.modules)"
    assert shell([sys.executable, "-c", code]).returncode == 0
