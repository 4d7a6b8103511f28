"""Several ranks: real gloo processes; one of each node prepares, the others wait and read."""

import json
import multiprocessing
import os
import socket
import time

import pytest
import torch.distributed as dist

from tests.datasets.samples import chats, small_tokenizer
from xlength import LengthConcatDataset
from xlength.datasets import prepare, tokenize
from xlength.datasets.map_fns import openai_map_fn

ENCODE = tokenize.TextEncoder.__call__


def write(folder, rows):
    folder.mkdir(exist_ok=True)
    small_tokenizer().save_pretrained(folder / "tokenizer")
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def concatenated(folder, **options):
    """Two sources, so that ranks meet twice."""
    source = dict(
        type="process_hf_dataset",
        dataset=dict(type="load_dataset", path="json", data_files=f"{folder}/a.jsonl"),
        tokenizer=dict(
            type="AutoTokenizer.from_pretrained",
            pretrained_model_name_or_path=f"{folder}/tokenizer",
        ),
        max_length=100,
        dataset_map_fn=openai_map_fn,
        **{"pack_to_max_length": False, **options},
    )
    return LengthConcatDataset([source, dict(source, max_length=50)])


def rank_main(rank, folder, mode, variables, connection):
    calls = []

    def slow(*args):
        calls.append(1)
        time.sleep(0.5)
        if mode == "fails":
            raise OSError("disk full")
        return ENCODE(*args)

    tokenize.TextEncoder.__call__ = slow
    os.environ.update(variables, RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo")
    if mode == "dies" and rank == 0:
        os._exit(3)
    if mode == "another node":
        os.environ.update(GROUP_RANK=str(rank), LOCAL_RANK="0")
        folder = folder / str(rank)
    elif mode != "no launcher":
        os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
    try:
        dataset = concatenated(folder, pack_to_max_length=mode == "packs")
        connection.send((len(calls), dataset.length, [row["input_ids"] for row in dataset]))
        dist.barrier()
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}")
        os._exit(1)


def run_ranks(folder, mode, **variables):
    """Two processes; what each has to say, and the exit codes."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port = listener.getsockname()[1]
    variables |= dict(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in range(2)]
    processes = [
        context.Process(target=rank_main, args=(rank, folder, mode, variables, pipes[rank][1]))
        for rank in range(2)
    ]
    try:
        for process in processes:
            process.start()
        for _, end in pipes:
            end.close()
        said = []
        for ours, _ in pipes:
            assert ours.poll(60), "a rank is silent"
            try:
                said.append(ours.recv())
            except EOFError:
                said.append(None)
        for process in processes:
            process.join(60)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return said, [process.exitcode for process in processes]


@pytest.mark.parametrize("mode", ["plain", "packs", "no launcher"])
def test_one_rank_tokenises_and_both_read_the_same_rows(mode, tmp_path):
    write(tmp_path, chats(20, seed=5))
    said, codes = run_ranks(tmp_path, mode)
    assert codes == [0, 0], said
    calls = [ranks_calls for ranks_calls, _, _ in said]
    assert sum(calls) == 2 and (mode == "no launcher" or calls[1] == 0)
    assert said[0][1:] == said[1][1:]
    alone = concatenated(tmp_path, pack_to_max_length=mode == "packs")
    assert said[0][1:] == (alone.length, [row["input_ids"] for row in alone])


def test_a_failing_rank_makes_the_other_fail_with_its_reason(tmp_path):
    write(tmp_path, chats(20, seed=6))
    said, codes = run_ranks(tmp_path, "fails")
    assert codes == [1, 1]
    assert "disk full" in said[0]
    assert "RuntimeError: the rank that prepares the data set failed: OSError: disk full" in said[1]


def test_a_rank_that_dies_does_not_keep_the_other_waiting(tmp_path):
    write(tmp_path, chats(2))
    said, codes = run_ranks(tmp_path, "dies")
    assert codes == [3, 1]
    assert said[1].startswith("RuntimeError: the process group's store is gone")


def test_waiting_ends_after_the_minutes_of_the_environment(tmp_path):
    write(tmp_path, chats(20, seed=7))
    said, codes = run_ranks(tmp_path, "plain", XLENGTH_DATASET_TIMEOUT="0.005")
    assert codes[1] == 1
    assert said[1].startswith("RuntimeError: rank 1 waited 0:00:00.3")
    assert "XLENGTH_DATASET_TIMEOUT sets the minutes to wait" in said[1]


def test_nodes_that_prepared_different_data_are_told(tmp_path):
    for rank in range(2):
        write(tmp_path / str(rank), chats(20, seed=rank))
    said, codes = run_ranks(tmp_path, "another node")
    assert 1 in codes
    told = "ValueError: datasets[0]: the prepared data set differs between ranks"
    assert any(str(words).startswith(told) for words in said), said


def test_nodes_prepare_each_for_itself(tmp_path):
    for rank in range(2):
        write(tmp_path / str(rank), chats(20, seed=8))
    said, codes = run_ranks(tmp_path, "another node")
    assert codes == [0, 0], said
    assert [calls for calls, _, _ in said] == [2, 2] and said[0] == said[1]


def test_the_minutes_to_wait_can_be_set_in_either_name(monkeypatch):
    for name in ("XLENGTH_DATASET_TIMEOUT", "XTUNER_DATASET_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    assert prepare._timeout().total_seconds() == 3600
    monkeypatch.setenv("XTUNER_DATASET_TIMEOUT", "30")
    assert prepare._timeout().total_seconds() == 1800
    monkeypatch.setenv("XLENGTH_DATASET_TIMEOUT", "1.5")
    assert prepare._timeout().total_seconds() == 90
    monkeypatch.setenv("XLENGTH_DATASET_TIMEOUT", "soon")
    with pytest.raises(ValueError, match="XLENGTH_DATASET_TIMEOUT='soon' must be a number"):
        prepare._timeout()
