"""Measures messages between neighbours, by pipelines of two ranks whose stages compute nothing.

    chain of one micro-batch    s + 4 actions + 4 messages + 2 transfers     one stage on each rank
                                s + 8 actions + 12 messages + 6 transfers    two stages on each rank
    many micro-batches          each more costs 2 actions and 2 messages     on the busier rank

Here s is what a step has besides, an action is what the executor needs for one, a message is how
long sending or receiving one keeps a rank from computing, and a transfer is what it lasts beyond
that.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter
from types import SimpleNamespace

import numpy as np

from mpipipe import arrays, optim, schedules
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


def measure_links(measured: MeasuredRanks, action: float) -> dict[int, tuple[Link, ...]]:
    """Return the links of this rank's pipeline by size of micro-batch; collective."""
    pipe = group_of(measured.mesh.pipe)
    own_links = dict.fromkeys(measured.problem.space.sizes, Link())
    for phase in range(2 + pipe.size % 2):
        # A rank without a neighbour in this phase is by itself.
        color = pipe.size + pipe.rank
        for link in (pipe.rank, (pipe.rank - 1) % pipe.size):
            if pipe.size > 1 and _phase(link, pipe.size) == phase:
                color = link
        pair = pipe.split(color, int(pipe.rank != color), "plan: two neighbours")
        if color < pipe.size:
            for size in own_links:
                seconds = _link(pair, _array(measured, size), action)
                if pipe.rank == color:
                    own_links[size] = seconds
        pipe.agree("plan: these neighbours are measured")
        pair.Free()
    everyone = pipe.gather("plan: the links", own_links)
    merged = {}
    for size in own_links:
        merged[size] = tuple([links[size] for links in everyone])
    return merged


def measure_step(
    measured: MeasuredRanks, action: float, links: dict[int, tuple[Link, ...]]
) -> float:
    """Return the seconds of a step besides its actions and messages; collective."""
    size = min(links)
    ranks = measured.mesh.pipe.size
    seconds = step_seconds(measured.mesh.pipe, schedules.gpipe(ranks, 1), _array(measured, size))
    on_the_way = 0.0
    for link in links[size][: ranks - 1]:
        on_the_way += 2 * (2 * link.message + link.transfer)
    return max(0.0, seconds - 2 * ranks * action - on_the_way)


def _phase(link: int, ranks: int) -> int:
    """Return when a link of a ring of ranks is measured: no rank has two of them at once."""
    if ranks % 2 and link == ranks - 1:
        return 2
    return link % 2


def _array(measured: MeasuredRanks, size: int) -> np.ndarray:
    return np.zeros(measured.message_shape(size), arrays.dtype(measured.problem.dtype))


def _link(pair: Communicator, array: np.ndarray, action: float) -> Link:
    one = step_seconds(pair, schedules.gpipe(2, 1), array)
    many = step_seconds(pair, schedules.gpipe(2, MANY), array)
    twice = step_seconds(pair, schedules.looped_bfs(2, 2, 1), array)
    message = max(0.0, (many - one) / (2 * (MANY - 1)) - action)
    return Link(message, max(0.0, (twice - one - 4 * action - 8 * message) / 4))


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
    with (
        Pipeline(
            stages, plan.schedule, mesh.pipe, loss, replicas=mesh.replicas, input_grads=False
        ) as pipeline,
        optim.GlobalNorm(stages, mesh.pipe, replicas=mesh.replicas) as over,
    ):
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
            norm = optim.scaled_step(
                optimizer, scaler, measured.clip, lr=measured.lr / 100, over=over
            )
            if norm is not None:
                float(norm)  # waits for a GPU

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
