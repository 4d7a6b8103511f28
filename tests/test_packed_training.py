"""Packs in real Runners: a plan, a packed data set, and a packed stream."""

import pytest

from tests.test_loops import Watch, train, weights

LENGTHS = [3 + (7 * i) % 23 for i in range(60)]
PACKED = dict(type="packed_collate_fn")


class Samples(Watch):
    """Notes which samples a run trains on: the first token of each says which."""

    def __init__(self, stop_after=None):
        super().__init__(stop_after)
        self.samples, self.losses = [], []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        data = data_batch["data"]
        starts = data["cu_seqlens"][:-1].long()
        firsts = data["input_ids"].flatten()[starts].tolist()
        self.samples.append(firsts)
        assert len(firsts) == len(data["lengths"])
        self.losses.append(float(outputs["loss"]))
        super().after_train_iter(runner, batch_idx, data_batch, outputs)


def plan_loader(**plan):
    return dict(
        batch_size=1,
        dataset=dict(type="TinyText", length=LENGTHS),
        sampler=dict(
            type="PlanSampler", plan=dict(type="Packing", max_length=64, window=32, **plan)
        ),
        batch_sampler=dict(type="PlanBatchSampler"),
        collate_fn=PACKED,
    )


def epochs_of(watch, count):
    steps = len(watch.samples) // count
    return [watch.samples[i * steps : (i + 1) * steps] for i in range(count)]


def test_every_epoch_of_a_packing_plan_trains_every_sample_once(tmp_path):
    watch, _ = train(tmp_path, dict(type="TrainLoop", max_epochs=3), plan_loader(), Samples())
    epochs = epochs_of(watch, 3)
    for epoch in epochs:
        assert sorted(i for step in epoch for i in step) == list(range(60))
    assert epochs[0] != epochs[1] != epochs[2]
    assert watch.losses[-1] < watch.losses[0]


def test_a_packing_run_that_is_killed_continues_with_the_same_packs(tmp_path):
    loop = dict(type="TrainLoop", max_epochs=2)
    hooks = dict(checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=5))
    whole, reference = train(tmp_path / "whole", loop, plan_loader(), Samples())
    train(tmp_path / "cut", loop, plan_loader(), Samples(stop_after=7), default_hooks=hooks)
    rest, resumed = train(
        tmp_path / "cut", loop, plan_loader(), Samples(), default_hooks=hooks, resume=True
    )
    assert rest.samples == whole.samples[5:]
    assert weights(resumed).equal(weights(reference))


def test_several_packs_a_batch_and_accumulation_train_every_sample_once(tmp_path):
    loader = plan_loader(packs_per_batch=2, accumulate=2)
    loader["collate_fn"] = dict(**PACKED, max_length=64)
    options = dict(optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1), accumulative_counts=2))
    shapes = []

    class Shapes(Watch):
        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            shapes.append(tuple(data_batch["data"]["input_ids"].shape))
            self.epochs[-1].append(data_batch["data"]["lengths"].tolist())

    watch, _ = train(tmp_path, dict(type="TrainLoop", max_epochs=1), loader, Shapes(), **options)
    lengths = [n for epoch in watch.epochs for batch in epoch for n in batch]
    assert sorted(lengths) == sorted(LENGTHS)
    assert len(shapes) % 2 == 0 and max(shapes) <= (2, 64)


@pytest.mark.parametrize("sampler", ["DefaultSampler", "LengthGroupedSampler"])
def test_a_packed_data_set_trains_under_any_sampler(sampler, tmp_path):
    options = {} if sampler == "DefaultSampler" else dict(per_device_batch_size=2)
    loader = dict(
        batch_size=1,
        dataset=dict(
            type="PackedDataset", dataset=dict(type="TinyText", length=LENGTHS), max_length=64
        ),
        sampler=dict(type=sampler, **options),
        collate_fn=PACKED,
    )
    watch, _ = train(tmp_path, dict(type="TrainLoop", max_epochs=1), loader, Samples())
    assert {i for step in watch.samples for i in step} == set(range(60))


def stream_loader():
    return dict(
        batch_size=1,
        num_workers=2,
        dataset=dict(
            type="PackedStream",
            dataset=dict(type="TinyStream", length=LENGTHS),
            max_length=64,
            pool_size=16,
            shard="rank",
        ),
        sampler=None,
        collate_fn=PACKED,
    )


def test_a_packed_stream_trains_without_a_seam(tmp_path):
    watch, _ = train(tmp_path, dict(type="TrainLoop", max_iters=40), stream_loader(), Samples())
    seen = [i for step in watch.samples for i in step]
    assert len(watch.samples) == 40 and set(seen) == set(range(60))


def test_a_packed_stream_that_is_killed_continues_at_the_next_pack(tmp_path):
    loop = dict(type="TrainLoop", max_iters=20)
    hooks = dict(checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=5))
    whole, _ = train(tmp_path / "whole", loop, stream_loader(), Samples())
    train(tmp_path / "cut", loop, stream_loader(), Samples(stop_after=12), default_hooks=hooks)
    rest, _ = train(
        tmp_path / "cut", loop, stream_loader(), Samples(), default_hooks=hooks, resume=True
    )
    assert rest.samples == whole.samples[10:]
