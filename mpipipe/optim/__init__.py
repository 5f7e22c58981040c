"""Optimizers on flat buffers, clipping by the global norm, scaling of the loss, learning-rate curves."""

from __future__ import annotations

from mpipipe.optim.adamw import AdamW
from mpipipe.optim.clipping import clip_by_global_norm
from mpipipe.optim.curves import warmup_cosine
from mpipipe.optim.global_norm import GlobalNorm
from mpipipe.optim.groups import Group
from mpipipe.optim.norm import gradient_norm
from mpipipe.optim.pending import PendingUpdate, begin_step
from mpipipe.optim.scaling import LossScaler, scaled_step
from mpipipe.optim.sgd import SGD

__all__ = [
    "SGD",
    "AdamW",
    "GlobalNorm",
    "Group",
    "LossScaler",
    "PendingUpdate",
    "begin_step",
    "clip_by_global_norm",
    "gradient_norm",
    "scaled_step",
    "warmup_cosine",
]
