"""The measures of a plan, on examples that can be worked out by hand."""

import subprocess
import sys

import numpy as np
import pytest

from xlength.plan import (
    Cost,
    Groups,
    batchmate_repeat,
    padding_efficiency,
    rank_balance,
    step_correlation,
    step_costs,
    wall_efficiency,
)

LENGTHS = np.array([2, 3, 7, 9])
TWO_STEPS = np.array([[0], [1]])


@pytest.mark.parametrize(("pairs", "percent"), [([[0, 3], [1, 2]], 65.6), ([[0, 1], [2, 3]], 87.5)])
def test_the_textbook_example_of_padding_efficiency(pairs, percent):
    assert round(100 * padding_efficiency(LENGTHS, Groups.from_lists(pairs)), 1) == percent


def test_lengths_of_either_sign_count_by_their_size():
    groups = Groups.from_lists([[0, 1], [2, 3]])
    assert padding_efficiency(LENGTHS * [1, -1, 1, -1], groups) == 21 / 24


def test_one_rank_wall_efficiency_under_token_cost_is_padding_efficiency():
    groups = Groups.from_lists([[0, 3], [1, 2]])
    assert wall_efficiency(LENGTHS, groups, TWO_STEPS) == padding_efficiency(LENGTHS, groups)


def test_all_ranks_wait_for_the_slowest():
    groups = Groups.from_lists([[0], [1], [2], [3]])
    steps = np.array([[0, 3], [1, 2]])
    costs = step_costs(LENGTHS, groups, steps)
    assert costs.tolist() == [[2, 9], [3, 7]]
    assert rank_balance(costs) == pytest.approx((5.5 / 9 + 5 / 7) / 2)
    assert wall_efficiency(LENGTHS, groups, steps) == 21 / (2 * 16)


def test_attention_cost_is_length_plus_its_square_over_the_crossover():
    assert Cost(10).of(np.array([10, -20])).tolist() == [20, 60]
    groups = Groups.from_lists([[0, 1], [2, 3]])
    real = sum(length + length**2 / 10 for length in (2, 3, 7, 9))
    padded = 2 * (3 + 0.9) + 2 * (9 + 8.1)
    assert wall_efficiency(LENGTHS, groups, TWO_STEPS, Cost(10)) == pytest.approx(real / padded)


def test_a_repeated_sample_is_useful_once():
    groups = Groups.from_lists([[2], [2]])
    assert wall_efficiency(LENGTHS, groups, TWO_STEPS) == 0.5


def test_a_saw_tooth_shows_in_the_step_correlation():
    lengths = np.tile(np.arange(50, 0, -1), 4)
    groups = Groups.singles(np.arange(200))
    falling = np.arange(200)[:, None]
    shuffled = np.random.RandomState(0).permutation(200)[:, None]
    assert step_correlation(lengths, groups, falling) > 0.9
    assert abs(step_correlation(lengths, groups, shuffled)) < 3 / 200**0.5
    assert step_correlation(np.full(200, 7), groups, falling) == 0


def test_batchmate_repeat_is_the_share_of_pairs_that_meet_again():
    now = Groups.from_lists([[0, 1, 2], [3, 4, 5]])
    assert batchmate_repeat(now, now) == 1
    assert batchmate_repeat(now, Groups.from_lists([[0, 1, 3], [2, 4, 5]])) == 2 / 6
    assert batchmate_repeat(now, Groups.from_lists([[0, 3], [1, 4], [2, 5]])) == 0
    assert batchmate_repeat(Groups.singles([0, 1]), now) == 0


def test_importing_the_plan_layer_loads_neither_torch_nor_mmengine():
    code = (
        "import sys, xlength.plan as plan; "
        "plan.padding_efficiency; "
        "heavy = {'torch', 'mmengine', 'datasets', 'transformers'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
