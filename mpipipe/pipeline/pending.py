"""A training step whose gradients are there, and whose loss may still be on its way."""

from __future__ import annotations

from dataclasses import dataclass

from mpipipe.pipeline.life import Life
from mpipipe.pipeline.shared_loss import SharedLoss


@dataclass(frozen=True)
class StepResult:
    """What a training step gives.

    Attributes
    ----------
    loss : float
        Mean loss over the batch of all replicas, each micro-batch weighted by what the loss says, or its rows; on every
        rank.
    losses : list of float
        Loss of each micro-batch of this pipeline, in order; on every rank. NaN where the weight is 0.
    input_grads : list or None
        On the rank of stage 0, the gradient of `loss` with respect to the inputs of each micro-batch, in order (None
        for integer inputs); elsewhere None.
    """

    loss: float
    losses: list[float]
    input_grads: list | None


class PendingStep:
    """What `Pipeline.launch` returns: the step, whose loss may still be on its way to this rank.

    Parameters
    ----------
    shared : SharedLoss
        The losses on their way.
    life : Life
        Of the pipeline.
    input_grads : list or None
        As in StepResult.

    Examples
    --------
    A loop that asks for the loss of a step while the next one is under way:

    >>> import numpy as np
    >>> from mpipipe import Pipeline, nn, optim, schedules
    >>> from mpipipe.comm import inprocess
    >>> def on_each_rank(comm):
    ...     stage = nn.Stage([nn.Linear(3, 3)], first=comm.rank)
    ...     x = np.ones((8, 3), np.float32) if comm.rank == 0 else None
    ...     target = np.zeros((8, 3), np.float32) if comm.rank == 1 else None
    ...     optimizer, losses, before = optim.SGD([stage], lr=0.1), [], None
    ...     with Pipeline([stage], schedules.one_f_one_b(2, 4), comm, loss=nn.mean_squared_error) as pipe:
    ...         for step in range(3):
    ...             pending = pipe.launch(x, target)
    ...             optimizer.step()
    ...             if before is not None:
    ...                 losses.append(before.result().loss)
    ...             before = pending
    ...         losses.append(before.result().loss)
    ...     return losses[0] > losses[1] > losses[2]
    >>> inprocess.run(2, on_each_rank)
    [True, True]
    """

    def __init__(self, shared: SharedLoss, life: Life, input_grads: list | None) -> None:
        self._shared, self._life, self._input_grads = shared, life, input_grads
        self._result: StepResult | None = None

    def result(self) -> StepResult:
        """Wait for the loss of this step, and return what `Pipeline.step` returns.

        No collective call: each rank asks when it likes, in any order of steps, as often as it likes, or never. What
        has arrived can be had after the end of the pipeline, too.

        Returns
        -------
        StepResult
            Losses on every rank, and gradients of the inputs on the rank of stage 0.

        Raises
        ------
        PeerError
            Another rank has failed before the loss was here; that ends the life of the pipeline.
        ArgumentError
            The pipeline has failed before the loss was here.
        """
        if self._result is None:
            if not self._shared.is_here():
                self._life.check("result")
                with self._life:
                    self._shared.wait()
            self._result = StepResult(self._shared.mean, self._shared.losses, self._input_grads)
        return self._result
