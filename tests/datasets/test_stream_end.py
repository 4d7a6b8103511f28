"""All ranks stop at the same step: real processes with unequal numbers of batches."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stream_helpers import BROKEN_OFF_AFTER, CASES
from xlength.datasets.stream_end import EqualSteps

ROOT = Path(__file__).parents[2]
WORLD_SIZE = 3


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each of three processes drew, and the output of all."""
    folder = tmp_path_factory.mktemp("ends")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(WORLD_SIZE), "-m", "tests.stream_helpers"),
            str(folder / "rank"),
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    files = [folder / f"rank{rank}.json" for rank in range(WORLD_SIZE)]
    return [json.loads(file.read_text()) for file in files], done.stdout + done.stderr


@pytest.mark.parametrize("case", range(len(CASES)))
def test_every_rank_draws_the_batches_that_all_ranks_have(results, case):
    counts, _ = CASES[case]
    for rank in results[0]:
        assert rank["passes"][case] == list(range(min(counts)))


def test_no_more_is_read_ahead_than_the_interval_and_one(results):
    for rank in results[0]:
        for (_, interval), ahead in zip(CASES, rank["ahead"], strict=True):
            assert ahead <= interval + 1


def test_the_batches_that_are_left_out_and_the_ranks_that_ended_are_logged(results):
    assert "ends after 5 steps on all ranks, since ranks [0] have no more data" in results[1]
    assert "At least 3 batches of other ranks are left out" in results[1]


def test_passes_follow_each_other_and_may_be_broken_off_at_the_same_step(results):
    for rank in results[0]:
        assert rank["again"] == [list(range(5)), list(range(9))]
        assert rank["broken"] == list(range(BROKEN_OFF_AFTER))


def test_a_single_process_draws_everything():
    assert list(EqualSteps().over(range(21))) == list(range(21))


def test_an_interval_below_1_is_refused():
    with pytest.raises(ValueError, match="interval must be at least 1, got 0"):
        EqualSteps(0)
