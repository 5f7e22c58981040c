"""A training step whose loss may still be on its way; the state of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from mpipipe.errors import ArgumentError, MpipipeError
from mpipipe.job import RankGroup, is_rank, whoami
from mpipipe.pipeline.loss import SharedLoss
from mpipipe.text import name_slice


@dataclass(frozen=True)
class StepResult:
    """What a training step gives.

    Attributes
    ----------
    loss : float
        Mean loss over the batch of all replicas, on every rank; each micro-batch counts by its weight, or its rows.
    losses : list of float
        Loss of each micro-batch of this pipeline, in order, the mean of its slices where it has some; on every rank.
        NaN where the weight is 0.
    found : list or None, or False
        What `input_grads` is; False where that was not computed.
    """

    loss: float
    losses: list[float]
    found: list | Literal[False] | None = field(repr=False)

    @property
    def input_grads(self) -> list | None:
        """On the rank of stage 0, the gradients of `loss` with respect to the inputs, by micro-batch.

        None on the other ranks, and for integers. An ArgumentError where the pipeline has input_grads=False.
        """
        if self.found is False:
            raise ArgumentError(
                "the gradients of the inputs were not computed",
                found="a pipeline with input_grads=False, as in a training",
                remedy="Pipeline(..., input_grads=True)",
            )
        return self.found


class PendingStep:
    """What `Pipeline.launch` returns: the step, whose loss may still be on its way to this rank.

    Parameters
    ----------
    shared : SharedLoss
        The losses on their way.
    state : PipelineState
        Of the pipeline.
    input_grads : list or None, or False
        As in StepResult; False where they were not computed.

    Examples
    --------
    A loop that asks for the loss of a step while the next one is under way:

    >>> import numpy as np
    >>> from mpipipe import Pipeline, nn, optim, schedules
    >>> from mpipipe.job import inprocess
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
    ...                 losses.append(before.wait().loss)
    ...             before = pending
    ...         losses.append(before.wait().loss)
    ...     return losses[0] > losses[1] > losses[2]
    >>> inprocess.run(2, on_each_rank)
    [True, True]
    """

    def __init__(self, shared: SharedLoss, state: PipelineState, input_grads: list | Literal[False] | None) -> None:
        self._shared, self._state, self._input_grads = shared, state, input_grads
        self._result: StepResult | None = None

    def wait(self) -> StepResult:
        """Wait for the loss of this step, and return what `Pipeline.step` returns.

        No collective call: each rank asks when it likes, in any order of steps, as often as it likes, or never. What
        has arrived can be had after the end of the pipeline, too. Raises PeerError or ArgumentError where another rank,
        or the pipeline, has failed before the loss was here.
        """
        if self._result is None:
            if not self._shared.is_here():
                self._state.check("wait")
                with self._state:
                    self._shared.wait()
            self._result = StepResult(self._shared.mean, self._shared.losses, self._input_grads)
        return self._result


# -- The state of a pipeline: open, then closed, or failed for good ---------------------------------------------------


class PipelineState:
    """Whether a pipeline is "open", "closed" or "failed". Any error inside `with state:` ends it on all ranks.

    `groups` are the ranks that must learn of a failure; `where` says where this rank is; `abandon` gives up a call that
    has failed. While a call is under way, `running` is true.
    """

    def __init__(
        self, name: str, rank: int, groups: Sequence[RankGroup], where: Callable[[], str], abandon: Callable[[], object]
    ) -> None:
        self.name, self.rank, self.groups, self.state, self.running = name, rank, groups, "open", False
        self._where, self._abandon = where, abandon

    @property
    def is_open(self) -> bool:
        return self.state == "open"

    def check(self, call: str) -> None:
        """Raise ArgumentError if a call cannot begin."""
        if not self.is_open:
            raise ArgumentError(
                f"the pipeline is {self.state}",
                rank=self.rank,
                remedy="start the job anew" if self.state == "failed" else "call step before close",
            )
        if self.running:
            raise ArgumentError(
                f"{call} was called within another call of {self.name}",
                rank=self.rank,
                remedy="a stage, or a loss, must not call the pipeline that runs it",
            )

    def __enter__(self) -> None:
        self.running = True

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.running = False
        if error is not None:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """End the pipeline, and let the other ranks know. Messages and kernels of the broken call may be under way."""
        self.state = "failed"
        if isinstance(error, MpipipeError):
            name_slice(error)
        if not is_rank():  # a process that a stage has forked must not call MPI
            return
        text = f"{self._where()} ({whoami()}) failed: {type(error).__name__}: {error}"
        for group in self.groups:
            group.fail(error, text)
        self._abandon()

    def leave(self, error: BaseException | None, close: Callable[[], object]) -> None:
        """End a with-block: close the pipeline, or let it fail for an error that not all ranks raise."""
        if error is None:
            close()
        elif self.is_open and all(group.agreed_on(error) for group in self.groups):
            try:  # all ranks raise this error, so they may all come here
                close()
            except MpipipeError:
                self.fail(error)
        elif self.is_open:
            self.fail(error)
