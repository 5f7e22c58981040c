"""Sums of gradients over the replicas, and what a training step does with gradients besides.

    compute    last backward of stage 1   last backward of stage 0
    sums                                | gradients of stage 1   | gradients of stage 0 |

The sums of a stage start when its last backward, or weight gradient, has ended, and go on while
other stages compute. In a pipeline of several ranks sums by NCCL start when the last message of the
rank has ended: a message that the host moves on piece by piece might come after a sum otherwise,
which waits for another rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from mpipipe import arrays
from mpipipe.arrays import Array
from mpipipe.comm import AllReduce, NcclSums
from mpipipe.job import RankGroup, ReplicaSum
from mpipipe.nn import kernels
from mpipipe.pipeline.attached import AttachedStage
from mpipipe.pipeline.check import Checks
from mpipipe.pipeline.ties import Ties


class GradientSums:
    """The sums of one rank's gradients over the replicas; `close` is collective over them.

    `messages` is True if the pipeline has other ranks, which send this one messages.
    """

    def __init__(
        self,
        replicas: RankGroup,
        nccl: NcclSums | None,
        messages: bool,
        stages: Sequence[AttachedStage],
    ):
        self.replicas = replicas
        self.nccl = nccl
        self.stages = stages
        # Sums that this call has started.
        self.underway: list[ReplicaSum] = []
        self._postpones = nccl is not None and messages
        # Chunks whose sums start when the last message has ended.
        self._postponed: list[int] = []

    def begin(self) -> None:
        """Begin a call."""
        self.underway = []
        self._postponed = []

    def complete(self, chunk: int) -> None:
        """Start the sums of a stage, whose gradients are complete on this rank."""
        if self._postpones:
            self._postponed.append(chunk)
        else:
            self._start(chunk)

    def _start(self, chunk: int) -> None:
        for array in self.stages[chunk].gradient_arrays:
            if self.nccl is not None and self.nccl.takes(array):
                self.underway.append(self.nccl.start(array))
            else:
                self.underway.append(AllReduce(self.replicas.comm, array))

    def wait(self) -> None:
        """Start the sums that were postponed, and wait for all; messages have ended."""
        for chunk in self._postponed:
            self._start(chunk)
        for pending in self.underway:
            self.replicas.wait(pending, "the sum of gradients over the replicas")

    def progress(self) -> None:
        if self.underway:
            self.underway[0].progress()

    def cancel(self) -> None:
        for pending in self.underway:
            pending.Cancel()
        if self.nccl is not None:
            self.nccl.abort()

    def close(self) -> None:
        if self.nccl is not None:
            self.nccl.close()


# -- All gradients of a training step: zeroed, summed over ties and replicas, added to earlier ones

# Gradients, and copies of what was in them.
Earlier: TypeAlias = "tuple[list[Array], list[Array]]"


class StepGradients:
    """The gradients of the stages of one rank."""

    def __init__(
        self,
        stages: Sequence[AttachedStage],
        ties: Ties,
        sums: GradientSums | None,
        checks: Checks | None,
    ):
        self.stages = stages
        self.ties = ties
        self.sums = sums
        self.checks = checks

    @contextmanager
    def making(self, accumulate: bool) -> Iterator[Earlier]:
        """Let stages add to gradients that begin with zeros; sum them over ties at the end.

        To `accumulate`, a copy of the earlier gradients is given. They are sums already.
        """
        earlier: Earlier = [], []
        if accumulate:
            shown, copies = earlier
            for stage in self.stages:
                for gradients in stage.stage.shown_gradients:
                    if not arrays.shares_any(gradients, shown):
                        shown.append(gradients)
                        copies.append(arrays.copy(gradients))
        try:
            for stage in self.stages:
                stage.begin_gradients()
            yield earlier
            self.ties.sum_gradients()
            if self.checks is not None:
                self.checks.look_at_sums()
        finally:
            for stage in self.stages:
                stage.leave_step()

    def wait(self) -> None:
        """Wait for the sums over replicas."""
        if self.sums is not None:
            self.sums.wait()

    def add(self, earlier: Earlier) -> None:
        """Add earlier gradients to those of the step."""
        for gradients, copy in zip(*earlier):
            kernels.of_array(gradients).accumulate(gradients, copy)

    def close(self) -> None:
        """Free what sums over replicas by NCCL need."""
        if self.sums is not None:
            self.sums.close()
