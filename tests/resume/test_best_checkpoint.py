"""Checkpoints that ``save_best`` writes, which come behind a validation and on rank 0 alone."""

import pytest
from mmengine.evaluator import BaseMetric
from mmengine.registry import METRICS

from tests.resume.runs import LENGTHS, loader, log_of, resume, stream, train


@METRICS.register_module(force=True)
class Falling(BaseMetric):
    """Best at the first validation."""

    calls = 0

    def process(self, data_batch, data_samples):
        self.results.append(0)

    def compute_metrics(self, results):
        self.calls += 1
        return {"score": -self.calls}


def plain_stream():
    data = stream()
    data["dataset"]["dataset"]["type"] = "TinyText"  # a pool is read ahead
    return data


@pytest.mark.parametrize("data", [loader, plain_stream])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_best_checkpoint_is_continued_like_any_other_but_for_the_optimiser(
    data, accumulate, tmp_path
):
    """Data, augmentation and dropout; mmengine saves no optimiser with it."""
    options = dict(
        val_dataloader=loader("DefaultSampler", LENGTHS[:4]),
        val_cfg=dict(),
        val_evaluator=dict(type="Falling"),
        checkpoint=dict(save_best="score", rule="greater", save_last=False),
        interval=100,
        accumulate=accumulate,
    )
    cfg = dict(type="TrainLoop", max_iters=9, val_interval=4)
    whole, _ = train(tmp_path, cfg, data(), **options)
    rest, runner = resume(tmp_path, "best_score_iter_4", cfg, data(), **options)
    done = 4 - 4 % accumulate
    assert rest.batches == whole.batches[done:]
    assert rest.tokens == whole.tokens[done:], "other augmentation"
    assert "no random states" not in log_of(runner)
    assert "passing over them" not in log_of(runner)
