"""Optimizers on flat buffers, clipping by the global norm, learning-rate curves."""

from __future__ import annotations

from mpipipe.optim.adamw import AdamW
from mpipipe.optim.clipping import clip_by_global_norm
from mpipipe.optim.curves import warmup_cosine
from mpipipe.optim.sgd import SGD

__all__ = ["SGD", "AdamW", "clip_by_global_norm", "warmup_cosine"]
