"""Images and text through ``xlength train``: one and two processes, resuming, every config."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mmengine.config import Config

from tests.vlm_helpers import write_rows
from xlength.cli import main

ROOT = Path(__file__).resolve().parents[1]
numbers = itertools.count()

CONFIG = """
custom_imports = dict(imports=['xlength', 'tests.vlm_helpers'])
family = 'llava'
batch_size = 4
model = dict(
    type='SupervisedFinetune', use_activation_checkpointing=False,
    llm=dict(type='tests.families.model', family=family))
train_dataloader = dict(
    batch_size=batch_size,
    dataset=dict(
        type='LLaVADataset', data_path='rows.jsonl', image_folder='.', cache_dir='cache',
        processor=dict(type='tests.families.processor', family=family), max_length=200),
    sampler=dict(
        type='LengthGroupedSampler', length_property='modality_length',
        per_device_batch_size=batch_size),
    collate_fn=dict(type='default_collate_fn'))
train_cfg = dict(type='TrainLoop', max_epochs=4)
optim_wrapper = dict(type='OptimWrapper', optimizer=dict(type='AdamW', lr=5e-3))
default_hooks = dict(
    logger=dict(type='LoggerHook', interval=5),
    checkpoint=dict(type='CheckpointHook', by_epoch=False, interval=14),
    sampler_seed=dict(type='DistSamplerSeedHook'))
custom_hooks = [dict(type='LengthStatsHook'), dict(type='ImageDiary')]
log_processor = dict(by_epoch=False)
randomness = dict(seed=0)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to run in, with images, rows and the config ``config.py``."""
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path)
    (tmp_path / "config.py").write_text(CONFIG)
    return tmp_path


def train(config: str, *arguments: str, options: tuple[str, ...] = ()) -> int:
    """The exit code of ``xlength train`` in this process, as an experiment of its own."""
    name = f"experiment_name=images{next(numbers)}"
    return main(["train", config, *arguments, "--cfg-options", name, *options])


def two_ranks(*arguments: str, timeout: int = 240) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHON": sys.executable}
    command = [str(ROOT / "tools/dist_train.sh"), "config.py", "2", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=timeout)


def diary(work_dir: str, rank: int = 0) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(Path(work_dir, f"images{rank}.json").read_text())
    return result


def with_family(family: str) -> None:
    Path("config.py").write_text(CONFIG.replace("'llava'", f"'{family}'"))


@pytest.mark.parametrize("family", ["llava", "internvl", "qwen2_5_vl"])
def test_the_loss_falls_and_a_checkpoint_trains_on(here: Path, family: str) -> None:
    with_family(family)
    assert train("config.py", "--work-dir", "whole") == 0
    entries = diary("whole")["entries"]
    losses = [entry["loss"] for entry in entries]
    assert len(losses) == 28
    assert sum(losses[-4:]) < 0.6 * sum(losses[:4])
    kinds = {"".join("i" if n else "t" for n in sorted(e["images"])) for e in entries}
    assert {"tttt", "iiii"} <= kinds and len(kinds) > 2  # mixed batches are among them
    orders = [[e["lengths"] for e in entries[start : start + 7]] for start in (0, 7, 14)]
    assert orders[0] != orders[1] != orders[2]
    assert train("config.py", "--work-dir", "cut", options=("train_cfg.max_epochs=2",)) == 0
    assert train("config.py", "--work-dir", "cut", "--resume") == 0
    rest = diary("cut")["entries"]
    assert [e["lengths"] for e in rest] == [e["lengths"] for e in entries[14:]]
    assert [e["loss"] for e in rest] == pytest.approx(losses[14:], abs=1e-4)


@pytest.mark.parametrize(
    "family",
    ["llava", *(pytest.param(f, marks=pytest.mark.long) for f in ("internvl", "qwen2_5_vl"))],
)
def test_two_ranks_train_on_images_and_texts_in_xtuners_order(here: Path, family: str) -> None:
    with_family(family)
    result = two_ranks("--work-dir", "two")
    assert result.returncode == 0, result.stderr[-2000:]
    first, second = diary("two", 0), diary("two", 1)
    assert len(first["entries"]) == len(second["entries"]) == 16
    assert first["weights"] == second["weights"]
    losses = [entry["loss"] for entry in first["entries"]]
    assert losses == [entry["loss"] for entry in second["entries"]]
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])


def test_measuring_beforehand_prints_lengths_by_modality_and_training_reads_them(
    here: Path, capsys: pytest.CaptureFixture[str], log_lines: list[str]
) -> None:
    with_family("internvl")
    assert main(["measure", "config.py", "-o", "lengths.npy"]) == 0
    lengths = np.load("lengths.npy")
    table = {
        line.split()[0]: line.split()[1:3] for line in capsys.readouterr().out.splitlines()[-3:]
    }
    assert table["images"] == ["18", f"{lengths[lengths > 0].sum():,}"]
    assert table["text"] == ["10", f"{-lengths[lengths < 0].sum():,}"]
    (file,) = Path("cache").glob("*.npz")
    written = file.stat().st_mtime_ns
    assert train("config.py", "--work-dir", "run", options=("train_cfg.max_epochs=1",)) == 0
    assert file.stat().st_mtime_ns == written
    seen = [n for entry in diary("run")["entries"] for n in entry["lengths"]]
    assert sorted(seen) == sorted(np.abs(lengths).tolist())


KINDS = ["ittit", "itiit"]
"""Steps: both images, both texts, one each, both images, both texts."""


def of_one_kind(model: str, family: str = "llava") -> None:
    sampler = "type='OneRankTextOtherImage', batch_size=batch_size"
    text = CONFIG.replace("'llava'", f"'{family}'").replace("'SupervisedFinetune'", f"'{model}'")
    text = text.replace(
        """type='LengthGroupedSampler', length_property='modality_length',
        per_device_batch_size=batch_size""",
        f"{sampler}, kinds={KINDS}",
    )
    assert "OneRankTextOtherImage" in text
    Path("config.py").write_text(text.replace("max_epochs=4", "max_epochs=2"))


def test_steps_with_text_on_one_rank_and_images_on_the_other_do_not_hang(here: Path) -> None:
    of_one_kind("SupervisedFinetune")
    result = two_ranks("--work-dir", "two")
    assert result.returncode == 0, result.stderr[-2000:]
    first, second = diary("two", 0), diary("two", 1)
    for rank, own in enumerate((first, second)):
        kinds = ["i" if all(e["images"]) else "t" for e in own["entries"]]
        assert "".join(kinds) == 2 * KINDS[rank]
    assert first["weights"] == second["weights"]
    assert first["iter"] == second["iter"] == 10


SHARDED = """
runner_type = 'FlexibleRunner'
strategy = dict(
    type='xlength.FSDPStrategy', state_dict_cfg='local',
    model_wrapper=dict(
        type='MMFullyShardedDataParallel', use_orig_params=True,
        auto_wrap_policy=dict(
            type='torch.distributed.fsdp.wrap.size_based_auto_wrap_policy', min_num_params=3000)))
default_hooks = dict(checkpoint=None)
"""


@pytest.mark.long
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_sharded_parameters_take_the_same_steps_with_text_on_one_rank(
    here: Path, family: str
) -> None:
    of_one_kind("SupervisedFinetune", family)
    assert two_ranks("--work-dir", "whole").returncode == 0
    Path("config.py").write_text(Path("config.py").read_text() + SHARDED)
    result = two_ranks("--work-dir", "shards")
    assert result.returncode == 0, result.stderr[-2000:]
    losses = [[e["loss"] for e in diary(run)["entries"]] for run in ("whole", "shards")]
    assert losses[1] == pytest.approx(losses[0], abs=2e-3)


@pytest.mark.long
def test_without_the_blank_image_such_steps_stop_the_run(here: Path) -> None:
    of_one_kind("WithoutBlankImages")
    result = two_ranks("--work-dir", "two")
    assert result.returncode != 0
    assert "did not receive grad" in result.stderr or "finished reduction" in result.stderr


RECIPES = sorted((ROOT / "configs/vlm").glob("*.py"))

TINY = """
_base_ = ['{recipe}']
custom_imports = dict(imports=['xlength', 'tests.vlm_helpers'])
model = dict(
    use_activation_checkpointing=False,
    llm=dict(_delete_=True, type='tests.families.model', family='{family}'))
train_dataloader = dict(
    num_workers=0,
    dataset=dict(
        data_path='rows.jsonl', image_folder='.', cache_dir='cache',
        processor=dict(_delete_=True, type='tests.families.processor', family='{family}')))
train_cfg = dict(_delete_=True, type='TrainLoop', max_iters=2)
param_scheduler = None
custom_hooks = [dict(type='LengthStatsHook'), dict(type='ImageDiary')]
"""


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_takes_two_steps_with_tiny_parts(here: Path, recipe: Path) -> None:
    families = {"llava": "llava", "internvl": "internvl", "qwen2": "qwen2_5_vl"}
    family = next(f for start, f in families.items() if recipe.stem.startswith(start))
    (here / "tiny.py").write_text(TINY.format(recipe=recipe, family=family))
    assert train("tiny.py", "--work-dir", "two_steps") == 0
    assert diary("two_steps")["iter"] == 2


def test_the_recipes_twins_differ_by_the_sampler_alone() -> None:
    twins = [path for path in RECIPES if path.stem.endswith("_length_grouped")]
    assert len(twins) == 3
    for path in twins:
        grouped = Config.fromfile(path)
        plain = Config.fromfile(path.with_name(path.name.replace("_length_grouped", "")))
        sampler = grouped.train_dataloader.pop("sampler")
        assert plain.train_dataloader.pop("sampler").type == "DefaultSampler"
        assert sampler.length_property == "modality_length"
        size = grouped.batch_size * grouped.accumulative_counts
        assert sampler.per_device_batch_size == size
        assert grouped.to_dict() == plain.to_dict()


def test_the_recipes_are_those_of_xtuner() -> None:
    llava = Config.fromfile(ROOT / "configs/vlm/llava_v1_5_7b_mix665k_e1.py")
    assert (llava.max_length, llava.batch_size) == (2048 - 576, 16)
    assert llava.train_dataloader.dataset.max_length == 2048
    internvl = Config.fromfile(ROOT / "configs/vlm/internvl_v2_2b_mix665k_8k_e1.py")
    assert internvl.train_dataloader.dataset.max_length == 8192
    assert (internvl.batch_size, internvl.optim_wrapper.accumulative_counts) == (4, 4)


def test_the_quickstart_draws_its_pages_once_and_trains(here: Path) -> None:
    options = (
        "train_cfg._delete_=True",
        "train_cfg.type=TrainLoop",
        "train_cfg.max_iters=3",
        "train_dataloader.num_workers=0",
        "train_dataloader.persistent_workers=False",
        "train_dataloader.batch_size=2",
        "train_dataloader.sampler.per_device_batch_size=2",
        "train_dataloader.dataset.num_pages=6",
        "train_dataloader.dataset.num_texts=6",
    )
    config = str(ROOT / "configs/quickstart/images.py")
    assert train(config, "--work-dir", "quick", options=options) == 0
    folder = here / "work_dirs/page_images/pages_6_6"
    pages = {path: path.stat().st_mtime_ns for path in folder.glob("*.png")}
    assert len(pages) == 6
    assert train(config, "--work-dir", "again", options=options) == 0
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*.png")} == pages
