"""What a pipeline says when something goes wrong: how far it is, in a report of a hang; what fills the memory of a GPU.

Nothing extra is noted for an action. The clock makes two marks for each action of the plan anyway:

    marks  0 . . 1 . . 2 . . 3        an even number: the next action waits for its message
           |0F0 |     |0F1 |          an odd number: an action computes

The mailbox keeps which messages it has sent. A message that must have left by now, according to the plan, and has not,
was skipped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from threading import get_ident
from time import perf_counter
from typing import Any, NamedTuple

from mpipipe import arrays
from mpipipe.arrays import Shortage
from mpipipe.comm import Envelope
from mpipipe.errors import StageError
from mpipipe.job import Message, RankGroup, Snapshot
from mpipipe.pipeline.batch import CallState
from mpipipe.pipeline.graphs import StageGraphs
from mpipipe.pipeline.messages import StageMessages
from mpipipe.pipeline.pending import PipelineState
from mpipipe.pipeline.plan import ActionPlan, PlannedAction
from mpipipe.stages import StageAdapter

NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient", "R": "recomputation"}
KEPT_CALLS = 3
LISTED = 16  # actions of a call that a dump lists
SENT = 64  # messages of a call that a dump names


class KeptCall(NamedTuple):
    """One call of a pipeline."""

    name: str
    number: int
    plan: ActionPlan
    marks: list
    sent: list[Envelope]
    thread: int


class PipelineFlight:
    """The last calls of a pipeline on one rank. `timed` is whether marks are times of the host's clock."""

    def __init__(self, group: RankGroup, messages: StageMessages, state: PipelineState, timed: bool) -> None:
        self.group, self.messages, self.state, self.timed = group, messages, state, timed
        self.calls: deque[KeptCall] = deque(maxlen=KEPT_CALLS)
        self.begun = 0
        self.running = False
        group.context.add_inspectable(self)

    def begin(self, call: str, number: int, plan: ActionPlan, marks: list) -> None:
        """Note that a call begins: its messages are known, and its actions are about to run."""
        self.begun += 1
        name = f"{call} (call {number}) of {self.state.name}"
        self.calls.append(KeptCall(name, number, plan, marks, self.messages.mailbox.sent, get_ident()))
        self.running = True

    def end(self) -> None:
        """Note that the call has ended."""
        self.running = False

    def progress_token(self) -> object:
        """Return a value that changes with every progress."""
        mailbox = self.messages.mailbox
        marks = self.calls[-1].marks if self.calls else ()
        return self.begun, self.running, len(marks), len(mailbox.sent), mailbox.polls

    def snapshot(self) -> Snapshot:
        """Return how far this rank has come in the running call."""
        call = self.calls[-1] if self.running and self.state.running else None
        operations = [text for kept in tuple(self.calls) for text in self._operations(kept)]
        idle = Snapshot(self.group.key, operations=tuple(operations))
        if call is None:
            return idle
        done, computes = divmod(len(call.marks), 2)
        action = call.plan.steps[done] if done < len(call.plan.steps) else None
        awaited = None if action is None or computes else self._awaited(call, action)
        doing = f"the end of {call.name}"
        if action is not None:
            doing = f"{NAMES[action.op]} of stage {action.stage}, micro-batch {action.microbatch}, in {call.name}"
        return idle._replace(
            call=call.number,
            doing=doing,
            computes=bool(computes),
            stage=None if action is None else action.stage,
            microbatch=None if action is None else action.microbatch,
            thread=call.thread,
            expects=None if awaited is None else self._message(awaited),
            sent=tuple(self._message(envelope) for envelope in call.sent[-SENT:]),
            skipped=tuple(self._message(envelope) for envelope in self._skipped(call, done, bool(computes))),
        )

    def _awaited(self, call: KeptCall, action: PlannedAction) -> Envelope | None:
        """Return the message that an action waits for: the first of its messages that was not taken."""
        taken = self.messages.mailbox.taken
        next_one = call.plan.receives[taken] if taken < len(call.plan.receives) else None
        return next_one if next_one in action.receives else None

    def _skipped(self, call: KeptCall, done: int, computes: bool) -> Iterator[Envelope]:
        """Yield messages of ended actions that were not sent. The last action may not have sent all of its own yet."""
        ended = done if computes or self.group.context.long_waits else done - 1
        sent = set(call.sent)
        for action in call.plan.steps[: max(0, ended)]:
            yield from (message for message in action.sends if message not in sent)

    def _message(self, envelope: Envelope) -> Message:
        peer = self.group.members[envelope.peer]
        return Message(envelope.name, envelope.subject, peer, envelope.data, self.messages.bytes_of(envelope))

    def _operations(self, call: KeptCall) -> Iterator[str]:
        """Yield the last actions of a call as text, with the time since their end if the host's clock knows it."""
        yield call.name
        done, now, sent = len(call.marks) // 2, perf_counter(), set(call.sent)
        for index in range(max(0, done - LISTED), done):
            action = call.plan.steps[index]
            ended = f" {now - call.marks[2 * index + 1]:.3f} s ago" if self.timed else ""
            messages = [f"received {self._transfer(envelope, 'from')}" for envelope in action.receives]
            for envelope in action.sends:
                messages.append(f"{'sent' if envelope in sent else 'has not sent'} {self._transfer(envelope, 'to')}")
            yield "; ".join([f"  {action}: done{ended}", *messages])

    def _transfer(self, envelope: Envelope, preposition: str) -> str:
        message = self._message(envelope)
        size = "" if message.nbytes is None else f", {message.nbytes} bytes"
        return f"{preposition} rank {message.peer} (channel {message.tag[0]}, tag {message.tag[1]}{size})"


# -- A GPU that runs out of memory within a step: what it holds, and what would make it hold less ---------------------
#
# Everything is read on the host from arrays that are there. Where no more than one activation is alive, recomputation
# saves nothing: the backward needs all of that one.


class HeldBytes(NamedTuple):
    """What the stages of a rank hold on its GPU."""

    parameters: int  # bytes of parameters, of their copies to compute with, and of gradients
    idle: int  # bytes of these that places of a tied parameter have given up, and nobody uses (pipeline.ties)
    activations: int  # how many (stage, micro-batch) are alive
    saved: int  # bytes that these hold for their backwards
    inputs: int  # bytes of these that are inputs of stages, which recomputation keeps

    @property
    def freed_by_recomputation(self) -> int:
        """Bytes that recomputation would free now, with one activation computed anew at a time."""
        return max(0, self.saved - self.inputs - self.saved // max(1, self.activations))


def memory_error(
    what: str, error: Exception, stages: Sequence[StageAdapter], state: CallState | None, recompute: bool
) -> StageError | None:
    """Return the error that explains a lack of device memory in the action `what`; None if `error` is another kind."""
    shortage = arrays.memory_shortage(error)
    if shortage is None:
        return None
    held = held_by(stages, state)
    graphs = any(isinstance(stage.computes, StageGraphs) for stage in stages)
    idle = f" ({held.idle:,} of them unused: places of a tied parameter share one array)" if held.idle else ""
    return StageError(
        f"{what} ran out of memory on the GPU",
        found=f"{_asked(shortage)}, {shortage.free:,} bytes free of {shortage.total:,}; {held.activations} activations "
        f"hold {held.saved:,} bytes, parameters and gradients {held.parameters:,}{idle}",
        remedy=("MPIPIPE_GRAPHS=0: without the temporary arrays that each CUDA graph keeps; " if graphs else "")
        + f"{_recomputation(held, recompute)}; twice as many stages: about "
        f"{held.parameters // 2:,} bytes of parameters and gradients less on each rank, and half of the optimizer's "
        "state; more micro-batches: smaller activations",
    )


def held_by(stages: Sequence[StageAdapter], state: CallState | None) -> HeldBytes:
    """Count what the stages of this rank hold on its GPU."""
    models = [model for stage in stages for model in stage.models]
    buffers = [buffer for model in models for buffer in (model.parameters, model.compute, model.gradients)]
    own = list(_spans([buffer.whole for buffer in buffers]))
    used = [buffer.flat for buffer in buffers] + [part for model in models for part in model.parts.values()]
    parameters = _covered(own)
    idle = parameters - _covered(_spans(used))
    if state is None:
        return HeldBytes(parameters, idle, 0, 0, 0)
    kept = [*state.saved.values(), *state.pending.values()]
    leases = [view for _, lease in kept for _, (_, view) in lease]
    first = [state.inputs.inputs[m] for stage, m in state.saved if stage == 0]
    saved = _covered([*own, *_spans([saved for saved, _ in kept]), *_spans(leases)]) - parameters
    inputs = _covered([*_spans(leases), *_spans(first)])
    return HeldBytes(parameters, idle, len(kept), saved, min(inputs, saved))


def _asked(shortage: Shortage) -> str:
    return "an unknown number of bytes asked for" if shortage.asked is None else f"{shortage.asked:,} bytes asked for"


def _recomputation(held: HeldBytes, recompute: bool) -> str:
    if recompute:
        return "recompute=True is on already"
    if held.activations < 2:
        return "recompute=True: saves nothing here, since no more than one activation is alive"
    return f"recompute=True: about {held.freed_by_recomputation:,} bytes of activations less"


def _spans(value: Any) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of the device memory of each array in tuples, lists, dicts and dataclasses."""
    if arrays.is_array(value):
        if arrays.is_device(value) and value.nbytes:
            start = arrays.address(value)
            yield start, start + value.nbytes
        return
    inner: Iterable[Any] = ()
    if isinstance(value, (tuple, list)):
        inner = value
    elif isinstance(value, dict):
        inner = value.values()
    elif is_dataclass(value) and not isinstance(value, type):
        inner = [getattr(value, field.name) for field in fields(value)]
    for part in inner:
        yield from _spans(part)


def _covered(spans: Iterable[tuple[int, int]]) -> int:
    """Count the bytes that any of the spans covers."""
    total, end = 0, 0
    for start, stop in sorted(spans):
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total
