"""States of ``LengthPoolSortDataset``: right after any sample, with any parent and loader."""

import copy
import pickle
from itertools import islice

import numpy as np
import pytest
from datasets import Dataset, IterableDataset, interleave_datasets, load_dataset
from torch.utils.data import DataLoader

from xlength.datasets.pool_sort import LengthPoolSortDataset
from xlength.datasets.stream_notes import samples_given
from xlength.datasets.stream_state import merge_states


def rows(n, seed=0):
    lengths = np.random.RandomState(seed).randint(1, 300, n)
    return [{"id": i, "length": int(length)} for i, length in enumerate(lengths)]


def generate(shards):
    for shard in shards:
        for row in rows(60 + 7 * shard, seed=shard):
            yield {"id": row["id"] + 1000 * shard, "length": row["length"]}


def jsonl_stream(folder):
    for shard in range(4):
        table = Dataset.from_list(list(generate([shard])))
        table.to_json(folder / f"part{shard}.jsonl")
    files = sorted(str(path) for path in folder.glob("*.jsonl"))
    return load_dataset("json", data_files=files, split="train", streaming=True)


PARENTS = {
    "list": lambda folder: rows(250),
    "generator function": lambda folder: lambda: iter(rows(250)),
    "datasets table": lambda folder: Dataset.from_list(rows(250)),
    "datasets generator": lambda folder: IterableDataset.from_generator(
        generate, gen_kwargs={"shards": [0, 1, 2, 3]}
    ),
    "datasets jsonl": jsonl_stream,
    "datasets map, filter, skip": lambda folder: (
        jsonl_stream(folder)
        .map(lambda row: {"length": row["length"] + 1})
        .filter(lambda row: row["length"] % 5)
        .skip(3)
    ),
    "datasets batched map": lambda folder: jsonl_stream(folder).map(
        lambda batch: {"length": [n + 1 for n in batch["length"]]}, batched=True, batch_size=16
    ),
    "datasets shuffle buffer": lambda folder: jsonl_stream(folder).shuffle(7, buffer_size=30),
    "datasets interleaved": lambda folder: interleave_datasets(
        [jsonl_stream(folder), Dataset.from_list(rows(90, 5)).to_iterable_dataset()],
        probabilities=[0.7, 0.3],
        seed=1,
        stopping_strategy="all_exhausted",
    ),
    "of its own kind": lambda folder: LengthPoolSortDataset(rows(250), 12, seed=5),
}
MODES = {
    "off": dict(pool_size=0),
    "pool": dict(pool_size=40),
    "warm-up": dict(pool_size=40, warmup_steps=3, initial_pool_size=5),
    "micro-batches": dict(pool_size=42, micro_batch_size=4),
    "sliding": dict(pool_size=40, mode="sliding"),
    "sliding micro-batches": dict(
        pool_size=42, mode="sliding", micro_batch_size=4, warmup_steps=9, max_age=20
    ),
}


def key(sample):
    return sample["id"], sample["length"]


def check_every_position(make, epoch, step):
    whole = make()
    whole.set_epoch(epoch)
    order = [key(sample) for sample in whole]
    running = make()
    running.set_epoch(epoch)
    assert len(order) > 200
    for position, sample in enumerate(running, start=1):
        if position % step and position not in (1, len(order)):
            continue
        assert key(sample) == order[position - 1]
        state = pickle.loads(pickle.dumps(running.state_dict()))
        resumed = make()
        resumed.load_state_dict(state)
        rest = [key(sample) for sample in resumed]
        assert rest == order[position:], position


@pytest.mark.parametrize("options", MODES.values(), ids=MODES)
def test_a_run_continues_right_after_any_sample(options):
    check_every_position(lambda: LengthPoolSortDataset(rows(250), **options), 1, step=1)


@pytest.mark.parametrize("parent", PARENTS.values(), ids=PARENTS)
@pytest.mark.parametrize("mode", ["off", "pool", "sliding"])
def test_a_run_continues_whatever_the_parent_is(parent, mode, tmp_path):
    check_every_position(
        lambda: LengthPoolSortDataset(parent(tmp_path), **MODES[mode]), epoch=1, step=29
    )


@pytest.mark.parametrize("mode", ["pool", "sliding"])
def test_a_repeating_stream_continues_across_passes(mode):
    def make():
        return LengthPoolSortDataset(rows(70), repeat=True, **MODES[mode])

    order = [key(sample) for sample in islice(make(), 400)]
    running = make()
    for position, _ in enumerate(islice(running, 300), start=1):
        if position % 7 == 0:
            resumed = make()
            resumed.load_state_dict(running.state_dict())
            rest = [key(sample) for sample in islice(resumed, 60)]
            assert rest == order[position : position + 60]


def test_a_repeating_stream_gives_every_sample_once_a_pass_before_the_pool_mixes_passes():
    order = [s["id"] for s in islice(LengthPoolSortDataset(rows(80), 40, repeat=True), 400)]
    assert all(sorted(order[i : i + 80]) == list(range(80)) for i in range(0, 400, 80))
    assert order[:80] != order[80:160]


def test_a_state_is_a_copy_and_loading_it_twice_gives_the_same_remainder():
    dataset = LengthPoolSortDataset(rows(250), 40)
    iterator = iter(dataset)
    list(islice(iterator, 55))
    state = dataset.state_dict()
    before = copy.deepcopy(state)
    rest = [key(sample) for sample in iterator]
    assert state == before
    other = LengthPoolSortDataset(rows(250), 40)
    for target in (other, other, dataset, dataset):
        target.load_state_dict(state)
        assert [key(sample) for sample in target] == rest
    assert state == before


def test_after_the_continued_epoch_the_next_one_is_whole():
    dataset = LengthPoolSortDataset(rows(250), 40)
    expected = [[key(s) for s in dataset] for _ in range(3)]
    running = LengthPoolSortDataset(rows(250), 40)
    running.set_epoch(1)
    list(islice(running, 77))
    resumed = LengthPoolSortDataset(rows(250), 40)
    resumed.load_state_dict(running.state_dict())
    assert [key(s) for s in resumed] == expected[1][77:]
    assert [key(s) for s in resumed] == expected[2]


def test_set_epoch_keeps_a_loaded_position_of_that_epoch_only():
    running = LengthPoolSortDataset(rows(250), 40)
    order = [key(s) for s in running]
    list(islice(running, 77))
    state = running.state_dict()
    assert state["epoch"] == 1
    same, other = (LengthPoolSortDataset(rows(250), 40) for _ in range(2))
    same.load_state_dict(state)
    same.set_epoch(1)
    assert len(list(same)) == 250 - 77
    other.load_state_dict(state)
    other.set_epoch(0)
    assert [key(s) for s in other] == order


def test_a_state_before_the_first_sample_and_of_a_loaded_state_is_that_position():
    dataset = LengthPoolSortDataset(rows(250), 40)
    order = [key(s) for s in dataset]
    fresh = LengthPoolSortDataset(rows(250), 40)
    fresh.load_state_dict(LengthPoolSortDataset(rows(250), 40).state_dict())
    assert [key(s) for s in fresh] == order
    running = LengthPoolSortDataset(rows(250), 40)
    list(islice(running, 61))
    loaded = LengthPoolSortDataset(rows(250), 40)
    loaded.load_state_dict(running.state_dict())
    again = LengthPoolSortDataset(rows(250), 40)
    again.load_state_dict(loaded.state_dict())
    iterator = iter(again)
    third = LengthPoolSortDataset(rows(250), 40)
    third.load_state_dict(again.state_dict())
    assert [key(s) for s in third] == [key(s) for s in iterator] == order[61:]


def test_other_data_options_or_ranks_are_refused_by_name():
    running = LengthPoolSortDataset(rows(250), 40)
    list(islice(running, 61))
    state = running.state_dict()
    with pytest.raises(ValueError, match="pool_size was 40 and is 41"):
        LengthPoolSortDataset(rows(250), 41).load_state_dict(state)
    with pytest.raises(ValueError, match=r"\(world_size\) was 1 and is 2"):
        LengthPoolSortDataset(rows(250), 40, dp_rank=0, dp_world_size=2).load_state_dict(state)
    changed = LengthPoolSortDataset(rows(250, seed=1), 40)
    changed.load_state_dict(state)
    with pytest.raises(ValueError, match="have other lengths than when the state was saved"):
        list(changed)
    shorter = LengthPoolSortDataset(rows(90), 40)
    shorter.load_state_dict(state)
    with pytest.raises(ValueError, match="has 90 samples where the saved state had read"):
        list(shorter)
    with pytest.raises(KeyError, match="not a state of a stream"):
        LengthPoolSortDataset(rows(250), 40).load_state_dict({"epoch": 1})


def test_a_state_that_does_not_fit_may_begin_its_epoch_anew(log_lines):
    running = LengthPoolSortDataset(rows(250), 40)
    list(running)
    list(islice(running, 61))
    other = LengthPoolSortDataset(rows(250), 41)
    other.load_state_dict(running.state_dict(), strict=False)
    assert "pool_size was 40 and is 41. Epoch 1 begins anew" in log_lines[-1]
    expected = LengthPoolSortDataset(rows(250), 41)
    expected.set_epoch(1)
    assert [key(s) for s in other] == [key(s) for s in expected]


@pytest.mark.parametrize(
    ("num_batches", "totals", "drop_last", "expected"),
    [
        (0, [None, None], False, ([0, 0], 0)),
        (5, [None, None], False, ([12, 8], 1)),
        (6, [None, 5, None], False, ([8, 5, 8], 0)),
        (9, [None, 5, None], False, ([16, 5, 12], 2)),
        (8, [None, 5, 0], False, ([24, 5, 0], 0)),
        (8, [None, 5, 0], True, ([28, 4, 0], 0)),
        (5, [9, 7], False, ([9, 7], 0)),
        (4, [9, 7], False, ([8, 7], 0)),
    ],
)
def test_batches_are_taken_from_workers_in_turn_past_those_that_ended(
    num_batches, totals, drop_last, expected
):
    assert samples_given(num_batches, 4, totals, drop_last) == expected


def test_more_batches_than_the_workers_have_are_refused():
    with pytest.raises(ValueError, match="num_batches=6, but the workers have 5 batches in all"):
        samples_given(6, 4, [9, 7])


def as_ids(batch):
    return [key(sample) for sample in batch]


@pytest.mark.parametrize("num_workers", [0, 1, 2, 4])
@pytest.mark.parametrize("mode", ["pool", "sliding"])
def test_the_main_process_knows_the_state_after_any_batch_without_asking_the_workers(
    num_workers, mode, tmp_path
):
    options = dict(pool_size=10, mode=mode, micro_batch_size=2)

    def loader_on(state=None):
        dataset = LengthPoolSortDataset(jsonl_stream(tmp_path), **options)
        if state is not None:
            dataset.load_state_dict(state)
        return DataLoader(
            dataset, batch_size=4, num_workers=num_workers, collate_fn=as_ids
        ), dataset

    loader, dataset = loader_on()
    batches, states = [], []
    for batch in loader:
        batches.append(batch)
        states.append(dataset.state_after(len(batches), 4, num_workers))
    total = sum(len(batch) for batch in batches)
    assert total == 60 + 67 + 74 + 81
    for position in (1, 2, 17, len(batches) - 6, len(batches) - 1, len(batches)):
        resumed, _ = loader_on(states[position - 1])
        assert list(resumed) == batches[position:], position


def test_a_worker_without_shards_does_not_disturb_the_state_of_the_others(tmp_path):
    def make():
        stream = Dataset.from_list(rows(60)).to_iterable_dataset()
        dataset = LengthPoolSortDataset(stream, 10)
        return dataset, DataLoader(dataset, 4, num_workers=2, collate_fn=as_ids)

    dataset, loader = make()
    batches, states = [], []
    for batch in loader:
        batches.append(batch)
        states.append(dataset.state_after(len(batches), 4, 2))
    for position in (1, 2, 9, 15):
        dataset, loader = make()
        dataset.load_state_dict(states[position - 1])
        assert list(loader) == batches[position:]


@pytest.mark.parametrize("persistent", [False, True])
def test_every_epoch_of_workers_differs_and_a_later_epoch_continues_exactly(persistent):
    def make():
        dataset = LengthPoolSortDataset(rows(200), 24, micro_batch_size=4)
        return dataset, DataLoader(
            dataset, 4, num_workers=2, persistent_workers=persistent, collate_fn=as_ids
        )

    _, loader = make()
    epochs = [list(loader) for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert all(len({row for b in epoch for row in b}) == 200 for epoch in epochs)
    dataset, again = make()
    assert [list(again) for _ in range(2)] == epochs[:2]
    dataset.set_epoch(0)
    assert list(again) == epochs[0]
    state = dataset.state_after(7, 4, 2, epoch=1)
    dataset, resumed = make()
    dataset.load_state_dict(state)
    assert [list(resumed), list(resumed)] == [epochs[1][7:], epochs[2]]


def test_another_number_of_workers_is_refused_with_both_numbers():
    dataset = LengthPoolSortDataset(rows(200), 24)
    state = dataset.state_after(7, 4, 2)
    dataset.load_state_dict(state)
    with pytest.raises(ValueError, match="was saved with 2 workers .* worker 0 of 1"):
        list(dataset)


def test_each_rank_picks_its_own_of_merged_states_and_finds_its_place_from_anothers(tmp_path):
    def make(rank):
        return LengthPoolSortDataset(jsonl_stream(tmp_path), 24, dp_rank=rank, dp_world_size=2)

    orders = [[key(s) for s in make(rank)] for rank in range(2)]
    assert not {*orders[0]} & {*orders[1]}
    states = []
    for rank in range(2):
        running = make(rank)
        list(islice(running, 50))
        states.append(running.state_dict())
    for state in (merge_states(states), states[0]):
        for rank in range(2):
            resumed = make(rank)
            resumed.load_state_dict(state)
            assert [key(s) for s in resumed] == orders[rank][50:]


@pytest.mark.parametrize("after", [3, 1500, 4000])
def test_long_streams_continue_from_the_last_note_not_from_the_beginning(after):
    dataset = LengthPoolSortDataset(rows(5000), 100)
    list(islice(dataset, after))
    state = dataset.state_after(after, 1, 0)
    [worker] = state["workers"]
    assert worker["given"] + worker["skip"] == after
    assert worker["skip"] <= 1000
    resumed = LengthPoolSortDataset(rows(5000), 100)
    resumed.load_state_dict(state)
    order = [key(s) for s in LengthPoolSortDataset(rows(5000), 100)]
    assert [key(s) for s in resumed] == order[after:]


@pytest.mark.long
@pytest.mark.parametrize("num_workers", [0, 1, 2, 4])
@pytest.mark.parametrize("persistent", [False, True])
def test_torchdata_continues_after_any_batch(num_workers, persistent, tmp_path):
    loaders = pytest.importorskip("torchdata.stateful_dataloader")

    def make():
        return loaders.StatefulDataLoader(
            LengthPoolSortDataset(jsonl_stream(tmp_path), 24),
            batch_size=4,
            num_workers=num_workers,
            persistent_workers=persistent and num_workers > 0,
            collate_fn=as_ids,
        )

    whole = make()
    epochs = [list(whole), list(whole)]
    for position in (1, 2, 9, len(epochs[0]) - 1):
        running = make()
        list(islice(running, position))
        state = running.state_dict()
        resumed = make()
        resumed.load_state_dict(state)
        assert list(resumed) == epochs[0][position:]
        assert list(resumed) == epochs[1]
