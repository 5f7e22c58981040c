"""Recording the steps of a pipeline on all its ranks, and bringing the records together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from mpipipe.comm import Envelope
from mpipipe.errors import ArgumentError
from mpipipe.job import Communicator, RankGroup, group_of, own
from mpipipe.pipeline import Pipeline, PlannedAction
from mpipipe.schedules import Action
from mpipipe.trace import Recorder, Wait
from mpipipe.tracing.records import RankRecord, StepRecord, Waited, action_of
from mpipipe.tracing.trace import Trace, check_places


class Recording:
    """A recording under way on this rank: begin it, make steps, and end it; both are collective.

    Parameters
    ----------
    pipeline, comm, now : Pipeline, communicator, callable
        As for `recording`.

    Attributes
    ----------
    spans : list of Span
        What this rank has done so far, as (name, start, end) in seconds of its clock: actions such
        as "2F0", starts of sums over replicas, and the optimizer, in the order in which they ended.
    trace : Trace or None
        On rank 0 the result, once the recording has ended.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        comm: Communicator | None = None,
        now: Callable[[], float] = perf_counter,
    ) -> None:
        self.pipeline = pipeline
        self.trace: Trace | None = None
        self._recorder = Recorder(now)
        self.spans = self._recorder.spans
        if comm is None:
            self._group = pipeline.ranks.pipe
        else:
            self._group = group_of(comm)
        with self._group.raise_together("the begin of a recording"):
            if pipeline.recorder is not None:
                raise ArgumentError(
                    "the pipeline is being recorded already",
                    found="a recording that has not ended",
                    expected="one at a time",
                    remedy="end that recording first",
                )
        place = pipeline.ranks.replica, pipeline.rank
        places = self._group.gather("the begin of a recording", place)
        with self._group.raise_together("the begin of a recording"):
            check_places(places, pipeline.schedule.ranks)
        self._schedule = pipeline.plans.training.schedule
        self._comm = self._group.split(0, self._group.rank, "trace")
        self._before = clock_offset(self._group, self._comm, now)
        pipeline.record(self._recorder)

    def optimizer(self) -> AbstractContextManager[None]:
        """Mark the optimizer: the block belongs to the last step, as part "optimizer"."""
        return self._recorder.optimizer()

    def reading(self) -> AbstractContextManager[None]:
        """Mark the wait for a batch: the block belongs to the next step, as part "reading"."""
        return self._recorder.reading()

    @property
    def steps(self) -> int:
        """Number of steps that this rank has recorded so far."""
        return len(self._recorder.steps)

    def end(self) -> None:
        """Stop recording, and bring the records of all ranks together on rank 0."""
        pipeline = self.pipeline
        before = self._before
        pipeline.record(None)
        after = clock_offset(self._group, self._comm, self._recorder.now)
        replicas = pipeline.ranks.replicas
        planned = None
        if pipeline.executor.clock.unread:
            planned = pipeline.plans.training.steps
        key = None
        if replicas is not None:
            key = replicas.key
        steps = steps_of(self._recorder, key, planned, self._schedule.slices)
        clock = before[:2], after[:2]
        skips = []
        for edge, ends in enumerate(pipeline.schedule.skip_ends, pipeline.schedule.stages):
            skips.append((edge, *ends))
        record = RankRecord(
            self._group.rank, pipeline.rank, pipeline.ranks.replica, clock, steps, skips
        )
        found = collect(self._group, record)
        self._group.agree("the end of a recording")
        self._comm.Free()
        with self._group.raise_together("the analysis of a recording"):
            if found is not None:
                self.trace = Trace(self._schedule, found)


def collect(group: RankGroup, value: object) -> list[Any] | None:
    """Return the values of all ranks in rank order on rank 0, and None on the others; collective.

    Unlike those of `RankGroup.gather`, they may be too large to be on all ranks at once.
    """
    values = []
    for root in range(group.size):
        part = group.broadcast("collecting what all ranks have", value, root)
        if group.rank == 0:
            values.append(part)
    return values or None


@contextmanager
def recording(
    pipeline: Pipeline, comm: Communicator | None = None, now: Callable[[], float] = perf_counter
) -> Iterator[Recording]:
    """Record the training steps that are made in the block; collective at both ends.

    What it needs grows with the number of steps: record some, not thousands. After an error in the
    block nothing collective is done, and there is no trace.

    Parameters
    ----------
    pipeline : Pipeline
        Whose training steps are recorded.
    comm : communicator, optional
        All ranks that are recorded; by default those of the pipeline. With replicas: those of all
        replicas.
    now : callable, optional
        The clock of this rank, in seconds.

    Yields
    ------
    Recording
        Its `spans` are what this rank has done. After the block its `trace` is a Trace on rank 0,
        None elsewhere.

    Raises
    ------
    ArgumentError
        On every rank: the pipeline is being recorded already, or no training step was made in the
        block.

    Examples
    --------
    >>> import numpy as np
    >>> from mpipipe import Pipeline, nn, optim, schedules, tracing
    >>> from mpipipe.job import inprocess
    >>> def on_one_rank(comm):
    ...     stage = nn.Stage([nn.Linear(3, 3)])
    ...     optimizer = optim.SGD([stage], lr=0.1)
    ...     x, target = np.ones((2, 4, 3), np.float32)
    ...     with Pipeline([stage], schedules.gpipe(1, 2), comm, loss=nn.mean_squared_error) as pipe:
    ...         with tracing.recording(pipe) as record:
    ...             for step in range(3):
    ...                 pipe.step(x, target)
    ...                 with record.optimizer():
    ...                     optimizer.step()
    ...     return record.trace
    >>> (trace,) = inprocess.run(1, on_one_rank)
    >>> trace.summary()["steps"], list(trace.parts()[0])[:3]
    (3, ['compute', 'bubble', 'imbalance'])
    """
    found = Recording(pipeline, comm, now)
    try:
        yield found
    except BaseException:
        pipeline.record(None)
        raise
    found.end()


def steps_of(
    recorder: Recorder,
    sums: tuple[int, ...] | None,
    planned: Sequence[PlannedAction] | None = None,
    slices: int = 1,
) -> list[StepRecord]:
    """Put the notes of a recorder in order, step by step.

    `sums` is the key of the replicas, whose waits are sums.

    `planned` are the actions of a step where they run on a device. There the host runs ahead, and
    its waits say nothing of messages: a gap on the device before an action that takes a message is
    a wait for it, and a message is sent at the end of the action that makes it.
    """
    found = []
    for step in recorder.steps:
        actions = []
        spans = []
        for span in recorder.spans:
            if step.start <= span.start <= step.end:
                action = action_of(span.name, slices)
                if action is None:
                    spans.append(span)
                else:
                    actions.append((action, span.start, span.end))
        waits = []
        for wait in recorder.waits:
            if step.start <= wait.start <= step.end:
                waits.append(_waited(wait, sums))
        sent = []
        for message in recorder.sent:
            if step.start <= message.time <= step.end:
                sent.append(message)
        if planned is not None:
            waits = [wait for wait in waits if wait.message is None] + _gaps(actions, planned)
            ends = {}
            for plan, (_, _, end) in zip(planned, actions):
                for envelope in plan.sends:
                    ends[envelope.name] = end
            for number, message in enumerate(sent):
                sent[number] = message._replace(time=ends.get(message.message, message.time))
        found.append(StepRecord(step.start, step.end, actions, waits, sent, spans))
    return found


def _waited(wait: Wait, sums: tuple[int, ...] | None) -> Waited:
    message = None
    text = str(wait.what)
    if isinstance(wait.what, Envelope):
        message = wait.what.name
        text = wait.what.subject
    is_sum = wait.group is not None and wait.group == sums
    return Waited(text, wait.start, wait.end, message, wait.group, is_sum)


def _gaps(
    actions: Sequence[tuple[Action, float, float]], planned: Sequence[PlannedAction]
) -> list[Waited]:
    found = []
    end = None
    for each, (_, start, stop) in zip(planned, actions):
        if each.receives and end is not None and end < start:
            message = each.receives[0]  # the one of the chain is made last
            found.append(Waited(message.subject, end, start, message.name))
        end = stop
    return found


# -- How far the clock of rank 0 is ahead, by messages to and fro ----------------------------------
#
#     rank 0    ------- t0 -------
#                      /  \
#     rank r    ----- a    b -----      rank 0 has t0 between a and b of this rank
#
# So t0 - (a + b) / 2 is off by at most (b - a) / 2, however unlike the two ways are. The smallest b
# - a of many is taken (Cristian, Probabilistic clock synchronization, Distributed Computing 3,
# 1989).


ROUNDS = 50
WHAT = "the clock of rank 0"


class Offset(NamedTuple):
    """A comparison with the clock of rank 0, in seconds."""

    at: float  # when it was, by this rank's clock
    ahead: float  # the clock of rank 0 less this rank's
    error: float  # how far `ahead` may be off


def clock_offset(group: RankGroup, comm: Communicator, now: Callable[[], float]) -> Offset:
    """Compare this rank's clock with that of rank 0; collective.

    No other messages are under way on `comm`.
    """
    group.agree("comparing clocks")
    with group.failing("comparing clocks"):
        if comm.rank > 0:
            offsets = [_ask(group, comm, now) for _ in range(ROUNDS)]
            return min(offsets, key=lambda offset: offset.error)
        for peer in range(1, comm.size):
            what = f"rank {peer}, to compare clocks"
            for _ in range(ROUNDS):
                group.wait(own(comm.Irecv(np.empty(1), peer, 0)), what, peer=peer)
                group.wait(own(comm.Isend(np.array([now()]), peer, 0)), what, peer=peer)
    return Offset(now(), 0.0, 0.0)


def _ask(group: RankGroup, comm: Communicator, now: Callable[[], float]) -> Offset:
    answer = np.empty(1)
    receive = own(comm.Irecv(answer, 0, 0))
    before = now()
    send = own(comm.Isend(np.zeros(1), 0, 0))
    group.wait(receive, WHAT, peer=0)
    after = now()
    group.wait(send, WHAT, peer=0)
    middle = (before + after) / 2
    return Offset(middle, float(answer[0]) - middle, (after - before) / 2)
