"""The common case of a forward and a backward, with all that it needs looked up once: a plan is
bound to these.

One array on the host comes in, and one goes out, whose shapes are known from an earlier call. All
else (trees, skips, GPUs, new shapes, recomputation, check mode, recordings) runs by
`Executor.forward` and `Executor.backward`.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np

from mpipipe import nn
from mpipipe.arrays import read_only
from mpipipe.comm import Envelope, Lease
from mpipipe.pipeline.batch import CallState
from mpipipe.pipeline.loss import unscaled
from mpipipe.pipeline.messages import StageMessages, copy_if_aliased
from mpipipe.pipeline.plan import PlannedAction
from mpipipe.stages import StageAdapter


class PlainAction:
    """What both have in common: the stage, where its array comes from, and where its result goes
    to.
    """

    __slots__ = ("action", "kind", "mailbox", "messages", "send", "shape", "stage", "start", "unit")

    def __init__(self, action: PlannedAction, stage: Any, messages: StageMessages):
        self.action = action
        self.unit = action.microbatch
        self.stage = stage
        self.messages = messages
        self.mailbox = messages.mailbox
        self.send: Envelope | None = action.send
        if self.send is not None:
            ((self.shape, self.kind),) = messages.specs[self.send.edge, self.unit].leaves
            self.start = self.mailbox.transport.sender(self.send.data[0], self.shape, self.kind)

    def give(self, state: CallState, array: Any, taken: Lease) -> None:
        """Send the result. `taken` has the arrays that the action read, which it may have returned
        again.
        """
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
            self.messages.give(self.action, state.local, copy_if_aliased(array, taken), {}, taken)


class PlainForward(PlainAction):
    """A forward whose backward follows."""

    __slots__ = ("evaluate_loss",)

    def __init__(
        self,
        action: PlannedAction,
        stage: Any,
        messages: StageMessages,
        evaluate_loss: Callable[..., None],
    ):
        super().__init__(action, stage, messages)
        self.evaluate_loss = evaluate_loss

    def run(self, state: CallState) -> None:
        unit = self.unit
        inputs = state.inputs
        marks = state.marks
        taken: Lease = ()
        if self.action.first:
            x = inputs.inputs[unit]
        else:
            received = self.mailbox.take()
            x = received.view
            taken = (received,)
        marks.append(perf_counter())
        self.stage.position = inputs.positions[unit]
        y, saved = self.stage.forward(x)
        if self.action.last and inputs.targets is not None:
            self.evaluate_loss(self.action, state, read_only(y), inputs.targets[unit], unit)
        marks.append(perf_counter())
        if self.send is not None:
            self.give(state, y, taken)
        elif inputs.outputs:
            state.outputs[unit] = copy_if_aliased(y, taken)
        state.saved[self.action.stage, unit] = saved, taken


class PlainBackward(PlainAction):
    """A whole backward."""

    __slots__ = ("returns_dx",)

    def __init__(
        self, action: PlannedAction, stage: Any, messages: StageMessages, input_grads: bool
    ):
        super().__init__(action, stage, messages)
        self.returns_dx = action.first and input_grads

    def run(self, state: CallState) -> None:
        unit = self.unit
        marks = state.marks
        saved, taken = state.saved.pop((self.action.stage, unit))
        if self.action.last:
            dy = state.loss_gradients.pop(unit)
        else:
            received = self.mailbox.take()
            dy = received.view
            taken = (*taken, received)
        marks.append(perf_counter())
        dx = self.stage.backward(dy, saved)
        marks.append(perf_counter())
        if self.send is not None:
            self.give(state, dx, taken)
        elif self.returns_dx:
            state.input_gradients[unit] = unscaled(copy_if_aliased(dx, taken), state.inputs.scale)
        for received in taken:
            received.free.append(received)


def is_plain(action: PlannedAction, stage: StageAdapter, messages: StageMessages) -> bool:
    """True for an action of the common kind; the shapes of its messages must be known."""
    is_forward = action.op == "F"
    enters = action.first if is_forward else action.last
    leaves = action.last if is_forward else action.ends
    return (
        action.op in "FB"
        and getattr(type(stage.given), "forward", None)
        is nn.Stage.forward  # whose result needs no check
        and stage.computes is stage.given
        and stage.device == "cpu"
        and action.keeps
        and not (action.recomputed or action.takes or action.gives)
        and enters == (action.receive is None)
        and leaves == (action.send is None)
        and all(
            messages.specs[each.edge, each.microbatch].is_one_array
            for each in [*action.receives, *action.sends]
        )
    )
