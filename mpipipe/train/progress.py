"""How far a training has come: what it remembers besides its parameters, and how that is saved and found again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpipipe import checkpoint, optim
from mpipipe.checkpoint import Checkpoint
from mpipipe.comm.group import group_of
from mpipipe.comm.mesh import Mesh
from mpipipe.errors import ArgumentError
from mpipipe.pipeline import Pipeline
from mpipipe.train.config import TrainConfig
from mpipipe.train.report import Record


class Progress:
    """The state of a training on this rank.

    Batches follow from (seed, step), dropout masks from (seed, steps of the pipeline), and the sample from the seed. So
    these numbers are the position in the data and the state of all random numbers.

    Parameters
    ----------
    config : the same on every rank
    pipeline : with this rank's stages
    mesh : all ranks

    Attributes
    ----------
    step : number of steps made
    record : the last one
    optimizer, scaler : of the training
    """

    def __init__(self, config: TrainConfig, pipeline: Pipeline, mesh: Mesh) -> None:
        self.pipeline, self.mesh = pipeline, mesh
        self.optimizer = _optimizer(config, pipeline)
        self.scaler = _scaler(config)
        self.step, self.record = 0, Record(0)

    def check_weights(self, every: int) -> None:
        """Compare the replicas after each `every` steps, 0 for never; collective. Raises ReplicaError on every rank."""
        if every and self.step % every == 0:
            checkpoint.check_replicas(self.mesh, self.pipeline.stages, self.optimizer)

    def state(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a checkpoint remembers besides the arrays, as plain values.

        Parameters
        ----------
        facts : what else, such as the configuration
        """
        scaler = self.scaler
        return {
            **facts,
            "record": self.record.facts(),
            "random": {"steps_taken": self.pipeline.steps_taken},
            "loss_scale": {"scale": scaler.scale, "good": scaler.good, "skipped": scaler.skipped},
        }

    def load(self, found: Checkpoint) -> None:
        """Go on behind a checkpoint; collective. Raises ArgumentError on every rank."""
        checkpoint.load(found.path, self.mesh, self.pipeline.stages, self.optimizer)
        with group_of(self.mesh.comm).together("train: the state in the checkpoint"):
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
        scale, record = state["loss_scale"], Record(**state["record"])
        if any(type(value) not in (int, float) for value in record.facts().values()):
            raise ValueError("the record has something else than numbers")
        optim.LossScaler(initial=scale["scale"])  # raises where it is out of range
        self.step, self.record = found.step, record
        self.pipeline.steps_taken = _count(state["random"]["steps_taken"])
        self.scaler.scale = float(scale["scale"])
        self.scaler.good, self.scaler.skipped = _count(scale["good"]), _count(scale["skipped"])


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r:.40} is no count")
    return value


def _optimizer(config: TrainConfig, pipeline: Pipeline) -> optim.AdamW | optim.SGD:
    if config.optimizer == "adamw":
        return optim.AdamW(pipeline.stages, config.lr, weight_decay=config.weight_decay)
    return optim.SGD(pipeline.stages, config.lr, momentum=config.momentum, weight_decay=config.weight_decay)


def _scaler(config: TrainConfig) -> optim.LossScaler:
    if config.scales_dynamically:
        return optim.LossScaler()
    return optim.LossScaler(config.loss_scale or 1.0, dynamic=False)
