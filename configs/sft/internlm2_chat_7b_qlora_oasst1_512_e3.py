# XTuner's QLoRA recipe for InternLM2-Chat-7B on OpenAssistant chats.
_base_ = [
    "../_base_/runtime.py",
    "../_base_/qlora_internlm2_7b.py",
    "../_base_/oasst1.py",
    "../_base_/adamw_cosine_e3.py",
]
max_length = 512
batch_size = 1  # per device
accumulative_counts = 16

train_dataloader = dict(
    batch_size=batch_size,
    num_workers=4,
    dataset=dict(
        type="process_hf_dataset",
        dataset=_base_.oasst1,
        tokenizer=_base_.tokenizer,
        max_length=max_length,
        dataset_map_fn="oasst1_map_fn",
        template_map_fn=dict(type="template_map_fn_factory", template="internlm2_chat"),
        remove_unused_columns=True,
        pack_to_max_length=False,
    ),
    sampler=dict(
        type="DefaultSampler",
        shuffle=True,
    ),
    collate_fn=dict(type="default_collate_fn"),
)
optim_wrapper = dict(
    type="AmpOptimWrapper",
    optimizer=dict(type="AdamW", lr=_base_.lr, betas=(0.9, 0.999), weight_decay=0),
    clip_grad=dict(max_norm=1, error_if_nonfinite=False),
    accumulative_counts=accumulative_counts,
    loss_scale="dynamic",
    dtype="float16",
)
