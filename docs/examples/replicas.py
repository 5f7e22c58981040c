"""
Data-parallel replicas of a pipeline
====================================

``Mesh(pipe=2)`` on four ranks makes two pipelines of two ranks. Each takes half of the
batch, and gradients are summed over the ranks that hold the same stage. The gradients
are those of the mean loss over all rows of both replicas, even if the replicas have
different numbers of rows: here 24 and 8. A single rank computes the same loss.

It prints::

    rank 0 of 4 is pipe 0, data 0
    rank 1 of 4 is pipe 0, data 1
    rank 2 of 4 is pipe 1, data 0
    rank 3 of 4 is pipe 1, data 1
    loss of the replicas and of one rank differ by less than 1e-6: True
"""

import numpy as np

import mpipipe
from mpipipe import nn, schedules

comm = mpipipe.world()
random = np.random.default_rng(0)
x, target = random.standard_normal((2, 32, 8)).astype("float32")
rows = [slice(0, 24), slice(24, 32)]  # of each replica


def layers() -> list[nn.Layer]:
    return [nn.Linear(8, 8), nn.Gelu(), nn.Linear(8, 8)]


with mpipipe.Mesh(comm, pipe=2) as mesh:
    place = f"pipe {mesh.coords.pipe}, data {mesh.coords.data}"
    lines = comm.allgather(f"rank {comm.rank} of {comm.size} is {place}")
    part = rows[mesh.coords.data]
    schedule = schedules.one_f_one_b(2, microbatches=4)
    # The same seed on all replicas
    stages = mpipipe.cut(layers(), schedule, mesh.pipe.rank, seed=0)
    with mpipipe.Pipeline(
        stages, schedule, mesh.pipe, nn.mean_squared_error, replicas=mesh.replicas
    ) as pipeline:
        together = pipeline.step(
            x[part] if stages.is_first else None,
            target[part] if stages.is_last else None,
        )

# The same names, so the same parameters
alone = nn.Stage(layers(), seed=0)
output, _ = alone.forward(x)
if comm.rank == 0:
    print(*lines, sep="\n")
    difference = abs(together.loss - nn.mean_squared_error(output, target)[0])
    print(
        "loss of the replicas and of one rank differ by less than 1e-6:",
        bool(difference < 1e-6),
    )
# sphinx_gallery_thumbnail_path = "figures/mesh.svg"
