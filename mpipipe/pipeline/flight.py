"""The part of the flight recorder that follows a pipeline: the plan of the running call, and how far this rank is.

Nothing extra is noted for an action. The clock makes two marks for each action of the plan anyway:

    marks  0 . . 1 . . 2 . . 3        an even number: the next action waits for its message
           |0F0 |     |0F1 |          an odd number: an action computes

The mailbox keeps which messages it has sent. A message that must have left by now, according to the plan, and has not,
was skipped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from math import prod
from threading import get_ident
from time import perf_counter
from typing import NamedTuple

from mpipipe.comm.mailbox import Envelope
from mpipipe.job.flight import Message, Snapshot
from mpipipe.job.group import Group
from mpipipe.pipeline.executor import NAMES, Executor
from mpipipe.pipeline.pending import Life
from mpipipe.pipeline.plan import Plan, PlannedAction

KEPT_CALLS = 3
LISTED = 16  # actions of a call that a dump lists
SENT = 64  # messages of a call that a dump names


class Call(NamedTuple):
    """One call of a pipeline."""

    name: str
    number: int
    plan: Plan
    marks: list
    sent: list[Envelope]
    thread: int


class PipelineFlight:
    """The last calls of a pipeline on one rank.

    Parameters
    ----------
    group : the ranks of the pipeline
    executor : runs its calls
    life : tells whether a call is running, and has not failed
    """

    def __init__(self, group: Group, executor: Executor, life: Life) -> None:
        self.group, self.executor, self.life = group, executor, life
        self.calls: deque[Call] = deque(maxlen=KEPT_CALLS)
        self.begun = 0
        self.running = False
        group.context.add_inspectable(self)

    def begin(self, call: str, number: int, plan: Plan) -> None:
        """Note that a call begins: its messages are known, and its actions are about to run."""
        self.begun += 1
        name = f"{call} (call {number}) of {self.life.name}"
        self.calls.append(
            Call(name, number, plan, self.executor.marks, self.executor.messages.mailbox.sent, get_ident())
        )
        self.running = True

    def end(self) -> None:
        """Note that the call has ended."""
        self.running = False

    def progress_token(self) -> object:
        """Return a value that changes with every progress."""
        mailbox = self.executor.messages.mailbox
        return self.begun, self.running, len(self.executor.marks), len(mailbox.sent), mailbox.polls

    def snapshot(self) -> Snapshot:
        """Return how far this rank has come in the running call."""
        call = self.calls[-1] if self.running and self.life.running else None
        operations = [text for each in tuple(self.calls) for text in self._operations(each)]
        idle = Snapshot(self.group.key, operations=tuple(operations))
        if call is None:
            return idle
        done, computes = divmod(len(call.marks), 2)
        step = call.plan.steps[done] if done < len(call.plan.steps) else None
        awaited = None if step is None or computes else self._awaited(call, step)
        return idle._replace(
            call=call.number,
            doing=f"{_described(step)}, in {call.name}" if step is not None else f"the end of {call.name}",
            computes=bool(computes),
            stage=None if step is None else step.stage,
            microbatch=None if step is None else step.microbatch,
            thread=call.thread,
            expects=None if awaited is None else self._message(awaited),
            sent=tuple(self._message(envelope) for envelope in call.sent[-SENT:]),
            skipped=tuple(self._message(envelope) for envelope in self._skipped(call, done, bool(computes))),
        )

    def _awaited(self, call: Call, step: PlannedAction) -> Envelope | None:
        """Return the message that an action waits for: the first of its messages that was not taken."""
        taken, own = self.executor.messages.mailbox.taken, step.receives
        found = call.plan.receives[taken] if taken < len(call.plan.receives) else None
        return found if found in own else None

    def _skipped(self, call: Call, done: int, computes: bool) -> Iterator[Envelope]:
        """Yield messages of ended actions that were not sent. The last action may not have sent all of its own yet."""
        behind = done if computes or self.group.context.long_waits else done - 1
        sent = set(call.sent)
        for step in call.plan.steps[: max(0, behind)]:
            yield from (message for message in step.sends if message not in sent)

    def _message(self, envelope: Envelope) -> Message:
        peer = self.group.peers.members[envelope.peer]
        return Message(envelope.name, envelope.subject, peer, envelope.data, self._bytes(envelope))

    def _bytes(self, envelope: Envelope) -> int | None:
        spec = self.executor.messages.specs.get((envelope.edge, envelope.microbatch))
        if spec is None:
            return None
        leaves = spec.gradients if envelope.direction else spec.leaves
        return sum(prod(shape) * kind.itemsize for shape, kind in leaves)

    def _operations(self, call: Call) -> Iterator[str]:
        """Yield the last actions of a call as text, with the time since their end if the host's clock knows it."""
        yield call.name
        done, now, sent = len(call.marks) // 2, perf_counter(), set(call.sent)
        for index in range(max(0, done - LISTED), done):
            step = call.plan.steps[index]
            ended = "" if self.executor.clock.waits else f" {now - call.marks[2 * index + 1]:.3f} s ago"
            messages = [f"received {self._transfer(each, 'from')}" for each in step.receives]
            for each in step.sends:
                messages.append(f"{'sent' if each in sent else 'has not sent'} {self._transfer(each, 'to')}")
            yield "; ".join([f"  {step}: done{ended}", *messages])

    def _transfer(self, envelope: Envelope, preposition: str) -> str:
        message = self._message(envelope)
        size = "" if message.nbytes is None else f", {message.nbytes} bytes"
        return f"{preposition} rank {message.peer} (channel {message.tag[0]}, tag {message.tag[1]}{size})"


def _described(step: PlannedAction) -> str:
    return f"{NAMES[step.op]} of stage {step.stage}, micro-batch {step.microbatch}"
