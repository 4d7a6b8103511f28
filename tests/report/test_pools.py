"""xlength report --stream: a table, a curve, and lines that work."""

import json
import re

import numpy as np
import pytest
from mmengine.config import Config
from mmengine.registry import DATASETS

import tests.tiny  # noqa: F401  registers the data
from tests.report.test_measures import tool_chats
from xlength.cli import main
from xlength.datasets.pool_sort import LengthPoolSortDataset

LENGTHS = (tool_chats(2000) // 10 + 1).tolist()


@pytest.fixture
def lengths(tmp_path):
    path = tmp_path / "lengths.npy"
    np.save(path, np.array(LENGTHS))
    return path


def config_file(tmp_path, dataset):
    path = tmp_path / "config.py"
    path.write_text(
        f"train_dataloader = dict(batch_size=4, dataset={dataset}, sampler=None,\n"
        "    collate_fn=dict(type='default_collate_fn'))\n"
    )
    return path


def report(source, tmp_path, *options):
    out = tmp_path / "stream.json"
    command = ["report", str(source), "--stream", "--world-size", "2", "--json", str(out)]
    assert main([*command, "--num-workers", "1", "3", *map(str, options)]) == 0
    return json.loads(out.read_text())


def test_the_table_the_json_and_the_page_show_every_setting_and_the_choice(
    lengths, tmp_path, capsys
):
    page = tmp_path / "stream.html"
    found = report(lengths, tmp_path, "--batch-size", 4, "--html", page, "--png", tmp_path / "png")
    assert {row["num_workers"] for row in found["rows"]} == {1, 3}
    best = found["recommended"]
    assert best in found["rows"] and best["pool_size"] > 0
    out, text = capsys.readouterr().out, page.read_text()
    name = f"{best['mode']} {best['pool_size']:,}, micro-batch {best['micro_batch_size']}"
    assert f"* {name}" in out and f"Take {name}" in text
    assert found["reason"] in " ".join(out.split())
    assert text.count("<tr") == 1 + len(found["rows"]) // 2
    assert not re.search(r"https?://(?!www\.w3\.org)", text) and "<script" not in text
    assert (tmp_path / "png/pools.png").stat().st_size > 5000


def test_the_lines_put_a_pool_around_a_stream(lengths, tmp_path):
    found = report(lengths, tmp_path, "--batch-size", 4)
    path = config_file(tmp_path, f"dict(type='TinyStream', length={LENGTHS[:100]})")
    path.write_text(path.read_text() + found["config_lines"])
    config = Config.fromfile(path)
    dataset = DATASETS.build(config.train_dataloader.dataset)
    assert isinstance(dataset, LengthPoolSortDataset)
    assert dataset.options.pool_size == found["recommended"]["pool_size"]
    assert config.train_dataloader.sampler is None and config.train_dataloader.batch_size == 4


def test_a_config_on_a_stream_is_read_for_its_lengths_and_its_pool_is_updated(tmp_path, capsys):
    stream = f"dict(type='TinyStream', length={LENGTHS})"
    pool = f"dict(type='xlength.LengthPoolSortDataset', dataset={stream}, pool_size=8)"
    path = config_file(tmp_path, pool)
    found = report(path, tmp_path)
    assert found["num_samples"] == 2000 and found["batch_size"] == 4
    assert found["config_lines"].startswith('train_dataloader["dataset"].update(')
    path.write_text(path.read_text() + found["config_lines"])
    dataset = DATASETS.build(Config.fromfile(path).train_dataloader.dataset)
    assert dataset.options.pool_size == found["recommended"]["pool_size"] != 8
    assert main(["report", str(path)]) == 2
    assert "add --stream" in capsys.readouterr().err


def test_equal_lengths_need_no_pool(tmp_path, capsys):
    np.save(tmp_path / "l.npy", np.full(3000, 70))
    found = report(tmp_path / "l.npy", tmp_path)
    assert found["recommended"]["pool_size"] == 0 and found["config_lines"] == ""
    assert "all lengths are 70" in found["warnings"][0]
    assert "* no pool" in capsys.readouterr().out


def test_seconds_of_the_warm_up_are_shown_where_the_speed_is_known(lengths, tmp_path, capsys):
    found = report(lengths, tmp_path, "--samples-per-second", 100)
    row = next(row for row in found["rows"] if row["pool_size"] == 256)
    assert row["warmup_seconds"] == pytest.approx(2.56)
    assert "256 (2.6 s)" in capsys.readouterr().out
