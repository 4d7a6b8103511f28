"""Checkpoints are whole or not there; a damaged one is named and the one before it offered."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mmengine.fileio import LocalBackend, get_file_backend, register_backend

from xlength.cli import main
from xlength.runtime.atomic import (
    checkpoints_in,
    damage_of,
    last_whole,
    write_atomically,
    write_file,
)

numbers = itertools.count()
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def atomic():
    write_atomically()
    yield
    register_backend("local", LocalBackend, force=True, prefixes="")


def save(path, number=1):
    torch.save({"state_dict": {"w": torch.full((1000,), float(number))}}, path)
    return path


def test_a_kill_while_writing_leaves_the_old_file(tmp_path, monkeypatch):
    """The process dies at any of the steps: before the renaming there is the old content."""
    path = tmp_path / "iter_3.pth"
    write_file(path, b"old")
    for step in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, step, lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                write_file(path, b"new" * 1000)
        assert path.read_bytes() == b"old"
    write_file(path, b"new")
    assert path.read_bytes() == b"new"
    assert [file.name for file in tmp_path.iterdir()] == ["iter_3.pth"]


def test_mmengine_writes_through_it_and_removes_a_checkpoint_only_behind_the_next(atomic, tmp_path):
    old, new = str(tmp_path / "iter_1.pth"), str(tmp_path / "iter_2.pth")
    get_file_backend(old).put(b"1", old)
    get_file_backend(old).remove(old)
    assert os.path.exists(old), "now there would be none"
    get_file_backend(new).put(b"2", new)
    assert os.listdir(tmp_path) == ["iter_2.pth"]
    get_file_backend(new).put(b"2", str(tmp_path / "notes.txt"))
    get_file_backend(new).remove(str(tmp_path / "notes.txt"))
    assert os.listdir(tmp_path) == ["iter_2.pth"]


def test_damage_of_every_kind_is_found(tmp_path):
    path = save(tmp_path / "iter_3.pth")
    content = path.read_bytes()
    assert damage_of(path) is None
    for cut in (0, 1, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:cut])
        assert "cut off" in damage_of(path)
    middle = content.index(torch.full((4,), 1.0).numpy().tobytes())
    path.write_bytes(content[:middle] + b"\0" + content[middle + 1 :])
    path.write_bytes(content[: middle + 2] + b"\1" + content[middle + 3 :])
    assert "checksum" in damage_of(path)


def test_the_last_whole_one_is_found_also_without_a_note(tmp_path):
    paths = [save(tmp_path / f"iter_{n}.pth", n) for n in (4, 8, 12)]
    for time, path in enumerate(paths):
        os.utime(path, (time, time))
    stale = save(tmp_path / "iter_99.pth")  # of an earlier run
    os.utime(stale, (-9, -9))
    assert checkpoints_in(tmp_path)[:3] == paths[::-1]
    (tmp_path / "last_checkpoint").write_text("")  # killed while it was written
    paths[2].write_bytes(b"PK")
    paths[1].write_bytes(b"")
    assert last_whole(checkpoints_in(tmp_path))[0] == paths[0]
    paths[0].write_bytes(b"")
    for time, path in enumerate(paths):
        os.utime(path, (time, time))
    whole, damaged = last_whole(checkpoints_in(tmp_path))
    assert whole is None, "one of an earlier run would be taken"
    assert [path for path, _ in damaged] == paths[::-1]


def test_checkpoints_with_a_name_of_the_users_are_found_by_that_of_the_last(tmp_path):
    paths = [save(tmp_path / f"step-{n}.v2.pth", n) for n in (4, 8, 12)]
    for time, path in enumerate(paths):
        os.utime(path, (time, time))
    save(tmp_path / "weights-7.pth")
    assert checkpoints_in(tmp_path) == []
    (tmp_path / "last_checkpoint").write_text(str(paths[1]))
    assert checkpoints_in(tmp_path) == paths[::-1]
    paths[2].write_bytes(b"PK")
    assert last_whole(checkpoints_in(tmp_path))[0] == paths[1]


CONFIG = """
custom_imports = dict(imports=['xlength', 'tests.train_helpers'])
model = dict(
    type='SupervisedFinetune',
    llm=dict(
        type='AutoModelForCausalLM.from_config',
        config=dict(
            type='LlamaConfig', hidden_size=16, intermediate_size=32, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=1, vocab_size=128)))
train_dataloader = dict(
    batch_size=4,
    dataset=dict(type='TinyText', length=[3 + (7 * i) % 23 for i in range(22)]),
    sampler=dict(type='LengthGroupedSampler', per_device_batch_size=4),
    collate_fn=dict(type='tiny_collate'))
train_cfg = dict(type='TrainLoop', max_epochs=2)
optim_wrapper = dict(type='OptimWrapper', optimizer=dict(type='AdamW', lr=1e-3))
default_hooks = dict(checkpoint=dict(type='CheckpointHook', by_epoch=False, interval=4))
custom_hooks = [dict(type='Diary')]
log_processor = dict(by_epoch=False)
"""


@pytest.fixture
def here(tmp_path, monkeypatch, atomic):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.py").write_text(CONFIG)
    return tmp_path


def train(*arguments, options=()):
    name = f"experiment_name=damage{next(numbers)}"
    return main(
        ["train", "config.py", "--work-dir", "run", *arguments, "--cfg-options", name, *options]
    )


def half(path):
    content = Path(path).read_bytes()
    Path(path).write_bytes(content[: len(content) // 2])


def process(*arguments):
    """``train`` as a process of its own."""
    command = [sys.executable, "-m", "xlength.cli", "train", "config.py", "--work-dir", "run"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run([*command, *arguments], capture_output=True, text=True, env=env)


def test_the_latest_is_passed_over_with_one_warning_that_names_it_and_the_one_before(here):
    assert train() == 0
    for number in (8, 12):
        half(f"run/iter_{number}.pth")
    result = process("--resume")
    assert result.returncode == 0, result.stderr
    warnings = [line for line in result.stdout.splitlines() if "is damaged" in line]
    assert len(warnings) == 2, "one for each"
    for number, line in zip((12, 8), warnings, strict=True):
        assert f"run/iter_{number}.pth is damaged: it has no end" in line
        assert "The run continues from run/iter_4.pth" in line
    assert "resumed epoch: 0, iter: 4" in result.stdout


def test_a_damaged_one_that_is_named_stops_the_process_with_a_command_to_copy(here):
    assert train() == 0
    half("run/iter_12.pth")
    result = process("--resume", "run/iter_12.pth")
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("xlength: error: config.py: the checkpoint run/iter_12.pth is damaged:")
    assert line.endswith("; the one before it is whole: --resume run/iter_8.pth")
    assert process(*line.split()[-2:]).returncode == 0


def test_resume_passes_over_a_damaged_checkpoint_and_goes_on_as_undisturbed(here):
    assert train("--resume", "--seed", "3") == 0  # none is there: a new run
    right = torch.load("run/iter_12.pth", weights_only=False)["state_dict"]
    half("run/iter_12.pth")
    assert train("--resume") == 0
    logs = "".join(log.read_text() for log in Path("run").glob("*/*.log"))
    assert "resumed epoch: 1, iter: 8" in logs
    again = torch.load("run/iter_12.pth", weights_only=False)["state_dict"]
    assert all(torch.equal(right[name], again[name]) for name in right)


def test_a_checkpoint_that_was_written_just_before_a_kill_is_the_last_one_from_then_on(here):
    """mmengine writes its name into ``last_checkpoint`` afterwards."""
    assert train() == 0
    note = Path("run/last_checkpoint")
    last = note.read_text()
    note.write_text(last.replace("iter_12", "iter_8"))
    assert train("--resume") == 0  # nothing is left to train
    assert Path(note.read_text()).resolve() == Path(last).resolve()


def test_a_checkpoint_without_a_note_is_continued_and_not_begun_anew(here):
    """As after a kill between the first checkpoint and its note, or where it alone was copied."""
    assert train() == 0
    Path("run/last_checkpoint").unlink()
    for number in (8, 12):
        Path(f"run/iter_{number}.pth").unlink()
    result = process("--resume")
    assert result.returncode == 0, result.stderr
    assert "a new run begins" not in result.stdout
    assert "resumed epoch: 0, iter: 4" in result.stdout


def test_a_folder_that_is_named_is_answered_with_the_newest_checkpoint_in_it(here, capsys):
    assert train() == 0
    assert train("--resume", "run") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    newest = Path("run/last_checkpoint").read_text()
    assert "run is a folder; name a checkpoint in it (the newest is run/iter_12.pth)" in error
    assert Path(newest).name == "iter_12.pth"
    os.mkdir("empty")
    assert train("--resume", "empty") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "empty is a folder; a checkpoint is a file" in error


def test_a_damaged_checkpoint_that_is_named_is_refused_with_an_offer(here, capsys):
    assert train() == 0
    half("run/iter_12.pth")
    assert train("--resume", "run/iter_12.pth") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "iter_12.pth is damaged" in error and "--resume run/iter_8.pth" in error
    for number in (4, 8):
        half(f"run/iter_{number}.pth")
    assert train("--resume") == 2
    assert "every checkpoint in run is damaged" in capsys.readouterr().err


def test_a_changed_batch_size_ends_with_2_and_one_line_unless_the_epoch_may_begin_anew(
    here, capsys
):
    assert train(options=["train_cfg.max_epochs=1"]) == 0
    smaller = ["train_dataloader.batch_size=2"]
    assert train("--resume", options=smaller) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "batch_size was 4 and is 2" in error
    (here / "config.py").write_text(
        CONFIG.replace(
            "dict(type='Diary')", "dict(type='Diary'), dict(type='DataStateHook', strict=False)"
        )
    )
    assert train("--resume", options=smaller) == 0
