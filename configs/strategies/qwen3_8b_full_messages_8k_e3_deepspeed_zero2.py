# All weights of Qwen3-8B with DeepSpeed ZeRO-2: for `tools/dist_train.sh CONFIG N`. Needs
# deepspeed, 0.17.6 for instance (0.19 lacks a module that mmengine 0.10.7 imports).
_base_ = ["../sft/qwen3_8b_lora_messages_8k_e3_length_grouped.py"]
accumulative_counts = 1  # above 1, micro-steps of one step weigh alike, whatever their tokens

runner_type = "FlexibleRunner"
strategy = dict(
    type="DeepSpeedStrategy",
    bf16=dict(enabled=True),
    zero_optimization=dict(
        stage=2,
        allgather_partitions=True,
        reduce_scatter=True,
        overlap_comm=True,
        contiguous_gradients=True,
    ),
    gradient_clipping=1.0,
    gradient_accumulation_steps=accumulative_counts,
)
model = dict(lora=None)
train_dataloader = dict(
    batch_size=4,
    sampler=dict(per_device_batch_size=4 * accumulative_counts),
)
optim_wrapper = dict(
    _delete_=True,
    type="DeepSpeedOptimWrapper",
    optimizer=dict(type="AdamW", lr=1e-5, betas=(0.9, 0.999), weight_decay=0),
)
