"""The task encoder of test_energon.py, at the top of a module, as Energon's restoring needs it."""

import json

import torch
from megatron.energon import Cooker, DefaultTaskEncoder, SkipSample, basic_sample_keys, stateless

from xlength.integrations.energon import LengthPoolSortDataset


@stateless
def cook(sample):
    content = sample["json"]
    row = json.loads(content) if isinstance(content, bytes) else content
    return {**basic_sample_keys(sample), **row}


class PoolEncoder(DefaultTaskEncoder):
    """Sorts in pools before batching; skips the batch that holds one given sample position."""

    cookers = [Cooker(cook)]

    def __init__(self, options, skip=None):
        super().__init__()
        self.options = options
        self.skip = skip
        self.batches = 0

    @stateless
    def batch(self, samples):
        self.batches += 1
        if self.batches == self.skip:
            raise SkipSample()
        rows = {name: torch.tensor([s[name] for s in samples]) for name in ("id", "length")}
        return {**basic_sample_keys(samples[0]), **rows}

    def build_batch(self, dataset, *, batch_size, worker_config, **options):
        dataset = LengthPoolSortDataset(dataset, worker_config=worker_config, **self.options)
        return super().build_batch(
            dataset, batch_size=batch_size, worker_config=worker_config, **options
        )
