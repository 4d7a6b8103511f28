# One epoch: 3 % linear warm-up, then a cosine to zero.
max_epochs = 1
warmup_ratio = 0.03

train_cfg = dict(type="TrainLoop", max_epochs=max_epochs)
param_scheduler = [
    dict(
        type="LinearLR",
        start_factor=1e-5,
        by_epoch=True,
        begin=0,
        end=warmup_ratio * max_epochs,
        convert_to_iter_based=True,
    ),
    dict(
        type="CosineAnnealingLR",
        eta_min=0.0,
        by_epoch=True,
        begin=warmup_ratio * max_epochs,
        end=max_epochs,
        convert_to_iter_based=True,
    ),
]
