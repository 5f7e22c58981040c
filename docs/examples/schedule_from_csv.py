"""
A schedule of your own
======================

A schedule is a table: one row for each rank, one cell for each action. ``from_csv``
reads it, ``check`` tests it for deadlock, ``simulate`` times it, ``timeline`` draws it,
and a pipeline runs it. The first table is wrong: rank 1 wants micro-batch 1 first, and
rank 0 sends that only after the gradient of micro-batch 0. The error names the ranks
that wait for each other.

It prints::

    refused
    slot 1: deadlock: rank 0 at 0B0 waits for 1B0, later on rank 1; ...
    rank 0 0F0 0F1 ........0B0---- ....0B1----
    rank 1 ....1F0 1B0---- 1F1 1B1---- ........
    makespan 9, bubble 0.33
    loss 1.0
"""

import numpy as np

import mpipipe
from mpipipe import nn, schedules
from mpipipe.errors import ScheduleError

WRONG = """
0F0, 0B0, 0F1, 0B1
1F1, 1B1, 1F0, 1B0
"""
RIGHT = """
0F0, 0F1, 0B0, 0B1
1F0, 1B0, 1F1, 1B1
"""


class Identity:
    def forward(self, x: np.ndarray) -> tuple[np.ndarray, None]:
        return x, None

    def backward(self, dy: np.ndarray, saved: None) -> np.ndarray:
        return dy


comm = mpipipe.world()
# The schedule has two ranks: each pair of ranks runs it
pair = comm.Split(comm.rank // 2, comm.rank)
if comm.rank == 0:
    try:
        schedules.check(schedules.from_csv(WRONG.strip()))
    except ScheduleError as error:
        print("refused", error.message.splitlines()[0], sep="\n")
schedule = schedules.from_csv(RIGHT.strip())
found = schedules.simulate(schedule)
x, target = (np.ones((4, 3)), np.zeros((4, 3)))
with mpipipe.Pipeline(
    [Identity()], schedule, pair, loss=nn.mean_squared_error
) as pipeline:
    result = pipeline.step(
        x if pair.rank == 0 else None, target if pair.rank == 1 else None
    )
if comm.rank == 0:
    print(schedules.timeline(schedule))
    print(f"makespan {found.makespan:.0f}, bubble {found.bubble_fraction:.2f}")
    print("loss", result.loss)
