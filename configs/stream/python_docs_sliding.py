# A stream through a sliding buffer: less waiting than pools of the same size.
_base_ = [
    "../_base_/runtime.py",
    "../_base_/python_docs_stream.py",
    "../_base_/tiny_llama.py",
    "../_base_/adamw_cosine_iters300.py",
]
batch_size = 8  # per device

train_dataloader = dict(
    batch_size=batch_size,
    num_workers=2,
    persistent_workers=True,
    dataset=dict(
        type="LengthPoolSortDataset",
        dataset=_base_.stream,
        mode="sliding",
        pool_size=256,
        micro_batch_size=batch_size,
    ),
    sampler=None,  # a stream has none; mmengine wants it spelt out
    collate_fn=dict(type="default_collate_fn"),
)
randomness = dict(seed=0)
