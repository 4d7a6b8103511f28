# The recipe of qwen3_8b_lora_messages_8k_e3.py with samples laid end to end, in packs of 8,192
# tokens, that do not see each other. A step holds accumulative_counts packs a device.
_base_ = [
    "../_base_/runtime.py",
    "../_base_/qwen3_8b.py",
    "../_base_/adamw_cosine_e3.py",
]
data_files = "data/train.jsonl"  # one {"messages": [{"role": ..., "content": ...}, ...]} a line
max_length = 8192
accumulative_counts = 4

# With flash-attn installed: "flash_attention_2". Without it this keeps samples apart fastest.
model = dict(llm=dict(attn_implementation="sdpa_by_sample"))

train_dataloader = dict(
    batch_size=1,
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
        plan=dict(type="Packing", max_length=max_length, accumulate=accumulative_counts),
    ),
    batch_sampler=dict(type="PlanBatchSampler"),
    collate_fn=dict(type="packed_collate_fn"),
)
optim_wrapper = dict(
    type="AmpOptimWrapper",
    optimizer=dict(type="AdamW", lr=_base_.lr, betas=(0.9, 0.999), weight_decay=0),
    clip_grad=dict(max_norm=1, error_if_nonfinite=False),
    accumulative_counts=accumulative_counts,
    dtype="bfloat16",
)
