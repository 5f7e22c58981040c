"""The machinery of a pipeline on one rank: built once all ranks have agreed, and run call by call."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from time import perf_counter
from typing import Any

import numpy as np

from mpipipe.comm import runtime, settings
from mpipipe.comm.allreduce import AllReduce
from mpipipe.comm.mailbox import Mailbox
from mpipipe.comm.nccl.choice import Choice, choose
from mpipipe.comm.nccl.sums import NcclSums
from mpipipe.comm.requests import own
from mpipipe.comm.tags import Tags, neighbours
from mpipipe.comm.transport import gpu_aware
from mpipipe.comm.transport.choose import make_transport
from mpipipe.comm.transport.nccl import Pair
from mpipipe.errors import ArgumentError, MpipipeError
from mpipipe.nn import Position
from mpipipe.pipeline.batch import Batch, BatchReader
from mpipipe.pipeline.call_agreement import Agreed, Agreement
from mpipipe.pipeline.call_state import CallInputs, CallState
from mpipipe.pipeline.construction import Partners
from mpipipe.pipeline.executor import Executor
from mpipipe.pipeline.flight import PipelineFlight
from mpipipe.pipeline.gradient_sums import GradientSums
from mpipipe.pipeline.life import Life
from mpipipe.pipeline.loss import Loss
from mpipipe.pipeline.messages import StageMessages
from mpipipe.pipeline.plan import Plan, recomputes_all
from mpipipe.pipeline.shortage import memory_error
from mpipipe.pipeline.ties import TieNames, Ties
from mpipipe.schedules import Schedule
from mpipipe.schedules.recompute import before_backwards
from mpipipe.trace import Recorder

logger = logging.getLogger("mpipipe")


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
    host_elapsed : seconds of the last call, by the host's clock
    """

    def __init__(
        self, partners: Partners, schedule: Schedule, loss: Callable[..., Any] | None, recompute: bool
    ) -> None:
        self.pipe, self.replicas, self.stages = partners.pipe, partners.replicas, partners.stages
        self.groups, self.schedule = partners.groups, schedule
        self.comm, self.rank, self.recompute = self.pipe.comm, self.pipe.rank, recompute
        self.comm.Set_name("mpipipe pipeline")
        self.pipe.process.pipelines += 1
        self.name = f"pipeline {self.pipe.process.pipelines} ({schedule.name})"  # the how many-th of this rank
        placement, skips = schedule.placement, schedule.skip_ends
        self.tags = Tags(placement, schedule.microbatches, runtime.tag_upper_bound(self.comm), skips)
        device = partners.devices[self.rank]
        names = TieNames(partners.ties, self.tags.channels, self.tags.base)
        pairs = sorted({*neighbours(placement, skips), *names.pairs})
        self.nccl = self._choose_nccl(device, partners.devices, pairs)
        self.nccl_sums = NcclSums(self.replicas) if self.nccl.sums and self.replicas is not None else None
        channels = self.tags.channels + names.channels
        rehearsals = 2 if settings.graphs() else 1  # one is run as ever, in the next one graphs are recorded
        self.messages = StageMessages(self._make_mailbox(channels, device, partners.devices, pairs), rehearsals)
        self.agreement = Agreement(self.pipe, self.replicas, self.name)
        mailbox, numbers = self.messages.mailbox, schedule.stages_of(self.rank)
        self.ties = Ties(self.pipe, mailbox.transport, self.stages, numbers, names)
        replicas, stages = self.replicas, self.stages
        self.sums = None if replicas is None else GradientSums(replicas, self.nccl_sums, mailbox, stages)
        self.executor = Executor(
            self.rank,
            self.stages,
            self.messages,
            loss=None if loss is None else Loss(loss),
            recompute=recompute or recomputes_all(schedule, self.rank),
            sums=self.sums,
            device=device,
        )
        poll = mailbox.poll if self.sums is None else self.executor.poll
        for stage, number in zip(self.stages, numbers):
            stage.attach(number, poll, ends=0 < number == schedule.trained_from)
            if device == "cuda" and settings.graphs():
                stage.use_graphs(mailbox.waits_on_host)
        self.life = Life(self.name, self.rank, self.groups, self.executor)
        self.flight = PipelineFlight(self.pipe, self.executor, self.life)
        self.batches = BatchReader(schedule, self.rank, loss is not None)
        running = before_backwards(schedule) if recompute else schedule
        self.plans: dict[str | int, Plan] = {"step": Plan(running, self.rank, self.tags)}
        self.steps_taken = 0
        self.started = self.host_elapsed = 0.0
        watched = weakref.ref(self.agreement)  # a pipeline that nobody closed can be freed, if its groups cannot
        for group in self.groups:
            group.progress = lambda name=self.name: f"call {_count(watched)} of {name}"
            group.related = self.groups

    def _make_mailbox(self, channels: int, device: str, devices: list[str], pairs: list[Pair]) -> Mailbox:
        verdict = gpu_aware.detect(self.comm, self.pipe) if "cuda" in devices else None
        transport = make_transport(
            self.comm,
            channels,
            settings.synchronous_sends(),
            device,
            verdict,
            group=self.pipe,
            pairs=pairs if self.nccl.messages else (),
        )
        return Mailbox(transport, self.pipe)

    def _choose_nccl(self, device: str, devices: list[str], pairs: list[Pair]) -> Choice:
        """Whether NCCL is used; where there are no replicas and no GPU, nobody is asked."""
        if self.replicas is None and "cuda" not in devices and not settings.nccl_is_demanded():
            return Choice(False, False, "the ranks compute on the CPU")
        mine = sum(self.rank in pair for pair in pairs)
        choice = choose(self.groups, device, mine)
        if device == "cuda" and self.rank == 0:
            logger.info("NCCL: %s", choice)
        return choice

    # -- one call -----------------------------------------------------------------------------------------------

    def agree(self, call: str, inputs: Any = None, targets: Any = None, scale: Any = 1.0) -> tuple[Batch, Agreed]:
        """Check this rank's arguments of a call, and agree with the peers that all ranks make it."""
        self.life.check(call)
        self.started = perf_counter()
        if call == "step" and self.recorder is not None:
            self.recorder.begin_step()
        error, batch = None, Batch()
        try:
            if call in ("step", "evaluate", "forward"):
                batch = self.batches.read(call, inputs, targets)
            if call == "step":
                for stage in self.stages:
                    stage.check_storage()
            if not isinstance(scale, (int, float, np.number)) or not (scale > 0 and math.isfinite(scale)):
                raise ArgumentError("scale", found=repr(scale), expected="a finite number above 0")
        except Exception as caught:
            error, scale = caught, 1.0
        with self.life:
            agreed, problem = self.agreement.reach(call, batch.facts, error, scale)
        if problem is not None:
            raise problem
        return batch, agreed

    def run(self, call: str, batch: Batch, agreed: Agreed, scale: float = 1.0) -> CallState:
        """Run the plan of a call."""
        plan = self._plan(call, agreed.microbatches)
        training, replica = call == "step", 0 if self.replicas is None else self.replicas.rank
        loss = self.executor.loss
        inputs = CallInputs(
            training,
            batch.inputs or [],
            batch.targets,
            weights=[] if batch.rows is None else [rows / agreed.total_rows for rows in batch.rows],
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
        self.executor.marks = self.executor.clock.begin(plan.steps, training)
        self.flight.begin(call, self.agreement.count, plan)
        with nullcontext() if loss is None or batch.targets is None else loss.taking_head():
            state = self.executor.run(plan.steps, inputs)
        self.messages.end(agreed.signature)
        return state

    def train(self, batch: Batch, agreed: Agreed, scale: float) -> tuple[CallState, float, list[float]]:
        """Run a training step; return what it gave, the mean loss of all replicas, and the losses of this pipeline."""
        try:
            for stage in self.stages:
                stage.begin_gradients()
            state = self.run("step", batch, agreed, scale)
            if self.sums is not None:  # before losses are fetched: the device must wait for no rank that may fail
                self.sums.finish()
            loss, losses = self.share_losses(state, agreed.microbatches)
            self.ties.sum_gradients()
        finally:
            for stage in self.stages:
                stage.leave_step()
        self.steps_taken += 1
        if self.recorder is not None:
            self.recorder.end_step()
        return state, loss, losses

    def end(self) -> None:
        """Note how long the call took, and let go of its arrays."""
        self.host_elapsed = perf_counter() - self.started
        self.executor.state = None
        self.flight.end()

    @property
    def recorder(self) -> Recorder | None:
        """What notes actions, messages, waits and steps of this rank; None for nobody."""
        return self.executor.clock.recorder

    def record(self, recorder: Recorder | None) -> None:
        """Let `recorder` note them from now on."""
        clock, recorders = self.executor.clock, self.pipe.process.recorders
        clock.settle()
        if self.recorder is not None:
            recorders.discard(self.recorder)
        if recorder is not None:
            recorders.add(recorder)
        clock.recorder = self.messages.mailbox.recorder = recorder
        if not clock.waits:  # marks are read from the host's clock
            self.executor.now = clock.now if recorder is None else recorder.now

    def _plan(self, call: str, microbatches: int) -> Plan:
        key = "step" if call == "step" else microbatches
        if key not in self.plans:
            self.plans[key] = Plan(self.schedule.forward_only_part(microbatches), self.rank, self.tags)
        return self.plans[key]

    def share_losses(self, state: CallState, microbatches: int) -> tuple[float, list[float]]:
        """Return (mean loss over all replicas, losses of this pipeline's micro-batches), on every rank."""
        table = np.zeros(microbatches + 1)
        if state.inputs.targets is not None:
            losses = self.executor.losses(state, self.schedule.stages - 1)
            table[:-1] = losses
            table[-1] = sum(weight * loss for weight, loss in zip(state.inputs.weights, losses))
        if self.pipe.size > 1:
            self.pipe.wait(own(self.comm.Ibcast(table, self.schedule.placement[-1])), "the loss", everyone=True)
        total = table[-1:].copy()
        if self.replicas is not None:
            self.replicas.wait(AllReduce(self.replicas.comm, total), "the loss of the replicas", everyone=True)
        return float(total[0]), table[:-1].tolist()

    @property
    def peak(self) -> int:
        """Most activations of the last training step: those that the simulation of the user's schedule counts.

        It knows no R where all forwards are run again for `recompute`: kept inputs count as activations there.
        """
        return self.executor.peak_under_way if self.recompute else self.executor.peak

    def share_durations(self) -> np.ndarray:
        """Return the mean seconds of forward, input gradient and weight gradient of each stage, (3, stages).

        An R is a forward. Where all forwards are run again for `recompute`, that is a part of the input gradient: the
        user's schedule knows no R.
        """
        names = {"F": "F", "B": "B", "I": "B", "W": "W", "R": "B" if self.recompute else "F"}
        totals, counts = np.zeros((2, 3, self.schedule.stages))
        self.executor.clock.settle()
        for (op, stage), (total, count) in self.executor.clock.totals.items():
            place = "FBW".index(names[op]), stage  # a stage may have B and I: some backwards in one piece
            totals[place] += total
            counts[place] += 0 if op == "R" and self.recompute else count
        mine = totals / np.maximum(counts, 1)
        everyone = np.zeros((self.pipe.size, *mine.shape))
        with self.life:
            self.pipe.wait(own(self.comm.Iallgather(mine, everyone)), "the durations of all stages", everyone=True)
        return everyone.sum(0)

    def close(self) -> None:
        """Free the communicators."""
        self.agree("close")
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
