# Qwen2.5-VL-7B with LoRA on LLaVA's data: images at their natural sizes, one epoch.
_base_ = [
    "../_base_/runtime.py",
    "../_base_/qwen2_5_vl_7b_lora.py",
    "../_base_/llava_mix665k.py",
    "../_base_/adamw_cosine_e1.py",
]
max_length = 4096
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
    ),
    sampler=dict(
        type="DefaultSampler",
        shuffle=True,
    ),
    collate_fn=dict(type="default_collate_fn"),
)
optim_wrapper = dict(
    type="AmpOptimWrapper",
    optimizer=dict(type="AdamW", lr=1e-4, betas=(0.9, 0.999), weight_decay=0),
    clip_grad=dict(max_norm=1, error_if_nonfinite=False),
    accumulative_counts=accumulative_counts,
    dtype="bfloat16",
)
