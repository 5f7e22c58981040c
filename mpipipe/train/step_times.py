"""The time that steps of a training took."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mpipipe import schedules
from mpipipe.comm.group import group_of
from mpipipe.comm.mesh import Mesh
from mpipipe.pipeline import Pipeline
from mpipipe.train.config import TrainConfig


@dataclass
class StepTimes:
    """Time that one rank spent in some steps.

    Attributes
    ----------
    steps : number of them
    seconds : by the host's clock
    busy, elapsed : seconds that the pipeline measured
    """

    steps: int = 0
    seconds: float = 0.0
    busy: float = 0.0
    elapsed: float = 0.0

    def add(self, seconds: float, busy: float, elapsed: float) -> None:
        """Count one more step."""
        self.steps += 1
        self.seconds += seconds
        self.busy += busy
        self.elapsed += elapsed


def shared_speed(times: StepTimes, config: TrainConfig, mesh: Mesh, pipeline: Pipeline) -> dict[str, Any]:
    """Return tokens per second and the bubble of some steps, and the bubble that the stages' durations predict.

    Collective over the mesh. Nothing is returned for no steps at all.
    """
    if times.steps == 0:
        return {}
    costs = pipeline.durations()
    everyone = group_of(mesh.comm).gather("train: the time of all ranks", times)
    busy, elapsed = sum(each.busy for each in everyone), sum(each.elapsed for each in everyone)
    tokens = times.steps * config.batch * config.seq_len
    return {
        "tokens_per_second": tokens / max(each.seconds for each in everyone),
        "bubble": 1 - busy / elapsed,
        "predicted": schedules.simulate(pipeline.schedule, costs).bubble_fraction,
    }
