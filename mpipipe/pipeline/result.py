"""What a training step gives; the state of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from mpipipe.errors import ArgumentError, MpipipeError, NonFiniteError
from mpipipe.job import RankGroup, is_rank, whoami
from mpipipe.pipeline.loss import SharedLoss
from mpipipe.text import name_slice


class StepResult:
    """What a training step gives.

    Where one GPU holds the whole model, losses stay there until somebody reads them: `step` has not
    waited for them. Reading then waits for the step, and raises NonFiniteError for a loss that is
    not finite.

    Parameters
    ----------
    shared : SharedLoss
        The losses of the step.
    state : PipelineState
        Of the pipeline, which ends where a loss is not finite.
    read : callable
        Reads the losses that steps have left on the GPU, in their order.
    input_grads : list or None, or False
        False where they were not computed.
    """

    def __init__(
        self,
        shared: SharedLoss,
        state: PipelineState,
        read: Callable[[], None],
        input_grads: list | Literal[False] | None,
    ) -> None:
        self._shared = shared
        self._state = state
        self._read_losses = read
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
            try:
                self._read_losses()
                self._shared.read()
            except NonFiniteError as error:
                if self._state.is_open:
                    self._state.fail(error)
                raise
        return self._shared

    def __repr__(self) -> str:
        return f"StepResult(loss={self.loss}, losses={self.losses})"


# -- The state of a pipeline: open, then closed, or failed for good --------------------------------


class PipelineState:
    """Whether a pipeline is "open", "closed" or "failed".

    Any error inside `with state:` ends it on all ranks.

    `groups` are the ranks that must learn of a failure; `where` says where this rank is; `abandon`
    gives up a call that has failed. While a call is under way, `running` is true.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        groups: Sequence[RankGroup],
        where: Callable[[], str],
        abandon: Callable[[], object],
    ) -> None:
        self.name = name
        self.rank = rank
        self.groups = groups
        self.state = "open"
        self.running = False
        self._where = where
        self._abandon = abandon

    @property
    def is_open(self) -> bool:
        return self.state == "open"

    def check(self, call: str) -> None:
        """Raise ArgumentError if a call cannot begin."""
        if not self.is_open:
            remedy = "call step before close"
            if self.state == "failed":
                remedy = "start the job anew"
            raise ArgumentError(f"the pipeline is {self.state}", rank=self.rank, remedy=remedy)
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
        """End the pipeline, and let the other ranks know.

        Messages and kernels of the broken call may be under way.
        """
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
        """End a with-block: close the pipeline, or fail it for an error of this rank alone."""
        if error is None:
            close()
        elif self.is_open and all(group.agreed_on(error) for group in self.groups):
            try:  # all ranks raise this error, so they may all come here
                close()
            except MpipipeError:
                self.fail(error)
        elif self.is_open:
            self.fail(error)
