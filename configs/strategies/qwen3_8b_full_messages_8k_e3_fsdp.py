# All weights of Qwen3-8B, sharded over the ranks by FSDP: for `tools/dist_train.sh CONFIG N`.
_base_ = ["../sft/qwen3_8b_lora_messages_8k_e3_length_grouped.py"]

runner_type = "FlexibleRunner"
strategy = dict(
    type="xlength.FSDPStrategy",  # mmengine's own cannot resume with torch > 2.0
    state_dict_cfg="full",  # one checkpoint; "local": one file per rank, quicker to write
    model_wrapper=dict(
        type="MMFullyShardedDataParallel",
        use_orig_params=True,
        mixed_precision=dict(param_dtype="bfloat16", reduce_dtype="float32"),
        auto_wrap_policy=dict(  # about one unit a layer
            type="torch.distributed.fsdp.wrap.size_based_auto_wrap_policy",
            min_num_params=100_000_000,
        ),
    ),
)
model = dict(lora=None, llm=dict(dtype="float32"))
# No clip_grad: mmengine would clip each rank's shard by the shard's own norm.
optim_wrapper = dict(
    _delete_=True,
    type="OptimWrapper",
    optimizer=dict(type="AdamW", lr=1e-5, betas=(0.9, 0.999), weight_decay=0),
    accumulative_counts=4,
)
