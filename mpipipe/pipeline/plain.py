"""The common case of a forward and a backward, with all that it needs looked up once: a plan is bound to these.

One array on the host comes in, and one goes out, whose shapes are known from an earlier call. All else (trees, skips,
GPUs, new shapes, recomputation, check mode, recordings) runs by `Executor.forward` and `Executor.backward`.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from mpipipe.arrays import read_only
from mpipipe.comm import Envelope, Lease, Mailbox
from mpipipe.pipeline.batch import CallState, MessageSpec
from mpipipe.pipeline.loss import unscaled
from mpipipe.pipeline.messages import copy_if_aliased
from mpipipe.pipeline.plan import PlannedAction

if TYPE_CHECKING:
    from mpipipe.pipeline.executor import Executor

Specs = Mapping[tuple[int, int], MessageSpec]


class PlainAction:
    """What both have in common: the stage, where its array comes from, and where its result goes to."""

    __slots__ = ("action", "executor", "kind", "mailbox", "send", "shape", "stage", "start", "unit")

    def __init__(self, executor: Executor, action: PlannedAction, specs: Specs):
        self.executor, self.action, self.unit = executor, action, action.microbatch
        self.mailbox: Mailbox = executor.messages.mailbox
        self.stage: Any = executor.stages[action.chunk].models[0]
        self.send: Envelope | None = action.send
        if self.send is not None:
            (self.shape, self.kind), *_ = specs[self.send.edge, self.unit].leaves
            self.start = self.mailbox.transport.sender(self.send.data[0], self.shape, self.kind)

    def give(self, state: CallState, array: Any, slots: Lease) -> None:
        """Send the result. `slots` are those of the arrays that the action read, which it may have returned again."""
        fresh = type(array) is np.ndarray and array.base is None
        if fresh and array.shape == self.shape and array.dtype == self.kind and array.flags.c_contiguous:
            assert self.send is not None
            self.mailbox.put_array(self.start, self.send, array)
        else:
            array = copy_if_aliased(array, slots)
            self.executor.messages.give(self.action, state.local, array, {}, slots)

    def run(self, state: CallState) -> None:
        raise NotImplementedError


class PlainForward(PlainAction):
    """A forward whose backward follows."""

    __slots__ = ()

    def run(self, state: CallState) -> None:
        unit, inputs, marks = self.unit, state.inputs, state.marks
        slots: Lease = ()
        if self.action.first:
            x = inputs.inputs[unit]
        else:
            slot = self.mailbox.take()
            x = slot.view
            slots = (slot,)
        marks.append(perf_counter())
        self.stage.position = inputs.positions[unit]
        y, saved = self.stage.forward(x)
        if self.action.last and inputs.targets is not None:
            self.executor.evaluate_loss(self.action, state, read_only(y), inputs.targets[unit], unit)
        marks.append(perf_counter())
        if self.send is not None:
            self.give(state, y, slots)
        elif inputs.outputs:
            state.outputs[unit] = copy_if_aliased(y, slots)
        state.saved[self.action.stage, unit] = saved, slots


class PlainBackward(PlainAction):
    """A whole backward."""

    __slots__ = ()

    def run(self, state: CallState) -> None:
        unit, marks = self.unit, state.marks
        saved, slots = state.saved.pop((self.action.stage, unit))
        if self.action.last:
            dy = state.loss_gradients.pop(unit)
        else:
            slot = self.mailbox.take()
            dy = slot.view
            slots = (*slots, slot)
        marks.append(perf_counter())
        dx = self.stage.backward(dy, saved)
        marks.append(perf_counter())
        if self.send is not None:
            self.give(state, dx, slots)
        elif self.action.first and self.executor.input_grads:
            state.input_gradients[unit] = unscaled(copy_if_aliased(dx, slots), state.inputs.scale)
        for slot in slots:
            slot.free.append(slot)


def plain_action(executor: Executor, action: PlannedAction, specs: Specs) -> PlainAction | None:
    """Return the action bound to what it needs; None where it is not of the common kind."""
    stage = executor.stages[action.chunk]
    is_forward = action.op == "F"
    messages = [*action.receives, *action.sends]
    plain = (
        (is_forward or action.op == "B")
        and stage.is_model
        and stage.computes is stage.given
        and stage.device == "cpu"
        and action.keeps
        and not (action.recomputed or action.takes or action.gives)
        and (action.first if is_forward else action.last) == (action.receive is None)
        and (action.last if is_forward else action.ends) == (action.send is None)
        and not (action.last and executor.gathers)
        and all(specs[each.edge, each.microbatch].is_one_array for each in messages)
    )
    if not plain:
        return None
    return (PlainForward if is_forward else PlainBackward)(executor, action, specs)
