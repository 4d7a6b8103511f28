"""Random augmentation of streams: it continues exactly, and leaves the training process alone."""

import random
from functools import lru_cache
from itertools import islice

import numpy as np
import pytest
import torch
from datasets import IterableDataset
from torch.utils.data import DataLoader

from xlength.datasets.packed_stream import PackedStream
from xlength.datasets.pool_sort import LengthPoolSortDataset
from xlength.runtime.random_state import random_states, restore_random_states

BATCH = 4


def drawn():
    """From all generators, and an odd number of normal ones, of which numpy makes two at once."""
    return [random.random(), np.random.rand(), np.random.randn(), torch.rand(()).item()]


@lru_cache
def rows(n=240):
    lengths = np.random.RandomState(0).randint(2, 300, n)
    return tuple({"id": i, "length": int(length)} for i, length in enumerate(lengths))


def noisy(row):
    return {**row, "noise": drawn()}


class NoisyTable:
    """Draws where it is indexed."""

    def __init__(self, n=240):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return noisy(rows(self.n)[index])


class Begins(torch.utils.data.IterableDataset):
    """Draws where it begins already, and which sample comes next."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        left = list(rows(self.n))
        random.shuffle(left)
        return self._from(left)

    def _from(self, left):
        while left:
            yield noisy(left.pop(np.random.randint(min(len(left), 50))))


class Around(torch.utils.data.IterableDataset):
    """Draws for what another stream of ours gives, and has its state."""

    def __init__(self, stream):
        self.stream = stream
        self.state_dict, self.load_state_dict = stream.state_dict, stream.load_state_dict

    def __iter__(self):
        for row in self.stream:
            row = noisy({**row, "length": row["length"] + random.randrange(9)})
            yield {**row, "noise": row["noise"] + [torch.rand(()).item()]}


def shards(numbers, n):
    for number in numbers:
        yield from rows(n)[number::4]


def hf_stream(n):
    return IterableDataset.from_generator(shards, gen_kwargs={"numbers": [0, 1, 2, 3], "n": n})


def inner(n):
    return LengthPoolSortDataset(lambda: map(noisy, rows(n)), 12, seed=5, shard="worker")


IN_GROUPS = {"batched": True, "batch_size": 16}
PARENTS = {
    "generator function": lambda n: lambda: map(noisy, rows(n)),
    "table": NoisyTable,
    "begins at random": Begins,
    "datasets map": lambda n: hf_stream(n).map(noisy).filter(lambda row: row["noise"][0] > 0.1),
    "datasets shuffle buffer": lambda n: hf_stream(n).shuffle(3, buffer_size=20).map(noisy),
    "datasets map behind a batched one": lambda n: (
        hf_stream(n).map(lambda rows: {"length": rows["length"]}, **IN_GROUPS).map(noisy)
    ),
    "of its own kind": inner,
    "around one of its own kind": lambda n: Around(inner(n)),
}
SPLIT_THEMSELVES = ("of its own kind", "around one of its own kind")
MODES = {
    "off": dict(pool_size=0),
    "pool": dict(pool_size=24, micro_batch_size=BATCH),
    "sliding": dict(pool_size=24, micro_batch_size=BATCH, mode="sliding", max_age=12),
}


def collate(samples):
    return [(row["id"], *row["noise"]) for row in samples], drawn()


def loader_of(dataset, num_workers):
    return DataLoader(dataset, BATCH, num_workers=num_workers, collate_fn=collate)


def train(dataset, num_workers, resumed=None, ask=False):
    """What batches and a model draw, and after each batch what to resume from: a state (of the
    reader itself, to ``ask``), the random states and the number of batches."""
    torch.manual_seed(1 if resumed is None else 999)
    if resumed is not None:
        dataset.load_state_dict(resumed[0])
    batches = iter(loader_of(dataset, num_workers))
    if resumed is not None:
        restore_random_states(resumed[1])
    steps, states = [], []
    done = 0 if resumed is None else resumed[2]
    for batch in batches:
        steps.append((batch, drawn()))
        done += 1
        state = dataset.state_dict() if ask else dataset.state_after(done, BATCH, num_workers)
        states.append((state, random_states(), done))
    return steps, states


@pytest.mark.parametrize("parent", PARENTS)
@pytest.mark.parametrize("mode", MODES)
def test_augmentation_and_the_model_draw_what_they_would_in_an_undisturbed_run(mode, parent):
    def make():
        shard = "none" if parent in SPLIT_THEMSELVES else "worker"
        return LengthPoolSortDataset(PARENTS[parent](240), shard=shard, **MODES[mode])

    steps, states = train(make(), 0, ask=True)
    assert len(steps) > 50
    for position in (1, 2, 11, 26, 40, len(steps) - 1, len(steps)):
        rest, _ = train(make(), 0, states[position - 1])
        assert rest == steps[position:], position


@pytest.mark.parametrize("parent", PARENTS)
@pytest.mark.parametrize("mode", MODES)
def test_workers_draw_for_samples_and_batches_what_they_would_in_an_undisturbed_run(mode, parent):
    """A worker leaves a note of its state after a thousand samples, one in a batch's middle too."""

    def make():
        shard = "none" if parent in SPLIT_THEMSELVES else "worker"
        return LengthPoolSortDataset(PARENTS[parent](2300), shard=shard, **MODES[mode])

    steps, states = train(make(), 2)
    assert len(steps) > 510
    for position in (1, 2, 300, 509, 511, len(steps) - 6, len(steps)):
        rest, _ = train(make(), 2, states[position - 1])
        assert rest == steps[position:], position


def test_without_it_the_same_comparison_fails():
    def make():
        return LengthPoolSortDataset(lambda: map(noisy, rows()), 24, reseed=False)

    steps, states = train(make(), 0)
    rest, _ = train(make(), 0, states[10])
    assert [[row[0] for row in batch[0]] for batch, _ in rest] == [
        [row[0] for row in batch[0]] for batch, _ in steps[11:]
    ]
    assert rest != steps[11:]


@pytest.mark.parametrize("shard", ["rank", "worker"])
def test_a_rank_that_passes_over_the_samples_of_others_continues_exactly(shard):
    def make():
        return LengthPoolSortDataset(
            lambda: map(noisy, rows()), 12, shard=shard, dp_rank=1, dp_world_size=2
        )

    steps, states = train(make(), 0, ask=True)
    rest, _ = train(make(), 0, states[12])
    assert rest == steps[13:]


def test_passes_of_a_stream_that_repeats_are_augmented_differently_and_continue():
    def make():
        return LengthPoolSortDataset(lambda: map(noisy, rows()), 24, repeat=True)

    steps = [batch for batch, _ in islice(loader_of(make(), 0), 80)]
    noise = [tuple(row[1:]) for batch in steps for row in batch]
    assert len(set(noise)) == len(noise) == 320
    cut_off, resumed = make(), make()
    list(islice(loader_of(cut_off, 0), 65))  # in the second pass
    resumed.load_state_dict(cut_off.state_dict())
    rest = [batch for batch, _ in islice(loader_of(resumed, 0), 15)]
    assert rest == steps[65:]


def test_every_epoch_rank_and_worker_draws_something_else():
    seen = []
    for rank in range(2):
        dataset = LengthPoolSortDataset(
            NoisyTable(), 24, shard="none", dp_rank=rank, dp_world_size=2
        )
        for num_workers in (0, 2):  # with two, both read the whole table
            dataset.set_epoch(num_workers)
            for _ in range(2):
                seen += [row for batch, _ in loader_of(dataset, num_workers) for row in batch]
    assert len(seen) == 2 * (2 + 4) * 240
    for column in range(1, 5):
        assert len({row[column] for row in seen}) == len(seen)


def test_the_generators_of_a_sample_are_unlike_each_other():
    """numpy's and torch's are the same algorithm: with one seed both would draw the same."""
    dataset = LengthPoolSortDataset(NoisyTable(), 0, reseed=True)
    noise = np.array([row["noise"] for row in dataset])
    correlations = np.corrcoef(noise.T) - np.eye(4)
    assert np.abs(correlations).max() < 0.3
    successive = [np.corrcoef(noise[:-1, i], noise[1:, i])[0, 1] for i in range(4)]
    assert np.abs(successive).max() < 0.3
    assert abs(noise[:, [0, 1, 3]].mean() - 0.5) < 0.06


@pytest.mark.parametrize("samples", [lambda: iter(rows()), lambda: map(noisy, rows())])
@pytest.mark.parametrize("through", ["loader", "reseed=True", "pack"])
def test_the_training_process_draws_what_it_draws_without_a_stream(samples, through):
    def model_draws(stream):
        restore_random_states(before)
        return [drawn() for _ in islice(stream, 20)]

    before = random_states()
    expected = [drawn() for _ in range(20)]
    if through == "loader":
        loader = loader_of(LengthPoolSortDataset(samples, 24), 0)
        loader.collate_fn = len
        stream = iter(loader)
    elif through == "pack":
        packs = PackedStream(lambda: map(tokens, samples()), 300, 24)
        stream = iter(DataLoader(packs, 1, collate_fn=len))
    else:
        stream = iter(LengthPoolSortDataset(samples, 24, reseed=True))
    assert model_draws(stream) == expected


def tokens(row):
    ids = [1 + int(900 * row.get("noise", [0])[0])] * row["length"]
    return {"input_ids": ids, "labels": ids, "length": row["length"]}


def test_nothing_is_seeded_where_no_loader_reads_unless_it_is_asked_for():
    def noise(**options):
        random.seed(7)
        return [row["noise"][0] for row in LengthPoolSortDataset(NoisyTable(), 0, **options)]

    plain = random.Random(7)
    assert noise() == [plain.random() for _ in range(240)]
    assert noise(reseed=True) != noise()
    assert noise(reseed=True) == noise(reseed=True) != noise(reseed=True, seed=-42)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_packs_of_augmented_samples_continue_exactly(num_workers):
    def make():
        return PackedStream(lambda: map(tokens, map(noisy, rows())), 600, 24, shard="worker")

    def read(dataset):
        return DataLoader(dataset, 1, num_workers=num_workers, collate_fn=packs_of)

    def packs_of(packs):
        return [pack["input_ids"].tolist() for pack in packs], drawn()

    dataset = make()
    whole, states = [], []
    for batch in read(dataset):
        whole.append(batch)
        states.append(dataset.state_after(len(whole), 1, num_workers))
    for position in (1, 7, 15, len(whole) - 1):
        resumed = make()
        resumed.load_state_dict(states[position - 1])
        rest = list(read(resumed))
        assert [ids for ids, _ in rest] == [ids for ids, _ in whole[position:]]
        if num_workers:
            assert rest == whole[position:]


@pytest.mark.parametrize("dataset", ["sorted", pytest.param("packed", marks=pytest.mark.long)])
def test_spawned_workers_draw_what_forked_ones_do(dataset):
    def read(context):
        table = NoisyTable() if dataset == "sorted" else NoisyTokens()
        if dataset == "sorted":
            stream = LengthPoolSortDataset(table, 24, micro_batch_size=BATCH)
        else:
            stream = PackedStream(table, 600, 24)
        return list(
            DataLoader(
                stream,
                BATCH,
                num_workers=1,
                collate_fn=collate if dataset == "sorted" else len,
                multiprocessing_context=context,
            )
        )

    assert read("spawn") == read("fork")


class NoisyTokens(NoisyTable):
    def __getitem__(self, index):
        return tokens(super().__getitem__(index))


def test_a_state_of_other_seeding_is_refused():
    state = LengthPoolSortDataset(rows(), 24, reseed=False).state_dict()
    with pytest.raises(ValueError, match="reseed was False and is None"):
        LengthPoolSortDataset(rows(), 24).load_state_dict(state)
