"""``LengthPoolSortDataset``: the original's order, keys, bad input, memory, reading, epochs."""

import hashlib
import json
import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mmengine.registry import DATASETS as MM_DATASETS
from torch.utils.data import IterableDataset

from xlength.datasets.pool_sort import LengthPoolSortDataset
from xlength.registry import DATASETS

CASES = json.loads((Path(__file__).parents[1] / "data/pool_sort_orders.json").read_text())


def samples_of(case):
    """The stream of a case, by the recipe of the original's orders."""
    random = np.random.RandomState(case["lengths_seed"])
    lengths = np.clip(np.exp(random.normal(5, 1.2, case["n"])).astype(int), 1, 4096)
    packed = random.rand(case["n"]) < 0.4
    return [
        {"id": i, "length": int(n), "cu_lengths": [0, 1, int(n) + 1] if p else [0, int(n)]}
        for i, (n, p) in enumerate(zip(lengths, packed, strict=True))
    ]


def options_of(case):
    names = ("pool_size", "ascending", "tail_shuffle", "warmup_steps", "initial_pool_size")
    return {name: case[name] for name in (*names, "separate_packed")}


def stream(n=500, seed=0):
    lengths = np.random.RandomState(seed).randint(1, 2000, n)
    return [{"id": i, "length": int(length)} for i, length in enumerate(lengths)]


def ids(samples):
    return [sample["id"] for sample in samples]


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_the_first_pass_has_the_order_of_the_original(case):
    order = ids(LengthPoolSortDataset(samples_of(case), **options_of(case)))
    digest = hashlib.sha256(np.array(order, dtype="<i8").tobytes()).hexdigest()[:16]
    assert digest == case["digest"]
    assert case["order"] is None or order == case["order"]


def test_the_cases_are_not_all_alike():
    assert len(CASES) == 80
    assert len({case["digest"] for case in CASES}) > 40


def test_a_generator_function_an_iterable_dataset_and_a_list_give_the_same_order():
    class Rows(IterableDataset):
        def __iter__(self):
            return iter(stream())

    expected = ids(LengthPoolSortDataset(stream(), 50))
    assert ids(LengthPoolSortDataset(lambda: iter(stream()), 50)) == expected
    assert ids(LengthPoolSortDataset(Rows(), 50)) == expected
    assert ids(LengthPoolSortDataset(iter(stream()), 50)) == expected


def test_it_is_built_from_a_config_through_either_registry():
    inner = dict(type="datasets.Dataset.from_list", mapping=stream(40))
    config = dict(type="LengthPoolSortDataset", dataset=inner, pool_size=10)
    expected = ids(LengthPoolSortDataset(stream(40), 10))
    assert ids(MM_DATASETS.build(config)) == expected
    assert ids(DATASETS.build(config)) == expected
    assert ids(MM_DATASETS.build({**config, "type": "xlength.LengthPoolSortDataset"})) == expected


def test_a_config_of_a_generator_function_can_be_read_again():
    config = dict(type=f"{__name__}.rows_one_by_one", n=60)
    dataset = LengthPoolSortDataset(config, 10)
    first, second = ids(dataset), ids(dataset)
    assert first == ids(LengthPoolSortDataset(stream(60), 10))
    assert sorted(second) == list(range(60))


def rows_one_by_one(n):
    yield from stream(n)


def test_a_pool_size_of_0_gives_the_stream_as_it_is():
    assert ids(LengthPoolSortDataset(stream(), 0)) == list(range(500))


@pytest.mark.parametrize("mode", ["pool", "sliding"])
def test_every_epoch_has_another_order_and_the_run_is_repeatable(mode):
    one, other = (LengthPoolSortDataset(stream(), 50, mode=mode) for _ in range(2))
    first, second, third = (ids(one) for _ in range(3))
    assert first != second != third != first
    assert sorted(first) == sorted(second) == list(range(500))
    other.set_epoch(2)
    assert ids(other) == third
    other.set_epoch(0)
    assert ids(other) == first


@pytest.mark.parametrize("mode", ["pool", "sliding"])
@pytest.mark.parametrize("size", [1, 4, 7])
def test_micro_batches_hold_neighbours_by_length_and_nothing_is_lost(mode, size):
    rows = stream(1000)
    order = list(LengthPoolSortDataset(rows, 100, micro_batch_size=size, mode=mode))
    assert sorted(ids(order)) == list(range(1000))
    lengths = np.array([row["length"] for row in order])
    whole = lengths[: len(lengths) // size * size].reshape(-1, size)
    spread = (whole.max(axis=1) - whole.min(axis=1)).mean()
    assert spread <= 2000 * (size - 1) / (100 // size * size) * 1.2


@dataclass
class Encoded:
    id: int
    total_len: int


def test_the_key_is_a_field_an_attribute_a_dotted_path_a_function_or_what_the_sample_has():
    lengths = [row["length"] for row in stream(100)]
    expected = ids(LengthPoolSortDataset(stream(100), 20))

    def order(rows, **options):
        return [
            row.id if hasattr(row, "id") else row["id"]
            for row in LengthPoolSortDataset(rows, 20, **options)
        ]

    pairs = list(enumerate(lengths))
    assert order([Encoded(i, n) for i, n in pairs]) == expected
    assert order([{"id": i, "tokens": [0] * n} for i, n in pairs]) == expected
    assert order([{"id": i, "input_ids": torch.zeros(n)} for i, n in pairs]) == expected
    assert order([{"id": i, "size": np.int32(n)} for i, n in pairs], key="size") == expected
    nested = [SimpleNamespace(id=i, meta={"n": n}) for i, n in pairs]
    assert order(nested, key="meta.n") == expected
    assert order(nested, key=lambda row: row.meta["n"]) == expected
    signed = [{"id": i, "modality_length": n if i % 2 else -n} for i, n in pairs]
    assert order(signed, key="modality_length") == expected


@pytest.mark.parametrize("value", [None, 0, 2.5, float("nan"), "12", True, [3]])
def test_a_bad_length_names_the_sample(value):
    rows = stream(20)
    rows[13]["length"] = value
    with pytest.raises(ValueError, match=r"'length'.*sample 13 of the stream.*at least 1"):
        list(LengthPoolSortDataset(rows, 5))


def test_a_missing_key_names_the_sample_and_what_was_tried():
    with pytest.raises(ValueError, match=r"sample 0 of the stream, a dict, has no 'size'"):
        list(LengthPoolSortDataset(stream(5), 5, key="size"))
    with pytest.raises(ValueError, match=r"no 'length', 'total_len', 'tokens' and 'input_ids'"):
        list(LengthPoolSortDataset([{"a": 1}], 5))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(pool_size=-1), "pool_size must be a whole number of at least 1, got -1"),
        (dict(pool_size=2.5), "pool_size .* got 2.5"),
        (dict(pool_size=True), "pool_size .* got True"),
        (dict(pool_size=3, micro_batch_size=4), "pool_size=3 and micro_batch_size=4"),
        (dict(pool_size=9, micro_batch_size=0), "micro_batch_size .* got 0"),
        (dict(pool_size=9, initial_pool_size=0), "initial_pool_size .* got 0"),
        (dict(pool_size=9, warmup_steps=-1), "warmup_steps .* got -1"),
        (dict(pool_size=9, seed=None), "seed must be an integer, .* got None"),
        (dict(pool_size=9, mode="heap"), "mode must be 'pool' or 'sliding', got 'heap'"),
        (dict(pool_size=9, max_age=99), "max_age=99 belongs to mode='sliding'"),
        (dict(pool_size=9, mode="sliding", max_age=8), "max_age .* at least 9, got 8"),
        (dict(pool_size=9, shard="node"), "shard must be .* got 'node'"),
        (dict(pool_size=9, key=3), "key must be a name or a function, got 3"),
        (dict(pool_size=9, cost="flops"), "cost type"),
        (dict(pool_size=9, num_samples=0), "num_samples must be at least 1, got 0"),
        (dict(pool_size=9, dp_rank=2), "dp_rank"),
        (dict(pool_size=9, dataset=7), "dataset must be an iterable"),
        (dict(pool_size=9, dataset=iter([]), repeat=True), "can be read once"),
    ],
)
def test_a_bad_argument_is_refused_by_name_value_and_rule(options, message):
    with pytest.raises(ValueError, match=message):
        LengthPoolSortDataset(**{"dataset": stream(5), **options})


def test_an_iterator_cannot_be_read_a_second_time_and_says_so():
    once = LengthPoolSortDataset(iter(stream(10)), 5)
    assert len(list(once)) == 10
    with pytest.raises(ValueError, match="list_iterator, which can be read once"):
        list(once)


class Counting:
    """A stream that counts the samples that are read and those that still exist."""

    def __init__(self, n):
        self.n = n
        self.read = 0
        self.alive = 0
        self.most = 0

    def __iter__(self):
        for row in stream(self.n):
            self.read += 1
            self.alive += 1
            self.most = max(self.most, self.alive)
            yield self.Row(self, row)

    class Row:
        def __init__(self, owner, row):
            self.owner, self.length = owner, row["length"]

        def __del__(self):
            self.owner.alive -= 1


@pytest.mark.parametrize("mode", ["pool", "sliding"])
@pytest.mark.parametrize("size", [1, 8])
def test_one_sample_is_read_for_each_that_is_given_and_never_more_than_a_pool_is_held(mode, size):
    source = Counting(2000)
    reads = []
    held = 0
    for _ in LengthPoolSortDataset(source, 100, micro_batch_size=size, mode=mode):
        reads.append(source.read)
        held = max(held, source.alive)
    steps = np.diff(reads)
    assert reads[0] == 100 // size * size
    assert (steps[:-100] == 1).all() and steps.max() == 1
    assert held <= 100 + size
    assert source.most <= 100 + size


def test_while_pools_grow_reading_is_spread_over_the_samples_that_are_given():
    source = Counting(3000)
    reads = []
    options = dict(warmup_steps=5, initial_pool_size=10)
    for _ in LengthPoolSortDataset(source, 400, **options):
        reads.append(source.read)
    assert reads[0] == 10
    assert max(np.diff(reads)) <= 9  # the second pool is 88 samples, the first 10
    assert source.most <= 401  # with the sample that was given last


def test_a_long_stream_takes_no_more_memory_than_a_short_one():
    def peak(n):
        tracemalloc.start()
        for _ in LengthPoolSortDataset(lambda: ({"length": i % 97 + 1} for i in range(n)), 50):
            pass
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    peak(10_000)
    assert peak(40_000) < peak(10_000) * 1.5


def test_the_length_is_known_where_it_can_be_and_a_type_error_elsewhere():
    assert len(LengthPoolSortDataset(stream(101), 10)) == 101
    rank1 = dict(dp_rank=1, dp_world_size=2)
    assert len(LengthPoolSortDataset(stream(101), 10, **rank1)) == 50
    assert len(LengthPoolSortDataset(lambda: stream(101), 10, num_samples=101, **rank1)) == 50
    assert len(LengthPoolSortDataset(stream(101), 10, num_samples=101)) == 101
    for unknown in (
        LengthPoolSortDataset(lambda: iter(stream(101)), 10),
        LengthPoolSortDataset(stream(101), 10, repeat=True),
    ):
        with pytest.raises(TypeError):
            len(unknown)
    assert ids(LengthPoolSortDataset(lambda: iter(stream(11)), 10))  # list() asks for the length


def test_costs_decide_the_order_of_packs_of_equal_total():
    rows = [
        {"id": i, "length": 100, "cu_seqlens": torch.tensor([0, i + 1, 100])} for i in range(50)
    ]
    costs = [(i + 1) ** 2 + (99 - i) ** 2 for i in range(50)]
    by_cost = ids(LengthPoolSortDataset(rows, 99, cost="attention", tail_shuffle=False))
    assert [costs[i] for i in by_cost] == sorted(costs)
    assert ids(LengthPoolSortDataset(rows, 99, tail_shuffle=False)) == list(range(50))
