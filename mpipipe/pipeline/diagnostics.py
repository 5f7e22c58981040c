"""What a pipeline says when something goes wrong: how far it is, in a report of a hang; what fills the memory of a GPU.

Nothing extra is noted for an action. The clock makes two marks for each action of the plan anyway:

    marks  0 . . 1 . . 2 . . 3        an even number: the next action waits for its message
           |0F0 |     |0F1 |          an odd number: an action computes

The mailbox keeps which messages it has sent. A message that must have left by now, according to the plan, and has not,
was skipped.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from threading import get_ident
from time import perf_counter
from traceback import walk_tb
from typing import Any, NamedTuple, TypeAlias

from mpipipe import arrays, nn
from mpipipe.comm import Envelope, Lease
from mpipipe.errors import StageError
from mpipipe.job import Message, RankGroup, Snapshot
from mpipipe.pipeline.batch import CallState
from mpipipe.pipeline.graphs import StageGraphs
from mpipipe.pipeline.messages import KNOWN_SHAPES, StageMessages
from mpipipe.pipeline.plan import ActionPlan, PlannedAction
from mpipipe.pipeline.result import PipelineState
from mpipipe.stages import StageAdapter, flat_if_any

NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient", "R": "recomputation"}
Function: TypeAlias = Callable[[PlannedAction, CallState], None]  # that runs an action
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
        self.begun, self.running = 0, False
        group.context.add_inspectable(self)

    def begin(self, call: str, number: int, plan: ActionPlan, marks: list) -> None:
        """Note that a call begins: its messages are known, and its actions are about to run."""
        self.begun += 1
        name = f"{call} (call {number}) of {self.state.name}"
        self.calls.append(KeptCall(name, number, plan, marks, self.messages.mailbox.sent, get_ident()))
        self.running = True

    def progress_token(self) -> object:
        mailbox = self.messages.mailbox
        marks = self.calls[-1].marks if self.calls else ()
        return self.begun, self.running, len(marks), len(mailbox.sent), mailbox.polls

    def snapshot(self) -> Snapshot:
        call = self.calls[-1] if self.running and self.state.running else None
        operations = [text for kept in tuple(self.calls) for text in self._operations(kept)]
        idle = Snapshot(self.group.key, operations=tuple(operations))
        if call is None:
            return idle
        done, computes = divmod(len(call.marks), 2)
        steps, receives, taken = call.plan.steps, call.plan.receives, self.messages.mailbox.taken
        # the last action may not have sent all of its own messages yet
        ended, sent = done if computes or self.group.context.long_waits else done - 1, set(call.sent)
        skipped = [message for step in steps[: max(0, ended)] for message in step.sends if message not in sent]
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
        awaited = receives[taken : taken + 1] if not computes else []  # the first that was not taken
        return account._replace(
            doing=f"{NAMES[action.op]} of stage {action.stage}, micro-batch {action.microbatch}, in {call.name}",
            stage=action.stage,
            microbatch=action.microbatch,
            expects=next((self._message(each) for each in awaited if each in action.receives), None),
        )

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
            messages = [f"received {self._transfer(each, 'from')}" for each in action.receives]
            for each in action.sends:
                messages.append(f"{'sent' if each in sent else 'has not sent'} {self._transfer(each, 'to')}")
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
    idle: int  # bytes of these that places of a tied parameter have given up, and that are unused (pipeline.ties)
    activations: int  # how many (stage, micro-batch) are alive
    saved: int  # bytes that these hold for their backwards
    inputs: int  # bytes of these that are inputs of stages, which recomputation keeps

    @property
    def freed_by_recomputation(self) -> int:
        """Bytes that recomputation would free now, with one activation computed anew at a time."""
        return max(0, self.saved - self.inputs - self.saved // max(1, self.activations))


def layer_of(error: Exception) -> str:
    """Return " of layer 3 (Conv)" for the innermost layer that an error has come through; "" for none."""
    found = ""
    for frame, _ in walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Layer) and owner.name:
            found = f" of layer {owner.name} ({type(owner).__name__})"
    return found


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
    if recompute:
        again = "recompute=True is on already"
    elif held.activations < 2:
        again = "recompute=True: saves nothing here, since no more than one activation is alive"
    else:
        again = f"recompute=True: about {held.freed_by_recomputation:,} bytes of activations less"
    return StageError(
        f"{what} ran out of memory on the GPU",
        found=f"{'an unknown number of' if shortage.asked is None else f'{shortage.asked:,}'} bytes asked for, "
        f"{shortage.free:,} bytes free of {shortage.total:,}; {held.activations} activations hold {held.saved:,} "
        f"bytes, parameters and gradients {held.parameters:,}{idle}",
        remedy=("MPIPIPE_GRAPHS=0: without the temporary arrays that each CUDA graph keeps; " if graphs else "")
        + f"{again}; twice as many stages: about {held.parameters // 2:,} bytes of parameters and gradients less on "
        "each rank, and half of the optimizer's state; more micro-batches: smaller activations",
    )


def held_by(stages: Sequence[StageAdapter], state: CallState | None) -> HeldBytes:
    """Count what the stages of this rank hold on its GPU."""
    models = [model for stage in stages for model in stage.models]
    buffers = [buffer for model in models for buffer in (model.parameters, model.compute, model.gradients)]
    own = list(_spans([buffer.whole for buffer in buffers]))
    used = [buffer.whole if buffer.is_divided else buffer.flat for buffer in buffers]
    used += [part for model in models for part in model.buffers.parts.values()]
    parameters = _covered(own)
    idle = parameters - _covered(_spans(used))
    if state is None:
        return HeldBytes(parameters, idle, 0, 0, 0)
    kept = [*state.saved.values(), *state.pending.values()]
    leases = [view for _, lease in kept for _, (_, view) in lease]
    batch = state.inputs.inputs
    first = [batch[m] for stage, m in state.saved if stage == 0] if isinstance(batch, list) else []
    saved = _covered([*own, *_spans([saved for saved, _ in kept]), *_spans(leases)]) - parameters
    inputs = _covered([*_spans(leases), *_spans(first)])
    return HeldBytes(parameters, idle, len(kept), saved, min(inputs, saved))


# -- What activations take: measured in the first training step with some input shapes, since later ones are alike -----


class ActivationBytes(NamedTuple):
    """Bytes held between forward and backward."""

    now: int
    peak: int  # most in a training step


TURNS_WITH_GRAPHS = 3  # which hold more memory: the second step makes graphs, the third one is by them
AT_ONCE, EVERY = 4, 16  # so many new shapes are measured in their first step, then one in so many training steps


class ActivationMeter:
    """The memory of what is held between forward and backward, after each action of a step that is measured."""

    def __init__(self, stages: Sequence[StageAdapter]) -> None:
        self.stages, self.peak, self.measures = stages, 0, False
        self._shapes = self._steps = 0  # measured so far, and training steps since the last one
        self._peaks: dict[int, int] = {}  # by signature of the inputs
        self._turns: Counter[int] = Counter()  # steps of a signature that were measured
        self._signature = self._total = self._most = 0
        self._held: dict[tuple[int, int], list[tuple[int, int]]] = {}  # ranges of each activation
        self._users: Counter[tuple[int, int]] = Counter()  # activations that hold a range

    def begin(self, signature: int, training: bool) -> None:
        self._signature, self._steps = signature, self._steps + training
        due = self._shapes < AT_ONCE or self._steps >= EVERY
        by_graphs = any(getattr(stage.computes, "reason", None) == "" for stage in self.stages)
        turns = TURNS_WITH_GRAPHS if by_graphs else 1
        self.measures = training and self._turns[signature] < turns and (due or signature in self._peaks)
        if self.measures:
            self._shapes, self._steps = self._shapes + (signature not in self._peaks), 0
            self._total, self._most, self._held, self._users = 0, 0, {}, Counter()

    def end(self) -> None:
        if self.measures:
            if len(self._peaks) == KNOWN_SHAPES and self._signature not in self._peaks:
                self._peaks.clear()
                self._turns.clear()
            self._turns[self._signature] += 1
            self._peaks[self._signature] = max(self._most, self._peaks.get(self._signature, 0))
            self.measures = False
        self.peak = self._peaks.get(self._signature, self.peak)

    def measured(self, function: Function) -> Function:
        """An action, and a look at what it leaves of its activation."""

        def run(action: PlannedAction, state: CallState) -> None:
            function(action, state)
            key = action.stage, action.microbatch
            kept = state.saved.get(key, state.pending.get(key))
            ranges = self.ranges([] if kept is None else [kept])
            for each in ranges:
                self._total += 0 if self._users[each] else each[1] - each[0]
                self._users[each] += 1
            for each in self._held.pop(key, ()):
                self._users[each] -= 1
                self._total -= 0 if self._users[each] else each[1] - each[0]
            self._held[key], self._most = ranges, max(self._most, self._total)

        return run

    def ranges(self, kept: Sequence[tuple[Any, Lease]]) -> list[tuple[int, int]]:
        """Return the memory of some activations, as ranges that do not overlap, without that of parameters."""
        models = [model for stage in self.stages for model in stage.models]
        holders = [getattr(stage.given, "parameters", None) for stage in self.stages if not stage.is_model]
        buffers = [each for model in models for each in (model.parameters, model.compute, model.buffers.held)]
        own = [*(buffer.whole for buffer in buffers), *arrays.workspaces()]
        own += [flat for flat in map(flat_if_any, holders) if flat is not None]
        parameters = list(_spans(own, on_host=True))
        leases = [view for _, lease in kept for _, (_, view) in lease]
        spans = _spans([[saved for saved, _ in kept], leases], on_host=True)
        return _merged(
            (start, stop)
            for start, stop in spans
            if not any(first <= start and stop <= last for first, last in parameters)
        )


def _spans(value: Any, on_host: bool = False) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of the device memory of each array in `value`, or of all memory."""
    for _, array in arrays.named_leaves(value, ""):
        if array.nbytes and (on_host or arrays.is_device(array)):
            start = arrays.address(array)
            extent = sum((count - 1) * step for count, step in zip(array.shape, array.strides))
            yield start, start + extent + array.itemsize


def _merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ranges that do not overlap, with all that any of the spans covers."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if found and start < found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found


def _covered(spans: Iterable[tuple[int, int]]) -> int:
    """Count the bytes that any of the spans covers."""
    return sum(stop - start for start, stop in _merged(spans))
