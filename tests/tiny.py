"""A tiny model and tiny data, for tests that train."""

import torch
from mmengine.registry import DATASETS, FUNCTIONS
from torch.utils.data import Dataset, IterableDataset

VOCAB = 128


def llama(**changes):
    """Config of a Llama of 27,000 parameters with random weights."""
    config = dict(
        type="LlamaConfig",
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        max_position_embeddings=256,
    )
    return dict(type="AutoModelForCausalLM.from_config", config={**config, **changes})


def sample(index, length):
    """Tokens that depend on the index alone; the first says which sample it is."""
    ids = [index % VOCAB] + [(7 * index + 3 * j) % (VOCAB - 1) + 1 for j in range(1, length)]
    return {"input_ids": ids, "labels": ids}


def collate(samples):
    """Pad, as XTuner does, without facts about the batch."""
    longest = max(len(s["input_ids"]) for s in samples)
    ids = torch.zeros(len(samples), longest, dtype=torch.long)
    labels, mask = ids - 100, ids.bool()
    for row, s in enumerate(samples):
        length = len(s["input_ids"])
        ids[row, :length] = torch.tensor(s["input_ids"])
        labels[row, :length] = torch.tensor(s["labels"])
        mask[row, :length] = True
    return {
        "data": {"input_ids": ids, "attention_mask": mask, "labels": labels},
        "data_samples": None,
    }


@DATASETS.register_module(force=True)
class TinyText(Dataset):
    """Samples of the given lengths, with the ``length`` attribute; counts what is loaded."""

    def __init__(self, length):
        self.length = list(length)
        self.loaded = []

    def __len__(self):
        return len(self.length)

    def __getitem__(self, index):
        self.loaded.append(index)
        return sample(index, self.length[index])


@DATASETS.register_module(force=True)
class TinyStream(IterableDataset):
    """The same in turn, as a stream without a length; each epoch begins one sample further."""

    def __init__(self, length):
        self.data = TinyText(length)
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for i in range(len(self.data)):
            yield self.data[(i + self.epoch) % len(self.data)]


FUNCTIONS.register_module(name="tiny_collate", module=collate, force=True)
