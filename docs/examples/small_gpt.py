"""
A small GPT
===========

A byte-level GPT learns one sentence by heart. Its layers are cut into stages of about
equal cost, AdamW updates the flat buffers, and the gradients are clipped by the norm
over all ranks. ``python -m mpipipe train`` is this loop with data, validation and
reports.

It prints::

    stages (0, 3) (3, 5) (5, 7) (7, 10)
    step   1  loss 5.98
    step  30  loss 0.0...
    the loss has fallen below a tenth: True
"""

import numpy as np

import mpipipe
from mpipipe import attention, nn, optim, schedules
from mpipipe.language.models import GPT

TEXT = b"A schedule is data that is proven before the first message is sent. "
STEPS = 30

comm = mpipipe.world()
model = GPT(dim=64, layers=4, heads=4, seq_len=len(TEXT) - 1)
schedule = schedules.one_f_one_b(comm.size, microbatches=8)
stages = mpipipe.cut(model.build(attention.Local()), schedule, comm.rank, model.costs())
optimizer = optim.AdamW(stages, lr=3e-3)

ids = np.frombuffer(TEXT, np.uint8).astype(np.int64)
batch = np.tile(ids, (8, 1))
inputs = np.ascontiguousarray(batch[:, :-1]) if stages.is_first else None
targets = np.ascontiguousarray(batch[:, 1:]) if stages.is_last else None

losses = []
with mpipipe.Pipeline(
    stages, schedule, comm, loss=nn.softmax_cross_entropy
) as pipeline:
    for step in range(STEPS):
        losses.append(pipeline.step(inputs, targets).loss)
        optim.clip_by_global_norm(stages, 1.0, comm)
        optimizer.step(lr=optim.warmup_cosine(step, STEPS, peak=3e-3, warmup=5))
if comm.rank == 0:
    print("stages", *stages.layer_ranges)
    for step in (1, STEPS):
        print(f"step {step:3}  loss {losses[step - 1]:.2f}")
    print("the loss has fallen below a tenth:", losses[-1] < losses[0] / 10)
# sphinx_gallery_thumbnail_path = "figures/gpipe.svg"
