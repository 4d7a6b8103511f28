"""``LengthPoolSortDataset`` around a real WebDataset. Needs the package."""

import io
import json
import tarfile

import pytest
from torch.utils.data import DataLoader

from xlength.datasets.pool_sort import LengthPoolSortDataset

pytestmark = pytest.mark.long
webdataset = pytest.importorskip("webdataset")

SHARDS, ROWS = 4, 50


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tars")
    for shard in range(SHARDS):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for row in range(ROWS):
                number = shard * ROWS + row
                text = json.dumps({"id": number, "length": (37 * number) % 211 + 1}).encode()
                info = tarfile.TarInfo(f"{number:05}.json")
                info.size = len(text)
                tar.addfile(info, io.BytesIO(text))
    return sorted(str(path) for path in folder.glob("*.tar"))


def make(urls):
    stream = webdataset.WebDataset(urls, shardshuffle=False).decode()
    return LengthPoolSortDataset(stream, 20, key="json.length", micro_batch_size=4)


def as_ids(batch):
    return [sample["json"]["id"] for sample in batch]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_sample_of_a_web_dataset_is_given_once_and_a_run_continues(urls, num_workers):
    dataset = make(urls)
    batches, states = [], []
    for batch in DataLoader(dataset, 4, num_workers=num_workers, collate_fn=as_ids):
        batches.append(batch)
        states.append(dataset.state_after(len(batches), 4, num_workers))
    assert sorted(sum(batches, [])) == list(range(SHARDS * ROWS))
    for position in (1, 20, 41):
        resumed = make(urls)
        resumed.load_state_dict(states[position - 1])
        loader = DataLoader(resumed, 4, num_workers=num_workers, collate_fn=as_ids)
        assert list(loader) == batches[position:]
