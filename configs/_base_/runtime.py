# What every recipe shares: registration, hooks, logging, randomness.
default_scope = "mmengine"
custom_imports = dict(imports=["xlength"])

default_hooks = dict(
    timer=dict(type="IterTimerHook"),
    logger=dict(type="LoggerHook", interval=10, log_metric_by_epoch=False),
    param_scheduler=dict(type="ParamSchedulerHook"),
    checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=500, max_keep_ckpts=2),
    sampler_seed=dict(type="DistSamplerSeedHook"),  # another order in every epoch
)
custom_hooks = [
    dict(type="DatasetInfoHook", max_characters=400),  # the first sample, lengths and order
    dict(type="LengthStatsHook"),  # padding efficiency and tokens/s in every log line
]

env_cfg = dict(
    cudnn_benchmark=False,
    mp_cfg=dict(mp_start_method="fork", opencv_num_threads=0),
    dist_cfg=dict(backend="nccl"),  # gloo is taken where there is no accelerator
)
visualizer = dict(type="Visualizer", vis_backends=[dict(type="LocalVisBackend")])
log_level = "INFO"
log_processor = dict(by_epoch=False, mean_pattern=r"loss|time|data_time|grad_norm")
load_from = None
resume = False
randomness = dict(seed=None, deterministic=False)
