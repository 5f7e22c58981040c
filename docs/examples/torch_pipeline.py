"""
A PyTorch model as a pipeline
=============================

Each rank makes a stage of its part of a model. The parameters stay those of the module,
so an optimizer of ``torch.optim`` updates them, and the norm to which gradients are
clipped is that of all ranks. The gradients are those that autograd gives for the whole
model on one process. It needs PyTorch.

It prints::

    loss 2.45; gradients on rank 0 are those of autograd: True
    loss 0.15 after 20 steps
"""

import numpy as np
import torch

import mpipipe
from mpipipe import adapters, optim, schedules


class Block(torch.nn.TransformerEncoderLayer):
    def __init__(self) -> None:
        super().__init__(
            32,
            nhead=4,
            dim_feedforward=128,
            dropout=0.0,
            batch_first=True,
            norm_first=True,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(
            x, src_mask=torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        )


def cross_entropy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


comm = mpipipe.world()
torch.manual_seed(0)  # every rank draws the whole model and keeps its part
parts = [torch.nn.Sequential(Block(), Block()) for _ in range(comm.size)]
parts[0].insert(0, torch.nn.Embedding(10, 32))
parts[-1].append(torch.nn.Linear(32, 10))
words = torch.from_numpy(np.random.default_rng(0).integers(10, size=(8, 13)))
cross_entropy(torch.nn.Sequential(*parts)(words[:, :-1]), words[:, 1:]).backward()
expected = parts[0][0].weight.grad.clone()

stage = adapters.torch_stage(parts[comm.rank])
optimizer = torch.optim.AdamW(stage.module.parameters(), lr=3e-3)
schedule = schedules.zero_bubble_h1(comm.size, microbatches=4)
x = words[:, :-1].numpy().copy() if comm.rank == 0 else None
target = words[:, 1:].numpy().copy() if comm.rank == comm.size - 1 else None
with mpipipe.Pipeline(
    [stage], schedule, comm, loss=adapters.torch_loss(cross_entropy)
) as pipeline:
    loss = pipeline.step(x, target).loss
    if comm.rank == 0:
        same = torch.allclose(stage.module[0].weight.grad, expected, atol=1e-6)
        print(f"loss {loss:.2f}; gradients on rank 0 are those of autograd: {same}")
    for _ in range(20):
        optim.clip_by_global_norm([stage], 1.0, comm)
        optimizer.step()
        loss = pipeline.step(x, target).loss
if comm.rank == 0:
    print(f"loss {loss:.2f} after 20 steps")
