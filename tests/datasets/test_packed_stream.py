import itertools

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import xlength
from xlength.collate_packed import packed_collate_fn
from xlength.datasets.packed_stream import PackedStream
from xlength.datasets.pool_sort import LengthPoolSortDataset


def rows(n=200, high=60, seed=0):
    """Row i holds the tokens i * 1000 + position."""
    lengths = np.random.RandomState(seed).randint(1, high, n)
    return [
        {"input_ids": list(range(i * 1000, i * 1000 + k)), "labels": [7] * k}
        for i, k in enumerate(lengths.tolist())
    ]


def hf(data=None, shards=4):
    def shard(parts):
        for part in parts:
            yield from part

    data = data or rows()
    parts = [data[i::shards] for i in range(shards)]
    return datasets.IterableDataset.from_generator(shard, gen_kwargs={"parts": parts})


def function():
    return iter(rows())


def tokens(packs):
    return sorted(int(token) for pack in packs for token in pack["input_ids"])


ALL = tokens(rows())


def same(one, other):
    return len(one) == len(other) and all(
        np.array_equal(a[key], b[key]) for a, b in zip(one, other, strict=True) for key in a
    )


@pytest.mark.parametrize("make", [rows, hf, lambda: function], ids=["list", "hf", "function"])
def test_every_token_of_a_stream_is_in_one_pack(make):
    packs = list(PackedStream(make(), 128, pool_size=30))
    assert tokens(packs) == ALL
    sizes = [len(pack["input_ids"]) for pack in packs]
    assert max(sizes) <= 128 and np.mean(sizes[:-3]) > 124


def test_items_are_those_of_a_packed_dataset():
    (pack,) = PackedStream(rows(2), 128)
    ends = pack["cumulative_len"]
    assert pack["position_ids"].tolist() == [k for n in np.diff(ends) for k in range(n)]
    assert (pack["labels"] == -100).nonzero()[0].tolist() == ends[:-1].tolist()
    assert pack["sample_ids"].tolist() == (pack["input_ids"][ends[:-1]] // 1000).tolist()
    assert pack["starts"].tolist() == [0, 0]
    batch = packed_collate_fn([pack, pack])["data"]
    assert batch["input_ids"].shape[0] == 2


@pytest.mark.parametrize("overlong", ["error", "split"])
@pytest.mark.parametrize("make", [rows, hf, lambda: function], ids=["list", "hf", "function"])
def test_a_checkpoint_right_after_any_pack_loses_nothing(make, overlong):
    options = dict(max_length=64 if overlong == "error" else 40, pool_size=20, overlong=overlong)
    whole = list(PackedStream(make(), **options))
    for count in (0, 1, 2, 17, len(whole) - 2, len(whole)):
        stream = PackedStream(make(), **options)
        iterator = iter(stream)
        for _ in range(count):
            next(iterator)
        state = stream.state_dict()
        for _ in itertools.islice(iterator, 3):
            pass  # going on does not change the state
        for _ in range(2):  # and it can be loaded twice
            again = PackedStream(make(), **options)
            again.load_state_dict(state)
            assert same(list(again), whole[count:])


def test_a_state_of_other_options_or_of_another_data_set_is_refused():
    state = PackedStream(rows(), 64).state_dict()
    with pytest.raises(ValueError, match="max_length was 64 and is 128"):
        PackedStream(rows(), 128).load_state_dict(state)
    with pytest.raises(ValueError, match="state of type 'PlanSampler'"):
        PackedStream(rows(), 64).load_state_dict({**state, "type": "PlanSampler"})


def test_changed_data_are_noticed():
    stream = PackedStream(rows(), 64, pool_size=20)
    next(iter(stream))
    other = PackedStream(rows(seed=1), 64, pool_size=20)
    other.load_state_dict(stream.state_dict())
    with pytest.raises(ValueError, match="data or the key have changed"):
        list(other)


@pytest.mark.parametrize("make", [rows, hf], ids=["list", "hf"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_ranks_and_workers_never_share_a_sample(make, num_workers):
    packs = []
    for rank in range(2):
        stream = PackedStream(make(), 128, pool_size=20, dp_rank=rank, dp_world_size=2)
        loader = DataLoader(stream, None, num_workers=num_workers)
        packs += [{k: np.asarray(v) for k, v in pack.items()} for pack in loader]
    assert tokens(packs) == ALL


def test_states_of_two_workers_continue_at_the_next_pack():
    def loader(state=None):
        stream = PackedStream(rows(400), 128, pool_size=20)
        if state is not None:
            stream.load_state_dict(state)
        return stream, DataLoader(stream, 2, num_workers=2, collate_fn=packed_collate_fn)

    ids = [batch["data"]["input_ids"] for batch in loader()[1]]
    stream, first = loader()
    for _ in itertools.islice(first, 5):
        pass
    rest = [batch["data"]["input_ids"] for batch in loader(stream.state_after(5, 2, 2))[1]]
    assert len(rest) == len(ids) - 5
    assert all(map(torch.equal, rest, ids[5:]))


def test_overlong_samples_follow_the_policy_and_are_reported(log_lines):
    data = [{"input_ids": [i] * n, "labels": [i] * n} for i, n in enumerate([3, 12, 4, 9])]
    with pytest.raises(ValueError, match="sample 1 of the stream has 12 tokens.*max_length=5"):
        list(PackedStream(data, 5))
    counts = {}
    for policy in ("truncate", "split", "drop"):
        packs = list(PackedStream(data, 5, overlong=policy))
        counts[policy] = np.bincount(np.concatenate([p["input_ids"] for p in packs]), minlength=4)
        assert max(len(p["input_ids"]) for p in packs) <= 5
    assert counts["truncate"].tolist() == [3, 5, 4, 5]
    assert counts["split"].tolist() == [3, 12, 4, 9]
    assert counts["drop"].tolist() == [3, 0, 4, 0]
    text = "\n".join(log_lines)
    assert "longer than max_length=5, so left out: sample 1 of the stream (12 tokens" in text
    assert "left out: 2 samples of the epoch" in text


def test_unusable_samples_are_named():
    with pytest.raises(ValueError, match="sample 0 of the stream has no labels"):
        list(PackedStream([{"input_ids": [1, 2]}], 5))
    with pytest.raises(ValueError, match="sample 0 of the stream has 2 tokens, fewer"):
        list(PackedStream([{"input_ids": [1, 2], "labels": [1, 2], "length": 4}], 5))


def squares(pack):
    return float((np.diff(pack["cumulative_len"]).astype(float) ** 2).sum())


def waiting(costs):
    costs = np.array(costs)
    return costs.max(axis=0).mean() / costs.mean()


def test_sorting_packs_by_attention_cost_makes_ranks_wait_less():
    rng = np.random.RandomState(0)
    lengths = np.clip(rng.lognormal(5, 1.2, 12_000), 1, 2048).astype(int)
    data = [
        {"input_ids": np.zeros(n, int), "labels": np.zeros(n, int), "length": int(n)}
        for n in lengths
    ]
    plain, pooled = [], []
    for rank in range(4):

        def stream(rank=rank):
            return PackedStream(data, 4096, pool_size=200, dp_rank=rank, dp_world_size=4)

        plain.append([squares(pack) for pack in stream()][:150])
        sorted_packs = LengthPoolSortDataset(
            stream(), 48, cost=dict(type="attention", crossover=1), mode="sliding", shard="none"
        )
        pooled.append([squares(pack) for pack in sorted_packs][:150])
    assert waiting(pooled) < 1.15 < 1.25 < waiting(plain)


def test_a_sorted_stream_of_packs_continues_after_any_pack():
    def build():
        return LengthPoolSortDataset(
            PackedStream(rows(300), 128, pool_size=20), 8, cost="attention", shard="none"
        )

    whole = list(build())
    stream = build()
    iterator = iter(stream)
    given = [next(iterator) for _ in range(25)]
    again = build()
    again.load_state_dict(stream.state_dict())
    assert same(given + list(again), whole)


def test_it_is_found_under_its_names_and_built_from_a_config():
    from mmengine.registry import DATASETS

    assert DATASETS.get("xlength.PackedStream") is xlength.PackedStream is PackedStream
    stream = DATASETS.build(dict(type="xlength.PackedStream", dataset=rows(5), max_length=64))
    assert len(tokens(stream)) == sum(len(row["input_ids"]) for row in rows(5))
