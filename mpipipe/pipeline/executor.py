"""Runs the actions of a plan: takes what an action needs, calls the stage, hands on what it made.

There is one loop for every schedule. What a forward saved is held until the backward that needs it;
the buffers of received arrays go back to the mailbox then. Where the forward is run again, its
input alone is held until then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Tree, read_only
from mpipipe.errors import ArgumentError, MpipipeError, PeerError, StageError
from mpipipe.pipeline.batch import CallInputs, CallState
from mpipipe.pipeline.clock import DeviceClock, HostClock
from mpipipe.pipeline.construction import Partners
from mpipipe.pipeline.diagnostics import NAMES, Function, layer_of, memory_error
from mpipipe.pipeline.gradient_sums import GradientSums
from mpipipe.pipeline.loss import Loss, Weighing, unscaled
from mpipipe.pipeline.messages import (
    KNOWN_SHAPES,
    Branches,
    StageMessages,
    copy_if_aliased,
    parted,
    remedy_of,
)
from mpipipe.pipeline.plain import PlainBackward, PlainForward, is_plain
from mpipipe.pipeline.plan import ActionPlan, PlannedAction
from mpipipe.trace import Recorder

Run: TypeAlias = Callable[[CallState], None]
Program: TypeAlias = list[tuple[Run, PlannedAction]]


class Executor:
    """The actions of one rank. With `recompute` every forward that has a backward is run again, for
    errors.
    """

    def __init__(
        self,
        partners: Partners,
        messages: StageMessages,
        loss: Loss | None,
        weighing: Weighing,
        sums: GradientSums | None,
        *,
        recompute: bool,
        input_grads: bool,
    ):
        self.rank = partners.pipe.rank
        self.stages = partners.stages
        self.messages = messages
        self.sums = sums
        # the shares of micro-batches in the loss
        self.loss = loss
        self.weighing = weighing
        self.recompute = recompute
        self.input_grads = input_grads
        self.functions: dict[str, Function] = {
            "F": self._forward,
            "B": self._backward,
            "I": self._backward,
            "W": self._weight_gradient,
            "R": self._recompute,
        }
        self.gathers = loss is not None and loss.over_batch
        self._use_output = self._gather if self.gathers else self.evaluate_loss
        self.clock = DeviceClock() if partners.device == "cuda" else HostClock()
        self.now = self.clock.now
        self.place = f"rank {self.rank}"  # for the report of an interruption
        self.programs: dict[tuple[int, int], Program] = {}  # by (signature, id of the plan)
        # of the call under way, or of one that has failed: kernels and messages may still touch its
        # arrays
        self.state: CallState | None = None

    def begin(self, actions: Sequence[PlannedAction], inputs: CallInputs) -> CallState:
        self.state = CallState(inputs, self.clock.begin(actions, inputs.training))
        if self.sums is not None:
            self.sums.begin()
        return self.state

    def program(self, plan: ActionPlan, training: bool) -> Program:
        """The actions of a plan, each with the function that runs it: the shortest one where shapes
        are known.
        """
        messages = self.messages
        usual = (
            training
            and messages.known
            and self.clock.recorder is None
            and type(messages) is StageMessages
        )
        if not usual:
            return [(self._bound(step, plain=False), step) for step in plan.steps]
        key = messages.signature, id(plan)
        if key not in self.programs:
            if len(self.programs) == 2 * KNOWN_SHAPES:
                self.programs.clear()
            self.programs[key] = [(self._bound(step, plain=True), step) for step in plan.steps]
        return self.programs[key]

    def _bound(self, action: PlannedAction, plain: bool) -> Run:
        stage = self.stages[action.chunk]
        run: Run
        if not (plain and is_plain(action, stage, self.messages)) or (action.last and self.gathers):
            run = partial(self.functions[action.op], action)
        elif action.op == "F":
            run = PlainForward(action, stage.given, self.messages, self.evaluate_loss).run
        else:
            run = PlainBackward(action, stage.given, self.messages, self.input_grads).run
        if self.clock.recorder is not None and self.clock.waits:
            run = partial(_annotated, run, action)
        return partial(self._complete, run, action) if action.completes else run

    def _complete(self, run: Run, action: PlannedAction, state: CallState) -> None:
        """Run the last action that adds to the gradients of a stage, and start their sums over
        replicas.
        """
        sums = self.sums
        chunk = action.chunk
        if sums is not None:
            sums.watch(chunk)
        run(state)
        self.stages[chunk].check_gradients()
        if sums is not None:
            start = self.clock.host_seconds()
            sums.complete(chunk)
            self.clock.add(f"all-reduce {action.stage}", start, self.clock.host_seconds())

    def run(self, program: Program, state: CallState) -> None:
        """Run actions. What a stage raises comes out as an error that names rank, stage,
        micro-batch.
        """
        if not program:  # of the second half of a step, where no stage of this rank has a backward
            return
        action = program[0][1]
        try:
            for run, action in program:  # noqa: B007 (for the errors)
                run(state)
        except PeerError:
            raise
        except MpipipeError as error:
            if not error.agreed:  # what ranks find out about each other belongs to no action
                self._locate(error, action)
            raise
        except Exception as error:
            raise self._stage_error(NAMES[action.op], action, error) from error
        except (
            BaseException
        ):  # SystemExit, KeyboardInterrupt: they stay what they are, the other ranks hear where
            self.place = (
                f"rank {self.rank}, stage {action.stage}, micro-batch "
                f"{action.microbatch}, {NAMES[action.op]}"
            )
            raise

    def end(self, state: CallState) -> None:
        self.clock.end()

    def abandon(self, recorders: set[Recorder]) -> None:
        """Give up a call that has failed: its messages, its sums, and its recording, since the step
        never ends.
        """
        recorders.discard(self.clock.recorder)
        self.messages.mailbox.cancel()
        if self.sums is not None:
            self.sums.cancel()

    def poll(self) -> None:
        """Let messages and sums advance; stages call this between layers."""
        self.messages.mailbox.poll()
        if self.sums is not None:
            self.sums.progress()

    def record(self, recorder: Recorder | None) -> None:
        """Let a recorder note actions and messages from now on; None ends that."""
        self.clock.settle()
        self.clock.recorder = self.messages.mailbox.recorder = recorder
        if not self.clock.waits:  # marks are read from the host's clock
            self.now = self.clock.now if recorder is None else recorder.now

    def _stage_error(self, what: str, action: PlannedAction, error: Exception) -> StageError:
        found = memory_error(what, error)
        if found is None:
            found = StageError(
                f"{what}{layer_of(error)} raised {type(error).__name__}: {error}",
                remedy=remedy_of(error),
            )
        self._locate(found, action)
        return found

    def _locate(self, error: MpipipeError, action: PlannedAction) -> None:
        """Add where it happened, as far as the error does not say that itself."""
        error.rank = self.rank if error.rank is None else error.rank
        error.stage = action.stage if error.stage is None else error.stage
        error.microbatch = action.microbatch if error.microbatch is None else error.microbatch

    def _forward(self, action: PlannedAction, state: CallState) -> None:
        inputs = state.inputs
        microbatch = action.microbatch
        x, lease = (
            (inputs.inputs[microbatch], ())
            if action.first
            else self.messages.take(action, state.local)
        )
        target = inputs.targets[microbatch] if action.last and inputs.targets is not None else None
        position = inputs.positions[microbatch]
        if inputs.training and not action.keeps:
            position = position._replace(keeps=False)
        if action.recomputed:
            position = position._replace(recompute="later")
        state.marks.append(self.now())
        result = self.stages[action.chunk].forward(x, position)
        if type(result) is not tuple or len(result) != 2:
            raise ArgumentError(
                "the forward of a stage returns (output, saved)",
                found=type(result).__name__,
                expected="a tuple of two",
                remedy="return (y, None) where nothing is saved",
            )
        y, saved = result
        skips: dict[str, Tree] = {}
        if action.gives or type(y) is Branches:
            y, skips = parted(y, action.gives, NAMES["F"])
        if target is not None:
            output = read_only(copy_if_aliased(y, lease) if lease and self.gathers else y)
            self._use_output(action, state, output, target, microbatch)
        state.marks.append(self.now())
        if lease and (type(y) is not np.ndarray or y.base is not None):
            y = copy_if_aliased(y, lease)
        if not action.last:
            self.messages.give(action, state.local, y, skips, lease)
        elif inputs.outputs:
            state.outputs[microbatch] = y
        if inputs.training and action.keeps:
            state.saved[action.stage, microbatch] = (x if action.recomputed else saved), lease
        elif lease:
            self.messages.mailbox.release(lease)

    def _gather(
        self, action: PlannedAction, state: CallState, y: Tree, target: Tree, microbatch: int
    ) -> None:
        """Keep an output until all are there; then evaluate the loss over the batch, which counts
        as micro-batch 0.
        """
        state.awaiting[microbatch] = y, target
        count = len(self.weighing.shares)
        if len(state.awaiting) < count:
            return
        outputs, targets = zip(*(state.awaiting[m] for m in range(count)))
        self.evaluate_loss(action, state, list(outputs), list(targets), 0)
        state.awaiting = {}
        state.losses = dict.fromkeys(range(count), state.losses[0])
        state.loss_gradients = dict(enumerate(state.loss_gradients.get(0, ())))
        self._download_losses(state)

    def evaluate_loss(
        self, action: PlannedAction, state: CallState, y: Any, target: Any, microbatch: int
    ) -> None:
        assert self.loss is not None  # agreed at the start of the call
        inputs = state.inputs
        loss = self.loss
        weighing = self.weighing
        factor = weighing.shares[microbatch] * inputs.scale if inputs.training else 1.0
        weigh = (
            partial(weighing.take, microbatch, training=True)
            if loss.weighs and inputs.training
            else None
        )
        try:
            result = loss.call(y, target, factor, inputs.positions[microbatch], weigh)
        except MpipipeError:
            raise
        except Exception as error:  # an error of the loss is not blamed on the stage
            raise self._stage_error("the loss", action, error) from error
        if (
            type(result) is tuple
            and len(result) == 2
            and type(result[0]) is float
            and math.isfinite(result[0])
        ):
            value, gradient = result  # the usual case
            weight = None
        else:
            value, gradient, weight = loss.checked(result)
        state.losses[microbatch] = value
        if weigh is not None:
            left = float(
                weight != 0
            )  # the loss has multiplied its gradient; without a weight that counts it is zero
        elif weight is None and weighing.known:
            left = 1.0
        else:
            left = weighing.take(microbatch, weight, inputs.training)
        if inputs.training:
            state.loss_gradients[microbatch] = loss.scaled(
                gradient, left if loss.takes_factor else left * factor, y
            )
        if len(state.losses) == len(
            weighing.shares
        ):  # the backwards to come need not be done when these are wanted
            self._download_losses(state)

    def _download_losses(self, state: CallState) -> None:
        waiting = [
            m
            for m, value in state.losses.items()
            if type(value) is not float and arrays.is_device(value)
        ]
        if waiting:
            state.download = waiting, arrays.Download([state.losses[m] for m in waiting])

    def _recompute(self, action: PlannedAction, state: CallState) -> None:
        """Run the forward again, at the same position and so with the same random numbers. Nothing
        is sent.
        """
        key = action.stage, action.microbatch
        x, lease = state.saved[key]
        state.marks.append(self.now())
        position = state.inputs.positions[action.microbatch]._replace(recompute="now")
        saved = self.stages[action.chunk].forward(x, position)[1]
        state.marks.append(self.now())
        state.saved[key] = saved, lease

    def _backward(self, action: PlannedAction, state: CallState) -> None:
        """Run a whole backward, or an input gradient, which keeps what its weight gradient
        needs.
        """
        microbatch = action.microbatch
        last = action.last
        dy, lease = (
            (state.loss_gradients.pop(microbatch), ())
            if last
            else self.messages.take(action, state.local)
        )
        saved, kept = state.saved.pop((action.stage, microbatch))
        leases = (*lease, *kept) if lease and kept else lease or kept
        computes = self.stages[action.chunk].computes
        whole = action.op == "B"
        state.marks.append(self.now())
        if whole:
            dx = computes.backward(dy, saved)
        else:
            dx, pending = computes.backward_input(dy, saved)
            state.pending[action.stage, microbatch] = pending, leases
        state.marks.append(self.now())
        skips: dict[str, Tree] = {}
        if action.gives or (
            type(dx) is Branches and not action.first
        ):  # else of the side inputs of the batch
            dx, skips = parted(dx, action.gives, NAMES[action.op])
        if leases and (type(dx) is not np.ndarray or dx.base is not None):
            dx = copy_if_aliased(dx, leases)
        if not action.ends:
            self.messages.give(action, state.local, dx, skips, leases)
        elif action.first and self.input_grads:
            scale = state.inputs.scale
            state.input_gradients[microbatch] = dx if scale == 1 else unscaled(dx, scale)
        if whole and leases:
            self.messages.mailbox.release(leases)

    def _weight_gradient(self, action: PlannedAction, state: CallState) -> None:
        pending, leases = state.pending.pop((action.stage, action.microbatch))
        state.marks.append(self.now())
        self.stages[action.chunk].computes.backward_weight(pending)
        state.marks.append(self.now())
        self.messages.mailbox.release(leases)


def _annotated(run: Run, action: PlannedAction, state: CallState) -> None:
    """Run an action that NVIDIA's profilers show by its name."""
    with arrays.annotated(str(action)):
        run(state)
