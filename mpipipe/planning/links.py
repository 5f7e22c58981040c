"""Measures messages between neighbours, by pipelines of two ranks whose stages compute nothing.

    chain of one micro-batch    s + 4 actions + 4 messages + 2 transfers     one stage on each rank
                                s + 8 actions + 12 messages + 6 transfers    two stages on each rank
    many micro-batches          each more costs 2 actions and 2 messages     on the busier rank

Here s is what a step has besides, an action is what the executor needs for one, a message is how long sending or
receiving one keeps a rank from computing, and a transfer is what it lasts beyond that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from mpipipe import Pipeline, arrays, optim, schedules
from mpipipe.job.group import group_of
from mpipipe.job.types import Communicator
from mpipipe.planning import Choice, Link
from mpipipe.planning.subject import Scene
from mpipipe.schedules import Schedule
from mpipipe.train.progress import Commitment, Progress
from mpipipe.train.training_plan import TrainingPlan

SECONDS = 0.1  # for each measurement
REPEATS = (5, 100)  # at least, at most
MANY = 9  # micro-batches


def measure_action(scene: Scene) -> float:
    """Return what the executor of this rank needs for an action; collective over all ranks."""
    group = group_of(scene.mesh.comm)
    alone = group.split(scene.mesh.rank, 0, "plan: a rank by itself")
    array = np.zeros(1)
    one, many = (_seconds(alone, schedules.gpipe(1, count), array) for count in (1, MANY))
    group.agree("plan: all ranks have measured their actions")
    alone.Free()
    return max(0.0, many - one) / (2 * (MANY - 1))


def measure_links(scene: Scene, action: float) -> dict[int, tuple[Link, ...]]:
    """Return the links of this rank's pipeline for each size of micro-batch; collective over all ranks."""
    pipe = group_of(scene.mesh.pipe)
    found: dict[int, dict[int, Link]] = {size: {} for size in scene.space.sizes}
    for phase in _phases(pipe.size):
        links = {rank: link for link in phase for rank in (link, (link + 1) % pipe.size)}
        mine = links.get(pipe.rank)
        color = pipe.size + pipe.rank if mine is None else mine
        pair = pipe.split(color, int(pipe.rank != mine), "plan: two neighbours")
        if mine is not None:
            for size in scene.space.sizes:
                found[size][mine] = _link(pair, _array(scene, size), action)
        pipe.agree("plan: these neighbours are measured")
        pair.Free()
    everyone = pipe.gather("plan: the links", found)
    if pipe.size == 1:
        return {size: (Link(),) for size in found}
    merged = {size: {link: each for other in everyone for link, each in other[size].items()} for size in found}
    return {size: tuple(links.get(link, links[0]) for link in range(pipe.size)) for size, links in merged.items()}


def measure_step(scene: Scene, action: float, links: dict[int, tuple[Link, ...]]) -> float:
    """Return what a step of the pipeline has besides its actions and messages; collective over all ranks."""
    size = min(links)
    ranks = scene.mesh.pipe.size
    seconds = _seconds(scene.mesh.pipe, schedules.gpipe(ranks, 1), _array(scene, size))
    on_the_way = sum(2 * (2 * link.message + link.transfer) for link in links[size][: ranks - 1])
    return max(0.0, seconds - 2 * ranks * action - on_the_way)


def _phases(ranks: int) -> list[list[int]]:
    """Return all links of a ring of ranks, in phases in which no rank has two of them."""
    if ranks <= 2:
        return [[0]] if ranks == 2 else []
    last = ranks - 1
    odd = [link for link in range(1, ranks, 2) if link != last or ranks % 2 == 0]
    even = [link for link in range(0, ranks, 2) if link != last]
    return [even, odd] if ranks % 2 == 0 else [even, odd, [last]]


def _array(scene: Scene, size: int) -> np.ndarray:
    return np.zeros(scene.message_shape(size), arrays.dtype(scene.config.dtype))


def _link(pair: Communicator, array: np.ndarray, action: float) -> Link:
    one, many = (_seconds(pair, schedules.gpipe(2, count), array) for count in (1, MANY))
    twice = _seconds(pair, schedules.looped_bfs(2, 2, 1), array)
    message = max(0.0, (many - one) / (2 * (MANY - 1)) - action)
    return Link(message, max(0.0, (twice - one - 4 * action - 8 * message) / 4))


class _Hollow:
    """A stage that computes nothing."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def forward(self, x: Any) -> tuple[np.ndarray, None]:
        """Return the array, whatever comes in."""
        return self.array, None

    def backward(self, dy: Any, saved: None) -> np.ndarray:
        """Return the array, whatever comes in."""
        return self.array


def _seconds(comm: Communicator, schedule: Schedule, array: np.ndarray) -> float:
    """Return the median seconds of a step; collective."""

    def loss(output: Any, target: Any, factor: float = 1.0) -> tuple[float, np.ndarray]:
        return 0.0, array

    group = group_of(comm)
    stages = [_Hollow(array) for _ in schedule.stages_of(comm.rank)]
    batch = [array] * schedule.microbatches
    inputs = batch if schedule.placement[0] == comm.rank else None
    targets = batch if schedule.placement[-1] == comm.rank else None
    with Pipeline(stages, schedule, comm, loss=loss) as pipeline:
        for _ in range(REPEATS[0]):
            pipeline.step(inputs, targets)
        seconds = max(group.gather("plan: the seconds of a message", pipeline.elapsed))
        times = []
        for _ in range(min(max(REPEATS[0], int(SECONDS / max(seconds, 1e-9))), REPEATS[1])):
            pipeline.step(inputs, targets)
            times.append(pipeline.elapsed)
        return max(group.gather("plan: the seconds of messages", median(times)))


# -- Real steps of a training with a plan: to compare predictions with ------------------------------------------------


WARMUP = 2  # steps: in the first ones memory is allocated


class Rehearsal:
    """Makes steps as the trainer does, with random tokens. All of its methods are collective over all ranks.

    Parameters
    ----------
    scene : the training
    choice : its plan
    pipeline, norm : of the plan's stages
    """

    def __init__(self, scene: Scene, plan: TrainingPlan, pipeline: Pipeline, norm: optim.GlobalNorm) -> None:
        mesh, config = scene.mesh, scene.config
        self.pipeline, self.norm, self.config = pipeline, norm, config
        self.group = group_of(mesh.comm)
        placement = plan.schedule.placement
        inputs, targets = scene.tokens(plan.rows, plan.schedule.microbatches)
        self.batch = (
            inputs if placement[0] == mesh.pipe.rank else None,
            targets if placement[-1] == mesh.pipe.rank else None,
        )
        self.progress = Progress(config, pipeline, mesh)
        self.commitment = Commitment(self.progress, self.group, together=False)
        self.made = 0

    def steps(self, count: int) -> list[float]:
        """Make steps one after the other; return the seconds of each on the slowest rank."""
        self.group.agree("plan: all ranks begin to make steps")
        times, last = [], perf_counter()
        for _ in range(count):
            self._step()
            now = perf_counter()
            times.append(now - last)
            last = now
        return [max(each) for each in zip(*self.group.gather("plan: the seconds of steps", times))]

    def _step(self) -> None:
        config, scaler = self.config, self.progress.scaler
        self.commitment.begin(self.made)
        pending = self.pipeline.launch(*self.batch, scale=scaler.scale)
        optim.begin_step(self.commitment, config.clip, scaler=scaler, lr=config.lr / 100, over=self.norm).finish()
        pending.wait()
        self.made += 1


@contextmanager
def rehearsal(scene: Scene, choice: Choice) -> Iterator[Rehearsal]:
    """Build the pipeline of a plan, and make its first steps; collective over all ranks."""
    mesh, config = scene.mesh, scene.planned(choice)
    with group_of(mesh.comm).raise_together("plan: the stages"):
        plan = TrainingPlan.of(config, scene.architecture, mesh.pipe.size, mesh.data.size, scene.vocab, scene.tuning)
        stages = plan.stages(mesh.pipe.rank, scene.shard, config.dtype, config.seed)
        loss = scene.shard.loss_for(stages[-1], plan.microbatch_rows)
    with (
        Pipeline(
            stages, plan.schedule, mesh.pipe, loss=loss, recompute=config.recompute, replicas=mesh.replicas
        ) as pipeline,
        optim.GlobalNorm(stages, mesh.pipe, replicas=mesh.replicas) as norm,
    ):
        rehearsed = Rehearsal(scene, plan, pipeline, norm)
        for stage in stages:
            stage.optimizer_writes_compute()
        rehearsed.steps(WARMUP)
        yield rehearsed
