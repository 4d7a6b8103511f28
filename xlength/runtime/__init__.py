"""Helpers of the training process: building from configs, process groups, checkpoints, loaders."""
