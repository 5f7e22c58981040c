"""The life of a pipeline: open, then closed, or failed for good."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType

from mpipipe.comm import runtime
from mpipipe.comm.group import Group
from mpipipe.comm.process import is_rank
from mpipipe.errors import ArgumentError, MpipipeError
from mpipipe.pipeline.executor import Executor


class Life:
    """The state of a pipeline. Any error inside `with life:` ends the pipeline, and the other ranks are told.

    Parameters
    ----------
    name : of the pipeline, for errors
    rank : of this process
    groups : ranks that must hear of a failure
    executor : its messages and sums are given up after a failure

    Attributes
    ----------
    state : "open", "closed" or "failed"
    """

    def __init__(self, name: str, rank: int, groups: Sequence[Group], executor: Executor):
        self.name, self.rank, self.groups, self.executor = name, rank, groups, executor
        self.state = "open"
        self.running = False

    @property
    def is_open(self) -> bool:
        """Whether calls can be made."""
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.running = False
        if error is not None:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """End the pipeline, and tell the other ranks.

        What the executor holds is kept: messages and kernels of the broken call may still touch it.
        """
        self.state = "failed"
        if not is_rank():  # a process that a stage has forked must not call MPI
            return
        text = f"{self.executor.place} ({runtime.whoami()}) failed: {type(error).__name__}: {error}"
        for group in self.groups:
            group.fail(error, text)
        if self.executor.clock.recorder is not None:  # the step never ends, so later waits do not belong to it
            self.groups[0].process.recorders.discard(self.executor.clock.recorder)
        self.executor.messages.mailbox.cancel()
        if self.executor.sums is not None:
            for pending in self.executor.sums.underway:
                pending.Cancel()

    def leave(self, error: BaseException | None, close: Callable[[], object]) -> None:
        """End a with-block: close the pipeline, or let it fail for an error that not all ranks raise."""
        if error is None:
            close()
        elif self.is_open and self.agreed_on(error):
            try:  # all ranks raise this error, so they may all come here
                close()
            except MpipipeError:
                self.fail(error)
        elif self.is_open:
            self.fail(error)

    def agreed_on(self, error: BaseException | None) -> bool:
        """Whether all ranks of all groups raise this same error."""
        return error is not None and all(group.agreed_on(error) for group in self.groups)
