"""Ranks that do not share one plan are stopped, on every rank, with what is different."""

import json
import socket
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from mmengine.runner import Runner

import tests.tiny as tiny
from xlength import LengthGroupedSampler, PlanBatchSampler, PlanSampler
from xlength.samplers.guard import check_same_plan

LENGTHS = [3 + (7 * i) % 23 for i in range(60)]
BUDGET = dict(type="TokenBudget", max_tokens=80)


def sampler(lengths=LENGTHS, rank=0, world=2, seed=1, epoch=0, plan=BUDGET):
    result = PlanSampler(tiny.TinyText(lengths), plan, seed=seed, dp_rank=rank, dp_world_size=world)
    result.set_epoch(epoch)
    return result


def compare(samplers):
    """``check_same_plan`` on the first of some ranks' samplers, each of which sends its row."""
    rows = []
    for one in samplers:
        check_same_plan(one, lambda row: rows.append(row))
    check_same_plan(samplers[0], lambda row: np.stack(rows))


def test_ranks_that_share_the_plan_go_on():
    compare([sampler(rank=rank) for rank in (0, 1)])
    grouped = [
        LengthGroupedSampler(tiny.TinyText(LENGTHS), 4, seed=1, dp_rank=rank, dp_world_size=2)
        for rank in (0, 1)
    ]
    compare(grouped)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (dict(lengths=LENGTHS[::-1]), "rank 1 differs from rank 0 in lengths"),
        (dict(seed=2), r"rank 1 differs from rank 0 in seed \(2 instead of 1\)"),
        (dict(epoch=4), r"rank 1 differs from rank 0 in epoch \(4 instead of 0\)"),
        (dict(plan={**BUDGET, "window": 8}), "rank 1 differs from rank 0 in options"),
        (dict(rank=0), "no process has data-parallel rank 1 of 2"),
    ],
)
def test_the_rank_that_differs_is_named_and_in_what(other, message):
    with pytest.raises(RuntimeError, match=message) as error:
        compare([sampler(rank=0), sampler(**{"rank": 1, **other})])
    assert "in plan" not in str(error.value)


def test_fewer_processes_than_data_parallel_ranks_are_refused():
    for ranks in ([0], [0, 1]):
        with pytest.raises(RuntimeError, match=f"data-parallel rank {len(ranks)} of 4"):
            compare([sampler(rank=rank, world=4) for rank in ranks])


def test_ranks_that_go_on_from_unlike_positions_or_histories_are_named():
    behind, ahead = sampler(rank=0), sampler(rank=1)
    ahead.load_state_dict(behind.state_dict(3))
    with pytest.raises(RuntimeError, match="rank 1 differs from rank 0 in position$"):
        compare([behind, ahead])
    behind.load_state_dict(sampler(rank=1).state_dict(3))
    compare([behind, ahead])
    other = sampler(rank=1)
    other.load_state_dict(sampler(world=4).state_dict(2))
    with pytest.raises(RuntimeError, match="rank 1 differs from rank 0 in position"):
        compare([sampler(rank=0), other])


def test_at_an_epochs_end_ranks_may_have_drawn_unequal_numbers():
    lengths = LENGTHS[:49]
    ranks = [
        LengthGroupedSampler(
            tiny.TinyText(lengths), 5, seed=1, round_up=False, dp_rank=rank, dp_world_size=2
        )
        for rank in (0, 1)
    ]
    for rank in ranks:
        rank.load_state_dict(rank.state_dict(rank.epoch_length()))
    compare(ranks)


def test_of_many_ranks_those_unlike_the_most_are_named():
    ranks = [sampler(rank=r, world=5, seed=9 if r in (0, 3) else 1) for r in range(5)]
    with pytest.raises(RuntimeError, match=r"ranks 0, 3 differ from rank 1 in seed \(9 instead"):
        compare(ranks)


def test_sequence_parallel_ranks_share_a_data_parallel_rank():
    compare([sampler(rank=rank // 2) for rank in range(4)])


def test_a_plan_that_comes_out_otherwise_is_noticed_though_its_inputs_are_the_same():
    other = sampler(rank=1)
    steps = other.epoch_plan().steps
    steps[0, 0], steps[1, 0] = steps[1, 0], steps[0, 0]
    with pytest.raises(RuntimeError, match="rank 1 differs from rank 0 in plan"):
        compare([sampler(rank=0), other])


def test_the_hook_compares_once_an_epoch_in_loops_by_epoch_and_by_iteration(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr(
        "xlength.hooks.plan_guard.check_same_plan",
        lambda sampler, timeout: seen.append(sampler.epoch),
    )
    steps = len(sampler(world=1))
    for loop in (
        dict(type="EpochBasedTrainLoop", max_epochs=3),
        dict(type="IterBasedTrainLoop", max_iters=3 * steps),
        dict(type="TrainLoop", max_epochs=3),
    ):
        runner(tmp_path, loop).train()
        assert [epoch for i, epoch in enumerate(seen) if i == 0 or epoch != seen[i - 1]] == [
            0,
            1,
            2,
        ]
        seen.clear()


def runner(work_dir, loop, lengths=LENGTHS, **options):
    return Runner(
        model=dict(type="SupervisedFinetune", llm=tiny.llama(), use_activation_checkpointing=False),
        work_dir=str(work_dir),
        train_dataloader=dict(
            batch_size=1,
            dataset=dict(type="TinyText", length=lengths),
            sampler=dict(type="PlanSampler", plan=BUDGET),
            batch_sampler=dict(type="PlanBatchSampler"),
            collate_fn=dict(type="tiny_collate"),
        ),
        train_cfg=loop,
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
        custom_hooks=[dict(type="PlanGuardHook")],
        randomness=dict(seed=1),
        default_scope="mmengine",
        experiment_name=f"guard-{loop['type']}",
        **options,
    )


def test_two_processes_with_different_data_stop_with_the_message_and_do_not_hang(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_rank, args=(port, str(tmp_path)), nprocs=2)
    reports = [json.loads(Path(tmp_path, f"{rank}.json").read_text()) for rank in (0, 1)]
    for report in reports:
        assert report["alike"] is None
        assert "rank 1 differs from rank 0 in lengths" in report["training"]
        assert "in seed" not in report["training"]
    # Hard input 15: the length is asked for on one rank only.
    assert [report["length"] for report in reports] == [len(sampler()), None]


def _rank(rank, port, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2
    )
    dataset = tiny.TinyText(LENGTHS)
    alike = PlanSampler(dataset, BUDGET)  # the seed is shared by mmengine
    loader = torch.utils.data.DataLoader(
        dataset, batch_sampler=PlanBatchSampler(alike), collate_fn=tiny.collate
    )
    report = {"length": len(loader) if rank == 0 else None}
    report["alike"] = check_same_plan(alike)
    alike.set_epoch(1)
    check_same_plan(alike)
    lengths = LENGTHS if rank == 0 else LENGTHS[::-1]
    training = runner(
        folder,
        dict(type="TrainLoop", max_epochs=1),
        lengths,
        cfg=dict(model_wrapper_cfg=dict(type="MMDistributedDataParallel", device_ids=None)),
    )
    try:
        training.train()
    except RuntimeError as error:
        report["training"] = str(error)
    Path(folder, f"{rank}.json").write_text(json.dumps(report))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
