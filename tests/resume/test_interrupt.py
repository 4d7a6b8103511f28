"""Ctrl-C, and the exit codes that a launcher passes on: real processes."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.resume.kill import config_file, entries
from tests.resume.signals import prepare, wait_for_steps
from tests.resume.test_kill import ROOT

CLI = [sys.executable, "-m", "xlength.cli", "train"]
DIST = [str(ROOT / "tools/dist_train.sh")]
pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")


def start(command, folder, **environment):
    """A process in a group of its own, as a terminal starts it; its output goes to two files."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ATTEMPT": "0"}
    env |= {"PYTHON": sys.executable, **environment}
    with open(folder / "stdout", "w") as out, open(folder / "stderr", "w") as err:
        return subprocess.Popen(
            [*map(str, command)],
            stdout=out,
            stderr=err,
            env=env,
            cwd=folder,
            start_new_session=True,
        )


def processes_of(word):
    """{id: command} of processes whose command has a word; ranks too, with groups of their own."""
    found = {}
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = file.read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # it has ended
            continue
        if word in command:
            found[int(file.parent.name)] = command
    return found


@pytest.fixture(autouse=True)
def nothing_outlives_a_test_that_fails(tmp_path):
    yield
    for process in processes_of(str(tmp_path)):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def lines_of_xlength(folder):
    text = (folder / "stderr").read_text()
    assert "Traceback" not in text, text
    return [line for line in text.splitlines() if "xlength:" in line]


@pytest.mark.parametrize("to", ["group", "process"])
def test_ctrl_c_ends_with_130_and_one_line_no_worker_is_left_and_resume_goes_on(to, tmp_path):
    run = prepare(tmp_path, "run", workers=2, slow=0.05)
    command = [*CLI, config_file(run), "--work-dir", run]
    process = start(command, tmp_path)
    wait_for_steps(run, 7)
    assert len(processes_of(str(run))) == 3
    {"group": os.killpg, "process": os.kill}[to](process.pid, signal.SIGINT)
    assert process.wait(20) == 130
    assert processes_of(str(run)) == {}
    (line,) = lines_of_xlength(tmp_path)
    assert line.startswith(f"xlength: interrupted while training {config_file(run)}, after ")
    done = max(iteration for iteration, _ in entries(run, 0)) + 1
    assert f"after {done} of 32 iterations" in line or f"after {done - 1} of 32" in line
    last = line.split("the last checkpoint is ")[1].split(":")[0]
    number = int(last.rpartition("_")[2].removesuffix(".pth"))
    assert os.path.exists(last) and done - 4 <= number <= done
    assert line.endswith(": the same command with --resume continues there")
    assert start([*command, "--resume"], tmp_path).wait(120) == 0
    assert f"iter: {number}" in (tmp_path / "stdout").read_text()


def test_ctrl_c_before_the_first_checkpoint_says_that_there_is_none(tmp_path):
    run = prepare(tmp_path, "run", slow=1.0)
    (run / "iter_9.pth").write_bytes(b"of an earlier run")
    os.utime(run / "iter_9.pth", (1, 1))
    process = start([*CLI, config_file(run), "--work-dir", run], tmp_path)
    wait_for_steps(run, 1)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(20) == 130
    (line,) = lines_of_xlength(tmp_path)
    assert line.endswith("; there is no checkpoint yet: the same command begins anew")


def test_ctrl_c_while_data_are_prepared_leaves_no_process_either(tmp_path):
    """The datasets library's own processes, which answer it in many ways."""
    text = (ROOT / "configs/quickstart/length_grouped.py").read_text()
    text = text.replace('"../', f'"{ROOT}/configs/')
    (tmp_path / "config.py").write_text(text)
    command = [*CLI, "config.py", "--work-dir", tmp_path / "run"]
    for _ in range(2):
        process = start(command, tmp_path, HF_DATASETS_CACHE=str(tmp_path / "cache"))
        until = time.monotonic() + 120
        while "Tokenising" not in (tmp_path / "stderr").read_text() and time.monotonic() < until:
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(20) == 130
        assert processes_of(str(tmp_path / "run")) == {}
        (line,) = lines_of_xlength(tmp_path)
        assert line == "xlength: interrupted before the training of config.py began"


@pytest.mark.parametrize(
    ("number", "code", "says"),
    [
        (signal.SIGINT, 130, "the same command with --resume continues there"),
        (signal.SIGTERM, 75, None),
    ],
)
def test_the_launcher_passes_on_how_its_processes_ended_and_leaves_none(
    number, code, says, tmp_path
):
    """A terminal's Ctrl-C reaches the launcher only, whose processes have groups of their own."""
    run = prepare(tmp_path, "run", slow=0.2)
    process = start([*DIST, config_file(run), 2, "--work-dir", run], tmp_path)
    wait_for_steps(run, 7)
    os.killpg(process.pid, number)
    assert process.wait(60) == code
    assert processes_of(str(run)) == {}
    assert [line.endswith(str(says)) for line in lines_of_xlength(tmp_path)] == [True] * bool(says)


@pytest.mark.long
def test_the_launcher_passes_on_75_when_only_one_process_was_signalled(tmp_path):
    run = prepare(tmp_path, "run", slow=0.2)
    process = start([*DIST, config_file(run), 2, "--work-dir", run], tmp_path)
    wait_for_steps(run, 7)
    rank = max(pid for pid, command in processes_of(str(run)).items() if "train.py" in command)
    os.kill(rank, signal.SIGTERM)
    assert process.wait(60) == 75
    assert processes_of(str(run)) == {}


def test_the_launcher_passes_on_2_on_bad_input(tmp_path):
    run = prepare(tmp_path, "run")
    process = start([*DIST, config_file(run), 2, "--cfg-options", "train_cfg.max_iter=3"], tmp_path)
    assert process.wait(120) == 2
    lines = lines_of_xlength(tmp_path)
    assert lines and all("unknown key train_cfg.max_iter of TrainLoop" in line for line in lines)
