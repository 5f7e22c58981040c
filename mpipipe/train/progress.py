"""How far a training has come: what it remembers besides its parameters, and how that is saved and
found again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from mpipipe import checkpoint, nn, optim
from mpipipe.checkpoint import Checkpoint
from mpipipe.comm import Mesh
from mpipipe.errors import ArgumentError, ConfigError
from mpipipe.job import group_of
from mpipipe.pipeline import Pipeline
from mpipipe.train.config import TrainingOptions
from mpipipe.train.report import Record
from mpipipe.train.task import Task
from mpipipe.train.task_calls import call, place_of

OPTIMIZER = "stages", "steps", "lr", "step", "named_state"  # attributes of one


class Progress:
    """The state of a training on this rank.

    Batches follow from (seed, step), dropout masks from (seed, steps of the pipeline), and the
    sample from the seed. So these numbers are the position in the data and the state of all random
    numbers.
    """

    def __init__(self, config: TrainingOptions, pipeline: Pipeline, mesh: Mesh, task: Task) -> None:
        self.pipeline = pipeline
        self.mesh = mesh
        self.optimizer = make_optimizer(config, pipeline.stages, task, mesh)
        self.scaler = make_scaler(config)
        # number of steps made, and the last record
        self.step = 0
        self.record = Record(0)

    def scaling(self) -> dict[str, Any]:
        """Return what a record says of the loss scale, where that is dynamic."""
        return (
            {"loss_scale": self.scaler.scale, "skipped": self.scaler.skipped}
            if self.scaler.dynamic
            else {}
        )

    def whole_parameters(self) -> AbstractContextManager[None]:
        """Within this context the parameters of the stages can be read and set; collective."""
        whole: Any = getattr(
            self.optimizer, "whole_parameters", nullcontext
        )  # not every task's own has it
        return whole()

    def state(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a checkpoint remembers besides the arrays: `facts`, such as the
        configuration, and this state.
        """
        scaler = self.scaler
        record = {
            name: value for name, value in self.record.facts().items() if math.isfinite(value)
        }
        return {
            **facts,
            "record": record,
            "random": {"steps_taken": self.pipeline.steps_taken},
            "loss_scale": {"scale": scaler.scale, "good": scaler.good, "skipped": scaler.skipped},
        }

    def load(self, found: Checkpoint) -> None:
        """Continue after a checkpoint; collective. Raises ArgumentError on every rank."""
        checkpoint.load(found.path, self.mesh, self.pipeline.stages, self.optimizer)
        with group_of(self.mesh.comm).raise_together("train: the state in the checkpoint"):
            try:
                self._restore(found)
            except (KeyError, TypeError, ValueError) as error:
                raise ArgumentError(
                    f"the state in the checkpoint is wrong: {type(error).__name__}: {error}",
                    found=str(found.path),
                    remedy="resume another checkpoint",
                ) from error

    def _restore(self, found: Checkpoint) -> None:
        state = found.state
        scale = state["loss_scale"]
        record = Record.of(dict(state["record"]))
        if any(type(value) not in (int, float) for value in record.facts().values()):
            raise ValueError("the record has something else than numbers")
        optim.LossScaler(initial=scale["scale"])  # raises where it is out of range
        self.step = found.step
        self.record = record
        self.scaler.good = _count(scale["good"])
        self.scaler.skipped = _count(scale["skipped"])
        self.scaler.scale = float(scale["scale"])
        self.pipeline.steps_taken = _count(state["random"]["steps_taken"])


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r:.40} is no count")
    return value


def make_optimizer(
    config: TrainingOptions, stages: Sequence[nn.Stage], task: Task, mesh: Mesh | None
) -> Any:
    """Return the optimizer of a task's own, or the one that a configuration asks for; collective
    over a mesh.
    """
    with (
        nullcontext()
        if mesh is None
        else group_of(mesh.comm).raise_together("train: the optimizer of the task")
    ):
        own = call(task, "optimizer", stages, config)
        lacking = [name for name in OPTIMIZER if own is not None and not hasattr(own, name)]
        if lacking:
            raise ConfigError(
                f"{place_of(task, 'optimizer')} returns no optimizer",
                found=f"{type(own).__name__} without {', '.join(lacking)}",
                expected="one with " + ", ".join(OPTIMIZER),
            )
        if own is not None and config.shard_optimizer:
            raise ConfigError(
                "shard_optimizer, and a task with an optimizer of its own",
                found=f"{type(task).__name__}.optimizer returns {type(own).__name__}",
                expected="None there: the optimizer that the options name is sharded",
                remedy="leave out shard_optimizer, or let the task return None",
            )
    if own is not None:
        return own
    replicas = mesh.replicas if mesh is not None and config.shard_optimizer else None
    common: Any = {"weight_decay": config.weight_decay, "groups": task.groups, "replicas": replicas}
    if config.optimizer == "adamw":
        return optim.AdamW(stages, config.lr, **common)
    return optim.SGD(stages, config.lr, momentum=config.momentum, **common)


def make_scaler(config: TrainingOptions) -> optim.LossScaler:
    """Return the scaler of the loss that a configuration asks for; a dynamic one changes it as the
    gradients allow.
    """
    if config.loss_scale == 0 or (config.loss_scale is None and config.dtype == "float16"):
        return optim.LossScaler()
    return optim.LossScaler(config.loss_scale or 1.0, dynamic=False)
