"""The lines that a report prints work when they are pasted."""

import subprocess
import sys

import numpy as np
import pytest
from mmengine.config import Config
from mmengine.dataset import DefaultSampler
from mmengine.runner import Runner

import tests.tiny  # noqa: F401  registers the data
from tests.report.test_measures import tool_chats
from xlength.report.choice import config_lines, recommend, source, verdict
from xlength.report.configs import assigns_loader
from xlength.report.measures import measure
from xlength.report.strategies import Setting, measure_all, strategies

SETTING = Setting(world_size=1, batch_size=4)
LENGTHS = np.minimum(tool_chats(90) // 10 + 3, 120)
ROWS = measure_all(strategies(LENGTHS, SETTING), LENGTHS, SETTING)

BASE = f"""
default_scope = 'mmengine'
train_dataloader = dict(
    batch_size=7,
    num_workers=0,
    dataset=dict(type='TinyText', length={LENGTHS.tolist()}),
    sampler=dict(type='InfiniteSampler', shuffle=True),
    collate_fn=dict(type='xlength.default_collate_fn'),
)
"""


def drawn(config):
    """Samples of each batch of a config's loader, by their first token."""
    loader = Runner.build_dataloader(config.train_dataloader, seed=0)
    batches = [batch["data"] for batch in loader]
    if "sample_ids" in batches[0]:
        return [batch["sample_ids"].tolist() for batch in batches]
    first = [batch["input_ids"][:, 0].tolist() for batch in batches]
    assert all(0 <= index < len(LENGTHS) for batch in first for index in batch)
    return first


@pytest.mark.parametrize("row", ROWS, ids=[row.strategy.name for row in ROWS])
@pytest.mark.parametrize("batch_sampler", ["", "    batch_sampler=None,\n"], ids=["", "none"])
@pytest.mark.parametrize("merge", [False, True], ids=["update", "merge"])
def test_pasted_lines_give_the_batches_that_were_simulated(row, merge, batch_sampler, tmp_path):
    base = BASE.replace("    num_workers", f"{batch_sampler}    num_workers")
    (tmp_path / "base.py").write_text(base)
    keys = list(Config.fromfile(tmp_path / "base.py").train_dataloader) if merge else None
    lines = config_lines(row, SETTING, merge=keys)
    path = tmp_path / "config.py"
    path.write_text(f"_base_ = ['base.py']\n{lines}" if merge else base + lines)
    assert assigns_loader(path)
    config = Config.fromfile(path)
    plan = row.strategy.build(0, None)
    expected = [plan.groups[group].tolist() for group in plan.steps[:, 0]]
    if row.strategy.packed:
        loader = Runner.build_dataloader(config.train_dataloader, seed=0)
        lengths = [batch["data"]["lengths"].tolist() for batch in loader]
        assert lengths == [LENGTHS[batch].tolist() for batch in expected]
    else:
        assert drawn(config) == expected


def test_lines_name_the_modality_where_lengths_are_signed():
    lines = config_lines(ROWS[3], SETTING, "modality_length")
    assert 'length_property="modality_length"' in lines
    assert "length_property" not in config_lines(ROWS[3], SETTING)


def test_lines_are_formatted_as_ruff_would():
    ruff = [sys.executable, "-m", "ruff", "format", "--line-length", "100", "-"]
    if subprocess.run([*ruff[:3], "--version"], capture_output=True).returncode:
        pytest.skip("ruff is not installed")
    for row in ROWS:
        for merge in (None, ["sampler"], ["sampler", "collate_fn"]):
            lines = config_lines(row, SETTING, merge=merge)
            done = subprocess.run(ruff, input=lines, capture_output=True, text=True, check=True)
            assert done.stdout == lines


def test_source_of_nested_values_is_python():
    value = {"a": 1, "b": {"type": "x.Y", "c": None, "d": {"e": 2.0, "f": True}}}
    assert eval(source(value)) == {**value, "b": {**value["b"], "d": {"e": 2, "f": True}}}


def test_the_verdict_names_gain_price_steps_and_memory():
    best = recommend(ROWS, SETTING)
    text = verdict(best, ROWS[0], SETTING)
    gain = best.wall_efficiency_attention / ROWS[0].wall_efficiency_attention
    assert f"{best.wall_efficiency_attention:.3f}" in text
    assert f"{gain:.1f} times shorter" in text
    assert f"{best.batchmate_repeat:.1%} of the pairs" in text
    assert "with DefaultSampler" in text


def test_a_config_that_is_good_already_is_kept():
    from dataclasses import replace

    best = recommend(ROWS, SETTING)
    now = replace(best, strategy=replace(best.strategy, kind="config"))
    assert verdict(best, now, SETTING).startswith("Keep this config")


def test_a_default_sampler_that_does_not_shuffle_is_simulated_in_file_order():
    from xlength.report.samplers import strategy_of

    sampler = DefaultSampler(LENGTHS, shuffle=False)
    strategy = strategy_of(sampler, 4, len(LENGTHS), 1)
    plan = strategy.build(0, None)
    assert plan.groups.members.tolist() == list(range(len(LENGTHS)))
    row = measure(strategy, LENGTHS, SETTING.cost, SETTING.attention)
    assert row.batchmate_repeat == 1  # the same batches in every epoch
