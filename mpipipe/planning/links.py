"""Measures messages of a pipeline, by steps whose stages compute nothing; and real steps of a plan.

    chain of one micro-batch    s + 2P actions + 4(P-1) messages + 2(P-1) transfers
    two stages on each rank     s + 4P actions + 4(2P-1) messages + 2(2P-1) transfers
    many micro-batches          each more costs two actions on the busiest rank, with one message
                                each on two ranks, and two on more

Here s is what a step has besides, an action is what the executor needs for one, a message is how
long sending or receiving one keeps a rank from computing, and a transfer is what it lasts beyond
that. All links of the pipeline work at once, and what is measured is their mean.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter
from types import SimpleNamespace

import numpy as np

from mpipipe import optim, schedules
from mpipipe.job import Communicator, RankGroup, group_of
from mpipipe.pipeline import Pipeline
from mpipipe.planning.predict import Choice
from mpipipe.planning.problem import MeasuredRanks
from mpipipe.planning.profile import Link
from mpipipe.schedules import Schedule

SECONDS = 0.1  # for each measurement
REPEATS = (5, 100)  # fewest, most
MANY = 9  # micro-batches


def measure_action(measured: MeasuredRanks) -> float:
    """Return what the executor of this rank needs for an action; collective over all ranks."""
    group = group_of(measured.mesh.comm)
    alone = group.split(measured.mesh.rank, 0, "plan: a rank by itself")
    array = np.zeros(1)
    one = step_seconds(alone, schedules.gpipe(1, 1), array)
    many = step_seconds(alone, schedules.gpipe(1, MANY), array)
    group.agree("plan: all ranks have measured their actions")
    alone.Free()
    return max(0.0, many - one) / (2 * (MANY - 1))


def measure_link(pipe: Communicator, nbytes: float, action: float) -> Link:
    """Return the mean link of a pipeline, for messages of these bytes; collective."""
    ranks = pipe.size
    if ranks == 1:
        return Link()
    array = np.zeros(max(1, round(nbytes) // 4), np.float32)
    one = step_seconds(pipe, schedules.gpipe(ranks, 1), array)
    many = step_seconds(pipe, schedules.gpipe(ranks, MANY), array)
    twice = step_seconds(pipe, schedules.looped_bfs(ranks, 2, 1), array)
    messages = (many - one) / (2 * (MANY - 1)) - action
    message = max(0.0, messages / min(2, ranks - 1))
    return Link(message, max(0.0, (twice - one) / (2 * ranks) - action - 2 * message))


def step_seconds(comm: Communicator, schedule: Schedule, array: np.ndarray) -> float:
    """Return the median seconds of a step of empty stages; collective."""

    def loss(output: object, target: object, factor: float = 1.0) -> tuple[float, np.ndarray]:
        return 0.0, array

    stages = []
    for _ in schedule.stages_of(comm.rank):
        stage = SimpleNamespace(
            forward=lambda x: (array, None), backward=lambda dy, saved: array, gradients=None
        )
        stages.append(stage)
    batch = [array] * schedule.microbatches
    inputs = targets = None
    if schedule.placement[0] == comm.rank:
        inputs = batch
    if schedule.placement[-1] == comm.rank:
        targets = batch
    with Pipeline(stages, schedule, comm, loss=loss) as pipeline:
        return typical_seconds(group_of(comm), lambda: pipeline.step(inputs, targets), SECONDS)


def repeats_in(available: float, seconds: float, limits: tuple[int, int]) -> int:
    """Return how many repeats fit into the time, between limits.

    All ranks pass the same.
    """
    least, most = limits
    return min(max(least, int(available / max(seconds, 1e-9))), most)


# -- Real steps of a training with a plan: to compare predictions with -----------------------------


WARMUP = 2  # steps: in the first ones memory is allocated
FIRST = 5  # steps after that
TRIAL_SECONDS = 1.0  # time for steps on example data


def trial_seconds(measured: MeasuredRanks, choice: Choice) -> float:
    """Return the seconds of a step of a plan on example data; collective."""
    problem = measured.problem
    mesh = measured.mesh
    group = group_of(mesh.comm)
    with group.raise_together("plan: the stages"):
        plan = problem.plan(choice)
        rank = mesh.pipe.rank
        stages = plan.stages(
            rank, measured.layers(), problem.dtype, measured.seed, frozen=measured.frozen
        )
        loss = measured.loss_for(stages[-1], plan.microbatch_rows)
    with Pipeline(
        stages, plan.schedule, mesh.pipe, loss, replicas=mesh.replicas, input_grads=False
    ) as pipeline:
        optimizer = measured.optimizer(stages, mesh)
        scaler = measured.scaler()
        example = measured.example(plan.rows, plan.schedule.microbatches)
        inputs = targets = None
        if plan.schedule.placement[0] == rank:
            inputs = example[0]
        if plan.schedule.placement[-1] == rank:
            targets = example[1]
        for stage in stages:
            stage.optimizer_writes_compute()

        def step() -> None:
            pipeline.step(inputs, targets, scale=scaler.scale)
            optim.scaled_step(optimizer, scaler, measured.clip, measured.lr / 100, mesh.pipe)

        return typical_seconds(group, step, TRIAL_SECONDS)


def typical_seconds(group: RankGroup, step: Callable[[], object], available: float) -> float:
    """Return the median seconds of a step; collective.

    The first steps say how many there is time for, and do not count: libraries may still find their
    way.
    """
    timed_steps(group, step, WARMUP)
    first = median(timed_steps(group, step, FIRST))
    return median(timed_steps(group, step, repeats_in(available, first, REPEATS)))


def timed_steps(group: RankGroup, step: Callable[[], object], count: int) -> list[float]:
    """Make steps one after the other; return the seconds of each on the slowest rank."""
    group.agree("plan: all ranks begin to make steps")
    times = []
    last = perf_counter()
    for _ in range(count):
        step()
        now = perf_counter()
        times.append(now - last)
        last = now
    return list(map(max, zip(*group.gather("plan: the seconds of steps", times))))
