"""What a rank does for one action of its plan: takes what comes, calls the stage, hands on.

An action is bound to its stage and messages once, and is run in each call. The common case is one
array on the host, of known shape: PlainForward and PlainBackward take the shortest way. Forward and
Backward also know trees, skips, GPUs, new shapes, recomputation and check mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, Protocol

import numpy as np

from mpipipe.arrays import Tree, read_only
from mpipipe.comm import Envelope, Lease
from mpipipe.pipeline.attached import AttachedStage
from mpipipe.pipeline.batch import Call
from mpipipe.pipeline.clock import Mark
from mpipipe.pipeline.evaluation import LossEvaluation
from mpipipe.pipeline.loss import unscaled
from mpipipe.pipeline.messages import Branches, StageMessages, copy_if_aliased, parted, wrong_result
from mpipipe.pipeline.plan import NAMES, PlannedAction

# A function that evaluates the loss: (call, output, target, unit).
UseOutput = Callable[[Call, Tree, Tree, int], None]


# -- The common case -------------------------------------------------------------------------------


class PlainAction:
    """What both have in common: the stage, and where its result goes to."""

    __slots__ = (
        "action",
        "attached",
        "kind",
        "mailbox",
        "messages",
        "send",
        "shape",
        "stage",
        "start",
        "unit",
    )

    def __init__(self, action: PlannedAction, attached: AttachedStage, messages: StageMessages):
        self.action = action
        self.unit = action.unit
        self.attached = attached
        self.stage = attached.stage
        self.messages = messages
        self.mailbox = messages.mailbox
        self.send: Envelope | None = action.send
        if self.send is not None:
            ((self.shape, self.kind),) = messages.specs[self.send.edge, self.unit].leaves
            self.start = self.mailbox.transport.sender(self.send.data[0], self.shape, self.kind)

    def give(self, call: Call, array: Any, taken: Lease) -> None:
        """Send the result. `taken` has the arrays that the action read."""
        is_fresh = type(array) is np.ndarray and array.base is None
        if (
            is_fresh
            and array.shape == self.shape
            and array.dtype == self.kind
            and array.flags.c_contiguous
        ):
            assert self.send is not None
            self.mailbox.put_array(self.start, self.send, array)
        else:
            self.messages.give(self.action, call.local, copy_if_aliased(array, taken), {}, taken)


class PlainForward(PlainAction):
    """A forward whose backward follows."""

    __slots__ = ("use_output",)

    def __init__(
        self,
        action: PlannedAction,
        attached: AttachedStage,
        messages: StageMessages,
        use_output: UseOutput,
    ):
        super().__init__(action, attached, messages)
        self.use_output = use_output

    def run(self, call: Call) -> None:
        unit = self.unit
        marks = call.marks
        taken: Lease = ()
        if self.action.first:
            x = call.inputs[unit]
        else:
            received = self.mailbox.take()
            x = received.view
            taken = (received,)

        marks.append(perf_counter())
        self.stage.position = call.positions[unit]
        result = self.attached.direct.forward(x)
        if type(result) is not tuple or len(result) != 2:
            raise wrong_result(result)
        y, saved = result
        if type(y) is Branches:
            y, _ = parted(y, (), NAMES["F"])
        if self.action.last and call.targets is not None:
            if type(y) is np.ndarray:
                output = y.view()
                output.flags.writeable = False
            else:
                output = read_only(y)
            self.use_output(call, output, call.targets[unit], unit)
        marks.append(perf_counter())

        if self.send is not None:
            self.give(call, y, taken)
        elif call.wants_outputs:
            call.outputs[unit] = copy_if_aliased(y, taken)
        call.saved[self.action.stage, unit] = saved, taken


class PlainBackward(PlainAction):
    """A whole backward."""

    __slots__ = ("returns_dx",)

    def __init__(
        self,
        action: PlannedAction,
        attached: AttachedStage,
        messages: StageMessages,
        input_grads: bool,
    ):
        super().__init__(action, attached, messages)
        self.returns_dx = action.first and input_grads

    def run(self, call: Call) -> None:
        unit = self.unit
        marks = call.marks
        saved, taken = call.saved.pop((self.action.stage, unit))
        if self.action.last:
            dy = call.loss_gradients.pop(unit)
        else:
            received = self.mailbox.take()
            dy = received.view
            taken = (*taken, received)

        marks.append(perf_counter())
        dx = self.attached.direct.backward(dy, saved)
        marks.append(perf_counter())

        if self.send is not None:
            if type(dx) is Branches:
                dx, _ = parted(dx, (), NAMES["B"])
            self.give(call, dx, taken)
        elif self.returns_dx:
            if taken:
                dx = copy_if_aliased(dx, taken)
            call.input_gradients[unit] = unscaled(dx, call.scale)
        for received in taken:
            received.free.append(received)


def is_plain(action: PlannedAction, stage: AttachedStage, messages: StageMessages) -> bool:
    """Return True for an action of the common kind; the shapes of its messages must be known."""
    if action.op not in "FB" or not action.keeps or action.recomputed:
        return False
    if action.takes or action.gives or stage.runner is not stage.stage:
        return False
    if stage.stage.device != "cpu":
        return False
    enters = action.first
    leaves = action.last
    if action.op == "B":
        enters = action.last
        leaves = action.ends
    if enters != (action.receive is None) or leaves != (action.send is None):
        return False
    for message in (*action.receives, *action.sends):
        if not messages.specs[message.edge, message.unit].is_one_array:
            return False
    return True


# -- Any case --------------------------------------------------------------------------------------


class Machine(Protocol):
    """What actions need of the executor."""

    stages: Sequence[AttachedStage]
    messages: StageMessages
    loss: LossEvaluation
    input_grads: bool
    now: Callable[[], Mark]  # makes a mark of the clock


class GeneralAction:
    """An action for any case."""

    def __init__(self, action: PlannedAction, executor: Machine):
        self.action = action
        self.unit = action.unit
        self.executor = executor
        self.messages = executor.messages
        self.runner = executor.stages[action.chunk].runner

    @property
    def key(self) -> tuple[int, int]:
        """The stage and unit, by which a call keeps what the backward needs."""
        return self.action.stage, self.unit


class Forward(GeneralAction):
    """A forward. With recomputation its input is held, and nothing of what it saved."""

    def run(self, call: Call) -> None:
        action = self.action
        unit = self.unit
        x: Tree
        lease: Lease = ()
        if action.first:
            x = call.inputs[unit]
        else:
            x, lease = self.messages.take(action, call.local)
        position = call.positions[unit]
        if call.training and not action.keeps:
            position = position._replace(keeps=False)
        if action.recomputed:
            position = position._replace(recompute="later")

        now = self.executor.now
        call.marks.append(now())
        self.runner.position = position
        result = self.runner.forward(x)
        if type(result) is not tuple or len(result) != 2:
            raise wrong_result(result)
        y, saved = result
        skips: dict[str, Tree] = {}
        if action.gives or type(y) is Branches:
            y, skips = parted(y, action.gives, NAMES["F"])
        if action.last and call.targets is not None:
            loss = self.executor.loss
            # A loss over the batch holds the output after its buffers may be used again.
            output = y
            if lease and loss.gathers:
                output = copy_if_aliased(y, lease)
            loss.use_output(call, read_only(output), call.targets[unit], unit)
        call.marks.append(now())

        if lease:
            y = copy_if_aliased(y, lease)
        if not action.last:
            self.messages.give(action, call.local, y, skips, lease)
        elif call.wants_outputs:
            call.outputs[unit] = y
        if action.recomputed:
            saved = x
        if call.training and action.keeps:
            call.saved[self.key] = saved, lease
        else:
            self.messages.mailbox.release(lease)


class Recomputation(GeneralAction):
    """A forward once more, at the same position and so with the same random numbers."""

    def run(self, call: Call) -> None:
        x, lease = call.saved[self.key]
        position = call.positions[self.unit]._replace(recompute="now")
        call.marks.append(self.executor.now())
        self.runner.position = position
        saved = self.runner.forward(x)[1]
        call.marks.append(self.executor.now())
        call.saved[self.key] = saved, lease


class Backward(GeneralAction):
    """A whole backward, or an input gradient, which keeps what its weight gradient needs."""

    def run(self, call: Call) -> None:
        action = self.action
        saved, lease = call.saved.pop(self.key)
        if action.last:
            dy = call.loss_gradients.pop(self.unit)
        else:
            dy, received = self.messages.take(action, call.local)
            lease = (*lease, *received)
        is_whole = action.op == "B"

        call.marks.append(self.executor.now())
        if is_whole:
            dx = self.runner.backward(dy, saved)
        else:
            dx, pending = self.runner.backward_input(dy, saved)
            call.pending[self.key] = pending, lease
        call.marks.append(self.executor.now())

        skips: dict[str, Tree] = {}
        # At the first stage Branches are of the side inputs of the batch.
        if action.gives or (type(dx) is Branches and not action.first):
            dx, skips = parted(dx, action.gives, NAMES[action.op])
        if lease:
            dx = copy_if_aliased(dx, lease)
        if not action.ends:
            self.messages.give(action, call.local, dx, skips, lease)
        elif action.first and self.executor.input_grads:
            call.input_gradients[self.unit] = unscaled(dx, call.scale)
        if is_whole:
            self.messages.mailbox.release(lease)


class WeightGradient(GeneralAction):
    """The weight gradient of a split backward."""

    def run(self, call: Call) -> None:
        pending, lease = call.pending.pop(self.key)
        call.marks.append(self.executor.now())
        self.runner.backward_weight(pending)
        call.marks.append(self.executor.now())
        self.messages.mailbox.release(lease)


GENERAL: dict[str, type[Forward | Backward | WeightGradient | Recomputation]] = {
    "F": Forward,
    "B": Backward,
    "I": Backward,
    "W": WeightGradient,
    "R": Recomputation,
}
