"""
Interleaved 1F1B, and reading the bubble
========================================

With two chunks per rank the bubble is half as long, because a rank waits for chunks
that take half the time. The first lines are simulated for chunks of equal cost. The
last lines are measured: a rank's idle share is the part of a step in which it computes
nothing. Measured times depend on the machine; on four ranks that share two cores they
mean little.

It prints::

    one_f_one_b        bubble 0.273  peaks [4, 3, 2, 1]
    interleaved_1f1b   bubble 0.158  peaks [11, 9, 7, 5]
    rank 0 idle ... %  peak 11
    rank 1 idle ... %  peak 9
    rank 2 idle ... %  peak 7
    rank 3 idle ... %  peak 5
"""

import numpy as np

import mpipipe
from mpipipe import nn, schedules

RANKS, CHUNKS, MICROBATCHES = 4, 2, 8

comm = mpipipe.world()
whole = schedules.Costs(forward=1, input_grad=1, weight_grad=1)
# A chunk is half of a rank's layers
half = schedules.Costs(forward=0.5, input_grad=0.5, weight_grad=0.5)
plain = schedules.one_f_one_b(RANKS, MICROBATCHES)
schedule = schedules.interleaved_1f1b(RANKS, CHUNKS, MICROBATCHES)
if comm.rank == 0:
    for candidate, costs in ((plain, whole), (schedule, half)):
        found = schedules.simulate(candidate, costs)
        bubble, peaks = found.bubble_fraction, found.peak_activations
        print(f"{candidate.name:18} bubble {bubble:.3f}  peaks {peaks}")

stages = mpipipe.cut(
    [lambda: nn.Linear(256, 256), nn.Gelu] * schedule.stages, schedule, comm.rank
)
x = np.ones((1024, 256), "float32") if stages.is_first else None
target = np.zeros((1024, 256), "float32") if stages.is_last else None
with mpipipe.Pipeline(stages, schedule, comm, loss=nn.mean_squared_error) as pipeline:
    # The first step learns the shapes of messages; the last one is measured
    for _ in range(5):
        pipeline.step(x, target)
    idle = 100 * (1 - pipeline.busy / pipeline.elapsed)
    lines = comm.allgather(
        f"rank {comm.rank} idle {idle:.0f} %  peak {pipeline.peak_activations}"
    )
    if comm.rank == 0:
        print(*lines, sep="\n")
# sphinx_gallery_thumbnail_path = "figures/interleaved_1f1b.svg"
