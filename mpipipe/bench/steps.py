"""`bench steps`: what it is worth that no barrier stands between steps.

A loop of steps with their optimizer, by `step` and by `launch`, takes turns in one run. Each chunk is one float32
linear stage, 512 wide, with 16 rows in a micro-batch: so AdamW takes as long as some actions do. Without clipping no
rank needs another one for its update, and ends of steps overlap with begins of the next ones; with clipping the ranks
meet at the norm.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from mpipipe import Pipeline, nn, optim, schedules
from mpipipe.bench.timing import compare, report
from mpipipe.errors import ArgumentError
from mpipipe.job import runtime
from mpipipe.job.types import Communicator

WIDTH, ROWS, STEPS = 512, 16, 8


def run(repeats: int = 30, microbatches: int = 4) -> None:
    """Print a line for each schedule, without and with clipping: milliseconds of a step, and the ratio."""
    comm = runtime.world()
    if comm.size < 2:
        raise ArgumentError("bench steps", found="1 rank", expected="at least 2 ranks")
    for schedule in (
        schedules.one_f_one_b(comm.size, microbatches),
        schedules.zero_bubble_h1(comm.size, microbatches),
        schedules.zero_bubble_v(comm.size, microbatches),
    ):
        loop = _Loop(comm, schedule)
        for max_norm in (None, 1.0):
            by_step, by_launch = partial(loop.steps, max_norm), partial(loop.launches, max_norm)
            times = [seconds * 1e3 / STEPS for seconds in compare(comm, [by_step, by_launch], repeats)]
            report(
                comm,
                f"steps {schedule.name}, {'no clipping' if max_norm is None else 'clipping'}",
                f"launch {times[1]:.2f} ms, step {times[0]:.2f} ms",
                times[1] / times[0],
                "at most 1",
            )
        loop.pipeline.close()


class _Loop:
    """A small training, by either method."""

    def __init__(self, comm: Communicator, schedule: schedules.Schedule) -> None:
        stages = [nn.Stage([nn.Linear(WIDTH, WIDTH)], first=s) for s in schedule.stages_of(comm.rank)]
        self.comm, self.pipeline = comm, Pipeline(stages, schedule, comm, loss=nn.mean_squared_error)
        self.optimizer = optim.AdamW(stages, lr=1e-4)
        batch = np.random.default_rng(0).standard_normal((ROWS * schedule.microbatches, WIDTH), dtype=np.float32)
        self.inputs = batch if schedule.placement[0] == comm.rank else None
        self.targets = batch if schedule.placement[-1] == comm.rank else None
        self.scaler = optim.LossScaler(1.0, dynamic=False)

    def steps(self, max_norm: float | None) -> None:
        """Let every step end on all ranks before the next one begins."""
        for _ in range(STEPS):
            self.pipeline.step(self.inputs, self.targets)
            if max_norm is None:
                self.optimizer.step()
            else:
                optim.scaled_step(self.optimizer, self.scaler, max_norm, comm=self.comm)

    def launches(self, max_norm: float | None) -> None:
        """Ask for the loss of a step while the next one is under way."""
        pending = None
        for _ in range(STEPS):
            launched = self.pipeline.launch(self.inputs, self.targets)
            update = optim.begin_step(self.optimizer, max_norm, comm=self.comm)
            if pending is not None:
                pending.wait()
            update.wait()
            pending = launched
