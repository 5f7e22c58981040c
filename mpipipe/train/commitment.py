"""The moment in a step before which no rank has changed anything, and behind which every rank can."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from mpipipe.arrays import DeviceArray
from mpipipe.comm.group import Group
from mpipipe.nn import Stage
from mpipipe.nn.writing import announce_write
from mpipipe.train.progress import Progress

Outcome: TypeAlias = "tuple[float, float, float | None]"  # of a step: loss, learning rate, norm
Scalars: TypeAlias = tuple[float, int, int, int]  # of the loss scaler: scale, good, skipped; and steps of the pipeline


class Commitment:
    """An optimizer that changes nothing before all ranks of a group have come to the same step.

    Parameters
    ----------
    progress : of the training: its optimizer, scaler and pipeline, and the number of steps made so far
    group : all ranks
    together : whether ranks wait for each other; else each makes its step as soon as it can

    Attributes
    ----------
    made : number of steps made
    pending : function that makes the step to which all ranks may have come; None if no step is pending
    """

    def __init__(self, progress: Progress, group: Group, together: bool) -> None:
        self.optimizer, self.scaler, self.pipeline = progress.optimizer, progress.scaler, progress.pipeline
        self.group, self.together = group, together
        self.step_begun, self.made = -1, progress.step
        self.pending: Callable[[], Any] | None = None
        self._before: Scalars = self._now()

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of the optimizer."""
        return self.optimizer.stages

    @property
    def steps(self) -> int:
        """Steps of the optimizer, which leaves out those that overflow."""
        return self.optimizer.steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self.optimizer.steps = steps

    def begin(self, step: int) -> None:
        """Remember what a step changes before its end."""
        self.step_begun, self._before = step, self._now()

    def step(self, lr: float | None = None, scale: float | DeviceArray = 1.0) -> None:
        """Make a step of the optimizer, once all ranks can; collective."""
        self._commit(lambda: self.optimizer.step(lr=lr, scale=scale))

    def skip(self) -> None:
        """Leave a step out, once all ranks know that they do; collective."""
        self._commit(lambda: None)

    def _commit(self, make: Callable[[], Any]) -> None:
        self.pending = make
        if self.together:
            self.group.agree("train: all ranks have the sums of gradients and their norm")
        self.make()

    def make(self) -> None:
        """Make the pending step. It stays pending if the wait for readers of the arrays ends in an error."""
        if self.pending is not None:
            announce_write(self.optimizer, *self.stages)
            make, self.pending = self.pending, None
            make()
            self.made += 1

    def scalars(self) -> Scalars:
        """Return what belongs to the number of steps that were made."""
        return self._before if self.made == self.step_begun else self._now()

    def scaling(self) -> dict[str, Any]:
        """Return what a record says of the loss scale, where that is dynamic."""
        scaler = self.scaler
        return {"loss_scale": scaler.scale, "skipped": scaler.skipped} if scaler.dynamic else {}

    def _now(self) -> Scalars:
        scaler = self.scaler
        return scaler.scale, scaler.good, scaler.skipped, self.pipeline.steps_taken
