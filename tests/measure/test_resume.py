"""A measurement that is killed goes on where it was."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.datasets.samples import CHATML, chats, small_tokenizer
from xlength.cli import main
from xlength.measure.counting import Counted
from xlength.measure.journal import Journal

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def source(tmp_path):
    small_tokenizer(chat_template=CHATML).save_pretrained(tmp_path / "tokenizer")
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in chats(2500)))
    return path


def arguments(source, out, num_proc=2):
    return ["measure", str(source), "-o", str(out), "--num-proc", str(num_proc)] + [
        "--tokenizer",
        str(source.parent / "tokenizer"),
        "--block-bytes",
        "4096",
    ]


def children(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux's /proc")
def test_killed_at_80_percent_it_continues_and_gives_the_same(source, tmp_path, capsys):
    assert main(arguments(source, tmp_path / "whole.npy")) == 0
    whole = np.load(tmp_path / "whole.npy")
    out = tmp_path / "killed.npy"
    log = tmp_path / "killed.npy.partial.jsonl"
    blocks = -(-source.stat().st_size // 4096)
    process = subprocess.Popen(
        [sys.executable, "-m", "xlength.cli", *arguments(source, out)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.DEVNULL,
    )
    while not log.exists() or log.read_bytes().count(b"\n") < 0.8 * blocks:
        assert process.poll() is None
        time.sleep(0.001)
    workers = children(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not out.exists() and len(workers) == 2
    kept = (tmp_path / "killed.npy.partial").stat().st_size // 4
    assert kept < len(whole)
    capsys.readouterr()
    assert main(arguments(source, out)) == 0
    said = capsys.readouterr().out
    continued = int(said.split("continuing after ")[1].split()[0].replace(",", ""))
    assert 0.7 * len(whole) < continued <= kept
    assert np.load(out).tolist() == whole.tolist()
    sides = [json.loads((tmp_path / f"{name}.json").read_text()) for name in ("whole", "killed")]
    for side in sides:
        side.pop("command")
    assert sides[0] == sides[1]
    assert not log.exists() and not (tmp_path / "killed.npy.partial").exists()
    for _ in range(50):  # the workers notice within a second that they are alone
        if not any(Path(f"/proc/{worker}").exists() for worker in workers):
            break
        time.sleep(0.1)
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)


def test_one_process_and_several_give_the_same(source, tmp_path):
    assert main(arguments(source, tmp_path / "a.npy", 1)) == 0
    assert main(arguments(source, tmp_path / "b.npy", 3)) == 0
    assert (tmp_path / "a.npy").read_bytes() == (tmp_path / "b.npy").read_bytes()


def test_a_measurement_that_is_there_is_not_repeated_unless_the_data_changed(
    source, tmp_path, capsys
):
    out = tmp_path / "l.npy"
    assert main(arguments(source, out)) == 0
    before = out.stat().st_mtime_ns
    assert main(arguments(source, out)) == 0
    assert "holds this measurement already" in capsys.readouterr().out
    assert out.stat().st_mtime_ns == before
    with open(source, "a") as file:
        file.write(json.dumps(chats(1)[0]) + "\n")
    assert main(arguments(source, out)) == 0
    assert len(np.load(out)) == 2501


def counted(*lengths, step=None):
    return Counted(np.array(lengths, dtype=np.int32), len(lengths) if step is None else step)


def test_a_torn_line_and_lengths_without_a_line_are_cut_off(tmp_path):
    out = tmp_path / "l.npy"
    journal = Journal(out, {"a": 1})
    journal.add(0, 0, counted(1, 2, 3))
    journal.add(0, 1, counted(4, step=7))
    journal.close()
    with open(journal.log_path, "a") as file:
        file.write('{"part": 0, "block": 2, "ke')
    with open(journal.data_path, "ab") as file:
        file.write(b"\0" * 6)
    again = Journal(out, {"a": 1})
    assert again.resumed and again.done == (0, 1) and again.num_samples == 4
    assert again.place == 10
    again.add(1, 0, counted(5))
    assert again.place == 1  # of the next part
    assert again.finish().tolist() == [1, 2, 3, 4, 5]


def test_a_line_whose_lengths_are_missing_does_not_count(tmp_path):
    journal = Journal(tmp_path / "l.npy", {})
    journal.add(0, 0, counted(1, 2))
    journal.add(0, 1, counted(3, 4))
    journal.close()
    os.truncate(journal.data_path, 12)
    again = Journal(tmp_path / "l.npy", {})
    assert again.done == (0, 0) and again.num_samples == 2
    again.close()


def test_a_journal_of_another_request_is_not_continued(tmp_path):
    journal = Journal(tmp_path / "l.npy", {"tokenizer": "a"})
    journal.add(0, 0, counted(1, 2))
    journal.close()
    again = Journal(tmp_path / "l.npy", {"tokenizer": "b"})
    assert not again.resumed
    again.add(0, 0, counted(9))
    assert again.finish().tolist() == [9]
