"""`bench pipeline`: what the machinery costs, on stages so small that nothing else counts.

Two ranks, one 64-wide float32 linear stage per chunk, 32 micro-batches of 4 rows. The peer is the same order of work
written by hand with mpi4py calls and nothing around them, in the same run.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpipipe import Pipeline, nn, schedules
from mpipipe.bench.timing import compare, report
from mpipipe.errors import ArgumentError
from mpipipe.job import runtime
from mpipipe.job.types import Communicator, MpiCommunicator
from mpipipe.text import counted

WIDTH, ROWS, MICROBATCHES = 64, 4, 32


def run(repeats: int = 30) -> None:
    """Print a line for each schedule: microseconds per micro-batch (forward + backward), and the ratio."""
    comm = runtime.world()
    if comm.size != 2:
        raise ArgumentError("bench pipeline", found=counted(comm.size, "rank"), expected="2 ranks")
    for schedule in (schedules.one_f_one_b(2, MICROBATCHES), schedules.interleaved_1f1b(2, 2, MICROBATCHES)):
        ours, hand = _PipelineStep(comm, schedule), _HandWrittenStep(comm, schedule)
        times = compare(comm, [ours, hand], repeats)
        ours.close()
        scale = 1e6 / MICROBATCHES
        report(
            comm,
            f"pipeline {schedule.name} x {schedule.chunks}",
            f"{times[0] * scale:.1f} us, by hand {times[1] * scale:.1f} us per micro-batch",
            times[0] / times[1],
            "at most 3",
        )


def _batch() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    shape = (ROWS * MICROBATCHES, WIDTH)
    return rng.standard_normal(shape, dtype=np.float32), rng.standard_normal(shape, dtype=np.float32)


class _PipelineStep:
    """A step of the pipeline."""

    def __init__(self, comm: Communicator, schedule: schedules.Schedule) -> None:
        stages = [nn.Stage([nn.Linear(WIDTH, WIDTH)], first=s) for s in schedule.stages_of(comm.rank)]
        self.pipeline = Pipeline(stages, schedule, comm, loss=nn.mean_squared_error)
        inputs, targets = _batch()
        self.inputs = inputs if schedule.placement[0] == comm.rank else None
        self.targets = targets if schedule.placement[-1] == comm.rank else None
        self.close = self.pipeline.close

    def __call__(self) -> None:
        self.pipeline.step(self.inputs, self.targets)


class _HandWrittenStep:
    """The same actions with bare mpi4py: receive, multiply, send. Buffers and tags are laid out beforehand."""

    def __init__(self, comm: MpiCommunicator, schedule: schedules.Schedule) -> None:
        self.comm, chunks = comm, schedule.chunks
        rng = np.random.default_rng(comm.rank)
        self.weights = [rng.standard_normal((WIDTH, WIDTH), dtype=np.float32) / 8 for _ in range(chunks)]
        self.biases = [np.zeros(WIDTH, np.float32) for _ in range(chunks)]
        self.dweights = [np.zeros((WIDTH, WIDTH), np.float32) for _ in range(chunks)]
        self.dbiases = [np.zeros(WIDTH, np.float32) for _ in range(chunks)]
        inputs, targets = _batch()
        self.inputs = np.split(inputs, MICROBATCHES)
        self.targets = np.split(targets, MICROBATCHES)
        self.activations = np.empty((chunks, MICROBATCHES, ROWS, WIDTH), np.float32)
        self.gradients = np.empty((chunks, MICROBATCHES, ROWS, WIDTH), np.float32)
        last = schedule.stages - 1
        self.actions = [
            (op == "F", stage // 2, m, stage == 0, stage == last, stage * MICROBATCHES + m)
            for stage, op, m in schedule.orders[comm.rank]
        ]
        self.tag_shift = schedule.stages * MICROBATCHES

    def __call__(self) -> None:
        comm, peer = self.comm, 1 - self.comm.rank
        sends: list[tuple[Any, np.ndarray]] = []
        loss_gradients: dict[int, np.ndarray] = {}
        arrived: dict[tuple[int, int], np.ndarray] = {}
        for gradient in (*self.dweights, *self.dbiases):
            gradient.fill(0)
        for forward, chunk, m, first, last, tag in self.actions:
            weight = self.weights[chunk]
            if forward:
                x = self.inputs[m]
                if not first:
                    x = self.activations[chunk, m]
                    comm.Recv(x, peer, tag)
                arrived[chunk, m] = x
                y = x @ weight.T
                y += self.biases[chunk]
                if last:
                    difference = y - self.targets[m]
                    np.vdot(difference, difference) / difference.size
                    difference *= 2 / difference.size / MICROBATCHES
                    loss_gradients[m] = difference
                else:
                    sends.append((comm.Isend(y, peer, tag + MICROBATCHES), y))
            else:
                if last:
                    dy = loss_gradients.pop(m)
                else:
                    dy = self.gradients[chunk, m]
                    comm.Recv(dy, peer, tag + self.tag_shift)
                x = arrived.pop((chunk, m))
                self.dweights[chunk] += dy.T @ x
                self.dbiases[chunk] += dy.sum(0)
                if not first:
                    dx = dy @ weight
                    sends.append((comm.Isend(dx, peer, tag - MICROBATCHES + self.tag_shift), dx))
        for request, _ in sends:
            request.Wait()
