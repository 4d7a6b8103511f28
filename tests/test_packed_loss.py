"""The loss of packed data is that of the same samples unpacked, however a step is split."""

import socket

import pytest
import torch
import torch.multiprocessing as mp

import tests.tiny as tiny
from tests.test_losses import gradient, same
from xlength.collate import default_collate_fn
from xlength.collate_packed import packed_collate_fn
from xlength.datasets.packed import PackedDataset

LENGTHS = (11, 60, 5, 1, 33, 17, 2, 48)
ROWS = [tiny.sample(i, length) for i, length in enumerate(LENGTHS)]


def unpacked():
    return [default_collate_fn(ROWS)]


def packs(**options):
    dataset = PackedDataset(
        [{**row, "length": len(row["input_ids"])} for row in ROWS], 64, **options
    )
    return [dataset[i] for i in range(len(dataset))]


@pytest.fixture(scope="module")
def whole():
    return gradient(unpacked())


def test_a_batch_of_packs_has_the_loss_and_gradient_of_its_samples(whole):
    assert len(packs()) == 3
    for batch in (
        packed_collate_fn(packs()),
        packed_collate_fn(packs(), pad_to_multiple_of=64),
        packed_collate_fn(packs(strategy="next_fit")),
        packed_collate_fn(ROWS),
        packed_collate_fn(ROWS, max_length=64),
    ):
        found, losses = gradient([batch])
        same(found, whole[0])
        assert losses == pytest.approx(whole[1], abs=1e-6)


@pytest.mark.parametrize("hint", [True, False])
def test_accumulating_over_packs_gives_the_same(whole, hint):
    batches = [packed_collate_fn([pack]) for pack in packs()]
    found, losses = gradient(batches, accumulate=3, hint=hint)
    same(found, whole[0])
    assert losses[-1] == pytest.approx(whole[1][-1], abs=1e-6)


def test_the_mean_of_each_pack_would_be_another_gradient(whole):
    batches = [packed_collate_fn([pack]) for pack in packs()]
    found, _ = gradient(batches, accumulate=3, loss_reduction="mean")
    assert (found - whole[0]).abs().max() > 1e-4


def test_two_ranks_give_the_gradient_of_the_unpacked_samples(whole, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_rank, args=(port, str(tmp_path)), nprocs=2)
    for name in ("plain", "accumulated"):
        for rank in (0, 1):
            found = torch.load(tmp_path / f"{name} {rank}.pt")
            same(found["gradient"], whole[0])
            assert found["losses"][-1] == pytest.approx(whole[1][-1], abs=1e-6)


def _rank(rank, port, folder):
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2
    )
    torch.set_num_threads(1)
    first, second, third = packs()
    one, *others = [packed_collate_fn([pack]) for pack in (first, second, third)]
    both = packed_collate_fn([second, third])
    empty = packed_collate_fn([first])
    empty["data"]["labels"] = torch.full_like(empty["data"]["labels"], -100)
    runs = {
        "plain": dict(micro_batches=[one] if rank == 0 else [both]),
        "accumulated": dict(micro_batches=[one, empty] if rank == 0 else others, accumulate=2),
    }
    for name, run in runs.items():
        found, losses = gradient(**run)
        torch.save({"gradient": found, "losses": losses}, f"{folder}/{name} {rank}.pt")
    torch.distributed.destroy_process_group()
