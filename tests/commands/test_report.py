"""xlength report: from lengths, a config or a shape to a choice."""

import json

import numpy as np
import pytest
from mmengine.config import Config

import tests.tiny  # noqa: F401  registers the data
from tests.report.test_measures import tool_chats
from xlength.cli import main
from xlength.commands import InputError
from xlength.plan.groups import fingerprint
from xlength.report.configs import parse_options

KEYS = {
    "name",
    "steps",
    "padding_efficiency",
    "rank_balance",
    "wall_efficiency_tokens",
    "wall_efficiency_attention",
    "step_correlation",
    "batchmate_repeat",
    "repeated",
    "dropped",
    "plan_seconds",
}


@pytest.fixture
def lengths(tmp_path):
    path = tmp_path / "lengths.npy"
    np.save(path, tool_chats(1500).astype(np.int32))
    return path


def report(source, *options, tmp_path=None):
    """The JSON of a report."""
    out = tmp_path / "report.json"
    assert main(["report", str(source), "--json", str(out), *map(str, options)]) == 0
    return json.loads(out.read_text())


def config_file(tmp_path, sampler, batch_sampler="None", more=""):
    path = tmp_path / "config.py"
    path.write_text(
        "default_scope = 'mmengine'\n"
        "train_dataloader = dict(batch_size=4,\n"
        f"    dataset=dict(type='TinyText', length={(tool_chats(300) // 10).tolist()}),\n"
        f"    sampler={sampler}, batch_sampler={batch_sampler},\n"
        "    collate_fn=dict(type='default_collate_fn'))\n"
        f"optim_wrapper = dict(accumulative_counts=2)\n{more}"
    )
    return path


def test_the_json_has_the_columns_of_the_design(lengths, tmp_path, capsys):
    found = report(lengths, "--world-size", 4, "--batch-size", 8, tmp_path=tmp_path)
    assert (found["num_samples"], found["world_size"], found["batch_size"]) == (1500, 4, 8)
    assert found["cost"] == "attention"
    names = [row["name"] for row in found["strategies"]]
    assert names[:3] == ["DefaultSampler", "LengthGroupedSampler", "FixedBatch"]
    assert {"TokenBudget", "Packing"} <= set(names)
    assert all(set(row) >= KEYS for row in found["strategies"])
    assert found["recommended"] in names
    assert found["lengths"]["fingerprint"] == fingerprint(tool_chats(1500))
    out = capsys.readouterr().out
    assert f"* {found['recommended']}" in out
    assert found["config_lines"] in out and "train_dataloader.update(" in out
    assert all(name in out for name in names)


def test_what_a_config_does_now_comes_first_and_its_lines_can_be_pasted(tmp_path, capsys):
    path = config_file(tmp_path, "dict(type='DefaultSampler', shuffle=True)")
    found = report(path, "--world-size", 2, tmp_path=tmp_path)
    assert found["strategies"][0]["kind"] == "config"
    assert found["base"] == "DefaultSampler" and found["strategies"][0]["steps"] == 38
    assert [row["name"] for row in found["strategies"]].count("DefaultSampler") == 1
    assert (found["batch_size"], found["accumulate"]) == (4, 2)
    assert "now: DefaultSampler" in capsys.readouterr().out
    path.write_text(path.read_text() + found["config_lines"])
    again = report(path, "--world-size", 2, tmp_path=tmp_path)
    assert again["strategies"][0]["name"] == found["recommended"]
    measured = {row["name"]: row for row in found["strategies"]}[found["recommended"]]
    for key in KEYS - {"plan_seconds"}:
        assert again["strategies"][0][key] == pytest.approx(measured[key]), key
    assert again["config_lines"] == "" and again["verdict"].startswith("Keep this config")


def test_a_config_that_inherits_its_loader_gets_lines_that_are_merged(tmp_path):
    config_file(tmp_path, "dict(type='DefaultSampler', shuffle=True)")
    child = tmp_path / "child.py"
    child.write_text("_base_ = ['config.py']\n")
    found = report(child, "--world-size", 2, tmp_path=tmp_path)
    assert found["config_lines"].startswith("train_dataloader = dict(")
    child.write_text("_base_ = ['config.py']\n" + found["config_lines"])
    config = Config.fromfile(child)
    assert config.train_dataloader.dataset.type == "TinyText"
    assert "shuffle" not in config.train_dataloader.sampler


@pytest.mark.parametrize(
    ("sampler", "batch_sampler", "name"),
    [
        (
            "dict(type='LengthGroupedSampler', per_device_batch_size=8)",
            "None",
            "LengthGroupedSampler",
        ),
        (
            "dict(type='PlanSampler', plan=dict(type='FixedBatch', batch_size=4))",
            "dict(type='PlanBatchSampler')",
            "FixedBatch",
        ),
        ("dict(type='InfiniteSampler')", "None", None),
    ],
)
def test_a_configs_sampler_is_simulated_if_it_is_known(sampler, batch_sampler, name, tmp_path):
    found = report(
        config_file(tmp_path, sampler, batch_sampler), "--world-size", 3, tmp_path=tmp_path
    )
    first = found["strategies"][0]
    assert (first["name"] if first["kind"] == "config" else None) == name


def test_a_configs_plan_says_what_the_others_are_compared_at(tmp_path):
    plan = "dict(type='PlanSampler', plan=dict(type='TokenBudget', max_tokens=700))"
    path = config_file(tmp_path, plan, "dict(type='PlanBatchSampler')")
    found = report(path, "--world-size", 2, tmp_path=tmp_path)
    mean = np.mean(tool_chats(300) // 10)
    assert found["batch_size"] == round(700 / mean)
    rows = {(row["name"], row["kind"]): row for row in found["strategies"]}
    assert rows["Packing", "plan"]["options"]["max_length"] == 700


def test_a_config_of_ready_packs_is_compared_on_the_samples_in_them(tmp_path):
    path = config_file(tmp_path, "dict(type='DefaultSampler', shuffle=True)")
    text = path.read_text().replace(
        "dataset=dict(", "dataset=dict(type='PackedDataset', dataset=dict("
    )
    path.write_text(text.replace("),\n    sampler", "), max_length=600),\n    sampler"))
    found = report(path, "--world-size", 2, tmp_path=tmp_path)
    assert found["num_samples"] == 300 and found["config_lines"] == ""
    assert "ready packs of up to" in found["warnings"][0]
    packing = next(row for row in found["strategies"] if row["name"] == "Packing")
    assert packing["options"]["max_length"] <= 600


def test_max_length_cuts_and_says_what_is_lost(lengths, tmp_path, capsys):
    found = report(lengths, "--max-length", 600, tmp_path=tmp_path)
    over = tool_chats(1500) > 600
    assert f"{over.sum()} samples are longer than max_length=600" in " ".join(found["warnings"])
    assert f"first at row {int(np.argmax(over))}" in capsys.readouterr().out.replace("\n", " ")
    assert found["lengths"]["max"] == 600


@pytest.mark.parametrize(
    ("values", "warning"),
    [
        ([5, 9, 4, 0, 7, 8, 6, 0, 3, 2] * 20, "40 samples are of length zero, first at row 3"),
        ([-3, -4, -5] * 50, "only one modality was found"),
        ([7] * 300, "all lengths are 7"),
        ([10, 12, 14, 9] * 500 + [4000], "row 2000 with 4,000 tokens, alone decides"),
        ([5, 6, 7], "only 3 samples for steps of 128"),
        ([10] * 4000 + [900] * 4000, "shuffle before streaming"),
    ],
)
def test_what_is_peculiar_about_lengths_is_said(values, warning, tmp_path):
    np.save(tmp_path / "l.npy", np.array(values))
    found = report(tmp_path / "l.npy", tmp_path=tmp_path)
    assert warning in " ".join(found["warnings"])
    assert not [w for w in found["warnings"] if "Mean of empty" in w]


def test_ordinary_lengths_are_not_warned_about(tmp_path):
    found = report("--shape=lognormal:5.5,0.5:8,2048", tmp_path=tmp_path)
    assert found["warnings"] == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "give either SOURCE"),
        (["{lengths}", "--shape", "capped"], "give either SOURCE"),
        (["--shape", "cappd"], "did you mean 'capped'"),
        (["nothing.npy"], "there is no file nothing.npy"),
        (["no_such_config"], "there is no config"),
        (["{lengths}", "--cost", "tokns"], "--cost tokns"),
        (["{lengths}", "--cost", "attention:0"], "--cost attention:0"),
        (["{lengths}", "--max-tokens", "100"], "max_tokens=100 is less than"),
        (["{text}"], "measure it first: xlength measure"),
        (["{table}"], "one length per sample, got shape (2, 2)"),
        (["{floats}"], "whole numbers, 1 are not, the first (0.5) at row 1"),
        (["{broken}"], "no file of lengths"),
    ],
)
def test_mistakes_end_with_one_line_and_code_2(options, message, lengths, tmp_path, capsys):
    np.save(tmp_path / "table.npy", np.ones((2, 2)))
    np.save(tmp_path / "floats.npy", np.array([1.0, 0.5]))
    (tmp_path / "broken.npy").write_bytes(b"no numpy")
    (tmp_path / "chats.jsonl").write_text("{}")
    names = {
        "lengths": lengths,
        "table": tmp_path / "table.npy",
        "floats": tmp_path / "floats.npy",
        "broken": tmp_path / "broken.npy",
        "text": tmp_path / "chats.jsonl",
    }
    assert main(["report", *(option.format(**names) for option in options)]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error and "\n" not in error


def test_the_cost_can_be_tokens_or_have_its_own_crossover(lengths, tmp_path):
    tokens = report(lengths, "--cost", "tokens", tmp_path=tmp_path)
    assert tokens["cost"] == "tokens" and tokens["crossover"] == 12288
    assert 'cost="tokens"' in tokens["config_lines"]
    short = report(lengths, "--cost", "attention:500", tmp_path=tmp_path)
    assert short["crossover"] == 500
    assert 'cost=dict(type="attention", crossover=500)' in short["config_lines"]
    assert (
        short["strategies"][0]["wall_efficiency_attention"]
        < tokens["strategies"][0]["wall_efficiency_attention"]
    )


def test_the_report_needs_no_matplotlib_where_no_figures_are_asked_for(lengths):
    import subprocess
    import sys

    code = (
        "import sys; from xlength.cli import main;"
        f"code = main(['report', {str(lengths)!r}]);"
        "sys.exit(code or 10 * ('matplotlib.figure' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_brackets_in_a_files_name_are_printed_as_they_are(lengths, tmp_path, capsys):
    path = lengths.rename(tmp_path / "lengths[v2][bold].npy")
    assert main(["report", str(path), "--world-size", "2", "--batch-size", "4"]) == 0
    assert "lengths[v2][bold].npy: 1,500 samples" in capsys.readouterr().out


def test_a_negative_seed_is_refused_by_name(lengths, capsys):
    with pytest.raises(SystemExit):
        main(["report", str(lengths), "--seed", "-1"])
    assert "--seed: must be at least 0, got -1" in capsys.readouterr().err


def test_settings_on_the_command_line_are_read_as_mmengine_reads_them():
    pairs = ["a.b=1", "c=[1,(2,x)]", "d=True", "e=f=g", "h=None", "i=1,2"]
    found = parse_options(pairs)
    assert found == {"a.b": 1, "c": [1, (2, "x")], "d": True, "e": "f=g", "h": None, "i": [1, 2]}
    assert parse_options(None) == {}
    for pair, what in (("a", "KEY=VALUE, got 'a'"), ("a=[(1,2]", "a=[(1,2]: Imbalanced brackets")):
        with pytest.raises(InputError) as error:
            parse_options([pair])
        assert what in str(error.value)
