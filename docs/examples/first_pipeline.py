"""
A first pipeline
================

A chain of eight linear layers is cut into four stages, one on each rank. 1F1B runs
eight micro-batches through them. All ranks call the same functions; inputs are given on
the rank of the first stage, targets on the rank of the last one.

It prints::

    step  0  loss 1.038
    step 10  loss 0.743
    step 20  loss 0.604
    at most 4 activations at once on rank 0
"""

import numpy as np

import mpipipe
from mpipipe import nn, optim, schedules

comm = mpipipe.world()
schedule = schedules.one_f_one_b(comm.size, microbatches=8)
# Each rank makes its own
layers = [lambda: nn.Linear(16, 16), nn.Gelu, lambda: nn.Linear(16, 16)] * comm.size
stages = mpipipe.cut(layers, schedule, comm.rank)
optimizer = optim.AdamW(stages, lr=1e-2)

random = np.random.default_rng(0)
x = random.standard_normal((64, 16)).astype("float32")
target = np.roll(x, 1, axis=1)  # what the model has to learn

with mpipipe.Pipeline(stages, schedule, comm, loss=nn.mean_squared_error) as pipeline:
    for step in range(21):
        result = pipeline.step(
            x if stages.is_first else None, target if stages.is_last else None
        )
        optimizer.step()
        if comm.rank == 0 and step % 10 == 0:
            print(f"step {step:2}  loss {result.loss:.3f}")

if comm.rank == 0:
    print(f"at most {pipeline.peak_activations} activations at once on rank 0")
# sphinx_gallery_thumbnail_path = "figures/one_f_one_b.svg"
