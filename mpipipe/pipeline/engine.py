"""The machinery of a pipeline on one rank: built once all ranks have agreed, and run call by call."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from time import perf_counter
from typing import Any

import numpy as np

from mpipipe.comm.mailbox import Mailbox
from mpipipe.comm.nccl.channel import NcclChoice, agree_on_nccl
from mpipipe.comm.nccl.sums import NcclSums
from mpipipe.comm.tags import Tags, neighbours
from mpipipe.comm.transport import gpu_aware
from mpipipe.comm.transport.choose import make_transport
from mpipipe.comm.transport.nccl import Pair
from mpipipe.errors import ArgumentError, MpipipeError
from mpipipe.job import runtime, settings
from mpipipe.job.group import Group
from mpipipe.job.requests import own
from mpipipe.nn import Position
from mpipipe.pipeline.batch import Batch, BatchReader
from mpipipe.pipeline.call_agreement import TRAINS, Agreed, Agreement, of_this_rank
from mpipipe.pipeline.check import CheckedLoss, CheckedMessages, Checks, attach
from mpipipe.pipeline.construction import Partners
from mpipipe.pipeline.executor import Executor
from mpipipe.pipeline.flight import PipelineFlight
from mpipipe.pipeline.gradient_sums import GradientSums
from mpipipe.pipeline.graphs import use_graphs
from mpipipe.pipeline.loss import Loss, unscaled
from mpipipe.pipeline.messages import StageMessages
from mpipipe.pipeline.pending import Life, PendingStep
from mpipipe.pipeline.plan import Plan, recomputes_all
from mpipipe.pipeline.shortage import memory_error
from mpipipe.pipeline.ties import TieNames, Ties
from mpipipe.pipeline.weighing import CallInputs, CallState, SharedLoss, Weighing
from mpipipe.schedules import Schedule
from mpipipe.schedules.recompute import before_backwards
from mpipipe.trace import Recorder


class Engine:
    """What a Pipeline is made of; the constructor and `close` are collective.

    Parameters
    ----------
    partners : the ranks that the pipeline is built with, and this rank's stages
    schedule, loss, recompute : as for Pipeline; recomputation is a schedule of its own, with an R before each backward

    Attributes
    ----------
    pipe : group of the ranks of the pipeline
    replicas : group of the ranks with the same stages, or None
    name : of the pipeline, for errors
    life : whether the pipeline is open
    nccl : whether NCCL carries sums over replicas and messages, and why or why not
    runs_ahead : whether a launched step begins before the ranks have agreed on it; GPUs wait, as in any call
    losses_underway : of launched steps
    host_elapsed : seconds of the last call, by the host's clock
    """

    def __init__(
        self, partners: Partners, schedule: Schedule, loss: Callable[..., Any] | None, recompute: bool
    ) -> None:
        self.pipe, self.replicas, self.stages = partners.pipe, partners.replicas, partners.stages
        self.groups, self.schedule = partners.groups, schedule
        self.comm, self.rank, self.recompute = self.pipe.comm, self.pipe.rank, recompute
        self.comm.Set_name("mpipipe pipeline")
        self.pipe.context.pipelines += 1
        self.name = f"pipeline {self.pipe.context.pipelines} ({schedule.name})"  # the how many-th of this rank
        placement, skips = schedule.placement, schedule.skip_ends
        self.tags = Tags(placement, schedule.microbatches, runtime.tag_upper_bound(self.comm), skips)
        device = partners.devices[self.rank]
        names = TieNames(partners.ties, self.tags.channels, self.tags.base)
        pairs = sorted({*neighbours(placement, skips), *names.pairs})
        self.nccl = choose_nccl(self.pipe, self.replicas, device, partners.devices, pairs, partners.check)
        self.nccl_sums = NcclSums(self.replicas) if self.nccl.sums and self.replicas is not None else None
        channels = self.tags.channels + names.channels
        warmup = 2 if settings.graphs() else 1  # the second one records graphs
        carried = pairs if self.nccl.messages else ()
        mailbox = make_mailbox(self.pipe, channels, device, partners.devices, carried)
        self.checks = checks = Checks(self.rank, schedule.stages - 1, mailbox) if partners.check else None
        self.messages = StageMessages(mailbox, warmup) if checks is None else CheckedMessages(mailbox, warmup, checks)
        self.agreement = Agreement(self.pipe, self.replicas, self.name)
        numbers = schedule.stages_of(self.rank)
        self.ties = Ties(self.pipe, mailbox.transport, self.stages, numbers, names)
        replicas, stages = self.replicas, self.stages
        self.sums = None if replicas is None else GradientSums(replicas, self.nccl_sums, mailbox, stages)
        self.executor = Executor(
            self.rank,
            self.stages,
            self.messages,
            loss=None if loss is None else Loss(loss) if checks is None else CheckedLoss(loss, checks),
            recompute=recompute or recomputes_all(schedule, self.rank),
            sums=self.sums,
            device=device,
        )
        poll = mailbox.poll if self.sums is None else self.executor.poll
        for stage, number in zip(self.stages, numbers):
            stage.attach(number, poll, ends=0 < number == schedule.trained_from)
            if checks is not None:
                attach(checks, stage)
            elif device == "cuda" and settings.graphs():
                use_graphs(stage, mailbox.waits_on_host)
        self.life = Life(self.name, self.rank, self.groups, self.executor)
        self.flight = PipelineFlight(self.pipe, self.executor, self.life)
        bare = any(schedule.has_backward(n) and not s.shows_gradients for n, s in zip(numbers, self.stages))
        self.batches = BatchReader(schedule, self.rank, loss, bare)
        self.weighing = Weighing(self.pipe, self.replicas)
        running = before_backwards(schedule) if recompute else schedule
        self.plans: dict[str | int, Plan] = {"step": Plan(running, self.rank, self.tags)}
        self.steps_taken, self.started, self.host_elapsed = 0, 0.0, 0.0
        self._forget: Callable[[], object] = lambda: None  # takes the recorder out of the process
        self.runs_ahead = "cuda" not in partners.devices
        self.losses_underway: list[SharedLoss] = []
        watched = weakref.ref(self.agreement)  # a pipeline that nobody closed can be freed, if its groups cannot
        for group in self.groups:
            group.progress = lambda name=self.name: f"call {_count(watched)} of {name}"
            group.related = self.groups

    # -- one call -----------------------------------------------------------------------------------------------

    def agree(self, call: str, inputs: Any = None, targets: Any = None, scale: Any = 1.0) -> tuple[Batch, Agreed]:
        """Check this rank's arguments of a call, and agree with the peers that all ranks make it.

        A launch behind a training step does not wait for the peers: see call_agreement.
        """
        self.life.check(call)
        self.started = perf_counter()
        if call in TRAINS and self.recorder is not None:
            self.recorder.begin_step()
        error, batch = None, Batch()
        try:
            if call in (*TRAINS, "evaluate", "forward"):
                batch = self.batches.read("step" if call in TRAINS else call, inputs, targets)
            if call in TRAINS:
                for stage in self.stages:
                    stage.check_storage()
            if not isinstance(scale, (int, float, np.number)) or not (scale > 0 and math.isfinite(scale)):
                raise ArgumentError("scale", found=repr(scale), expected="a finite number above 0")
        except Exception as caught:
            error, scale = caught, 1.0
        with self.life:
            if call == "launch" and self.runs_ahead and self.agreement.trained is not None:
                if error is not None:
                    raise of_this_rank(error, self.rank)
                return batch, self.agreement.presume(batch.facts, scale)
            agreed, problem = self.agreement.reach(call, batch.facts, error, scale)
        if problem is not None:
            raise problem
        return batch, agreed

    def run(self, call: str, batch: Batch, agreed: Agreed, scale: float = 1.0) -> CallState:
        """Run the plan of a call."""
        plan = self._plan(call, agreed.microbatches)
        training, replica = call in TRAINS, 0 if self.replicas is None else self.replicas.rank
        loss = self.executor.loss
        self.weighing.begin(agreed, batch.counts or [])
        inputs = CallInputs(
            training,
            batch.inputs or [],
            batch.targets,
            weighing=self.weighing,
            scale=scale,
            positions=[Position(self.steps_taken, m, replica, training) for m in range(agreed.microbatches)],
        )
        try:
            for stage in self.stages:
                stage.begin_call()
            self.messages.begin(plan, agreed.signature)
        except Exception as error:
            short = memory_error(f"the start of {call}", error, self.stages, None, self.executor.recompute)
            if short is None:
                if isinstance(error, MpipipeError) and error.rank is None:
                    error.rank = self.rank
                raise
            short.rank = self.rank
            raise short from error
        if self.checks is not None:
            self.checks.begin(inputs)
        self.executor.marks = self.executor.clock.begin(plan.steps, training)
        self.flight.begin(call, self.agreement.count, plan)
        with nullcontext() if loss is None or batch.targets is None else loss.taking_head():
            state = self.executor.run(plan.steps, inputs)
        self.messages.end(agreed.signature)
        if self.checks is not None:
            self.checks.end()
        return state

    def train(self, call: str, inputs: Any, targets: Any, scale: Any) -> PendingStep:
        """Make a training step, by the call "step" or "launch". The loss of a launched step may still be on its way."""
        batch, agreed = self.agree(call, inputs, targets, scale)
        with self.life:
            try:
                for stage in self.stages:
                    stage.begin_gradients()
                state = self.run(call, batch, agreed, scale)
                if self.sums is not None:  # before losses are fetched: the device must wait for no rank that may fail
                    self.sums.finish()
                self.agreement.settle()  # whatever comes now is for gradients that all ranks agree on
                shared = self.share_losses(call, state, agreed.microbatches)
                self.ties.sum_gradients()
                if self.checks is not None:
                    self.checks.look_at_sums()
            finally:
                for stage in self.stages:
                    stage.leave_step()
            total, problem = self.weighing.settle(shared, self.stages, wait=call == "step")
            self.losses_underway = [each for each in (*self.losses_underway, shared) if not each.is_here()]
            self.steps_taken += 1
            if self.recorder is not None:
                self.recorder.end_step()
        self.end(problem)
        found = state.input_gradients
        grads = [unscaled(found[m], total) for m in range(agreed.microbatches)] if found else None
        return PendingStep(shared, self.life, grads)

    def end(self, problem: MpipipeError | None = None) -> None:
        """Note how long the call took, and let go of its arrays; raise what all ranks have found wrong."""
        self.host_elapsed = perf_counter() - self.started
        self.executor.state = None
        self.flight.end()
        if problem is not None:
            raise problem

    @property
    def recorder(self) -> Recorder | None:
        """What notes actions, messages, waits and steps of this rank; None for nobody."""
        return self.executor.clock.recorder

    def record(self, recorder: Recorder | None) -> None:
        """Let `recorder` note them from now on."""
        clock, recorders = self.executor.clock, self.pipe.context.recorders
        clock.settle()
        self._forget()
        if recorder is not None:
            recorders.add(recorder)
            self._forget = weakref.finalize(self, recorders.discard, recorder)  # nobody may close this pipeline
        clock.recorder = self.messages.mailbox.recorder = recorder
        if not clock.waits:  # marks are read from the host's clock
            self.executor.now = clock.now if recorder is None else recorder.now

    def _plan(self, call: str, microbatches: int) -> Plan:
        key = "step" if call in TRAINS else microbatches
        if key not in self.plans:
            self.plans[key] = Plan(self.schedule.forward_only_part(microbatches), self.rank, self.tags)
        return self.plans[key]

    def share_losses(self, call: str, state: CallState, microbatches: int) -> SharedLoss:
        """Begin to tell all ranks the losses of a call."""
        last, has_loss = self.schedule.stages - 1, state.inputs.targets is not None
        losses = self.executor.losses(state, last) if has_loss else None
        root, name = self.schedule.placement[-1], f"{call} (call {self.agreement.count}) of {self.name}"
        shares, gives = self.weighing.shares, bool(self.weighing.given)
        return SharedLoss(self.pipe, self.replicas, root, microbatches, losses, shares, gives, call=name)

    @property
    def peak(self) -> int:
        """Peak of activations in the last training step, counted as the simulation of the user's schedule counts them.

        With `recompute` that schedule has no R's, so each kept input counts as an activation.
        """
        return self.executor.peak_under_way if self.recompute else self.executor.peak

    def share_durations(self) -> np.ndarray:
        """Return the mean seconds of forward, input gradient and weight gradient of each stage, (3, stages)."""
        self.executor.clock.settle()
        mine = mean_durations(self.executor.clock.totals, self.schedule.stages, self.recompute)
        everyone = np.zeros((self.pipe.size, *mine.shape))
        with self.life:
            self.pipe.wait(own(self.comm.Iallgather(mine, everyone)), "the durations of all stages", everyone=True)
        return everyone.sum(0)

    def close(self) -> None:
        """Free the communicators, once the losses of launched steps are here: then no message is left on them."""
        self.agree("close")
        with self.life:
            while self.losses_underway:
                self.losses_underway[0].wait()
                del self.losses_underway[0]
        self.record(None)
        self.life.state = "closed"
        for stage in self.stages:
            stage.detach()
        if self.nccl_sums is not None:
            self.nccl_sums.close()
        self.messages.mailbox.transport.close()
        for group in self.groups:
            group.close()


def _count(agreement: Callable[[], Agreement | None]) -> int:
    """Calls so far, by a weak reference to an Agreement."""
    found = agreement()
    return 0 if found is None else found.count


# -- The choice of what carries the messages and sums of a pipeline: MPI, or NCCL between GPUs; the same on all ranks


logger = logging.getLogger("mpipipe")


def choose_nccl(
    pipe: Group, replicas: Group | None, device: str, devices: Sequence[str], pairs: Sequence[Pair], check: bool = False
) -> NcclChoice:
    """Return whether NCCL carries messages and sums; collective if there are replicas or GPUs.

    Parameters
    ----------
    pipe, replicas : group of the pipeline's ranks, and group of the replicas or None
    device, devices : "cpu" or "cuda": of this rank, and of all ranks of the pipeline
    pairs : ranks that exchange messages
    check : whether the host looks at all arrays: it would wait for a device that waits for another rank
    """
    if check:
        return NcclChoice(False, False, "check mode looks at arrays on the host")
    if replicas is None and "cuda" not in devices and not settings.nccl_is_demanded():
        return NcclChoice(False, False, "the ranks compute on the CPU")
    groups = [pipe] if replicas is None else [pipe, replicas]
    choice = agree_on_nccl(groups, device, sum(pipe.rank in pair for pair in pairs))
    if device == "cuda" and pipe.rank == 0:
        logger.info("NCCL: %s", choice)
    return choice


def make_mailbox(pipe: Group, channels: int, device: str, devices: Sequence[str], pairs: Sequence[Pair]) -> Mailbox:
    """Return the mailbox of this rank; `pairs` are the ranks whose messages go by NCCL. Collective."""
    verdict = gpu_aware.detect(pipe.comm, pipe) if "cuda" in devices else None
    synchronous = settings.synchronous_sends()
    return Mailbox(make_transport(pipe.comm, channels, synchronous, device, verdict, group=pipe, pairs=pairs), pipe)


# -- Mean times of the stages of one rank, in the form that `schedules.simulate` takes --------------------------------


def mean_durations(totals: Mapping[tuple[str, int], Sequence], stages: int, recompute: bool) -> np.ndarray:
    """Return mean seconds of forward, input gradient and weight gradient, (3, stages); 0 for stages of other ranks.

    The time of an R counts as that of a forward. With `recompute` it counts as a part of the input gradient, since the
    user's schedule has no R.

    Parameters
    ----------
    totals : (op, stage) -> (seconds, count), of this rank
    stages : number of stages on all ranks
    recompute : whether the pipeline runs all forwards again
    """
    names = {"F": "F", "B": "B", "I": "B", "W": "W", "R": "B" if recompute else "F"}
    seconds, counts = np.zeros((2, 3, stages))
    for (op, stage), (total, count) in totals.items():
        place = "FBW".index(names[op]), stage  # a stage may have both B and I, since it may split some backwards only
        seconds[place] += total
        counts[place] += 0 if op == "R" and recompute else count
    return seconds / np.maximum(counts, 1)
