"""What a training step gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from mpipipe.errors import ArgumentError
from mpipipe.pipeline.loss import SharedLoss


class StepResult:
    """What a training step gives.

    Where one GPU holds the whole model, losses stay there until somebody reads them: `step` has not
    waited for them. Reading then waits for the step, and raises NonFiniteError for a loss that is
    not finite.

    Parameters
    ----------
    shared : SharedLoss
        The losses of the step.
    read : callable
        Reads losses that are still on the GPU, after those of earlier steps.
    input_grads : list or None, or False
        False where they were not computed.
    """

    def __init__(
        self,
        shared: SharedLoss,
        read: Callable[[SharedLoss], None],
        input_grads: list | Literal[False] | None,
    ) -> None:
        self._shared = shared
        self._read_loss = read
        self._input_grads = input_grads

    @property
    def loss(self) -> float:
        """Mean loss over the batch of all replicas, on every rank.

        Each micro-batch counts by its weight, or rows.
        """
        return self._read().mean

    @property
    def losses(self) -> list[float]:
        """Loss of each micro-batch of this pipeline, in order; the mean of its slices.

        The same on every rank; NaN where the weight is 0.
        """
        return self._read().losses

    @property
    def input_grads(self) -> list | None:
        """Gradients of `loss` with respect to the inputs, by micro-batch, on the rank of stage 0.

        None on the other ranks, and for integers. An ArgumentError where the pipeline has
        input_grads=False.
        """
        if self._input_grads is False:
            raise ArgumentError(
                "the gradients of the inputs were not computed",
                found="a pipeline with input_grads=False, as in a training",
                remedy="Pipeline(..., input_grads=True)",
            )
        return self._input_grads

    def _read(self) -> SharedLoss:
        if not self._shared.was_read:
            self._read_loss(self._shared)
        return self._shared

    def __repr__(self) -> str:
        return f"StepResult(loss={self.loss}, losses={self.losses})"
