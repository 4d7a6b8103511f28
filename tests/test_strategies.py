"""The example configs of FlexibleRunner's strategies, in two processes over gloo."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

TINY = """
_base_ = [{config!r}]
custom_imports = dict(imports=['xlength', 'tests.train_helpers'])
custom_hooks = [dict(type='Diary')]
model = dict(llm=dict(
    _delete_=True, type='AutoModelForCausalLM.from_config',
    config=dict(
        type='LlamaConfig', hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, vocab_size=128)))
train_dataloader = dict(
    num_workers=0,
    dataset=dict(_delete_=True, type='TinyText', length=[3 + (7 * i) % 23 for i in range(64)]),
    collate_fn=dict(_delete_=True, type='tiny_collate'))
train_cfg = dict(_delete_=True, type='TrainLoop', max_iters=6)
default_hooks = dict(checkpoint=dict(interval=2))
param_scheduler = None
randomness = dict(seed=1)
"""
# On a CPU: gloo has no bfloat16, and torch's full state dict of FSDP, which is offloaded, crashes
# there ("full" without offloading works).
FSDP = """
strategy = dict(
    state_dict_cfg={state_dict_cfg},
    model_wrapper=dict(mixed_precision=None, auto_wrap_policy=dict(min_num_params=5000)))
"""
FULL = """dict(
    _delete_=True,
    state_dict_type='FULL_STATE_DICT',
    state_dict_config=dict(type='FullStateDictConfig'),
    optim_state_dict_config=dict(type='FullOptimStateDictConfig'))"""
DDP = """
runner_type = 'Runner'
optim_wrapper = dict(accumulative_counts={counts})
"""
DEEPSPEED = """
strategy = dict(bf16=None, zero_optimization=dict(overlap_comm=False))
"""
RECIPE = "qwen3_8b_full_messages_8k_e3"


def run(folder, name, recipe, changes, *arguments):
    """Train in two processes; the entries of both ranks' diaries."""
    config = str(ROOT / f"configs/strategies/{recipe}.py")
    (folder / f"{name}.py").write_text(TINY.format(config=config) + changes)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHON": sys.executable}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [ROOT / "tools/dist_train.sh", f"{name}.py", "2", "--work-dir", name, *arguments]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    diaries = [json.loads((folder / f"{name}/diary{rank}.json").read_text()) for rank in (0, 1)]
    return [diary["entries"] for diary in diaries]


def losses(entries):
    return [entry["loss"] for entry in entries]


def test_fsdp_trains_with_equal_steps_and_losses(tmp_path):
    first, second = run(tmp_path, "fsdp", f"{RECIPE}_fsdp", FSDP.format(state_dict_cfg="'local'"))
    assert len(first) == 6
    assert losses(first) == losses(second)
    assert len(set(losses(first))) > 1


@pytest.mark.long
@pytest.mark.parametrize("state_dict_cfg", ["'local'", FULL])
def test_fsdp_trains_like_ddp_and_resumes(state_dict_cfg, tmp_path):
    fsdp = FSDP.format(state_dict_cfg=state_dict_cfg)
    sharded = run(tmp_path, "fsdp", f"{RECIPE}_fsdp", fsdp)
    whole = run(tmp_path, "ddp", f"{RECIPE}_fsdp", DDP.format(counts=4))
    assert losses(sharded[0]) == pytest.approx(losses(whole[0]), abs=1e-4)
    rest = run(tmp_path, "fsdp", f"{RECIPE}_fsdp", fsdp, "--resume", "fsdp/iter_4.pth")
    assert [e["samples"] for e in rest[0]] == [e["samples"] for e in sharded[0]][4:]


@pytest.mark.long
def test_deepspeed_trains_like_ddp_and_resumes(tmp_path):
    pytest.importorskip("deepspeed")
    recipe = f"{RECIPE}_deepspeed_zero2"
    sharded = run(tmp_path, "deepspeed", recipe, DEEPSPEED)
    assert losses(sharded[0]) == losses(sharded[1])
    ddp = DDP.format(counts=1).replace(
        "optim_wrapper = dict(", "optim_wrapper = dict(type='OptimWrapper', "
    )
    whole = run(tmp_path, "ddp", recipe, f"{ddp}optim_wrapper['clip_grad'] = dict(max_norm=1.0)\n")
    assert losses(sharded[0]) == pytest.approx(losses(whole[0]), abs=1e-4)
    rest = run(tmp_path, "deepspeed", recipe, DEEPSPEED, "--resume", "deepspeed/iter_4.pth")
    assert losses(rest[0]) == pytest.approx(losses(sharded[0])[4:], abs=1e-4)
