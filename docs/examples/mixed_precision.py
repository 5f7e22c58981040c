"""
Mixed precision with a loss scaler
==================================

With ``dtype="float16"`` activations and messages are float16; parameters, gradients and
the optimizer's state stay in float32. Small gradients vanish in float16, so the loss is
multiplied by a scale. The scale here starts far too large: steps in which a gradient
overflows anywhere are skipped on all ranks, and the scale is halved until one fits.

It prints::

    skipped 7 steps, the scale is now 2^23
    every rank skipped the same steps: True
    parameters are float32, activations float16
    the loss fell: True
"""

import math

import numpy as np

import mpipipe
from mpipipe import nn, optim, schedules

comm = mpipipe.world()
stage = nn.Stage(
    [nn.Linear(32, 32), nn.Gelu(), nn.Linear(32, 32)], dtype="float16", seed=comm.rank
)
optimizer = optim.AdamW([stage], lr=1e-2)
scaler = optim.LossScaler(initial=2.0**30)
random = np.random.default_rng(0)
x, target = random.standard_normal((2, 32, 32)).astype("float16")
x = x if comm.rank == 0 else None
target = target if comm.rank == comm.size - 1 else None

losses, norms = [], []
schedule = schedules.one_f_one_b(comm.size, microbatches=4)
with mpipipe.Pipeline([stage], schedule, comm, loss=nn.mean_squared_error) as pipeline:
    for _ in range(40):
        losses.append(pipeline.step(x, target, scale=scaler.scale).loss)
        # None: the step was skipped
        norms.append(optim.scaled_step(optimizer, scaler, max_norm=1.0, comm=comm))

skipped = comm.allgather([step for step, norm in enumerate(norms) if norm is None])
if comm.rank == 0:
    scale = math.log2(scaler.scale)
    print(f"skipped {scaler.skipped} steps, the scale is now 2^{scale:.0f}")
    print(
        "every rank skipped the same steps:",
        all(steps == skipped[0] for steps in skipped) and bool(skipped[0]),
    )
    print(f"parameters are {stage.parameters.flat.dtype}, activations {stage.dtype}")
    print("the loss fell:", losses[-1] < 0.9 * losses[0])
# sphinx_gallery_thumbnail_path = "figures/microbatch.svg"
