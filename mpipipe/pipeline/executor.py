"""Runs the actions of a plan: one loop for every schedule.

What a forward saved is held until the backward that needs it; the buffers of received arrays go
back to the mailbox then.

An action is bound to its stage and messages once, and is run in each call: it takes what comes,
calls the stage, hands on. The common case is one array on the host, of known shape: PlainForward
and PlainBackward take the shortest way. Forward and Backward also know trees, skips, GPUs, new
shapes, recomputation and check mode.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, TypeAlias

import numpy as np

from mpipipe.arrays import Tree, read_only
from mpipipe.comm import Lease
from mpipipe.errors import MpipipeError, PeerError
from mpipipe.pipeline.attached import AttachedStage
from mpipipe.pipeline.batch import Call
from mpipipe.pipeline.check import Checks
from mpipipe.pipeline.clock import HostClock
from mpipipe.pipeline.diagnostics import action_error
from mpipipe.pipeline.evaluation import LossEvaluation
from mpipipe.pipeline.gradient_sums import StepGradients
from mpipipe.pipeline.loss import unscaled
from mpipipe.pipeline.messages import Branches, StageMessages, copy_if_aliased, parted, wrong_result
from mpipipe.pipeline.plan import NAMES, PlannedAction
from mpipipe.trace import Recorder

Run: TypeAlias = Callable[[Call], None]
Program: TypeAlias = list[tuple[Run, PlannedAction]]


@dataclass(eq=False)
class Executor:
    """The actions of one rank."""

    rank: int
    stages: Sequence[AttachedStage]
    messages: StageMessages
    loss: LossEvaluation
    gradients: StepGradients
    checks: Checks | None
    clock: HostClock
    input_grads: bool
    # The call under way, or one that has failed: kernels and messages may still touch its arrays.
    call: Call | None = None

    def run(self, call: Call, stop: int | None = None) -> None:
        """Run the actions of a call that have not run yet: up to number `stop`, or to its end.

        Errors name rank, stage and micro-batch.
        """
        action: PlannedAction | None = None
        with self.loss.taking_head(call):
            try:
                if self.call is not call:
                    self._begin(call)
                for run, action in self._program(call)[len(call.marks) // 2 : stop]:  # noqa: B007
                    run(call)
            except PeerError:
                raise
            except MpipipeError as error:
                # What ranks find out about each other belongs to no action.
                if not error.agreed:
                    self._locate(error, action)
                raise
            except Exception as error:
                what = f"the start of {call.name}"
                if action is not None:
                    what = NAMES[action.op]
                located = action_error(what, error)
                self._locate(located, action)
                raise located from error
            if stop is None:
                self._end(call)

    def _begin(self, call: Call) -> None:
        """Begin a call: its messages, and the marks of its actions."""
        for stage in self.stages:
            stage.begin_call()
        self.messages.begin(call.plan, call.agreed.signature)
        if self.checks is not None:
            self.checks.begin(call)
        self.clock.begin(call.training)
        self.call = call

    def _program(self, call: Call) -> Program:
        """Return the actions of a call, each with the function that runs it."""
        plan = call.plan
        programs = self.messages.shapes.programs
        is_observed = self.clock.recorder is not None or self.checks is not None
        may_be_plain = call.training and self.messages.known and not is_observed
        if not may_be_plain:
            programs = {}
        if plan not in programs:
            programs[plan] = [(self._bound(step, may_be_plain), step) for step in plan.steps]
        return programs[plan]

    def _bound(self, action: PlannedAction, may_be_plain: bool) -> Run:
        """Return the function that runs an action: the shortest one that can."""
        kinds = GENERAL
        if may_be_plain and is_plain(action, self):
            kinds = PLAIN
        run: Run = kinds[action.op](action, self).run
        if action.completes:
            run = partial(self._complete, run, action)
        return run

    def _complete(self, run: Run, action: PlannedAction, call: Call) -> None:
        """Run the last action that adds to the gradients of a stage, and start their sums."""
        run(call)
        stage = self.stages[action.chunk]
        stage.check_gradients()
        if self.gradients.replicas is not None:
            start = self.clock.host_now()
            self.gradients.complete(stage)
            self.clock.add(f"all-reduce {action.stage}", start, self.clock.host_now())

    def _end(self, call: Call) -> None:
        """End a call whose actions have all run."""
        self.clock.end(call.plan.steps, call.marks)
        self.messages.end(call.agreed.signature)
        if self.checks is not None:
            self.checks.end()

    def abandon(self, recorders: set[Recorder]) -> None:
        """Give up a call that has failed: its messages, its sums, and its recording."""
        if self.clock.recorder is not None:
            recorders.discard(self.clock.recorder)
        self.messages.mailbox.cancel()
        self.gradients.cancel()

    def record(self, recorder: Recorder | None) -> None:
        """Let a recorder note actions and messages from now on; None ends that."""
        self.clock.record(recorder)
        self.messages.mailbox.recorder = recorder

    def _locate(self, error: MpipipeError, action: PlannedAction | None) -> None:
        """Add where an error happened, as far as it does not say that itself."""
        if error.rank is None:
            error.rank = self.rank
        if action is not None and error.stage is None:
            error.stage = action.stage
        if action is not None and error.microbatch is None:
            error.microbatch = action.unit


# -- What all actions have in common ---------------------------------------------------------------


class BoundAction(ABC):
    """An action with all that it needs in each call."""

    def __init__(self, action: PlannedAction, executor: Executor):
        self.action = action
        self.unit = action.unit
        # By this a call keeps what the backward needs.
        self.key = action.stage, action.unit
        self.loss = executor.loss
        self.clock = executor.clock
        self.messages = executor.messages
        self.mailbox = executor.messages.mailbox
        self.attached = executor.stages[action.chunk]
        self.runner = self.attached.runner
        self.first = action.first
        self.last = action.last
        # Of a backward: the user asked for the gradient of the input.
        self.returns_dx = action.first and executor.input_grads

    @abstractmethod
    def run(self, call: Call) -> None:
        """Take what comes, compute, and hand on."""

    def timed(self, call: Call, work: Callable[..., Any], *arguments: Any) -> Any:
        """Return what `work` returns, between two marks of the clock."""
        call.marks.append(self.clock.now())
        result = work(*arguments)
        call.marks.append(self.clock.now())
        return result


# -- The common case -------------------------------------------------------------------------------


class PlainAction(BoundAction):
    """An action of one array on the host, whose result is sent from where it lies."""

    def __init__(self, action: PlannedAction, executor: Executor):
        super().__init__(action, executor)
        self.send = action.send
        if self.send is not None:
            ((self.shape, self.kind),) = self.messages.spec_of(self.send).leaves
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
            self.messages.give(self.action, call.local, array, {}, taken)


class PlainForward(PlainAction):
    """A forward whose backward follows."""

    def run(self, call: Call) -> None:
        unit = self.unit
        marks = call.marks
        taken: Lease = ()
        if self.first:
            x = call.inputs[unit]
        else:
            received = self.mailbox.take()
            x = received.view
            taken = (received,)

        marks.append(perf_counter())
        self.runner.position = call.positions[unit]
        result = self.attached.direct.forward(x)
        if type(result) is not tuple or len(result) != 2:
            raise wrong_result(result)
        y, saved = result
        if type(y) is Branches:
            y, _ = parted(y, (), NAMES["F"])
        if self.last and call.targets is not None:
            if type(y) is np.ndarray:
                output = y.view()
                output.flags.writeable = False
            else:
                output = read_only(y)
            self.loss.evaluate(call, output, call.targets[unit], unit)
        marks.append(perf_counter())

        if self.send is not None:
            self.give(call, y, taken)
        elif call.wants_outputs:
            call.outputs[unit] = copy_if_aliased(y, taken)
        call.saved[self.key] = saved, taken


class PlainBackward(PlainAction):
    """A whole backward."""

    def run(self, call: Call) -> None:
        marks = call.marks
        saved, taken = call.saved.pop(self.key)
        if self.last:
            dy = call.loss_gradients.pop(self.unit)
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
            call.input_gradients[self.unit] = unscaled(copy_if_aliased(dx, taken), call.scale)
        for received in taken:
            received.free.append(received)


def is_plain(action: PlannedAction, executor: Executor) -> bool:
    """Return True for an action of the common kind; the shapes of its messages must be known."""
    stage = executor.stages[action.chunk]
    enters = action.first
    leaves = action.last
    if action.op == "B":
        enters = action.last
        leaves = action.ends
    is_usual = (
        action.op in PLAIN
        and action.keeps
        and not action.recomputed
        and len(action.takes) == len(action.gives) == 1
        and stage.runner is stage.stage
        and stage.stage.device == "cpu"
        # A loss over the batch holds outputs that lie in received buffers.
        and not (action.last and executor.loss.gathers)
        # No data stays on the rank between two of its stages.
        and enters == (action.receive is None)
        and leaves == (action.send is None)
    )
    messages = (*action.receives, *action.sends)
    return is_usual and all(executor.messages.spec_of(one).is_one_array for one in messages)


# -- Any case --------------------------------------------------------------------------------------


class Forward(BoundAction):
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
        keeps = call.training and action.keeps
        recompute = ("", "later")[action.recomputed]
        position = call.positions[unit]._replace(keeps=keeps, recompute=recompute)

        call.marks.append(self.clock.now())
        self.runner.position = position
        result = self.runner.forward(x)
        if type(result) is not tuple or len(result) != 2:
            raise wrong_result(result)
        y, saved = result
        skips: dict[str, Tree] = {}
        if action.gives[1:] or type(y) is Branches:
            y, skips = parted(y, action.gives[1:], NAMES["F"])
        if action.last:
            # A loss over the batch, or the user, holds it when buffers are used again.
            y = copy_if_aliased(y, lease)
            if call.targets is not None:
                self.loss.use_output(call, read_only(y), call.targets[unit], unit)
        call.marks.append(self.clock.now())

        if not action.last:
            self.messages.give(action, call.local, y, skips, lease)
        elif call.wants_outputs:
            call.outputs[unit] = y
        if action.recomputed:
            saved = x
        if keeps:
            call.saved[self.key] = saved, lease
        else:
            self.mailbox.release(lease)


class Recomputation(BoundAction):
    """A forward once more, at the same position and so with the same random numbers."""

    def run(self, call: Call) -> None:
        x, lease = call.saved[self.key]
        self.runner.position = call.positions[self.unit]._replace(recompute="now")
        _, saved = self.timed(call, self.runner.forward, x)
        call.saved[self.key] = saved, lease


class Backward(BoundAction):
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
        if is_whole:
            dx = self.timed(call, self.runner.backward, dy, saved)
        else:
            dx, pending = self.timed(call, self.runner.backward_input, dy, saved)
            call.pending[self.key] = pending, lease

        skips: dict[str, Tree] = {}
        # At the first stage Branches are of the side inputs of the batch.
        if action.gives[1:] or (type(dx) is Branches and not action.first):
            dx, skips = parted(dx, action.gives[1:], NAMES[action.op])
        if not action.ends:
            self.messages.give(action, call.local, dx, skips, lease)
        elif self.returns_dx:
            call.input_gradients[self.unit] = unscaled(copy_if_aliased(dx, lease), call.scale)
        if is_whole:
            self.mailbox.release(lease)


class WeightGradient(BoundAction):
    """The weight gradient of a split backward."""

    def run(self, call: Call) -> None:
        pending, lease = call.pending.pop(self.key)
        self.timed(call, self.runner.backward_weight, pending)
        self.mailbox.release(lease)


PLAIN: dict[str, type[BoundAction]] = {"F": PlainForward, "B": PlainBackward}
GENERAL: dict[str, type[BoundAction]] = {
    "F": Forward,
    "B": Backward,
    "I": Backward,
    "W": WeightGradient,
    "R": Recomputation,
}
