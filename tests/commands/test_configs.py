"""Finding, listing and copying the configs that come with xlength."""

import os
import subprocess
import sys
import tarfile
from configparser import ConfigParser
from pathlib import Path

import pytest
from mmengine.config import Config

from xlength.cli import main
from xlength.runtime.config_file import find_config
from xlength.runtime.configs import named_configs
from xlength.runtime.flatten import flat_text

ROOT = Path(__file__).resolve().parents[2]


def test_every_config_copied_is_one_file_with_the_same_values(tmp_path):
    configs = named_configs()
    assert len(configs) > 3
    for name, file in configs.items():
        assert main(["copy-cfg", name, str(tmp_path)]) == 0
        copy = tmp_path / f"{name}_copy.py"
        text = copy.read_text()
        assert "_base_" not in text and "read_base" not in text
        assert Config.fromfile(copy).to_dict() == Config.fromfile(file).to_dict()


def test_a_copy_keeps_names_and_comments_and_begins_with_the_settings():
    text = flat_text(named_configs()["qwen3_8b_lora_messages_8k_e3"])
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert lines[0].startswith("data_files = ")
    assert "batch_size=batch_size" in text  # not the number
    assert "# per device" in text


def test_dicts_that_a_config_overrides_are_merged_in_the_copy(tmp_path):
    (tmp_path / "base.py").write_text(
        "model = dict(type='A', inner=dict(x=1, y=2), gone=dict(z=3))\nlr = 1\nuse = [lr]\n"
    )
    child = tmp_path / "child.py"
    child.write_text(
        "# Mine.\n_base_ = ['base.py']\n"
        "model = dict(inner=dict(y=5), gone=dict(_delete_=True, w=1))\nother = _base_.lr\n"
    )
    text = flat_text(child)
    (tmp_path / "flat.py").write_text(text)
    flat = Config.fromfile(tmp_path / "flat.py")
    assert flat.model == dict(type="A", inner=dict(x=1, y=5), gone=dict(w=1))
    assert flat.to_dict() == Config.fromfile(child).to_dict()
    assert text.startswith("# Mine.")


def test_a_config_that_cannot_be_joined_as_text_is_dumped_with_the_same_values(tmp_path):
    # `use` was made with the base's lr, so lines put one after the other would mean another thing.
    (tmp_path / "base.py").write_text("lr = 1\nuse = [lr]\n")
    child = tmp_path / "child.py"
    child.write_text("_base_ = ['base.py']\nlr = 2\n")
    (tmp_path / "flat.py").write_text(flat_text(child))
    flat = Config.fromfile(tmp_path / "flat.py")
    assert (flat.lr, flat.use) == (2, [1])


def test_a_copy_is_not_overwritten_without_force(tmp_path, capsys):
    target = tmp_path / "mine.py"
    assert main(["copy-cfg", "default_sampler", str(target)]) == 0
    target.write_text("edited = True\n")
    assert main(["copy-cfg", "default_sampler", str(target)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert target.read_text() == "edited = True\n"
    assert main(["copy-cfg", "default_sampler", str(target), "--force"]) == 0
    assert "batch_size" in target.read_text()


def test_names_are_listed_by_pattern_and_a_misspelt_one_is_answered_with_the_close_one(capsys):
    assert main(["list-cfg", "-p", "QWEN3"]) == 0
    out = capsys.readouterr().out
    assert "qwen3_8b_lora_messages_8k_e3\n" in out and "default_sampler" not in out
    assert main(["list-cfg", "-p", "nothing like it"]) == 2
    assert main(["copy-cfg", "default_smapler"]) == 2
    assert "did you mean 'default_sampler'" in capsys.readouterr().err


def test_a_file_that_is_not_there_is_not_taken_for_the_config_of_its_name(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main(["log-dataset", "python_docs_pool.py"]) == 2
    said = capsys.readouterr().err
    assert "no file 'python_docs_pool.py' here" in said
    assert "xlength copy-cfg python_docs_pool makes one" in said
    assert main(["copy-cfg", "python_docs_pool", "."]) == 0
    assert main(["log-dataset", "python_docs_pool.py"]) == 2
    assert "python_docs_pool_copy.py is there" in capsys.readouterr().err
    (tmp_path / "python_docs_pool.py").write_text("a = 1\n")
    assert find_config("python_docs_pool.py") == "python_docs_pool.py"


def test_every_folder_of_configs_is_installed():
    options = ConfigParser()
    options.read(ROOT / "setup.cfg")
    installed = dict(options["options.data_files"])
    folders = {file.parent.relative_to(ROOT).as_posix() for file in ROOT.glob("configs/**/*.py")}
    assert {f"share/xlength/{folder}": f"{folder}/*.py" for folder in folders} == installed


@pytest.mark.long
def test_configs_are_found_and_copied_where_xlength_was_installed_by_pip(tmp_path):
    source = tmp_path / "source"  # a copy, since a build writes beside its sources
    source.mkdir()
    files = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\n")
    with tarfile.open(tmp_path / "source.tar", "w") as tar:
        for name in files:
            if name and (ROOT / name).is_file():
                tar.add(ROOT / name, name)
    with tarfile.open(tmp_path / "source.tar") as tar:
        tar.extractall(source, filter="data")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    installed = subprocess.run(
        [*pip, "--target", str(tmp_path / "site"), str(source)], capture_output=True, text=True
    )
    assert installed.returncode == 0, installed.stderr[-1000:]
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    code = (
        "import sys; from xlength.cli import main; from xlength.runtime.configs import config_root;"
        "print(config_root()); sys.exit(main(['copy-cfg', 'qwen3_8b_lora_messages_8k_e3', '.']))"
    )
    copied = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
    )
    assert copied.returncode == 0, copied.stderr
    assert str(tmp_path / "site") in copied.stdout
    copy = tmp_path / "qwen3_8b_lora_messages_8k_e3_copy.py"
    assert Config.fromfile(copy).max_length == 8192
