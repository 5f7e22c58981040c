"""Options of a training: steps, batches, optimizer."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mpipipe.train.options.option import option


@dataclass(frozen=True)
class TrainingOptions:
    """Steps, batches, optimizer."""

    steps: int = option(300, "optimizer steps", least=1)
    batch: int = option(32, "sequences of a step, over all replicas", least=1)
    optimizer: str = option("adamw", "optimizer", choices=("adamw", "sgd"))
    lr: float = option(3e-3, "learning rate after warm-up; falls as a cosine to a tenth", above=0, below=math.inf)
    warmup: int = option(30, "steps of linear warm-up", least=0)
    momentum: float = option(0.9, "momentum of sgd", least=0, below=1)
    weight_decay: float = option(0.1, "decoupled weight decay of matrices", least=0, below=math.inf)
    clip: float = option(1.0, "largest norm of all gradients; inf for no limit", above=0)
    loss_scale: float | None = option(
        None,
        "factor on gradients inside a step, below 2^64; 0: as large as fits; default: 0 for float16, 1 otherwise",
        least=0,
        below=2.0**64,
    )
    seed: int = option(0, "seed of parameters, batches, dropout and sample", least=0, below=2**63)
    eval_every: int = option(100, "steps between two validations; there is one more at the end", least=1)
    eval_batches: int = option(4, "batches of a validation", least=1)
