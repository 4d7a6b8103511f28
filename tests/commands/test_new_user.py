"""From a JSONL file to a pasted, working config, as docs/tuning.md tells it: five commands."""

import json
import re

from tests.datasets.samples import CHATML, small_tokenizer
from xlength.cli import main
from xlength.plan.shapes import shape_lengths


def test_a_new_user_gets_from_chats_to_a_run_with_the_recommended_plan(
    tmp_path, monkeypatch, capsys
):
    from transformers import LlamaConfig, LlamaForCausalLM

    monkeypatch.chdir(tmp_path)
    small_tokenizer(chat_template=CHATML, pad_token="<|endoftext|>").save_pretrained("model")
    config = LlamaConfig(
        vocab_size=400,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=2048,
    )
    LlamaForCausalLM(config).save_pretrained("model")
    words = shape_lengths("lognormal:3.2,1.0:2,300", 400, seed=1)
    with open("chats.jsonl", "w") as file:
        for i, count in enumerate(words.tolist()):
            messages = [
                {"role": "user", "content": f"question {i}"},
                {"role": "assistant", "content": "fox " * count},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")

    assert main(["copy-cfg", "qwen3_8b_lora_messages_8k_e3", "."]) == 0
    copy = tmp_path / "qwen3_8b_lora_messages_8k_e3_copy.py"
    text = copy.read_text()
    for setting, value in (
        ("data_files", '"chats.jsonl"'),
        ("pretrained_model_name_or_path", '"model"'),
        ("max_length", "1024"),
        ("batch_size", "2"),
    ):
        text, count = re.subn(rf"^{setting} = .*", f"{setting} = {value}", text, flags=re.M)
        assert count == 1  # each is one line, at the top
    copy.write_text(text)

    assert main(["log-dataset", copy.name, "--num-samples", "1"]) == 0
    assert "[[fox fox" in capsys.readouterr().out

    assert main(["report", copy.name, "--world-size", "1"]) == 0
    printed = capsys.readouterr().out
    lines = printed.split("At the end of the config:\n\n")[1]
    copy.write_text(f"{text}\n{lines}")

    assert main(["report", copy.name, "--world-size", "1"]) == 0
    assert "Keep this config" in capsys.readouterr().out

    options = ["train_cfg.max_epochs=None", "train_cfg.max_iters=4", "model.llm.dtype=float32"]
    options += ["train_dataloader.num_workers=0", "default_hooks.logger.interval=1"]
    assert main(["train", copy.name, "--work-dir", "run", "--cfg-options", *options]) == 0
    (log,) = (tmp_path / "run").glob("*/*.log")
    text = log.read_text()
    named = re.findall(r'type="xlength\.(\w+)"', lines)
    assert f"{named[1]}(" in text if "PlanSampler" in named else f"{named[0]} is used" in text
    measured, predicted = re.search(
        r"wall_efficiency ([\d.]+) \(predicted ([\d.]+)\)", text
    ).groups()
    assert abs(float(measured) - float(predicted)) < 0.001
