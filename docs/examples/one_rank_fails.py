"""
What happens when one rank fails
================================

The stage on rank 2 raises in the third step. The other ranks do not wait for ever: each
raises PeerError, which names the failed rank. Here every rank catches its error and
sends it to rank 0. A script that does not catch it ends within seconds, with one report
and exit code 1, when it is started with ``python -m mpipipe run``.

It prints::

    rank 0: PeerError after 2 steps
    rank 1: PeerError after 2 steps
    rank 2: StageError after 2 steps
    rank 3: PeerError after 2 steps
    rank 2 says: forward raised ValueError: the data is bad
    the pipeline is failed for good: start the job anew
"""

import numpy as np

import mpipipe
from mpipipe import nn, schedules
from mpipipe.errors import ArgumentError, MpipipeError

comm = mpipipe.world()


class Fragile:
    calls = 0

    def forward(self, x: np.ndarray) -> tuple[np.ndarray, None]:
        self.calls += 1
        if comm.rank == 2 and self.calls > 8:  # four micro-batches a step
            raise ValueError("the data is bad")
        return x, None

    def backward(self, dy: np.ndarray, saved: None) -> np.ndarray:
        return dy


schedule = schedules.one_f_one_b(comm.size, microbatches=4)
pipeline = mpipipe.Pipeline([Fragile()], schedule, comm, loss=nn.mean_squared_error)
x, target = (
    np.ones((8, 4)) if comm.rank == rank else None for rank in (0, comm.size - 1)
)
steps = 0
try:
    while True:
        pipeline.step(x, target)
        steps += 1
except MpipipeError as error:
    seen = f"rank {comm.rank}: {type(error).__name__} after {steps} steps"
    text = error.message

lines, texts = comm.allgather(seen), comm.allgather(text)
if comm.rank == 0:
    print(*lines, sep="\n")
    print("rank 2 says:", texts[2].splitlines()[0])
    try:
        pipeline.step(x, target)
    except ArgumentError as error:
        print(f"{error.message} for good: {error.remedy}")
