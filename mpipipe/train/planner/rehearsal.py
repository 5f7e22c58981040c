"""Real steps of a training with a plan: to compare predictions with."""

from __future__ import annotations

from time import perf_counter

from mpipipe import Pipeline, optim
from mpipipe.comm.group import group_of
from mpipipe.planning import Choice
from mpipipe.train.commitment import Commitment
from mpipipe.train.planner.scene import Scene
from mpipipe.train.progress import Progress
from mpipipe.train.training_plan import TrainingPlan

WARMUP = 2  # steps: in the first ones memory is allocated


def rehearse(scene: Scene, choice: Choice, steps: int) -> list[float]:
    """Make steps with random tokens, and return the seconds of each on the slowest rank; collective over all ranks."""
    mesh, config = scene.mesh, scene.planned(choice)
    group = group_of(mesh.comm)
    with group.together("plan: the stages"):
        plan = TrainingPlan.of(config, scene.architecture, mesh.pipe.size, mesh.data.size, scene.vocab, scene.tuning)
        stages = plan.stages(mesh.pipe.rank, scene.shard, config.dtype, config.seed)
        loss = scene.shard.loss_for(stages[-1], plan.microbatch_rows)
    schedule = plan.schedule
    inputs, targets = scene.tokens(plan.rows, schedule.microbatches)
    batch = (
        inputs if schedule.placement[0] == mesh.pipe.rank else None,
        targets if schedule.placement[-1] == mesh.pipe.rank else None,
    )
    with (
        Pipeline(
            stages, schedule, mesh.pipe, loss=loss, recompute=config.recompute, replicas=mesh.replicas
        ) as pipeline,
        optim.GlobalNorm(stages, mesh.pipe, replicas=mesh.replicas) as norm,
    ):
        progress = Progress(config, pipeline, mesh)
        commitment = Commitment(progress, group, together=False)
        for stage in stages:
            stage.keep_compute()
        times = []
        last = perf_counter()
        for step in range(WARMUP + steps):
            commitment.begin(step)
            pipeline.step(*batch, scale=progress.scaler.scale)
            optim.scaled_step(commitment, progress.scaler, config.clip, lr=config.lr / 100, over=norm)
            now = perf_counter()
            times.append(now - last)
            last = now
        everyone = group.gather("plan: the seconds of steps", times[WARMUP:])
    return [max(each) for each in zip(*everyone)]
