"""
Zero bubble with a split backward
=================================

ZB-H1 splits each backward into I, the gradient of the input, which the rank before
waits for, and W, the gradient of the weights, which nobody waits for. The W fill the
bubble of 1F1B. The layers of ``mpipipe.nn`` have both halves, so the same stages run
under both schedules, and the gradients have the same bits.

It prints::

    rank 0 0F0 0F1 0F2 0F3 ............0I0 0W0 0I1 0W1 0I2 0W2 0I3 0W3
    rank 1 ....1F0 1F1 1F2 ........1I0 1F3 1I1 1W0 1I2 1W1 1I3 1W2 1W3
    rank 2 ........2F0 2F1 ....2I0 2F2 2I1 2F3 2I2 2W0 2I3 2W1 2W2 2W3
    rank 3 ............3F0 3I0 3F1 3I1 3F2 3I2 3F3 3I3 3W0 3W1 3W2 3W3
    makespan of one_f_one_b 21, of zero_bubble_h1 15
    gradients have the same bits on every rank: True
"""

import numpy as np

import mpipipe
from mpipipe import nn, schedules

comm = mpipipe.world()
plain, zero = schedules.one_f_one_b(4, 4), schedules.zero_bubble_h1(4, 4)
if comm.rank == 0:
    print(schedules.timeline(zero))
    times = [schedules.simulate(schedule).makespan for schedule in (plain, zero)]
    print(f"makespan of one_f_one_b {times[0]:.0f}, of zero_bubble_h1 {times[1]:.0f}")


def gradients(schedule: schedules.Schedule) -> np.ndarray:
    layers = [lambda: nn.Linear(32, 32), nn.Gelu, lambda: nn.RMSNorm(32)] * comm.size
    stages = mpipipe.cut(layers, schedule, comm.rank)
    x = (
        np.random.default_rng(0).standard_normal((40, 32)).astype("float32")
        if stages.is_first
        else None
    )
    target = np.zeros((40, 32), "float32") if stages.is_last else None
    with mpipipe.Pipeline(
        stages, schedule, comm, loss=nn.mean_squared_error
    ) as pipeline:
        pipeline.step(x, target)
    return stages[0].gradients.flat


same = comm.allgather(gradients(plain).tobytes() == gradients(zero).tobytes())
if comm.rank == 0:
    print("gradients have the same bits on every rank:", all(same))
# sphinx_gallery_thumbnail_path = "figures/zero_bubble_h1.svg"
