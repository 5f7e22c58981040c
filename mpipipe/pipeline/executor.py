"""Runs the steps of a plan: takes what an action needs, calls the stage, hands on what it made.

There is one loop for every schedule. What a forward saved is held until the backward that needs it; the buffers of
received arrays go back to the mailbox then. Where the forward is run again, its input alone is held until then.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Tree
from mpipipe.arrays.trees import read_only
from mpipipe.comm.mailbox import Lease
from mpipipe.errors import ArgumentError, MpipipeError, PeerError, StageError
from mpipipe.pipeline.gradient_sums import GradientSums
from mpipipe.pipeline.loss import Loss, check_finite, unscaled
from mpipipe.pipeline.messages import Branches, SkipMessages, StageMessages, copy_if_aliased, parted, remedy_of
from mpipipe.pipeline.plan import PlannedAction
from mpipipe.pipeline.shortage import memory_error
from mpipipe.pipeline.weighing import CallInputs, CallState
from mpipipe.stages import StageAdapter
from mpipipe.trace import Recorder

NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient", "R": "recomputation"}


class Executor:
    """The actions of one rank.

    Parameters
    ----------
    rank : of this process in the pipeline
    stages : of this rank
    messages : activations and gradients from and to other ranks
    loss : of the last stage, or None
    recompute : whether every forward with a backward is run again, for errors
    sums : of gradients over the replicas, or None
    device : "cpu" or "cuda", where the stages compute

    Attributes
    ----------
    state : of the call under way, or of one that has failed: kernels and messages may still touch its arrays
    peak : largest number of whole (stage, micro-batch) activations alive at once, in the last training step
    peak_under_way : the same with those of which the input alone is kept
    clock : how long the actions took
    place : where this rank is, for the report of an interruption
    """

    def __init__(
        self,
        rank: int,
        stages: Sequence[StageAdapter],
        messages: StageMessages,
        loss: Loss | None,
        recompute: bool = False,
        sums: GradientSums | None = None,
        device: str = "cpu",
    ):
        self.rank, self.stages, self.messages, self.loss = rank, stages, messages, loss
        self.skip_messages = SkipMessages(messages)
        self.recompute, self.sums = recompute, sums
        self.actions: dict[str, Callable[[PlannedAction, CallState], None]] = {
            "F": self._forward,
            "B": self._backward,
            "I": self._input_gradient,
            "W": self._weight_gradient,
            "R": self._recompute,
        }
        self.on_gpu = device == "cuda"
        self.clock = DeviceClock() if self.on_gpu else HostClock()
        self.now = self.clock.now
        self.marks: list = []
        self.place = f"rank {rank}"
        self.peak = self.peak_under_way = 0
        self.state: CallState | None = None

    def run(self, steps: Sequence[PlannedAction], inputs: CallInputs) -> CallState:
        """Run all steps of a plan. What a stage raises comes out as an error that names rank, stage, micro-batch."""
        self.state = state = CallState(inputs)
        if self.sums is not None:
            self.sums.begin()
        actions = self.actions if self.clock.recorder is None or not self.on_gpu else self._annotated()
        step = steps[0]
        try:
            for step in steps:
                if step.completes and self.sums is not None:
                    self.sums.watch(step)
                actions[step.op](step, state)
                if step.completes:
                    self.stages[step.chunk].end_gradients()
                    if self.sums is not None:
                        self._start_sums(self.sums, step)
        except PeerError:
            raise
        except MpipipeError as error:
            if not error.agreed:  # what ranks find out about each other belongs to no action
                self._complete(error, step)
            raise
        except Exception as error:
            raise self._stage_error(NAMES[step.op], step, error) from error
        except BaseException:  # SystemExit, KeyboardInterrupt: they stay what they are, the other ranks hear where
            self.place = f"rank {self.rank}, stage {step.stage}, micro-batch {step.microbatch}, {NAMES[step.op]}"
            raise
        self.clock.end()
        if inputs.training:
            self.peak, self.peak_under_way = state.peak, state.peak_under_way
        return state

    def _annotated(self) -> dict[str, Callable[[PlannedAction, CallState], None]]:
        """The actions, each shown by its name in NVIDIA's profilers."""

        def annotate(action: Callable[[PlannedAction, CallState], None]) -> Callable[[PlannedAction, CallState], None]:
            def run(step: PlannedAction, state: CallState) -> None:
                with arrays.annotated(str(step)):
                    action(step, state)

            return run

        return {op: annotate(action) for op, action in self.actions.items()}

    def _stage_error(self, what: str, step: PlannedAction, error: Exception) -> StageError:
        short = memory_error(what, error, self.stages, self.state, self.recompute)
        found = short or StageError(f"{what} raised {type(error).__name__}: {error}", remedy=remedy_of(error))
        self._complete(found, step)
        return found

    def _complete(self, error: MpipipeError, step: PlannedAction) -> None:
        """Add where it happened, as far as the error does not say that itself."""
        error.rank = self.rank if error.rank is None else error.rank
        error.stage = step.stage if error.stage is None else error.stage
        error.microbatch = step.microbatch if error.microbatch is None else error.microbatch

    # -- actions ------------------------------------------------------------------------------------------------

    def _forward(self, step: PlannedAction, state: CallState) -> None:
        inputs, microbatch, envelope = state.inputs, step.microbatch, step.receive
        lease: Lease = ()
        if step.first:
            x = inputs.inputs[microbatch]
        elif envelope is None:
            x = state.local.pop((step.stage, microbatch, "F"))
        else:
            x, lease = self.messages.receive_activation(envelope)
        if step.takes:
            x, lease = self.skip_messages.join(step, state, x, lease)
        self.marks.append(self.now())
        result = self.stages[step.chunk].forward(x, inputs.positions[microbatch])
        if type(result) is not tuple or len(result) != 2:
            raise ArgumentError(
                "the forward of a stage returns (output, saved)",
                found=type(result).__name__,
                expected="a tuple of two",
                remedy="return (y, None) where nothing is saved",
            )
        y, saved = result
        skips: dict[str, Tree] | None = None
        if step.gives or type(y) is Branches:
            y, skips = parted(y, step.gives, NAMES["F"])
        if step.last and inputs.targets is not None:
            self._evaluate_loss(step, state, read_only(y), inputs.targets[microbatch])
        self.marks.append(self.now())
        if lease:
            y = copy_if_aliased(y, lease)
        if step.send is not None:
            self.messages.send_activation(step.send, y)
        elif not step.last:
            state.local[step.stage + 1, microbatch, "F"] = read_only(y)
        elif not inputs.training:
            state.outputs[microbatch] = y
        if skips:
            self.skip_messages.give(step, state, skips, lease)
        if inputs.training and step.keeps:
            state.saved[step.stage, microbatch] = (x if step.recomputed else saved), lease
            state.under_way += 1
            state.peak_under_way = max(state.peak_under_way, state.under_way)
            if not step.recomputed:
                state.count_activation()
        elif lease:
            self.messages.mailbox.release(lease)

    def _evaluate_loss(self, step: PlannedAction, state: CallState, y: Tree, target: Tree) -> None:
        assert self.loss is not None  # agreed at the start of the call
        inputs, microbatch = state.inputs, step.microbatch
        weighing = inputs.weighing
        factor = weighing.shares[microbatch] * inputs.scale if inputs.training else 1.0
        try:
            result = self.loss.call(y, target, factor)
        except MpipipeError:
            raise
        except Exception as error:  # an error of the loss is not blamed on the stage
            raise self._stage_error("the loss", step, error) from error
        state.losses[microbatch], gradient, weight = self.loss.checked(result)
        known = weight is None and weighing.known
        change = 1.0 if known else weighing.take(microbatch, weight, inputs.training)
        if inputs.training:
            left = change if self.loss.takes_factor else change * factor
            state.loss_gradients[microbatch] = self.loss.scaled(gradient, left, y)
        if len(state.losses) == len(weighing.shares):  # the backwards to come need not be done when these are wanted
            waiting = [m for m, value in state.losses.items() if type(value) is not float and arrays.is_device(value)]
            if waiting:
                state.losses_underway = waiting, arrays.Download([state.losses[m] for m in waiting])

    def losses(self, state: CallState, last_stage: int) -> list[float]:
        """Return the losses of a call, by micro-batch; waits for those that are on the device, once."""
        found = state.losses
        if state.losses_underway is not None:
            waiting, download = state.losses_underway
            for microbatch, value in zip(waiting, download.result()):
                found[microbatch] = float(value.item())
                try:
                    check_finite(found[microbatch])
                except MpipipeError as error:
                    error.rank, error.stage, error.microbatch = self.rank, last_stage, microbatch
                    raise
        return [found[microbatch] for microbatch in range(len(found))]

    def _recompute(self, step: PlannedAction, state: CallState) -> None:
        """Run the forward again, at the same position and so with the same random numbers. Nothing is sent."""
        key = step.stage, step.microbatch
        x, lease = state.saved[key]
        self.marks.append(self.now())
        saved = self.stages[step.chunk].forward(x, state.inputs.positions[step.microbatch])[1]
        self.marks.append(self.now())
        state.saved[key] = saved, lease
        state.count_activation()

    def _backward(self, step: PlannedAction, state: CallState) -> None:
        stage = self.stages[step.chunk].computes
        dy, saved, leases = self._begin_backward(step, state)
        dx = stage.backward(dy, saved)
        self.marks.append(self.now())
        self._send_gradient(step, state, dx, leases)
        if leases:
            self.messages.mailbox.release(leases)
        state.drop_activation()

    def _input_gradient(self, step: PlannedAction, state: CallState) -> None:
        stage = self.stages[step.chunk].computes
        dy, saved, leases = self._begin_backward(step, state)
        dx, pending = stage.backward_input(dy, saved)
        self.marks.append(self.now())
        self._send_gradient(step, state, dx, leases)
        state.pending[step.stage, step.microbatch] = pending, leases

    def _weight_gradient(self, step: PlannedAction, state: CallState) -> None:
        pending, leases = state.pending.pop((step.stage, step.microbatch))
        self.marks.append(self.now())
        self.stages[step.chunk].computes.backward_weight(pending)
        self.marks.append(self.now())
        self.messages.mailbox.release(leases)
        state.drop_activation()

    def _begin_backward(self, step: PlannedAction, state: CallState) -> tuple[Tree, Any, Lease]:
        """Return (gradient of the output, what the forward saved, leases on the arrays of both)."""
        microbatch, envelope = step.microbatch, step.receive
        lease: Lease = ()
        if step.last:
            dy = state.loss_gradients.pop(microbatch)
        elif envelope is None:
            dy = state.local.pop((step.stage + 1, microbatch, "B"))
        else:
            dy, lease = self.messages.receive_gradient(envelope)
        if step.takes:
            dy, lease = self.skip_messages.join(step, state, dy, lease)
        saved, kept = state.saved.pop((step.stage, microbatch))
        self.marks.append(self.now())
        return dy, saved, (*lease, *kept) if lease and kept else lease or kept

    def _send_gradient(self, step: PlannedAction, state: CallState, dx: Tree, leases: Lease) -> None:
        skips: dict[str, Tree] | None = None
        if step.gives or type(dx) is Branches:
            dx, skips = parted(dx, step.gives, NAMES[step.op])
        if leases:
            dx = copy_if_aliased(dx, leases)
        if step.send is not None:
            self.messages.send_gradient(step.send, dx)
        elif not step.ends:
            state.local[step.stage, step.microbatch, "B"] = read_only(dx)
        elif step.first:
            state.input_gradients[step.microbatch] = unscaled(dx, state.inputs.scale)
        if skips:
            self.skip_messages.give(step, state, skips, leases)

    # -- sums over replicas, progress ---------------------------------------------------------------------------

    def _start_sums(self, sums: GradientSums, step: PlannedAction) -> None:
        start = self.clock.host_seconds()
        sums.complete(step)
        self.clock.add(f"all-reduce {step.stage}", start, self.clock.host_seconds())

    def poll(self) -> None:
        """Let messages and sums advance; stages call this between layers."""
        self.messages.mailbox.poll()
        if self.sums is not None:
            self.sums.progress()


# -- How long actions take: by the host's clock, or by events on a GPU, where the host runs ahead of the work ---------
#
# A call leaves two marks for each action. They become seconds when somebody asks, or when many calls have piled up.


MOST_CALLS = 8  # whose marks wait to be read


class Call(NamedTuple):
    """What is known of one call: its marks, and (name, start, end) of what was noted besides."""

    start: Any
    steps: Sequence[PlannedAction]
    training: bool
    marks: list
    others: list[tuple[str, float, float]]


class HostClock:
    """Durations of the actions of one rank.

    Attributes
    ----------
    now : function that makes a mark
    waits : whether reading marks waits for the device
    busy : seconds of all actions of the last call
    span : seconds from the first action of the last call to the end of the last one, where this clock knows
    totals : (op, stage) -> [seconds, count] over all training steps
    recorder : trace.Recorder, or None
    """

    now: Callable[[], Any] = staticmethod(perf_counter)
    waits = False

    def __init__(self) -> None:
        self.busy = self.span = 0.0
        self.totals: dict[tuple[str, int], list] = defaultdict(lambda: [0.0, 0])
        self.recorder: Recorder | None = None
        self.ended: deque[Call] = deque()  # calls that are not yet read
        self.running: Call | None = None
        self.counted: tuple[Sequence[PlannedAction], list[tuple[str, int]], np.ndarray] = ((), [], np.zeros(0, int))

    def begin(self, steps: Sequence[PlannedAction], training: bool) -> list:
        """Start a call; return the list that takes its marks, two for each action, in order."""
        if self.running is not None:  # it has failed
            self.end()
        while len(self.ended) > MOST_CALLS or (self.ended and self._can_read(self.ended[0])):
            self._read(self.ended.popleft())
        self.running = Call(self._start(), steps, training, [], [])
        return self.running.marks

    def end(self) -> None:
        """End the call."""
        if self.running is not None:
            self.ended.append(self.running)
            self.running = None
            if self.recorder is not None and not self.waits:
                self.settle()

    def host_seconds(self) -> float:
        """What the recorder's clock shows, if there is one."""
        return perf_counter() if self.recorder is None else self.recorder.now()

    def add(self, name: str, start: float, end: float) -> None:
        """Note something besides the actions, for the recorder; times of `host_seconds`."""
        if self.recorder is not None and self.running is not None:
            self.running.others.append((name, start, end))

    def settle(self) -> None:
        """Make the numbers of all calls that have ended final; on a GPU this waits for the last action."""
        while self.ended:
            self._read(self.ended.popleft())

    def _can_read(self, call: Call) -> bool:
        """Whether marks should be read before there are many."""
        return False

    def _start(self) -> Any:
        return None

    def _seconds(self, start: Any, marks: list) -> np.ndarray:
        """Seconds of the host's clock of each mark."""
        return np.array(marks)

    def _kinds(self, steps: Sequence[PlannedAction]) -> tuple[list[tuple[str, int]], np.ndarray]:
        """Return every (op, stage) of these steps, and the number of each step among them."""
        if self.counted[0] is not steps:  # one plan is run again and again
            kinds: dict[tuple[str, int], int] = {}
            numbers = np.array([kinds.setdefault((step.op, step.stage), len(kinds)) for step in steps], int)
            self.counted = steps, list(kinds), numbers
        return self.counted[1:]

    def _read(self, call: Call) -> None:
        count = len(call.marks) // 2  # fewer than actions after an error
        times = self._seconds(call.start, call.marks[: 2 * count]).reshape(count, 2)
        durations = times[:, 1] - times[:, 0]
        self.busy = float(durations.sum())
        if call.training:
            kinds, numbers = self._kinds(call.steps)
            seconds = np.bincount(numbers[:count], durations, len(kinds)).tolist()
            counts = np.bincount(numbers[:count], minlength=len(kinds)).tolist()
            for kind, total, times_run in zip(kinds, seconds, counts):
                entry = self.totals[kind]
                entry[0] += total
                entry[1] += times_run
        if self.recorder is not None:
            spans = [(str(step), begun, ended) for step, (begun, ended) in zip(call.steps, times.tolist())]
            for name, begun, ended in sorted([*spans, *call.others], key=lambda span: span[2]):
                self.recorder.add(name, begun, ended)


class DeviceClock(HostClock):
    """The same for actions whose work is on the current stream: marks are events, read once the work is done."""

    waits = True

    @staticmethod
    def now() -> Any:
        return arrays.record(timing=True)

    def _can_read(self, call: Call) -> bool:
        return not call.marks or arrays.is_done(call.marks[-1])

    def _start(self) -> Any:
        return self.host_seconds(), self.now()

    def _seconds(self, start: Any, marks: list) -> np.ndarray:
        self.span = 0.0
        if not marks:
            return np.zeros(0)
        zero, first = start
        if not arrays.is_done(marks[-1]):
            marks[-1].synchronize()
        self.span = arrays.seconds_between(first, marks[-1])
        return np.array([zero + arrays.seconds_between(first, mark) for mark in marks])
