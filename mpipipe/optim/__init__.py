"""Optimizers on flat buffers, clipping by the global norm, loss scaling, learning rates.

optimizers   AdamW and SGD, groups of parameters, the curve of the learning rate
shards       the state of an optimizer over replicas, a share on each
norm         the global norm of gradients: gathered by MPI, or on one GPU
step         clipping, the scale of the loss, and steps with a norm and a scale
"""

from mpipipe.optim.norm import NormOfStep
from mpipipe.optim.optimizers import (
    SGD,
    AdamW,
    Group,
    Optimizer,
    duplicate_name_error,
    warmup_cosine,
)
from mpipipe.optim.shards import StateShard
from mpipipe.optim.step import LossScaler, clip_by_global_norm, scaled_step

# The rest is internal.
__all__ = [
    "SGD",
    "AdamW",
    "Group",
    "LossScaler",
    "Optimizer",
    "clip_by_global_norm",
    "scaled_step",
    "warmup_cosine",
]
__dir__ = __all__.copy
