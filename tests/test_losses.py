"""The token-weighted loss: hard input 32, under every way to split an optimiser step."""

import os
import socket

import pytest
import torch
import torch.multiprocessing as mp
from mmengine.optim import OptimWrapper

import tests.tiny as tiny
from xlength.losses import count_predicted
from xlength.models.sft import SupervisedFinetune

LENGTHS = (11, 101)


class ScaledOptimWrapper(OptimWrapper):
    """``AmpOptimWrapper``'s steps on a CPU, without its lower precision."""

    def __init__(self, *args):
        super().__init__(*args)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)

    def backward(self, loss, **kwargs):
        self.scaler.scale(loss).backward(**kwargs)
        self._inner_count += 1

    def step(self, **kwargs):
        self.scaler.unscale_(self.optimizer)
        if self.clip_grad_kwargs:
            self._clip_grad()
        self.scaler.step(self.optimizer, **kwargs)
        self.scaler.update()


def gradient(
    micro_batches,
    *,
    accumulate=1,
    max_counts=-1,
    clip=None,
    hint=True,
    wrapper=OptimWrapper,
    **model_options,
):
    """The gradient that the optimiser sees at its last step, flat, and the losses reported.

    ``max_counts``: micro-steps of the run, as mmengine announces them. ``hint``: whether the loop
    says, as ``TrainLoop`` does, which micro-step is the last.
    """
    torch.manual_seed(0)
    model = SupervisedFinetune(
        tiny.llama(), use_activation_checkpointing=False, **model_options
    ).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(flat_gradient(model)))
    wrapper = wrapper(optimizer, accumulate, clip)
    wrapper.initialize_count_status(model, 0, max_counts)
    trained = wrap(model)
    if hint:
        model.token_weighted_loss.is_last = wrapper.should_sync
    losses = [trained.train_step(batch, wrapper)["loss"].item() for batch in micro_batches]
    return seen[-1], losses


def flat_gradient(model):
    return torch.cat([p.grad.flatten().clone() for p in model.parameters()])


def wrap(model):
    from mmengine.dist import is_distributed
    from mmengine.model import MMDistributedDataParallel

    return MMDistributedDataParallel(model) if is_distributed() else model


def batch(*indices):
    return tiny.collate([tiny.sample(i, LENGTHS[i % 2]) for i in indices])


@pytest.fixture(scope="module")
def whole():
    return gradient([batch(0, 1)])


def same(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_accumulating_gives_the_gradient_of_the_whole_batch(whole):
    found, losses = gradient([batch(0), batch(1)], accumulate=2)
    same(found, whole[0])
    assert losses[-1] == pytest.approx(whole[1][-1], abs=1e-6)


def test_the_mean_of_means_is_another_gradient(whole):
    found, _ = gradient([batch(0), batch(1)], accumulate=2, loss_reduction="mean")
    assert (found - whole[0]).abs().max() > 1e-3


def test_a_loop_that_does_not_announce_the_last_micro_step_gives_the_same(whole):
    same(gradient([batch(0), batch(1)], accumulate=2, hint=False)[0], whole[0])


@pytest.mark.parametrize("hint", [True, False])
def test_each_window_is_normalised_by_its_own_tokens_after_others(whole, hint):
    before = [batch(1, 3), batch(0), batch(2), batch(5)]
    found, losses = gradient([*before, batch(0), batch(1)], accumulate=2, hint=hint)
    same(found, whole[0])
    assert losses[-1] == pytest.approx(whole[1][-1], abs=1e-6)


@pytest.mark.parametrize("hint", [True, False])
def test_the_last_window_may_be_shorter(whole, hint):
    micro_batches = [batch(1), batch(2), batch(3), batch(0), batch(1)]
    found, _ = gradient(micro_batches, accumulate=3, max_counts=5, hint=hint)
    same(found, whole[0])


def test_clipping_sees_the_final_gradient(whole):
    norm = whole[0].norm().item()
    loose, _ = gradient([batch(0), batch(1)], accumulate=2, clip=dict(max_norm=1.01 * norm))
    same(loose, whole[0])
    tight, _ = gradient([batch(0), batch(1)], accumulate=2, clip=dict(max_norm=norm / 2))
    same(tight, whole[0] / 2)


@pytest.mark.parametrize("hint", [True, False])
def test_loss_scaling_and_clipping_together_see_the_final_gradient(whole, hint):
    norm = whole[0].norm().item()
    micro_batches = [batch(3), batch(2), batch(0), batch(1)]
    options = dict(accumulate=2, clip=dict(max_norm=norm / 2), wrapper=ScaledOptimWrapper)
    same(gradient(micro_batches, hint=hint, **options)[0], whole[0] / 2)


def test_a_micro_step_without_a_label_weighs_nothing(whole):
    empty = batch(0)
    empty["data"]["labels"] = torch.full_like(empty["data"]["labels"], -100)
    for micro_batches in ([empty, batch(0), batch(1)], [batch(0), empty, batch(1)]):
        found, _ = gradient(micro_batches, accumulate=3)
        assert torch.isfinite(found).all()
        same(found, whole[0])
    assert torch.equal(gradient([empty])[0], torch.zeros_like(whole[0]))


def test_one_micro_step_as_two_gives_the_mean_of_xtuner_when_asked():
    model = SupervisedFinetune(tiny.llama(), loss_reduction="mean")
    out = model(**batch(0, 1), mode="loss")
    assert model.parse_losses(out)[0].item() == pytest.approx(out["loss"].item())


def test_the_reported_loss_is_that_of_the_last_finished_step():
    _, losses = gradient([batch(0), batch(1), batch(2), batch(3)], accumulate=2)
    together = gradient([batch(0, 1)])[1][0]
    assert losses[1] == pytest.approx(together, abs=1e-6)
    assert losses[2] == losses[1]
    assert losses[3] != losses[2]


def test_predicted_tokens_are_the_labels_after_the_first():
    labels = torch.tensor([[5, 6, -100], [-100, 7, 8]])
    assert count_predicted(labels).item() == 3
    assert count_predicted(torch.tensor([[5]])).item() == 0


def test_two_ranks_give_the_gradient_of_the_whole_batch(whole, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_rank, args=(port, str(tmp_path)), nprocs=2)
    for name in ("plain", "accumulated", "not announced"):
        first, second = (torch.load(tmp_path / f"{name} {rank}.pt") for rank in (0, 1))
        same(first["gradient"], whole[0])
        assert torch.equal(first["gradient"], second["gradient"])
        assert first["losses"] == second["losses"]
        assert first["losses"][-1] == pytest.approx(whole[1][-1], abs=1e-6)
    mean = torch.load(tmp_path / "mean 0.pt")["gradient"]
    assert (mean - whole[0]).abs().max() > 1e-3


def _rank(rank, port, folder):
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2
    )
    torch.set_num_threads(1)
    long, short, empty = batch(1), batch(0), batch(0)
    empty["data"]["labels"] = torch.full_like(empty["data"]["labels"], -100)
    mine = [short, empty] if rank == 0 else [empty, long]
    runs = {
        "plain": dict(micro_batches=[short if rank == 0 else long]),
        "accumulated": dict(micro_batches=[*mine, *mine], accumulate=2),
        "not announced": dict(micro_batches=[*mine, *mine], accumulate=2, hint=False),
        "mean": dict(micro_batches=[short if rank == 0 else long], loss_reduction="mean"),
    }
    for name, run in runs.items():
        found, losses = gradient(**run)
        torch.save({"gradient": found, "losses": losses}, f"{folder}/{name} {rank}.pt")
    torch.distributed.destroy_process_group()
    os._exit(0)  # gloo's threads can abort an ordinary end
