# Samples laid end to end, nothing padded. Differs from default_sampler.py by the plan: sampler,
# batch_sampler and collate_fn. 110 packs of 2,048 tokens hold what 300 batches of 8 samples do.
_base_ = [
    "../_base_/runtime.py",
    "../_base_/python_docs.py",
    "../_base_/tiny_llama.py",
]
max_length = 2048
max_iters = 110

# Without flash attention this is the fastest way to keep the samples of a pack apart.
model = dict(llm=dict(config=dict(attn_implementation="sdpa_by_sample")))

train_dataloader = dict(
    batch_size=1,
    num_workers=2,
    persistent_workers=True,
    dataset=_base_.train_dataset,
    sampler=dict(
        type="PlanSampler",
        plan=dict(type="Packing", max_length=max_length),
    ),
    batch_sampler=dict(type="PlanBatchSampler"),
    collate_fn=dict(type="packed_collate_fn"),
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
