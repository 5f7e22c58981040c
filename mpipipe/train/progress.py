"""How far a training has come: what it remembers besides its parameters, in checkpoints, too."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from mpipipe import checkpoint, nn, optim
from mpipipe.checkpoint import Checkpoint
from mpipipe.comm import Mesh
from mpipipe.errors import ArgumentError, ConfigError
from mpipipe.job import group_of
from mpipipe.options import Values
from mpipipe.pipeline import Pipeline
from mpipipe.train.config import TaskConfig
from mpipipe.train.report import Record
from mpipipe.train.task import Task
from mpipipe.train.task_calls import call, place_of

# Attributes that an optimizer has.
OPTIMIZER = "stages", "steps", "lr", "step", "named_state"


class Progress:
    """The state of a training on this rank.

    Batches follow from (seed, step), dropout masks from (seed, steps of the pipeline), and the
    sample from the seed. So these numbers are the position in the data and the state of all random
    numbers.
    """

    def __init__(self, config: TaskConfig, pipeline: Pipeline, mesh: Mesh, task: Task) -> None:
        self.pipeline = pipeline
        self.mesh = mesh
        self.optimizer = make_optimizer(config, pipeline.stages, task, mesh)
        self.scaler = make_scaler(config)
        # number of steps made, and the last record
        self.step = 0
        self.record = Record(0)

    def scaling(self) -> dict[str, float]:
        """Return what a record says of the loss scale, where that is dynamic."""
        if not self.scaler.dynamic:
            return {}
        return {"loss_scale": self.scaler.scale, "skipped": self.scaler.skipped}

    def whole_parameters(self) -> AbstractContextManager[None]:
        """Within this context the parameters of the stages can be read and set; collective."""
        # An optimizer of a task need not have it.
        whole: Callable[[], AbstractContextManager[None]]
        whole = getattr(self.optimizer, "whole_parameters", nullcontext)
        return whole()

    def state(self, facts: Mapping[str, object]) -> dict[str, object]:
        """Return what a checkpoint remembers besides arrays: `facts`, and this state."""
        scaler = self.scaler
        measured = self.record.facts().items()
        record = {}
        for name, value in measured:
            if math.isfinite(value):
                record[name] = value
        return {
            **facts,
            "record": record,
            "random": {"steps_taken": self.pipeline.steps_taken},
            "loss_scale": {"scale": scaler.scale, "good": scaler.good, "skipped": scaler.skipped},
        }

    def load(self, start: Checkpoint) -> None:
        """Continue after a checkpoint; collective. Raises ArgumentError on every rank."""
        checkpoint.load(start.path, self.mesh, self.pipeline.stages, self.optimizer)
        with group_of(self.mesh.comm).raise_together("train: the state in the checkpoint"):
            try:
                self._restore(start)
            except (KeyError, TypeError, ValueError) as error:
                raise ArgumentError(
                    f"the state in the checkpoint is wrong: {type(error).__name__}: {error}",
                    found=str(start.path),
                    remedy="resume another checkpoint",
                ) from error

    def _restore(self, start: Checkpoint) -> None:
        facts = dict(start.state["record"])
        if not all(type(value) in (int, float) for value in facts.values()):
            raise ValueError("the record has something else than numbers")
        scale = start.state["loss_scale"]
        counts = scale["good"], scale["skipped"], start.state["random"]["steps_taken"]
        for count in counts:
            if type(count) is not int or count < 0:
                raise ValueError(f"{count!r:.40} is no count")
        # Raises where it is out of range.
        optim.LossScaler(initial=scale["scale"])
        self.step = start.step
        self.record = Record.of(facts)
        self.scaler.scale = float(scale["scale"])
        self.scaler.good, self.scaler.skipped, self.pipeline.steps_taken = counts


def make_optimizer(
    config: TaskConfig, stages: Sequence[nn.Stage], task: Task, mesh: Mesh | None
) -> Any:
    """Return the optimizer of the task, or the one that options name; collective over a mesh."""
    together: AbstractContextManager[None] = nullcontext()
    replicas = None
    if mesh is not None:
        together = group_of(mesh.comm).raise_together("train: the optimizer of the task")
        replicas = mesh.replicas
    with together:
        optimizer = call(task, "optimizer", stages, config)
        if optimizer is not None:
            _check_optimizer(optimizer, config, task)
            return optimizer
    common: Values = {
        "weight_decay": config.weight_decay,
        "groups": task.groups,
        "replicas": replicas if config.shard_optimizer else None,
    }
    if config.optimizer == "adamw":
        return optim.AdamW(stages, config.lr, **common)
    return optim.SGD(stages, config.lr, momentum=config.momentum, **common)


def _check_optimizer(optimizer: object, config: TaskConfig, task: Task) -> None:
    lacking = []
    for name in OPTIMIZER:
        if not hasattr(optimizer, name):
            lacking.append(name)
    if lacking:
        raise ConfigError(
            f"{place_of(task, 'optimizer')} returns no optimizer",
            found=f"{type(optimizer).__name__} without {', '.join(lacking)}",
            expected="one with " + ", ".join(OPTIMIZER),
        )
    if config.shard_optimizer:
        raise ConfigError(
            "shard_optimizer, and a task with an optimizer of its own",
            found=f"{type(task).__name__}.optimizer returns {type(optimizer).__name__}",
            expected="None there: the optimizer that the options name is sharded",
            remedy="leave out shard_optimizer, or let the task return None",
        )


def make_scaler(config: TaskConfig) -> optim.LossScaler:
    """Return the scaler of the loss; a dynamic one changes it as the gradients allow."""
    if config.loss_scale == 0 or (config.loss_scale is None and config.dtype == "float16"):
        return optim.LossScaler()
    return optim.LossScaler(config.loss_scale or 1.0, dynamic=False)
