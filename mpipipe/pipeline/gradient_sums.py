"""The gradients of a training step: zeroed, summed over ties and replicas, added to earlier ones.

    compute    last backward of stage 1   last backward of stage 0
    sums                                | gradients of stage 1   | gradients of stage 0 |

The sums of a stage over the replicas start when its last backward, or weight gradient, has ended,
and go on while other stages compute. In a pipeline of several ranks sums by NCCL start when the
last message of the rank has ended: a message that the host moves on piece by piece might come after
a sum otherwise, which waits for another rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from mpipipe import arrays
from mpipipe.arrays import Array
from mpipipe.comm import AllReduce, Mailbox, NcclSums
from mpipipe.job import ReplicaSum
from mpipipe.nn import kernels
from mpipipe.pipeline.attached import AttachedStage
from mpipipe.pipeline.check import Checks
from mpipipe.pipeline.construction import AgreedRanks
from mpipipe.pipeline.ties import TiedParameter


class StepGradients:
    """The gradients of the stages of one rank; `close` is collective over the replicas."""

    def __init__(
        self, ranks: AgreedRanks, ties: Sequence[TiedParameter], checks: Checks | None
    ) -> None:
        self.replicas = ranks.replicas
        self.ties = ties
        self.checks = checks
        self.nccl = None
        if self.replicas is not None and ranks.sums_by_nccl:
            self.nccl = NcclSums(self.replicas)
        # Sums that this call has started.
        self._underway: list[ReplicaSum] = []
        # Stages whose sums start when the last message has ended.
        self._postpones = self.nccl is not None and ranks.pipe.size > 1
        self._postponed: list[AttachedStage] = []
        # Gradients to which those of this step are added, with copies of what was in them.
        self._earlier: list[tuple[Array, Array]] = []

    @contextmanager
    def making(self, stages: Sequence[AttachedStage], accumulate: bool) -> Iterator[None]:
        """Let stages add to gradients that begin with zeros; sum them up at the end.

        To `accumulate`, copies of the earlier gradients are kept for `add_earlier`. They are sums
        already.
        """
        if accumulate:
            shown: list[Array] = []
            for stage in stages:
                for gradients in stage.stage.shown_gradients:
                    if not arrays.shares_any(gradients, shown):
                        shown.append(gradients)
                        self._earlier.append((gradients, arrays.copy(gradients)))
        try:
            for stage in stages:
                stage.begin_gradients()
            yield
            for stage in self._postponed:
                self._start(stage)
            for pending in self._underway:
                assert self.replicas is not None  # something is summed over them
                self.replicas.wait(pending, "the sum of gradients over the replicas")
            self._postponed = []
            self._underway = []
            for parameter in self.ties:
                parameter.sum_gradients()
            if self.checks is not None:
                self.checks.look_at_sums(stages)
        finally:
            for stage in stages:
                stage.leave_step()

    def complete(self, stage: AttachedStage) -> None:
        """Start the sums over replicas of a stage, whose gradients are complete on this rank."""
        if self._postpones:
            self._postponed.append(stage)
        else:
            self._start(stage)

    def _start(self, stage: AttachedStage) -> None:
        assert self.replicas is not None
        for array in stage.gradient_arrays:
            if self.nccl is not None and self.nccl.takes(array):
                self._underway.append(self.nccl.start(array))
            else:
                self._underway.append(AllReduce(self.replicas.comm, array))

    def poll(self, mailbox: Mailbox) -> None:
        """Let messages and sums advance."""
        mailbox.poll()
        if self._underway:
            self._underway[0].progress()

    def add_earlier(self) -> None:
        """Add earlier gradients to those of the step."""
        for gradients, copy in self._earlier:
            kernels.of_array(gradients).accumulate(gradients, copy)
        self._earlier = []

    def cancel(self) -> None:
        for pending in self._underway:
            pending.Cancel()
        if self.nccl is not None:
            self.nccl.abort()

    def close(self) -> None:
        """Free what sums over replicas by NCCL need."""
        if self.nccl is not None:
            self.nccl.close()
