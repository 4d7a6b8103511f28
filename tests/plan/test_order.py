"""The length-grouped order against XTuner 0.2.0's, and its properties."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xlength.plan import default_mega_batch_mult, length_grouped_order

CASES = json.loads((Path(__file__).parents[1] / "data/length_grouped_orders.json").read_text())


def lengths_of(case):
    """The lengths of a handed case, signed by its kind."""
    random = np.random.RandomState(case["lengths_seed"])
    n, kind = case["n"], case["kind"]
    lengths = np.clip(np.exp(random.normal(5.0, 1.2, n)).astype(np.int64), 1, 4096)
    if kind == "ties":
        lengths = random.randint(1, 9, n).astype(np.int64)
    share = random.rand(n)
    if kind == "text":
        return -lengths
    if kind in ("mixed", "rare"):
        return np.where(share < {"mixed": 0.5, "rare": 0.95}[kind], lengths, -lengths)
    return lengths


def digest(indices):
    return hashlib.sha256(np.ascontiguousarray(indices, dtype="<i8").tobytes()).hexdigest()[:16]


def permuter(seed):
    generator = torch.Generator()
    generator.manual_seed(seed)
    return lambda count: torch.randperm(count, generator=generator).numpy()


def test_the_handed_cases_cover_every_kind():
    assert len(CASES) == 120
    assert {case["kind"] for case in CASES} == {"image", "text", "mixed", "rare", "ties"}


def order_in_loops(lengths, window, permute):
    """The same algorithm, sample by sample, for comparison."""

    def windows(members):
        drawn = [members[i] for i in permute(len(members)).tolist()]
        return [drawn[i : i + window] for i in range(0, len(drawn), window)]

    signs = {value > 0 for value in lengths}
    if len(signs) == 1:
        parts = [sorted(p, key=lambda i: -lengths[i]) for p in windows(range(len(lengths)))]
    else:
        images = windows([i for i, value in enumerate(lengths) if value > 0])
        texts = windows([i for i, value in enumerate(lengths) if value < 0])
        images = [sorted(p, key=lambda i: -abs(lengths[i])) for p in images]
        texts = [sorted(p, key=lambda i: -abs(lengths[i])) for p in texts]
        others = images[:-1] + texts[:-1]
        parts = [others[i] for i in permute(len(others)).tolist()]
        parts.append(sorted(images[-1] + texts[-1], key=lambda i: -abs(lengths[i])))
    firsts = [abs(lengths[p[0]]) for p in parts]
    longest = firsts.index(max(firsts))
    parts[0][0], parts[longest][0] = parts[longest][0], parts[0][0]
    return [i for p in parts for i in p]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(-9, 9).filter(bool), min_size=1, max_size=60),
    st.integers(1, 20),
    st.integers(0, 1000),
)
def test_the_order_is_that_of_the_plain_loops_for_any_lengths_and_window(lengths, window, seed):
    expected = order_in_loops(lengths, window, permuter(seed))
    order = length_grouped_order(np.array(lengths), window, permuter(seed))
    assert order.tolist() == expected
    assert sorted(order.tolist()) == list(range(len(lengths)))


def test_lengths_too_large_for_one_key_are_still_sorted_stably():
    lengths = np.array([2**61, 3, 2**61, 1, 3, 2**62 - 1])
    order = length_grouped_order(lengths, 6, lambda count: np.arange(count))
    assert order.tolist() == [5, 0, 2, 1, 4, 3]


def test_an_empty_set_is_refused_by_name():
    with pytest.raises(ValueError, match="lengths is empty"):
        length_grouped_order(np.zeros(0, dtype=np.int64), 4, permuter(0))


def test_a_window_below_one_is_refused_by_name():
    with pytest.raises(ValueError, match="window must be at least 1, got 0"):
        length_grouped_order(np.array([1, 2]), 0, permuter(0))


def test_the_default_multiplier_leaves_four_mega_batches_and_is_at_most_fifty():
    assert default_mega_batch_mult(7, 16) == 1
    assert default_mega_batch_mult(3000, 16) == 46
    assert default_mega_batch_mult(10**6, 16) == 50
