"""``LengthPoolSortDataset`` inside Megatron-Energon, on real WebDataset tars. Needs the package."""

import copy
import io
import json
import pickle
import random
import tarfile
from itertools import islice

import numpy as np
import pytest

pytestmark = pytest.mark.long
energon = pytest.importorskip("megatron.energon")

from megatron.energon.flavors import BaseWebdatasetFactory  # noqa: E402

from tests.integrations.energon_encoder import PoolEncoder  # noqa: E402

SHARDS, ROWS = 8, 60
MODES = {
    "pool": dict(pool_size=24, micro_batch_size=4),
    "pool of ones": dict(pool_size=24, warmup_steps=3, initial_pool_size=5),
    "sliding": dict(pool_size=24, micro_batch_size=4, mode="sliding"),
}


@pytest.fixture(scope="module")
def dataset_path(tmp_path_factory):
    """Eight tars of JSON samples with random lengths, prepared for Energon."""
    folder = tmp_path_factory.mktemp("tars")
    lengths = random.Random(0)
    names = []
    for shard in range(SHARDS):
        names.append(f"shard_{shard:03}.tar")
        with tarfile.open(folder / names[-1], "w") as tar:
            for row in range(ROWS):
                number = shard * ROWS + row
                text = json.dumps({"id": number, "length": lengths.randint(1, 500)}).encode()
                info = tarfile.TarInfo(f"{number:06}.json")
                info.size = len(text)
                tar.addfile(info, io.BytesIO(text))
    BaseWebdatasetFactory.prepare_dataset(
        folder, names, split_parts_ratio=[("train", 1.0)], shuffle_seed=None, workers=1
    )
    (folder / ".nv-meta/dataset.yaml").write_text(
        "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
    )
    return folder


def loader_of(path, options, num_workers=0, rank=0, world_size=1, repeat=True, skip=None):
    config = energon.WorkerConfig(rank=rank, world_size=world_size, num_workers=num_workers)
    dataset = energon.get_train_dataset(
        path,
        worker_config=config,
        batch_size=4,
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
        task_encoder=PoolEncoder(options, skip),
        repeat=repeat,
    )
    return energon.get_savable_loader(
        dataset, checkpoint_every_sec=0, gc_collect_every_n_steps=0, watchdog_timeout_seconds=None
    )


def ids(batches):
    return [batch["id"].tolist() for batch in batches]


@pytest.mark.parametrize("options", MODES.values(), ids=MODES)
@pytest.mark.parametrize(("num_workers", "positions"), [(0, (1, 7, 33, 80)), (2, (33,))])
def test_a_saved_loader_continues_with_exactly_the_same_batches(
    dataset_path, options, num_workers, positions
):
    """With workers at one position only: Energon takes ten seconds to end a loader's workers."""
    for position in positions:
        running = loader_of(dataset_path, options, num_workers)
        batches = iter(running)
        list(islice(batches, position))
        state = pickle.loads(pickle.dumps(running.save_state_rank()))
        expected = ids(islice(batches, 60))
        resumed = loader_of(dataset_path, options, num_workers)
        resumed.restore_state_rank(state)
        assert ids(islice(resumed, 60)) == expected, position


def test_a_state_may_be_loaded_twice_and_saved_again_at_once(dataset_path):
    options = MODES["pool"]
    running = loader_of(dataset_path, options)
    batches = iter(running)
    list(islice(batches, 20))
    state = running.save_state_rank()
    expected = ids(islice(batches, 40))
    for _ in range(2):
        resumed = loader_of(dataset_path, options)
        # A copy, since Energon's own data sets go on to use the state that they are given.
        resumed.restore_state_rank(copy.deepcopy(state))
        assert ids(islice(resumed, 10)) == expected[:10]
        again = loader_of(dataset_path, options)
        again.restore_state_rank(resumed.save_state_rank())
        assert ids(islice(again, 30)) == expected[10:40]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_finite_pass_gives_every_sample_once_and_the_next_one_another_order(
    dataset_path, num_workers
):
    loader = loader_of(dataset_path, MODES["pool"], num_workers, repeat=False)
    passes = [ids(loader), ids(loader)]
    for batches in passes:
        assert sorted(sum(batches, [])) == list(range(SHARDS * ROWS))
    assert passes[0] != passes[1]


@pytest.mark.parametrize("mode", ["pool", "sliding"])
def test_ranks_meet_like_lengths_and_batches_hold_neighbours(dataset_path, mode):
    options = dict(pool_size=60, micro_batch_size=4, mode=mode)
    costs = []
    for rank in range(2):
        loader = loader_of(dataset_path, options, 0, rank, 2)
        batches = [batch["length"] for batch in islice(loader, 200)]
        assert np.mean([np.ptp(batch.numpy()) for batch in batches]) < 60
        costs.append([int(batch.max()) for batch in batches])
    costs = np.array(costs)
    assert costs.max(axis=0).mean() / costs.mean() < 1.1
    assert np.maximum(costs[0, 1:], costs[1, :-1]).mean() / costs.mean() > 1.15


def test_a_batch_that_one_rank_skips_does_not_shift_a_sliding_schedule_that_follows_the_loader(
    dataset_path,
):
    def wait(follow):
        options = dict(pool_size=60, micro_batch_size=4, mode="sliding", follow_loader=follow)
        costs = []
        for rank in range(2):
            skip = 30 if rank == 1 else None
            loader = loader_of(dataset_path, options, 0, rank, 2, skip=skip)
            costs.append([int(b["length"].max()) for b in islice(loader, 300)])
        costs = np.array(costs)[:, 60:]
        return costs.max(axis=0).mean() / costs.mean()

    assert wait(follow=True) < 1.1
    assert wait(follow=False) > 1.15


def test_a_bad_option_and_a_missing_length_are_named(dataset_path):
    with pytest.raises(ValueError, match="pool_size=3 and micro_batch_size=4"):
        loader_of(dataset_path, dict(pool_size=3, micro_batch_size=4))
    with pytest.raises(ValueError, match="follow_loader=True needs mode='sliding'"):
        loader_of(dataset_path, dict(pool_size=8, follow_loader=True))
    with pytest.raises(ValueError, match="sample 0 of the stream, a dict, has no 'size'"):
        next(iter(loader_of(dataset_path, dict(pool_size=8, key="size"))))
