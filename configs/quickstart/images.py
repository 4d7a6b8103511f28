# Images and text in one run: pages of documentation, mixed with texts that have none.
_base_ = [
    "../_base_/runtime.py",
    "../_base_/page_images.py",
    "../_base_/tiny_qwen2_5_vl.py",
]
batch_size = 8

train_dataloader = dict(
    batch_size=batch_size,
    num_workers=2,
    persistent_workers=True,
    dataset=_base_.train_dataset,
    sampler=dict(
        type="LengthGroupedSampler",
        length_property="modality_length",  # images and texts are grouped apart
        per_device_batch_size=batch_size,
    ),
    collate_fn=dict(type="default_collate_fn"),
)
train_cfg = dict(type="TrainLoop", max_epochs=3)
optim_wrapper = dict(
    type="OptimWrapper",
    optimizer=dict(type="AdamW", lr=2e-3, weight_decay=0.01),
    clip_grad=dict(max_norm=1.0),
)
param_scheduler = [
    dict(type="LinearLR", start_factor=0.01, by_epoch=False, end=20),
    dict(
        type="CosineAnnealingLR", eta_min=2e-4, by_epoch=True, convert_to_iter_based=True, T_max=3
    ),
]
randomness = dict(seed=0)
