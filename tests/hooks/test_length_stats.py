"""LengthStatsHook and DatasetInfoHook in real Runners: log, JSON and TensorBoard's files."""

import json
import os
import re
import socket
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from mmengine.config import Config
from mmengine.runner import Runner

import tests.tiny as tiny
from xlength.hooks.batch_facts import batch_facts
from xlength.plan import Cost
from xlength.plan.cost import TOKENS

LENGTHS = [3 + (7 * i) % 23 for i in range(22)]


def run(work_dir, train_cfg=None, hook=None, **options):
    """Train in batches of 4 and return the runner and its lines of JSON."""
    sampler = dict(type="LengthGroupedSampler", per_device_batch_size=4, round_up=False)
    loader = dict(
        batch_size=4,
        dataset=dict(type="TinyText", length=LENGTHS),
        sampler=sampler,
        collate_fn=dict(type="tiny_collate"),
    )
    runner = Runner(
        model=dict(type="SupervisedFinetune", llm=tiny.llama(), use_activation_checkpointing=False),
        work_dir=str(work_dir),
        train_dataloader=options.pop("train_dataloader", loader),
        train_cfg=train_cfg or dict(type="TrainLoop", max_epochs=2),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
        default_hooks=dict(logger=dict(type="LoggerHook", interval=5)),
        custom_hooks=[hook or dict(type="LengthStatsHook"), dict(type="DatasetInfoHook")],
        randomness=dict(seed=1),
        default_scope="mmengine",
        log_processor=dict(by_epoch=False),
        experiment_name=work_dir.name,
        **options,
    )
    runner.train()
    scalars = Path(runner.log_dir, "vis_data/scalars.json").read_text().splitlines()
    lines = [json.loads(line) for line in scalars]
    return runner, [line for line in lines if "loss" in line]


def expected(sampler, epochs, interval):
    """Padding efficiency of each interval of steps, from the plan alone."""
    real, padded = [], []
    for epoch in range(epochs):
        order = sampler.order(epoch)
        for start in range(0, len(order), 4):
            lengths = np.array(LENGTHS)[order[start : start + 4]]
            real.append(lengths.sum())
            padded.append(len(lengths) * lengths.max())
    intervals = range(0, len(real) - interval + 1, interval)
    per_interval = [sum(real[i : i + interval]) / sum(padded[i : i + interval]) for i in intervals]
    return per_interval, sum(real) / sum(padded)


@pytest.mark.parametrize(
    "loop",
    [
        dict(type="TrainLoop", max_epochs=2),
        dict(type="IterBasedTrainLoop", max_iters=12),
    ],
)
def test_each_line_has_the_interval_of_the_plan(loop, tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    runner, lines = run(tmp_path, loop)
    intervals, total = expected(runner.train_dataloader.sampler, 2, 5)
    assert [line["step"] for line in lines] == [5, 10]
    assert [line["padding_efficiency"] for line in lines] == pytest.approx(intervals)
    assert intervals[0] != pytest.approx(intervals[1])
    assert all(line["tokens_per_second"] > 0 for line in lines)
    assert "rank_balance" not in lines[0]
    stats = runner.message_hub.get_info("length_stats")
    assert stats["padding_efficiency"] == pytest.approx(total)


def test_the_log_and_tensorboard_show_the_same_numbers(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    backends = [dict(type="LocalVisBackend"), dict(type="TensorboardVisBackend")]
    visualizer = dict(type="Visualizer", vis_backends=backends, name=tmp_path.name)
    runner, lines = run(tmp_path, visualizer=visualizer)
    events = EventAccumulator(str(Path(runner.log_dir, "vis_data")))
    events.Reload()
    log = Path(runner.log_dir, f"{runner.timestamp}.log").read_text()
    for name in ("padding_efficiency", "tokens_per_second", "wall_efficiency"):
        shown = [event.value for event in events.Scalars(name)]
        assert shown == pytest.approx([line[name] for line in lines], rel=1e-5)
        for line in lines:
            assert f"{name}: {line[name]:.4f}" in log
    assert "Over the run: padding_efficiency" in log


def test_tokens_per_second_agree_with_the_timer(tmp_path):
    runner, lines = run(tmp_path)
    order = np.concatenate([runner.train_dataloader.sampler.order(epoch) for epoch in (0, 1)])
    tokens = np.array(LENGTHS)[order]
    first = tokens[: 5 * 4].sum() / (5 * lines[0]["time"])  # the first five batches are full
    assert lines[0]["tokens_per_second"] == pytest.approx(first, rel=0.1)


def test_the_start_of_a_run_describes_its_data(tmp_path):
    runner, _ = run(tmp_path)
    log = Path(runner.log_dir, f"{runner.timestamp}.log").read_text()
    assert "Num train samples 22" in log
    assert str(tiny.sample(0, LENGTHS[0])["input_ids"]) in log
    assert f"n 22, min 3, median 14, 90 % 23, max 25, total {sum(LENGTHS)}" in log
    assert "train order: LengthGroupedSampler(per_device_batch_size=4" in log


class Words:
    """A tokenizer that decodes token 7 to ``<7>``."""

    def decode(self, ids):
        return "".join(f"<{i}>" for i in ids)


def test_the_first_sample_is_decoded_with_its_images():
    from xlength.hooks.dataset_info import DatasetInfoHook

    hook = DatasetInfoHook(tokenizer=dict(type=Words))
    assert hook.decode([1, 2, -200, 3]) == "<1><2><image><3>"
    assert hook.decode([1, *[-200] * 576, 3]) == "<1><image>(x 576)<3>"
    assert hook.decode([1, *[7] * 576, 3]) == "<1><7>(x 576)<3>"
    assert DatasetInfoHook(Words(), is_intern_repo_dataset=True).decode([1, -2]) == "<1><2>"


def test_by_default_the_text_is_that_of_the_configs_tokenizer_and_as_short_as_asked(tmp_path):
    def log_of(name, **options):
        hook = dict(type="DatasetInfoHook", **options)
        cfg = Config(dict(tokenizer=dict(type="tests.hooks.test_length_stats.Words")))
        once = dict(type="TrainLoop", max_epochs=1)
        runner, _ = run(tmp_path / name, once, hook, cfg=cfg)
        return Path(runner.log_dir, f"{runner.timestamp}.log").read_text()

    ids = tiny.sample(0, LENGTHS[0])["input_ids"]
    text = "".join(f"<{i}>" for i in ids)
    assert f"train example:\n{text}\n" in _messages(log_of("whole"))
    short = f"{text[:3]} [... {len(text) - 5} characters more ...] {text[-2:]}"
    assert f"train example:\n{short}\n" in _messages(log_of("short", max_characters=5))


def _messages(log):
    """A log without the times."""
    return re.sub(r"^\S+ \S+ - mmengine - INFO - ", "", log, flags=re.M)


def test_of_a_stream_no_sample_is_read_for_the_description(tmp_path):
    data = dict(type="TinyText", length=LENGTHS)
    stream = dict(type="LengthPoolSortDataset", pool_size=8, micro_batch_size=4, dataset=data)
    loader = dict(batch_size=4, dataset=stream, sampler=None, collate_fn=dict(type="tiny_collate"))
    runner, _ = run(tmp_path, dict(type="TrainLoop", max_iters=5), train_dataloader=loader)
    log = Path(runner.log_dir, f"{runner.timestamp}.log").read_text()
    assert "LengthPoolSortDataset is a stream" in log and "train example" not in log


def facts(data, cost=TOKENS):
    found = batch_facts({"data": data, "data_samples": None}, cost)
    return (found.num_tokens, found.num_padded, found.cost)


def test_batches_of_every_kind_say_how_much_of_them_is_real():
    ids = torch.zeros(2, 10, dtype=torch.long)
    mask = torch.zeros(2, 10, dtype=torch.bool)
    mask[0, :10] = mask[1, :4] = True
    attention = Cost(crossover=10)
    assert facts({"input_ids": ids, "attention_mask": mask}) == (14, 20, 20)
    assert facts({"input_ids": ids, "attention_mask": mask}, attention) == (14, 20, 40)
    assert facts({"input_ids": ids, "lengths": torch.tensor([10, 4])}) == (14, 20, 20)
    pack = torch.zeros(1, 16, dtype=torch.long)
    ends = torch.tensor([0, 10, 14, 16], dtype=torch.int32)  # the last two are padding
    packed = {"input_ids": pack, "cu_seqlens": ends, "lengths": torch.tensor([10, 4])}
    assert facts(packed) == (14, 16, 16)
    assert facts(packed, attention) == pytest.approx((14, 16, 16 + 10 + 1.6 + 0.4))
    xtuner = {"input_ids": pack[:, :14], "cumulative_len": [ends[:3]], "max_seqlen": 10}
    assert facts(xtuner) == (14, 14, 14)
    assert batch_facts({"inputs": ids}, TOKENS) is None
    assert batch_facts([1, 2], TOKENS) is None


def test_wrong_options_are_named():
    from xlength.hooks.length_stats import LengthStatsHook

    with pytest.raises(ValueError, match="interval must be at least 1"):
        LengthStatsHook(interval=0)
    with pytest.raises(ValueError, match="cost"):
        LengthStatsHook(cost="tokns")
    with pytest.raises(ValueError, match=r"cost=multimodal\(.* several columns .*'attention' or"):
        LengthStatsHook(cost=dict(type="multimodal", weights=(1, 0.5)))


def two_ranks(folder, still):
    """What rank 0 and rank 1 found in real processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_rank, args=(port, str(folder), still), nprocs=2)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def test_a_rank_that_stands_still_is_waited_for_as_long_as_is_configured(tmp_path):
    first, _ = two_ranks(tmp_path, still=True)
    assert 2 < first["seconds"] < 20, "3 s are configured"
    assert first["alone"] == ["padding_efficiency", "tokens_per_second"]


def test_ranks_are_compared_and_a_rank_that_ends_stops_nobody(tmp_path):
    first, second = two_ranks(tmp_path, still=False)
    assert first["figures"] == pytest.approx(second["figures"], rel=1e-6)
    figures = first["figures"]
    # Rank 0 computes 2 x 10 tokens of which 14 are real, then 1 x 4; rank 1 1 x 10, then 2 x 4.
    assert figures["padding_efficiency"] == pytest.approx((14 + 4 + 10 + 8) / (20 + 4 + 10 + 8))
    assert figures["rank_balance"] == pytest.approx((15 / 20 + 6 / 8) / 2)
    assert figures["wall_efficiency"] == pytest.approx((14 + 4 + 10 + 8) / (2 * (20 + 8)))
    assert first["alone"] == ["padding_efficiency", "tokens_per_second"]
    assert second["alone"] is None


def _rank(rank, port, folder, still):
    from types import SimpleNamespace

    from xlength.hooks.length_stats import LengthStatsHook

    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2
    )
    hook = LengthStatsHook("tokens", interval=2)
    shown = {}
    hub = SimpleNamespace(update_scalar=lambda name, value: shown.update({name: value}))
    loader = SimpleNamespace(sampler=None, batch_size=1)
    cfg = dict(env_cfg=dict(dist_cfg=dict(timeout=3)))
    runner = SimpleNamespace(hooks=[], message_hub=hub, train_dataloader=loader, iter=0, cfg=cfg)
    hook.before_train(runner)
    hook.before_train_epoch(runner)
    lengths = [[[10, 4], [4]], [[10], [4, 4]]][rank]

    def steps():
        for i, batch in enumerate(lengths):
            ids = torch.zeros(len(batch), max(batch), dtype=torch.long)
            data = {"data": {"input_ids": ids, "lengths": torch.tensor(batch)}}
            hook.after_train_iter(runner, i, data)

    steps()
    figures = {name.removeprefix("train/"): value for name, value in shown.items()}
    shown.clear()
    alone, seconds = None, None
    if rank == 0:  # rank 1 has ended its training, or stands still
        begin = time.monotonic()
        steps()
        seconds = time.monotonic() - begin
        alone = sorted(name.removeprefix("train/") for name in shown)
    found = {"figures": figures, "alone": alone, "seconds": seconds}
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    until = time.monotonic() + 30
    while rank == 1 and still and time.monotonic() < until and not Path(folder, "0.json").exists():
        time.sleep(0.1)
    os._exit(0)  # gloo's threads can abort an ordinary end
