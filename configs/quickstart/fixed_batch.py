# Batches of 8 samples of like length, ranks of equal cost. Differs from default_sampler.py by the
# plan: sampler and batch_sampler.
_base_ = [
    "../_base_/runtime.py",
    "../_base_/python_docs.py",
    "../_base_/tiny_llama.py",
]
batch_size = 8
max_iters = 300

train_dataloader = dict(
    batch_size=batch_size,
    num_workers=2,
    persistent_workers=True,
    dataset=_base_.train_dataset,
    sampler=dict(
        type="PlanSampler",
        plan=dict(type="FixedBatch", batch_size=batch_size),
    ),
    batch_sampler=dict(type="PlanBatchSampler"),
    collate_fn=dict(type="default_collate_fn"),
)
train_cfg = dict(type="TrainLoop", max_iters=max_iters)
optim_wrapper = dict(
    type="OptimWrapper",
    optimizer=dict(type="AdamW", lr=2e-3, weight_decay=0.01),
    clip_grad=dict(max_norm=1.0),
)
param_scheduler = [
    dict(type="LinearLR", start_factor=0.01, by_epoch=False, end=30),
    dict(type="CosineAnnealingLR", eta_min=2e-4, by_epoch=False, T_max=max_iters),
]
randomness = dict(seed=0)
