"""The machinery of a pipeline on one rank: built once all ranks have agreed, and run call by
call.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array
from mpipipe.comm import Mailbox, NcclChoice, NcclSums, Tags, agree_on_nccl, make_transport
from mpipipe.errors import ArgumentError, MpipipeError
from mpipipe.job import own, runtime, settings
from mpipipe.nn import Position, kernels
from mpipipe.pipeline.agreement import Agreement
from mpipipe.pipeline.batch import (
    STEPS,
    Batch,
    BatchFacts,
    BatchReader,
    CallInputs,
    CallState,
    check_place,
)
from mpipipe.pipeline.check import CheckedLoss, CheckedMessages, CheckedStage, Checks
from mpipipe.pipeline.construction import Arguments, Partners, check_forwards_first
from mpipipe.pipeline.diagnostics import PipelineFlight, memory_error
from mpipipe.pipeline.executor import Executor, Program
from mpipipe.pipeline.gradient_sums import GradientSums
from mpipipe.pipeline.graphs import use_graphs
from mpipipe.pipeline.loss import Loss, OwnLosses, SharedLoss, Weighing, unscaled
from mpipipe.pipeline.messages import StageMessages
from mpipipe.pipeline.plan import ActionPlan, recomputes_all
from mpipipe.pipeline.result import PipelineState, StepResult
from mpipipe.pipeline.ties import TieNames, Ties
from mpipipe.pipeline.units import Slicing, split_as
from mpipipe.schedules import Schedule, before_backwards
from mpipipe.text import name_slice, units
from mpipipe.trace import Recorder

logger = logging.getLogger("mpipipe")


class Engine:
    """What a Pipeline is made of; the constructor and `close` are collective.

    `schedule` is the user's; recomputation runs another one, with an R before each backward.
    """

    def __init__(self, partners: Partners, arguments: Arguments) -> None:
        _, schedule, loss, recompute, _, _, input_grads, slice_lengths = arguments
        self.partners = partners
        self.steps_taken = 0
        self.input_grads = input_grads
        self.schedule: Schedule = schedule
        self.slicing = Slicing(schedule.slices, slice_lengths)
        pipe = partners.pipe
        replicas = partners.replicas
        stages = partners.stages
        rank = partners.pipe.rank
        numbers = schedule.stages_of(rank)
        device = partners.device
        pipe.comm.Set_name("mpipipe pipeline")
        pipe.context.pipelines += 1
        name = (
            f"pipeline {pipe.context.pipelines} ({schedule.name})"  # the how many-th of this rank
        )

        tags = Tags(
            schedule.placement,
            schedule.units,
            runtime.tag_upper_bound(pipe.comm),
            schedule.skip_ends,
        )
        ties = TieNames(partners.ties, tags.channels, tags.base)
        self.nccl = choose_nccl(partners)  # whether NCCL carries sums over replicas, and why
        sums_by_nccl = NcclSums(replicas) if self.nccl.sums and replicas is not None else None
        how = tags.channels + ties.channels, settings.SYNC_SENDS.is_on, device
        mailbox = Mailbox(make_transport(pipe.comm, *how, group=pipe), pipe)
        self.checks = checks = (
            Checks(rank, schedule.stages - 1, mailbox) if partners.check else None
        )
        self.messages = (
            StageMessages(mailbox) if checks is None else CheckedMessages(mailbox, checks)
        )
        self.ties = Ties(pipe, mailbox.transport, stages, numbers, ties)
        self.sums = (
            None
            if replicas is None
            else GradientSums(replicas, sums_by_nccl, pipe.size > 1, stages)
        )

        self.agreement = Agreement(pipe, replicas, name)
        self.weighing = Weighing(pipe, replicas, schedule.placement[-1])
        self.executor = Executor(
            partners,
            self.messages,
            None if loss is None else Loss(loss) if checks is None else CheckedLoss(loss, checks),
            self.weighing,
            self.sums,
            recompute=recompute or recomputes_all(schedule, rank),
            input_grads=input_grads,
        )
        poll = mailbox.poll if self.sums is None else self.executor.poll
        for stage, number in zip(stages, numbers):
            ends = number == schedule.trained_from and (number > 0 or not input_grads)
            runs_again = recompute or any(again == number for again, _ in schedule.recomputed)
            stage.attach(number, poll, ends, runs_again)
            if checks is not None:
                stage.computes = CheckedStage(stage, checks)
            elif device == "cuda" and settings.GRAPHS.is_on:
                use_graphs(stage)
        bare = any(
            schedule.has_backward(n) and not s.shows_gradients for n, s in zip(numbers, stages)
        )
        names = stages[0].input_names if numbers and numbers[0] == 0 else None
        self.batches = BatchReader(schedule, rank, loss, bare, names, self.slicing)
        self.tags = tags
        self.recompute = recompute
        self.training_plan = ActionPlan(
            before_backwards(schedule) if recompute else schedule, rank, tags
        )
        self.unread: list[SharedLoss] = []  # of training steps, on the GPU
        self.forward_plans: dict[
            int, ActionPlan
        ] = {}  # of calls without backwards, by the number of micro-batches
        # (facts, state, plan, number of its actions that have run) of a step between forward_train
        # and backward
        self.halfway: tuple[BatchFacts, CallState, ActionPlan, int] | None = None

        # no circle holds an engine that was not closed
        executor = self.executor
        recorders = pipe.context.recorders
        abandon = partial(executor.abandon, recorders)
        self.state = PipelineState(name, rank, partners.groups, lambda: executor.place, abandon)
        self.flight = PipelineFlight(pipe, self.messages, self.state)
        self._forget: Callable[[], object] = lambda: None  # takes the recorder out of the process
        agreement = weakref.ref(self.agreement)  # the groups of such an engine stay
        for group in partners.groups:
            group.progress = lambda: f"call {getattr(agreement(), 'count', 0)} of {name}"
            group.related = partners.groups

    def agree(
        self,
        call: str,
        inputs: Any = None,
        targets: Any = None,
        scale: Any = 1.0,
        accumulate: bool = False,
    ) -> tuple[Batch, BatchFacts]:
        """Check this rank's arguments of a call, and agree with the peers that all ranks make it
        (agreement.py).

        For "backward" the gradients of the outputs are in place of `inputs`.
        """
        self.state.check(call)
        self.executor.clock.enter()
        error = None
        batch = Batch()
        try:
            if (self.halfway is not None) != (call == "backward"):
                raise ArgumentError(
                    f"{call} was called {'without' if self.halfway is None else 'between'} a "
                    "forward_train"
                    + (" before it" if self.halfway is None else " and its backward"),
                    remedy="call forward_train, then backward once, and no other method of this "
                    "pipeline between them",
                )
            if call in STEPS and self.recorder is not None:
                self.recorder.begin_step()
            if call in (*STEPS, "evaluate", "forward"):
                batch = self.batches.read(call, inputs, targets)
            if call == "forward_train" and self.executor.rank == self.schedule.placement[-1]:
                check_forwards_first(self.schedule, "forward_train")
            if self.halfway is not None:
                self.take_gradients(self.halfway[1], inputs, scale)
            if call in (*STEPS, "backward"):
                for stage in self.partners.stages:
                    stage.check_storage()
            if not isinstance(scale, (int, float, np.number)) or not (
                scale > 0 and math.isfinite(scale)
            ):
                raise ArgumentError("scale", found=repr(scale), expected="a finite number above 0")
        except Exception as caught:
            error = caught
            scale = 1.0
        with self.state:
            agreed, problem = self.agreement.reach(
                call, batch.facts, error, scale, bool(accumulate)
            )
        if problem is not None:
            raise problem
        return batch, agreed

    def begin(
        self, call: str, batch: Batch, agreed: BatchFacts, scale: float = 1.0
    ) -> tuple[ActionPlan, CallState]:
        training = call in STEPS
        plan = self.training_plan if training else self.forward_plan(agreed.microbatches)
        self.weighing.begin(agreed, batch.counts or [])
        replica = self.partners.replica
        slices = self.slicing.count
        numbers = units(agreed.microbatches * slices, slices)
        positions = [
            Position(self.steps_taken, unit, replica, training, training) for unit in numbers
        ]
        outputs = call in ("forward", "forward_train")
        inputs = CallInputs(training, batch.inputs or [], batch.targets, outputs, scale, positions)
        try:
            for stage in self.partners.stages:
                stage.begin_call()
            self.messages.begin(plan, agreed.signature)
        except Exception as error:
            short = memory_error(f"the start of {call}", error)
            located = short or error
            if isinstance(located, MpipipeError) and located.rank is None:
                located.rank = self.executor.rank
            if short is None:
                raise
            raise short from error
        if self.checks is not None:
            self.checks.begin(inputs)
        state = self.executor.begin(plan.steps, inputs)
        self.flight.begin(call, self.agreement.count, plan, state.marks)
        return plan, state

    def forward_plan(self, microbatches: int) -> ActionPlan:
        if microbatches not in self.forward_plans:
            schedule = self.schedule.forward_only_part(microbatches)
            self.forward_plans[microbatches] = ActionPlan(schedule, self.executor.rank, self.tags)
        return self.forward_plans[microbatches]

    def finish(self, program: Program, state: CallState, agreed: BatchFacts) -> CallState:
        """Run the last actions of a call, and end it."""
        self.executor.run(program, state)
        self.executor.end(state)
        self.messages.end(agreed.signature)
        if self.checks is not None:
            self.checks.end()
        return state

    def run(self, call: str, batch: Batch, agreed: BatchFacts, scale: float = 1.0) -> CallState:
        (plan, state), loss = self.begin(call, batch, agreed, scale), self.executor.loss
        with nullcontext() if loss is None or batch.targets is None else loss.taking_head():
            return self.finish(self.executor.program(plan, state.inputs.training), state, agreed)

    def step(self, inputs: Any, targets: Any, scale: Any, accumulate: bool) -> StepResult:
        """Make a training step."""
        batch, agreed = self.agree("step", inputs, targets, scale, accumulate)
        with self.state:
            self.read_losses(wait=False)
            with self.making_gradients(accumulate) as before:
                state = self.run("step", batch, agreed, scale)
                if (
                    self.sums is not None
                ):  # before losses are fetched: the device must wait for no rank that may fail
                    self.sums.wait()
                shared = self.share_losses("step", state)
            total, problem = self.weighing.settle(shared, self.partners.stages)
            self.end_step(before)
        self.end(problem)
        if not shared.was_read:
            self.unread.append(shared)
        input_grads: list | Literal[False] | None = False
        if self.input_grads:
            input_grads = self.input_gradients(state, total)
        return StepResult(shared, self.state, partial(self.read_losses, wait=True), input_grads)

    @contextmanager
    def making_gradients(self, accumulate: bool) -> Iterator[list[tuple[Array, Array]]]:
        """Within this context stages add to gradients that begin with zeros, and are summed over
        ties at its end.

        To `accumulate`, a copy of those that are there is kept: (gradients, copy) of each array,
        sums already.
        """
        stages = self.partners.stages
        before: list[tuple[Array, Array]] = []
        if accumulate:
            for gradients in (flat for stage in stages for flat in stage.shown_gradients):
                if not any(arrays.shares_memory(gradients, other) for other, _ in before):
                    before.append((gradients, arrays.copy(gradients)))
        try:
            for stage in stages:
                stage.begin_gradients()
            yield before
            self.ties.sum_gradients()
            if self.checks is not None:
                self.checks.look_at_sums()
        finally:
            for stage in stages:
                stage.leave_step()

    def end_step(self, before: list[tuple[Array, Array]]) -> None:
        for gradients, copy in before:
            kernels.of_array(gradients).accumulate(gradients, copy)
        self.steps_taken += 1
        if self.recorder is not None:
            self.recorder.end_step()

    # -- a training step in two halves: its forwards, and its backwards from gradients that the caller makes

    def forward_train(self, inputs: Any) -> tuple[BatchFacts, CallState]:
        """Run the forwards of a training step, and keep what its backwards need."""
        batch, agreed = self.agree("forward_train", inputs)
        with self.state:
            plan, state = self.begin("forward_train", batch, agreed)
            count = 1 + max(place for place, action in enumerate(plan.steps) if action.op == "F")
            self.executor.run(self.executor.program(plan, training=True)[:count], state)
            self.messages.mailbox.flush()  # nothing moves them while the caller computes
        self.flight.running = False
        self.halfway = agreed, state, plan, count
        for hooks in self.write_hooks():
            hooks.append(_refuse_write)
        return agreed, state

    def write_hooks(self) -> list[list]:
        """The lists of functions that are called before anything writes to parameters of this
        rank.
        """
        things = [thing for stage in self.partners.stages for thing in (stage.given, *stage.models)]
        return [
            hooks
            for hooks in (getattr(thing, "before_write", None) for thing in things)
            if hooks is not None
        ]

    def take_gradients(self, state: CallState, gradients: Any, scale: float) -> None:
        """Take the caller's gradients of the outputs; raises ArgumentError where they do not
        fit.
        """
        root = self.schedule.placement[-1]
        check_place(
            "gradients",
            gradients,
            self.executor.rank == root,
            f"rank {root}, which holds the last stage",
        )
        outputs = [state.outputs[unit] for unit in range(len(state.outputs))]
        parts = split_as(gradients, self.slicing.whole(outputs)) if outputs else []
        for unit, (gradient, y) in enumerate(zip(self.slicing.cut_as(parts, outputs), outputs)):
            try:
                if self.checks is not None and scale == 1:
                    self.checks.finite(
                        gradient, "doutput", "a gradient that backward was given is not finite"
                    )
                state.loss_gradients[unit] = Loss.scaled(gradient, scale, y)
            except MpipipeError as error:
                error.microbatch = state.inputs.positions[unit].microbatch
                name_slice(error)
                raise

    def backward(self, gradients: Any, scale: Any, accumulate: bool) -> list | None:
        """Run the backwards of the step whose forwards have run; return the gradients of its
        inputs.
        """
        self.agree("backward", gradients, None, scale, accumulate)
        assert self.halfway is not None  # agreed
        (agreed, state, plan, count), self.halfway = self.halfway, None
        state.outputs, state.inputs, self.flight.running = (
            {},
            state.inputs._replace(scale=scale),
            True,
        )
        for hooks in self.write_hooks():
            hooks[:] = [hook for hook in hooks if hook is not _refuse_write]
        if self.checks is not None:
            self.checks.gradients = scale == 1
        with self.state:
            with self.making_gradients(accumulate) as before:
                self.finish(self.executor.program(plan, training=True)[count:], state, agreed)
                if self.sums is not None:
                    self.sums.wait()
            self.end_step(before)
        self.end()
        return self.input_gradients(state, 1.0)

    def input_gradients(self, state: CallState, scale: float) -> list | None:
        """The gradients of the inputs by micro-batch, without a factor that they carry; None where
        there are none.
        """
        grads = self.slicing.whole(
            [state.input_gradients[unit] for unit in range(len(state.input_gradients))]
        )
        return ([unscaled(grad, scale) for grad in grads] if scale != 1 else grads) or None

    def share_losses(self, call: str, state: CallState) -> SharedLoss:
        """Tell all ranks the losses of a call."""
        microbatches = len(state.inputs.positions) // self.slicing.count
        own_losses = None
        if state.inputs.targets is not None:
            waiting, download = state.download or ([], None)
            when = f"step {self.steps_taken + 1}" if state.inputs.training else call
            where = self.executor.rank, self.schedule.stages - 1, when
            own_losses = OwnLosses(state.losses, waiting, download, where)
        return SharedLoss(
            self.weighing,
            own_losses,
            microbatches,
            f"{call} (call {self.agreement.count}) of {self.state.name}",
        )

    def read_losses(self, wait: bool) -> None:
        """Look at losses that steps before have left on the GPU: all of them, or those that are
        there by now.
        """
        while self.unread and (wait or self.unread[0].is_here()):
            self.unread.pop(0).read()

    def end(self, problem: MpipipeError | None = None) -> None:
        """Note how long the call took, and let go of its arrays; raise what all ranks have found
        wrong.
        """
        self.executor.clock.leave()
        self.executor.state = None
        self.flight.running = False
        if problem is not None:
            raise problem

    @property
    def recorder(self) -> Recorder | None:
        """What notes actions, messages, waits and steps of this rank; None where nothing does."""
        return self.executor.clock.recorder

    def record(self, recorder: Recorder | None) -> None:
        """Let `recorder` note them from now on."""
        self._forget()
        self.executor.record(recorder)
        recorders = self.partners.pipe.context.recorders
        if recorder is not None:
            recorders.add(recorder)
            self._forget = weakref.finalize(
                self, recorders.discard, recorder
            )  # this pipeline may never be closed

    def share_durations(self) -> np.ndarray:
        """Return the mean seconds of forward, input gradient and weight gradient of each stage, (3,
        stages).
        """
        pipe = self.partners.pipe
        mine = self.executor.clock.means(self.schedule.stages, self.recompute)
        everyone = np.zeros((pipe.size, *mine.shape))
        with self.state:
            pipe.wait(
                own(pipe.comm.Iallgather(mine, everyone)),
                "the durations of all stages",
                everyone=True,
            )
        return everyone.sum(0)

    def close(self) -> None:
        """Free the communicators."""
        try:
            self.agree("close")
        except MpipipeError as error:
            if (
                self.halfway is not None and self.state.is_open
            ):  # receives of gradients are posted, which never come
                self.state.fail(error)
            raise
        with self.state:
            self.read_losses(wait=True)
        self.record(None)
        self.state.state = "closed"
        for stage in self.partners.stages:
            stage.detach()
        if self.sums is not None:
            self.sums.close()
        self.messages.mailbox.transport.close()
        for group in self.partners.groups:
            group.close()


def _refuse_write() -> None:
    raise ArgumentError(
        "parameters would be written between forward_train and its backward, which needs them as "
        "they were",
        remedy="call backward first, and then step of the optimizer",
    )


# -- The choice of what carries the sums of a pipeline: MPI, or NCCL between GPUs; the same on all ranks


def choose_nccl(partners: Partners) -> NcclChoice:
    """Return whether NCCL carries sums over replicas; collective if there are replicas or GPUs."""
    pipe = partners.pipe
    device = partners.device
    if partners.check:  # the host would wait for a device that waits for another rank
        return NcclChoice(False, "check mode looks at arrays on the host")
    if partners.replicas is None and device != "cuda" and not settings.NCCL.is_on:
        return NcclChoice(False, "the ranks compute on the CPU")
    choice = agree_on_nccl(partners.groups, device)
    if device == "cuda" and pipe.rank == 0:
        logger.info("NCCL: %s", choice)
    return choice
