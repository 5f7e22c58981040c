"""What a pipeline says when something goes wrong: how far it is, and where an error came from.

Nothing extra is noted for an action. The clock makes two marks for each action of the plan anyway:

    marks  0 . . 1 . . 2 . . 3        an even number: the next action waits for its message
           |0F0 |     |0F1 |          an odd number: an action computes

The mailbox keeps which messages it has sent. A message that must have left by now, according to the
plan, and has not, was skipped.
"""

from __future__ import annotations

from threading import get_ident
from traceback import walk_tb
from typing import NamedTuple

from mpipipe import arrays, nn
from mpipipe.comm import Envelope
from mpipipe.errors import StageError
from mpipipe.job import Message, RankGroup, Snapshot
from mpipipe.pipeline.messages import StageMessages, remedy_of
from mpipipe.pipeline.plan import NAMES, ActionPlan
from mpipipe.pipeline.result import PipelineState

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
    """The last call of a pipeline on one rank."""

    def __init__(self, group: RankGroup, messages: StageMessages, state: PipelineState) -> None:
        self.group = group
        self.messages = messages
        self.state = state
        self.call: KeptCall | None = None
        self.begun = 0
        self.running = False
        group.context.add_inspectable(self)

    def begin(self, call: str, number: int, plan: ActionPlan, marks: list) -> None:
        """Note that a call begins: its messages are known, and its actions are about to run."""
        self.begun += 1
        name = f"{call} (call {number}) of {self.state.name}"
        self.call = KeptCall(name, number, plan, marks, self.messages.mailbox.sent, get_ident())
        self.running = True

    def progress_token(self) -> object:
        mailbox = self.messages.mailbox
        marks = 0
        if self.call is not None:
            marks = len(self.call.marks)
        return self.begun, self.running, marks, len(mailbox.sent), mailbox.polls

    def snapshot(self) -> Snapshot:
        call = self.call
        idle = Snapshot(self.group.key)
        if call is None or not self.running or not self.state.running:
            return idle
        done, computes = divmod(len(call.marks), 2)
        steps = call.plan.steps
        ended = done
        # The last action may not have sent all of its own messages yet.
        if done and not computes and not self.group.context.long_waits:
            ended -= 1
        sent = set(call.sent)
        skipped = []
        for step in steps[:ended]:
            for message in step.sends:
                if message not in sent:
                    skipped.append(message)
        account = idle._replace(
            call=call.number,
            doing=f"the end of {call.name}",
            computes=bool(computes),
            thread=call.thread,
            sent=tuple(map(self._message, call.sent[-SENT:])),
            skipped=tuple(map(self._message, skipped)),
        )
        if done == len(steps):
            return account
        action = steps[done]
        awaited = self.messages.mailbox.awaited
        expects = None
        if not computes and awaited in action.receives:
            expects = self._message(awaited)
        return account._replace(
            doing=f"{NAMES[action.op]} of stage {action.stage}, micro-batch {action.unit}, "
            f"in {call.name}",
            stage=action.stage,
            microbatch=action.unit,
            expects=expects,
        )

    def _message(self, envelope: Envelope) -> Message:
        peer = self.group.members[envelope.peer]
        return Message(
            envelope.name, envelope.subject, peer, envelope.data, self.messages.bytes_of(envelope)
        )


# -- Errors of an action ---------------------------------------------------------------------------


REMEDY = (
    "recompute=True, which keeps the inputs of stages alone; more stages, or more and so smaller "
    "micro-batches; MPIPIPE_GRAPHS=0, without the temporary arrays that each CUDA graph keeps"
)


def layer_of(error: Exception) -> str:
    """Return " of layer 3 (Conv)" for the innermost layer of an error's traceback; "" for none."""
    text = ""
    for frame, _ in walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Layer) and owner.name:
            text = f" of layer {owner.name} ({type(owner).__name__})"
    return text


def action_error(what: str, error: Exception) -> StageError:
    """Return the error to raise for one that came out of `what`, an action or the loss."""
    shortage = memory_error(what, error)
    if shortage is not None:
        return shortage
    return StageError(
        f"{what}{layer_of(error)} raised {type(error).__name__}: {error}", remedy=remedy_of(error)
    )


def memory_error(what: str, error: Exception) -> StageError | None:
    """Return the error that explains a lack of GPU memory in an action; None for other errors."""
    shortage = arrays.memory_shortage(error)
    if shortage is None:
        return None
    request = "an unknown number of"
    if shortage.request is not None:
        request = f"{shortage.request:,}"
    return StageError(
        f"{what} ran out of memory on the GPU",
        found=f"{request} bytes asked for, {shortage.free:,} bytes free of {shortage.total:,}",
        remedy=REMEDY,
    )
