# Qwen3-8B with LoRA on a stream of your own chats, JSONL files of `messages`, sorted by pools.
_base_ = [
    "../_base_/runtime.py",
    "../_base_/qwen3_8b.py",
]
data_files = "data/*.jsonl"  # one {"messages": [{"role": ..., "content": ...}, ...]} a line
max_length = 8192
max_iters = 10000
batch_size = 4  # per device
accumulative_counts = 4
lr = 2e-4

train_dataloader = dict(
    batch_size=batch_size,
    num_workers=4,  # at most as many as files for each rank
    dataset=dict(
        type="LengthPoolSortDataset",
        dataset=dict(
            type="stream_hf_dataset",
            dataset=dict(
                type="datasets.load_dataset",
                path="json",
                data_files=data_files,
                split="train",
                streaming=True,
            ),
            tokenizer=_base_.tokenizer,
            max_length=max_length,
            dataset_map_fn="openai_map_fn",
            template_map_fn=dict(type="template_map_fn_factory", template="qwen_chat"),
        ),
        pool_size=512,  # of every worker; `xlength report --stream` computes it
        micro_batch_size=batch_size,
        cost="attention",
    ),
    sampler=None,  # a stream has none; mmengine wants it spelt out
    collate_fn=dict(type="default_collate_fn"),
)
train_cfg = dict(type="TrainLoop", max_iters=max_iters)
optim_wrapper = dict(
    type="AmpOptimWrapper",
    optimizer=dict(type="AdamW", lr=lr, betas=(0.9, 0.999), weight_decay=0),
    clip_grad=dict(max_norm=1, error_if_nonfinite=False),
    accumulative_counts=accumulative_counts,
    dtype="bfloat16",
)
param_scheduler = [
    dict(type="LinearLR", start_factor=1e-5, by_epoch=False, begin=0, end=300),
    dict(type="CosineAnnealingLR", eta_min=0.0, by_epoch=False, begin=300, end=max_iters),
]
