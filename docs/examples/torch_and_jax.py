"""
Half PyTorch, half JAX
======================

The first half of the ranks computes with PyTorch and the second half with JAX. Messages
are plain arrays, so neither knows of the other. One optimizer of mpipipe and one norm
serve both. It needs PyTorch and JAX.

It prints::

    rank 0 computes with TorchStage, rank 3 with JaxStage
    loss 0.64 -> 0.02 in 60 steps
"""

import jax
import numpy as np
import torch

import mpipipe
from mpipipe import adapters, nn, optim, schedules


def layer(parameters: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return x + jax.numpy.tanh(x @ parameters["up"]) @ parameters["down"]


def squared_error(output: jax.Array, target: jax.Array) -> jax.Array:
    return jax.numpy.mean((output - target) ** 2)


comm = mpipipe.world()
random = np.random.default_rng(comm.rank)
stage: nn.Stage
if comm.rank < comm.size // 2:
    torch.manual_seed(comm.rank)
    module = torch.nn.Sequential(
        torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8)
    )
    stage = adapters.torch_stage(module)
else:
    up, down = random.normal(size=(8, 32)), random.normal(size=(32, 8)) / 8
    stage = adapters.jax_stage(
        layer, {"up": up.astype("float32"), "down": down.astype("float32")}
    )
kinds = comm.allgather(type(stage).__name__)

schedule = schedules.one_f_one_b(comm.size, microbatches=4)
optimizer = optim.AdamW([stage], lr=3e-3)
batch = np.random.default_rng(9).normal(size=(2, 32, 8)).astype("float32")
x = batch[0] if comm.rank == 0 else None
target = np.tanh(batch[0] + batch[0][:, ::-1]) if comm.rank == comm.size - 1 else None
losses = []
with mpipipe.Pipeline(
    [stage], schedule, comm, loss=adapters.jax_loss(squared_error)
) as pipeline:
    for _ in range(60):
        losses.append(pipeline.step(x, target).loss)
        optim.clip_by_global_norm([stage], 1.0, comm)
        optimizer.step()
if comm.rank == 0:
    print(f"rank 0 computes with {kinds[0]}, rank {comm.size - 1} with {kinds[-1]}")
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f} in 60 steps")
# sphinx_gallery_thumbnail_path = "figures/microbatch.svg"
