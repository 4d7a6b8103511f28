"""Signals, ranks that die or stand still, restarts, other numbers of ranks: real processes."""

import json
import os
import subprocess
import sys

import pytest

from tests.resume.kill import config
from tests.resume.test_kill import ROOT, run_module


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_sigterm_to_one_rank_saves_at_the_end_of_a_step_and_ends_all_with_75(ranks, tmp_path):
    result = run_module("signals", tmp_path, "stop" if ranks == 1 else "stop_two_ranks")
    assert result["codes"] == [75] * ranks
    assert result["seconds"] < 25, "a cluster waits 30 s"
    assert result["last"] == f"iter_{result['done']}.pth"
    assert result["problems"] == []


@pytest.mark.long
def test_sigterm_saves_by_iteration_where_checkpoints_go_by_epochs_and_keeps_those(tmp_path):
    result = run_module("signals", tmp_path, "stop_by_epoch")
    assert result["codes"] == [75]
    assert result["files"] == ["ep1.pth", f"iter_{result['done']}.pth"]
    assert result["problems"] == []


def test_sigterm_to_the_whole_group_leaves_the_workers_to_the_step_that_saves(tmp_path):
    """As ``timeout`` and launchers send it."""
    result = run_module("signals", tmp_path, "stop_with_workers")
    assert result["codes"] == [75]
    assert result["last"] == f"iter_{result['done']}.pth"
    assert result["problems"] == []


@pytest.mark.long
def test_sigterm_in_a_validation_ends_all_at_the_same_step_also_where_they_have_unequally_many(
    tmp_path,
):
    result = run_module("signals", tmp_path, "stop_in_validation")
    assert result["codes"] == [75, 75]
    assert result["steps"] == ["4: step 0"] and result["last"] == "iter_4.pth"
    assert result["seen"] == ["4: saw 5", "8: saw 5"]
    assert result["problems"] == []


@pytest.mark.long
def test_a_rank_that_learnt_of_the_signal_from_another_does_not_take_its_own_for_a_second_one(
    tmp_path,
):
    """A launcher passes the signal on to all ranks, and they agree in between."""
    assert run_module("signals", tmp_path, "stop_one_after_the_other")["codes"] == [75, 75]


@pytest.mark.long
def test_a_second_sigterm_ends_the_run_at_once(tmp_path):
    result = run_module("signals", tmp_path, "stop_twice")
    assert result["codes"] == [128 + 15]
    assert result["seconds"] < 4, "the step took 5 s"


@pytest.mark.parametrize(
    ("scenario", "within"),
    [("dead_rank", 30), pytest.param("hung_rank", 16, marks=pytest.mark.long)],
)
def test_when_a_rank_dies_or_stands_still_the_other_ends_with_a_message(scenario, within, tmp_path):
    """A time-out of 6 s is configured where one stands still."""
    result = run_module("signals", tmp_path, scenario)
    assert result["codes"][0] == 1
    assert result["seconds"] < within
    assert "another rank" in result["output"]


@pytest.mark.long
def test_two_ranks_with_unequal_numbers_of_samples_go_on_after_the_end_of_an_epoch(tmp_path):
    assert run_module("signals", tmp_path, "unequal_ranks")["problems"] == []


@pytest.mark.long
def test_the_number_of_ranks_changes_at_every_kill_and_every_sample_is_drawn_once(tmp_path):
    result = run_module("signals", tmp_path, "elastic")
    for case, counts in result.items():
        assert counts["kills"] >= 4 and counts["hung"] == 0
        assert sorted(counts["epochs"]) == ["0", "1", "2"]
        for epoch in counts["epochs"].values():
            assert epoch["missing"] == []
            # The drop-in sampler rounds 50 samples up to whole batches, as XTuner's does.
            assert epoch["repeated"] <= (6 if case == "LengthGroupedSampler" else 0)


@pytest.mark.long
def test_torchrun_restarts_a_run_that_crashed_and_it_ends_like_an_undisturbed_one(tmp_path):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ATTEMPT": "0"}
    for name in ("whole", "cut"):
        text = config("TokenBudget", 0, seed=3)
        if name == "cut":
            crash = "dict(type='ConsumedLog'), dict(type='CrashOnce', rank=1, at=11)"
            text = text.replace("dict(type='ConsumedLog')", crash)
        (tmp_path / f"{name}.py").write_text(text)
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"),
            *("--max-restarts=1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"),
            *("-m", "xlength.cli", "train", f"{name}.py", "--work-dir", name),
            *("--launcher", "pytorch", "--resume"),
        ]
        result = subprocess.run(
            command, capture_output=True, text=True, env=env, cwd=tmp_path, timeout=600
        )
        assert result.returncode == 0, result.stderr[-3000:]
    crashes = (tmp_path / "cut/crashed").read_text()
    assert json.loads(crashes) == {"iter": 11, "rank": 1}
    from tests.resume.kill import compare

    os.chdir(tmp_path)
    assert compare(tmp_path / "whole", tmp_path / "cut", 2) == []
