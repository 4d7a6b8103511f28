"""Processes that are killed at random moments end, in the end, like an undisturbed run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.resume.kill import CASES

ROOT = Path(__file__).resolve().parents[2]


def run_module(module, folder, *arguments, timeout=1500):
    """What a module that forks real training processes printed as JSON."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", f"tests.resume.{module}", str(folder), *map(str, arguments)]
    result = subprocess.run(
        command, capture_output=True, text=True, env=env, timeout=timeout, cwd=ROOT
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


def killed(folder, case, ranks, workers, kills, seed):
    options = {"case": case, "ranks": ranks, "workers": workers, "kills": kills, "seed": seed}
    arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
    return run_module("kill", folder, *arguments)


@pytest.mark.parametrize(("case", "workers"), [("TokenBudget", 2), ("LengthPoolSortDataset", 0)])
def test_a_killed_run_loses_and_repeats_nothing_and_ends_with_the_same_weights(
    case, workers, tmp_path
):
    result = killed(tmp_path, case, ranks=1, workers=workers, kills=4, seed=1)
    assert result["problems"] == []
    assert result["kills"] >= 1 and result["steps"] == 32
    assert result["steps_of_all"] > 32, "no step was ever done again: the kills came too late"


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("workers", [0, 2])
def test_runs_killed_seven_times_each_end_like_undisturbed_ones(case, ranks, workers, tmp_path):
    seed = 100 + CASES.index(case) * 4 + ranks * 2 + workers
    result = killed(tmp_path, case, ranks, workers, kills=7, seed=seed)
    print(case, ranks, workers, result)
    assert result["problems"] == []
    assert result["hung"] == 0
    assert result["kills"] >= 5


def test_the_comparison_sees_a_changed_batch_and_a_changed_weight(tmp_path):
    import torch

    from tests.resume.kill import compare

    for name, sample, weight in [("whole", 1, 1.0), ("cut", 2, 1.5)]:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "consumed0.jsonl").write_text(json.dumps({"iter": 0, "samples": [sample]}))
        torch.save(
            {"meta": {"iter": 1}, "state_dict": {"w": torch.tensor(weight)}}, folder / "iter_1.pth"
        )
        (folder / "last_checkpoint").write_text(str(folder / "iter_1.pth"))
    problems = compare(tmp_path / "whole", tmp_path / "cut", 1)
    assert len(problems) == 2 and "final w differs" in problems[1]
