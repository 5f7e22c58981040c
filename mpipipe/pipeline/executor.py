"""Runs the actions of a plan: one loop for every schedule.

What a forward saved is held until the backward that needs it; the buffers of received arrays go
back to the mailbox then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from mpipipe.errors import MpipipeError, PeerError
from mpipipe.pipeline.actions import GENERAL, PLAIN, is_plain
from mpipipe.pipeline.attached import AttachedStage
from mpipipe.pipeline.batch import Call
from mpipipe.pipeline.check import Checks
from mpipipe.pipeline.clock import HostClock
from mpipipe.pipeline.diagnostics import action_error
from mpipipe.pipeline.evaluation import LossEvaluation
from mpipipe.pipeline.gradient_sums import GradientSums
from mpipipe.pipeline.messages import StageMessages
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
    sums: GradientSums | None
    checks: Checks | None
    clock: HostClock
    input_grads: bool
    # The call under way, or one that has failed: kernels and messages may still touch its arrays.
    call: Call | None = None
    place: str = ""  # where this rank is, for the report of an interruption

    def __post_init__(self) -> None:
        self.place = f"rank {self.rank}"

    def begin(self, call: Call) -> None:
        """Begin a call: its messages, and the marks of its actions."""
        for stage in self.stages:
            stage.begin_call()
        self.messages.begin(call.plan, call.agreed.signature)
        if self.checks is not None:
            self.checks.begin(call)
        self.clock.begin(call.training)
        if self.sums is not None:
            self.sums.begin()
        self.call = call

    def program(self, call: Call) -> Program:
        """Return the actions of a call, each with the function that runs it."""
        plan = call.plan
        programs = self.messages.shapes.programs
        if (
            not (call.training and self.messages.known)
            or self.clock.recorder is not None
            or self.checks is not None
        ):
            return [(self._bound(step, may_be_plain=False), step) for step in plan.steps]
        if plan not in programs:
            programs[plan] = [(self._bound(step, may_be_plain=True), step) for step in plan.steps]
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
        self.stages[action.chunk].check_gradients()
        if self.sums is not None:
            start = self.clock.host_now()
            self.sums.complete(action.chunk)
            self.clock.add(f"all-reduce {action.stage}", start, self.clock.host_now())

    def run(self, program: Program, call: Call) -> None:
        """Run actions; errors name rank, stage and micro-batch."""
        if not program:
            return  # the second half of a step, where no stage of this rank has a backward
        action = program[0][1]
        try:
            for run, action in program:  # noqa: B007 (for the errors)
                run(call)
        except PeerError:
            raise
        except MpipipeError as error:
            # What ranks find out about each other belongs to no action.
            if not error.agreed:
                self._locate(error, action)
            raise
        except Exception as error:
            located = action_error(NAMES[action.op], error)
            self._locate(located, action)
            raise located from error
        except BaseException:
            # SystemExit and KeyboardInterrupt stay what they are; other ranks hear where it was.
            self.place = (
                f"rank {self.rank}, stage {action.stage}, micro-batch {action.unit}, "
                f"{NAMES[action.op]}"
            )
            raise

    def end(self, call: Call) -> None:
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
        if self.sums is not None:
            self.sums.cancel()

    def poll(self) -> None:
        """Let messages and sums advance; stages call this between layers."""
        self.messages.mailbox.poll()
        if self.sums is not None:
            self.sums.progress()

    def record(self, recorder: Recorder | None) -> None:
        """Let a recorder note actions and messages from now on; None ends that."""
        self.clock.record(recorder)
        self.messages.mailbox.recorder = recorder

    def _locate(self, error: MpipipeError, action: PlannedAction) -> None:
        """Add where an error happened, as far as it does not say that itself."""
        where = {"rank": self.rank, "stage": action.stage, "microbatch": action.unit}
        for name, value in where.items():
            if getattr(error, name) is None:
                setattr(error, name, value)
