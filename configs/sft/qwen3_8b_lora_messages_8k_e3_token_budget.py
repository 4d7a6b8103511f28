# The recipe of qwen3_8b_lora_messages_8k_e3.py with batches by tokens and ranks of equal cost.
_base_ = [
    "../_base_/runtime.py",
    "../_base_/qwen3_8b.py",
    "../_base_/adamw_cosine_e3.py",
]
data_files = "data/train.jsonl"  # one {"messages": [{"role": ..., "content": ...}, ...]} a line
max_length = 8192
batch_size = 4  # per device
accumulative_counts = 4

train_dataloader = dict(
    batch_size=1,  # the plan decides
    num_workers=4,
    dataset=dict(
        type="process_hf_dataset",
        dataset=dict(type="datasets.load_dataset", path="json", data_files=data_files),
        tokenizer=_base_.tokenizer,
        max_length=max_length,
        dataset_map_fn="openai_map_fn",
        template_map_fn=dict(type="template_map_fn_factory", template="qwen_chat"),
        remove_unused_columns=True,
        pack_to_max_length=False,
    ),
    sampler=dict(
        type="PlanSampler",
        plan=dict(
            type="TokenBudget",
            max_tokens=batch_size * max_length,  # what fits the memory already
            accumulate=accumulative_counts,
        ),
    ),
    batch_sampler=dict(type="PlanBatchSampler"),
    collate_fn=dict(type="default_collate_fn"),
)
optim_wrapper = dict(
    type="AmpOptimWrapper",
    optimizer=dict(type="AdamW", lr=_base_.lr, betas=(0.9, 0.999), weight_decay=0),
    clip_grad=dict(max_norm=1, error_if_nonfinite=False),
    accumulative_counts=accumulative_counts,
    dtype="bfloat16",
)
