# The recipe of llava_v1_5_7b_mix665k_e1.py with batches by tokens, ranks of equal cost, one
# modality a step.
_base_ = [
    "../_base_/runtime.py",
    "../_base_/llava_v1_5_7b.py",
    "../_base_/llava_mix665k.py",
    "../_base_/adamw_cosine_e1.py",
]
image_tokens = (336 // 14) ** 2
max_length = 2048 - image_tokens  # of the text, as XTuner counts
batch_size = 16  # per device
accumulative_counts = 1

train_dataloader = dict(
    batch_size=1,  # the plan decides
    num_workers=4,
    dataset=dict(
        type="LLaVADataset",
        data_path=_base_.data_path,
        image_folder=_base_.image_folder,
        processor=_base_.processor,
        max_length=max_length + image_tokens,
        template="vicuna",
        image_first=True,
        pad_image_to_square=True,
    ),
    sampler=dict(
        type="PlanSampler",
        length_property="modality_length",
        plan=dict(type="TokenBudget", max_tokens=batch_size * 2048),
    ),
    batch_sampler=dict(type="PlanBatchSampler"),
    collate_fn=dict(type="default_collate_fn"),
)
optim_wrapper = dict(
    type="AmpOptimWrapper",
    optimizer=dict(type="AdamW", lr=2e-5, betas=(0.9, 0.999), weight_decay=0),
    clip_grad=dict(max_norm=1, error_if_nonfinite=False),
    accumulative_counts=accumulative_counts,
    dtype="bfloat16",
)
