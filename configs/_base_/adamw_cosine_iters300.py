# 300 iterations of AdamW: a stream has no epochs to count.
max_iters = 300

train_cfg = dict(type="TrainLoop", max_iters=max_iters)
optim_wrapper = dict(
    type="OptimWrapper",
    optimizer=dict(type="AdamW", lr=2e-3, weight_decay=0.01),
    clip_grad=dict(max_norm=1.0),
)
param_scheduler = [
    dict(type="LinearLR", start_factor=0.01, by_epoch=False, end=30),
    dict(type="CosineAnnealingLR", eta_min=2e-4, by_epoch=False, begin=30, end=max_iters),
]
