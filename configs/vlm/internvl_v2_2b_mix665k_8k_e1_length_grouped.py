# The recipe of internvl_v2_2b_mix665k_8k_e1.py with batches of like length, images and texts
# apart.
_base_ = [
    "../_base_/runtime.py",
    "../_base_/internvl3_2b.py",
    "../_base_/llava_mix665k.py",
    "../_base_/adamw_cosine_e1.py",
]
max_length = 8192
batch_size = 4  # per device
accumulative_counts = 4

train_dataloader = dict(
    batch_size=batch_size,
    num_workers=4,
    dataset=dict(
        type="LLaVADataset",
        data_path=_base_.data_path,
        image_folder=_base_.image_folder,
        processor=_base_.processor,
        max_length=max_length,
        image_first=True,
    ),
    sampler=dict(
        type="LengthGroupedSampler",
        length_property="modality_length",
        per_device_batch_size=batch_size * accumulative_counts,
    ),
    collate_fn=dict(type="default_collate_fn"),
)
optim_wrapper = dict(
    type="AmpOptimWrapper",
    optimizer=dict(type="AdamW", lr=1e-6, betas=(0.9, 0.999), weight_decay=0.05),
    clip_grad=dict(max_norm=1, error_if_nonfinite=False),
    accumulative_counts=accumulative_counts,
    dtype="bfloat16",
)
