"""``LengthPoolSortDataset`` in workers and on ranks: each sample once, alignment, refusals."""

import numpy as np
import pytest
import torch
from datasets import Dataset, IterableDataset
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data import IterableDataset as TorchIterableDataset

from xlength.datasets.pool_sort import LengthPoolSortDataset


def numbered(n, seed=0):
    lengths = np.random.RandomState(seed).randint(1, 300, n)
    return [{"id": i, "length": int(length)} for i, length in enumerate(lengths)]


def generate(shards, size):
    for shard in shards:
        lengths = np.random.RandomState(shard).randint(1, 300, size)
        for i, length in enumerate(lengths):
            yield {"id": shard * size + i, "length": int(length)}


def shards_of(num_shards, size):
    kwargs = {"shards": list(range(num_shards)), "size": size}
    return IterableDataset.from_generator(generate, gen_kwargs=kwargs)


class Rows(TorchIterableDataset):
    """Every process sees the whole stream."""

    def __iter__(self):
        return iter(numbered(1000))


class SplitByWorker(TorchIterableDataset):
    """Splits itself by worker, as many data sets do."""

    def __iter__(self):
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(numbered(1000)[first::step])


def module_level_key(sample):
    return sample["length"]


def as_ids(batch):
    return [sample["id"] for sample in batch]


def read(dataset, num_workers, batch_size=4, **options):
    loader = DataLoader(dataset, batch_size, num_workers=num_workers, collate_fn=as_ids, **options)
    return [row for batch in loader for row in batch]


STREAMS = {
    "16 shards": (lambda: shards_of(16, 60), None),
    "6 shards, no multiple of the ranks' readers": (lambda: shards_of(6, 150), None),
    "1 shard": (lambda: shards_of(1, 900), None),
    "5 shards, no multiple of the ranks": (lambda: shards_of(5, 180), None),
    "list": (lambda: numbered(1000), None),
    "generator function": (lambda: lambda: iter(numbered(1000)), None),
    "table": (lambda: Dataset.from_list(numbered(1000)), None),
    "iterable data set": (Rows, "rank"),
}


@pytest.mark.parametrize(("make", "shard"), STREAMS.values(), ids=STREAMS)
@pytest.mark.parametrize(("world_size", "num_workers"), [(1, 0), (1, 4), (2, 0), (2, 4)])
def test_every_row_is_drawn_once_by_all_workers_of_all_ranks(make, shard, world_size, num_workers):
    total = 0
    seen = set()
    for rank in range(world_size):
        dataset = LengthPoolSortDataset(
            make(), 32, micro_batch_size=4, shard=shard, dp_rank=rank, dp_world_size=world_size
        )
        drawn = read(dataset, num_workers)
        total += len(drawn)
        seen.update(drawn)
    assert total == len(seen) in (900, 960, 1000)


def test_ten_thousand_rows_four_workers_two_ranks_each_row_once():
    kwargs = dict(pool_size=100, micro_batch_size=4, dp_world_size=2)
    drawn = [
        row
        for rank in range(2)
        for row in read(LengthPoolSortDataset(shards_of(8, 1250), dp_rank=rank, **kwargs), 4)
    ]
    assert sorted(drawn) == list(range(10_000))


def test_a_stream_that_the_user_split_by_node_is_not_split_by_rank_again():
    own = split_dataset_by_node(shards_of(4, 50), rank=1, world_size=2)
    dataset = LengthPoolSortDataset(own, 20, dp_rank=1, dp_world_size=2)
    assert sorted(read(dataset, 2)) == [*range(50, 100), *range(150, 200)]


def test_streams_that_split_themselves_are_left_whole_or_asked_about():
    whole = LengthPoolSortDataset(SplitByWorker(), 20, shard="none")
    assert sorted(read(whole, 2)) == list(range(1000))
    by_worker = LengthPoolSortDataset(Rows(), 20, shard="worker", dp_rank=1, dp_world_size=2)
    assert sorted(read(by_worker, 2)) == list(range(1000))
    with pytest.raises(ValueError, match="shard must say how SplitByWorker is to be split"):
        list(LengthPoolSortDataset(SplitByWorker(), 20, dp_rank=0, dp_world_size=2))
    assert len(list(LengthPoolSortDataset(SplitByWorker(), 20))) == 1000


@pytest.mark.parametrize("num_workers", [1, 2, 4, 8])
def test_ranks_meet_like_lengths_with_any_number_of_workers(num_workers):
    lengths = np.clip(np.random.RandomState(0).lognormal(5, 1, 8000), 1, 2048).astype(int)
    rows = [{"id": i, "length": int(n)} for i, n in enumerate(lengths)]
    costs = []
    for rank in range(2):
        dataset = LengthPoolSortDataset(
            rows, 400, micro_batch_size=4, dp_rank=rank, dp_world_size=2
        )
        drawn = read(dataset, num_workers)
        costs.append(lengths[drawn[:4000]].reshape(-1, 4).max(axis=1))
    aligned = np.maximum(*costs).mean() / np.mean(costs)
    shifted = np.maximum(costs[0][1:], costs[1][:-1]).mean() / np.mean(costs)
    assert aligned < 1.06
    assert shifted > 1.3  # so the first figure is due to the alignment


def test_workers_orders_differ_between_epochs_and_are_the_same_when_the_run_is_repeated():
    def two_epochs():
        dataset = LengthPoolSortDataset(shards_of(4, 100), 40, micro_batch_size=4)
        return [read(dataset, 2), read(dataset, 2)]

    first, second = two_epochs()
    assert sorted(first) == sorted(second) == list(range(400))
    assert first != second
    assert two_epochs() == [first, second]


def test_set_epoch_reaches_persistent_workers():
    dataset = LengthPoolSortDataset(numbered(300), 40, micro_batch_size=4)
    loader = DataLoader(dataset, 4, num_workers=2, persistent_workers=True, collate_fn=as_ids)
    orders = {}
    for epoch in (0, 1, 2):
        dataset.set_epoch(epoch)
        orders[epoch] = list(loader)
    dataset.set_epoch(1)
    assert list(loader) == orders[1] != orders[0]


def test_spawned_workers_work_with_a_function_of_a_module_and_refuse_a_lambda_by_name():
    spawned = dict(multiprocessing_context="spawn")
    plain = LengthPoolSortDataset(numbered(200), 40, key=module_level_key)
    drawn = read(plain, 1, **spawned)
    assert drawn == read(LengthPoolSortDataset(numbered(200), 40), 1)
    with pytest.raises(ValueError, match=r"key=<function .*lambda.*cannot be pickled"):
        read(LengthPoolSortDataset(numbered(200), 40, key=lambda s: s["length"]), 1, **spawned)


def test_a_lambda_works_in_forked_workers():
    dataset = LengthPoolSortDataset(numbered(200), 40, key=lambda sample: sample["length"])
    assert sorted(read(dataset, 2, multiprocessing_context="fork")) == list(range(200))


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_loader_that_takes_batches_out_of_order_is_refused(context):
    dataset = LengthPoolSortDataset(numbered(200), 40, micro_batch_size=4)
    with pytest.raises(ValueError, match="leave the loader's in_order True"):
        read(dataset, 1, in_order=False, multiprocessing_context=context)


def test_a_loader_with_another_batch_size_than_the_micro_batch_is_warned_of(log_lines):
    read(LengthPoolSortDataset(numbered(40), 20), 0, batch_size=8)
    assert "micro_batch_size is 1 and the loader's batch size is 8" in log_lines[-1]


@pytest.mark.parametrize("num_workers", [0, 1, 3])
@pytest.mark.parametrize("total", [1000, 1001, 1007])
def test_with_num_samples_all_ranks_give_equally_many_and_what_is_left_is_logged(
    num_workers, total, log_lines
):
    counts, seen = set(), []
    for rank in range(4):
        dataset = LengthPoolSortDataset(
            lambda: iter(numbered(total)),
            40,
            micro_batch_size=4,
            num_samples=total,
            dp_rank=rank,
            dp_world_size=4,
        )
        loader = DataLoader(dataset, 4, num_workers=num_workers, collate_fn=as_ids)
        batches = list(loader)
        counts.add(tuple(len(batch) for batch in batches))
        seen += [row for batch in batches for row in batch]
        assert len(dataset) == total // 4 == sum(map(len, batches))
    assert len(counts) == 1
    assert len(seen) == len(set(seen)) == total // 4 * 4
    left = [line for line in log_lines if "are left out" in line]
    assert len(left) == (0 if total == 1000 else 4)


def test_with_shard_sizes_all_ranks_of_a_datasets_stream_give_equally_many():
    def generate_unequal(shards):
        for shard, size in shards:
            for i in range(size):
                yield {"id": 1000 * shard + i, "length": i % 50 + 1}

    sizes = [90, 100, 95, 110]
    shards = list(enumerate(sizes))
    for epoch in (0, 1, 2):
        counts = []
        for rank in range(2):
            stream = IterableDataset.from_generator(generate_unequal, gen_kwargs={"shards": shards})
            dataset = LengthPoolSortDataset(
                stream, 40, num_samples=sizes, dp_rank=rank, dp_world_size=2
            )
            dataset.set_epoch(epoch)
            counts.append(len(read(dataset, 2)))
        assert counts == [180, 180] == [len(dataset)] * 2


def test_a_promise_that_the_stream_breaks_names_both_counts():
    dataset = LengthPoolSortDataset(lambda: iter(numbered(90)), 40, num_samples=100)
    with pytest.raises(ValueError, match=r"promises 100 samples to worker 0 .* has 90 for it"):
        list(dataset)


@pytest.mark.parametrize(
    ("num_shards", "num_samples", "message"),
    [
        (4, 401, "one size per shard, of which there are 4"),
        (4, [100, 100], "one size per shard"),
        (3, 300, "shards that can be dealt to 2 ranks, got 3"),
    ],
)
def test_sizes_that_do_not_tell_what_a_reader_has_are_refused(num_shards, num_samples, message):
    with pytest.raises(ValueError, match=message):
        LengthPoolSortDataset(
            shards_of(num_shards, 100), 40, num_samples=num_samples, dp_rank=0, dp_world_size=2
        )


def test_a_repeating_stream_on_unequal_ranks_never_ends_and_stays_aligned():
    lengths = np.clip(np.random.RandomState(1).lognormal(5, 1, 2001), 1, 2048).astype(int)
    costs = []
    for rank in range(2):
        own = lengths[rank::2]
        dataset = LengthPoolSortDataset(
            [{"length": int(n)} for n in own], 200, repeat=True, shard="none"
        )
        iterator = iter(dataset)
        costs.append([next(iterator)["length"] for _ in range(6000)])
    costs = np.array(costs[:2])[:, 3000:]
    assert np.max(costs, axis=0).mean() / costs.mean() < 1.1


def test_an_idle_worker_of_a_repeating_stream_ends_instead_of_searching_for_ever():
    dataset = LengthPoolSortDataset(shards_of(1, 50), 10, repeat=True)
    loader = DataLoader(dataset, 5, num_workers=2, collate_fn=as_ids)
    drawn = []
    for batch in loader:
        drawn += batch
        if len(drawn) >= 100:
            break
    assert sorted(drawn[:50]) == list(range(50))


def test_tensors_of_a_batch_have_the_loaders_default_collate():
    rows = [{"length": n, "x": torch.full((2,), n)} for n in range(1, 9)]
    [batch] = DataLoader(LengthPoolSortDataset(rows, 4), 8)
    assert sorted(batch["length"].tolist()) == list(range(1, 9))
