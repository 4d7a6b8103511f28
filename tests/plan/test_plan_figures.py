"""How busy plans keep the ranks: on lengths like real ones and, where at hand, on real ones."""

from pathlib import Path

import numpy as np
import pytest

from xlength.plan import (
    ATTENTION,
    TOKENS,
    FixedBatch,
    TokenBudget,
    batchmate_repeat,
    padding_efficiency,
    step_correlation,
    wall_efficiency,
)

SHARED = Path(__file__).resolve().parents[3] / "shared/lengths"


def test_a_plan_beats_random_and_length_grouped_batches_on_heavy_tails():
    lengths = np.clip(np.exp(np.random.RandomState(0).normal(5, 1, 8000)), 8, 8192).astype(int)
    plan = TokenBudget(8192).build(lengths, seed=0, epoch=0, world_size=8)
    assert wall_efficiency(lengths, plan.groups, plan.steps) > 0.95
    assert padding_efficiency(lengths, plan.groups) > 0.97


def figures(name, plan, world_size=8):
    path = SHARED / f"{name}.npy"
    if not path.exists():
        pytest.skip("the lengths of real data sets are not beside this checkout")
    lengths = np.load(path).astype(np.int64)
    plan = plan(lengths) if callable(plan) else plan
    now = plan.build(lengths, seed=0, epoch=0, world_size=world_size)
    then = plan.build(lengths, seed=0, epoch=1, world_size=world_size, num_steps=now.num_steps)
    assert now.dropped == 0
    correlation = step_correlation(lengths, now.groups, now.steps)
    assert abs(correlation) < 3 / now.num_steps**0.5
    return (
        wall_efficiency(lengths, now.groups, now.steps, TOKENS),
        wall_efficiency(lengths, now.groups, now.steps, ATTENTION),
        batchmate_repeat(now.groups, then.groups),
        now,
    )


def thirty_two_rows(lengths):
    return TokenBudget(int(32 * lengths.mean()))


@pytest.mark.parametrize(
    ("name", "plan", "tokens", "attention", "repeat"),
    [
        ("mixture", TokenBudget(11546, 4096), 0.97, 0.975, 0.07),
        ("mixture", TokenBudget(11546, 1024), 0.935, 0.94, 0.02),
        ("mixture", FixedBatch(16), 0.90, 0.82, 0.25),
        ("mixture_modality", TokenBudget(11546, 4096), 0.97, 0.97, 0.07),
        ("gsm8k", thirty_two_rows, 0.985, 0.985, 0.4),
        ("sgd_dialogues", thirty_two_rows, 0.985, 0.985, 0.3),
        ("gpteacher", thirty_two_rows, 0.985, 0.985, 0.2),
        ("openchat_2k", thirty_two_rows, 0.98, 0.98, 0.4),
        ("bfcl_tools", thirty_two_rows, 0.96, 0.965, 0.8),
        ("chat_misc", TokenBudget(11546), 0.945, 0.895, 0.8),
    ],
)
def test_the_figures_on_real_lengths_are_reached(name, plan, tokens, attention, repeat):
    of_tokens, of_attention, mates, epoch = figures(name, plan)
    assert of_tokens >= tokens and of_attention >= attention and mates <= repeat
    assert epoch.repeated == 0 and epoch.mixed_steps <= 1
