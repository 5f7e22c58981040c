"""Real steps of a training with a plan: to compare predictions with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from mpipipe import Pipeline, optim
from mpipipe.comm.group import group_of
from mpipipe.planning import Choice
from mpipipe.train.commitment import Commitment
from mpipipe.train.planner.scene import Scene
from mpipipe.train.progress import Progress
from mpipipe.train.training_plan import TrainingPlan

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
        pending.result()
        self.made += 1


@contextmanager
def rehearsal(scene: Scene, choice: Choice) -> Iterator[Rehearsal]:
    """Build the pipeline of a plan, and make its first steps; collective over all ranks."""
    mesh, config = scene.mesh, scene.planned(choice)
    with group_of(mesh.comm).together("plan: the stages"):
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
            stage.keep_compute()
        rehearsed.steps(WARMUP)
        yield rehearsed
