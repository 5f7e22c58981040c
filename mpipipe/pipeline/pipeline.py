"""Pipeline: the object that users hold. It agrees on each step with its peers, runs it, and brings results home."""

from __future__ import annotations

import math
import weakref
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from mpipipe import arrays
from mpipipe.comm import runtime, settings
from mpipipe.comm.allreduce import AllReduce
from mpipipe.comm.mailbox import Mailbox
from mpipipe.comm.process import is_rank
from mpipipe.comm.requests import own
from mpipipe.comm.tags import Tags
from mpipipe.comm.transport import gpu_aware
from mpipipe.comm.transport.choose import make_transport
from mpipipe.errors import ArgumentError, MpipipeError
from mpipipe.nn import Stage
from mpipipe.pipeline.arguments import check_present
from mpipipe.pipeline.construction import agree_on_construction, end_groups
from mpipipe.pipeline.executor import Executor, Job
from mpipipe.pipeline.microbatches import merge, rows_of, split
from mpipipe.pipeline.plan import Plan
from mpipipe.pipeline.step_agreement import Agreement, Batch, signature_of
from mpipipe.pipeline.ties import Ties
from mpipipe.schedules import Costs, Schedule

KNOWN_SHAPES = 32  # input signatures whose message shapes are remembered, and buffers kept


@dataclass(frozen=True)
class StepResult:
    """What a training step gives.

    Attributes
    ----------
    loss : mean loss over the batch of all replicas, each micro-batch weighted by its rows; on every rank
    losses : loss of each micro-batch of this pipeline, in order; on every rank
    input_grads : on the rank of stage 0, the gradient of `loss` with respect to the inputs of each micro-batch, in
        order (None for integer inputs); elsewhere None
    """

    loss: float
    losses: list[float]
    input_grads: list | None


class Pipeline:
    """Stages on the ranks of a communicator, run by a schedule.

    Parameters
    ----------
    stages : this rank's stages, one for each of its logical stages in `schedule.placement`, in rising order. A stage
        has `forward(x) -> (y, saved)` and `backward(dy, saved) -> dx`; schedules that split the backward need
        `backward_input(dy, saved) -> (dx, pending)` and `backward_weight(pending)` as well. x, y: an array, or a tuple
        or dict of arrays. A stage may keep x until its backward, must not write to x or dy, and must not use the
        memory of y or dx again within the step: they are sent from where they lie. To take part in replicas a stage
        has `gradients`: an object whose `flat` is one contiguous array of all gradients, zeroed at the start of each
        step and summed at its end, or None.
    schedule : what `mpipipe.schedules` makes or reads; it is checked here, before the first message
    comm : communicator with one rank for each rank of the schedule; None means COMM_WORLD. It is duplicated.
    loss : `loss(output, target) -> (value, doutput)`, needed on the rank of the last stage; value is the mean over the
        micro-batch, doutput its gradient, shaped as the output. A loss with a parameter `factor` multiplies doutput by
        it before rounding: by the share of the micro-batch in the batch, and the `scale` of the step
    recompute : keep only the input of each stage, and run its forward again before its backward
    replicas : communicator of the ranks with the same stages and parameters, over which gradients are summed; None for
        a single pipeline

    Collective, as are `step`, `evaluate`, `forward`, `durations` and `close`. Wrong or disagreeing arguments raise the
    same error on every rank; a failure inside a step raises on the rank where it happened (StageError,
    NonFiniteError) and as PeerError on the others, and ends the life of the pipeline.

    Attributes
    ----------
    peak_activations : largest number of (stage, micro-batch) activations held at once in the last training step
    bytes_sent : bytes of activations and gradients that this rank sent in the last call
    bytes_per_edge : the same by (edge, "forward" or "backward"); edge e joins stage e-1 to stage e
    busy, elapsed : seconds of the last call spent in stages and loss, and in all; on a GPU by events, and reading them
        waits for the last action
    recorder : a trace.Recorder, or None
    """

    def __init__(self, stages, schedule: Schedule, comm=None, loss=None, recompute: bool = False, replicas=None):
        comm = runtime.resolve(comm)
        partners = agree_on_construction(comm, replicas, stages, schedule, loss, recompute)
        self.pipe, self.partners = partners.pipe, partners.replicas
        try:
            self._build(partners, stages, schedule, loss, recompute)
        except BaseException as error:
            end_groups(self._groups(), error, "a pipeline could not be built")
            raise

    def _build(self, partners, stages, schedule, loss, recompute):
        """What is left to do once all ranks have agreed."""
        self.comm, self.rank, devices = self.pipe.comm, self.pipe.rank, partners.devices
        self.comm.Set_name("mpipipe pipeline")
        self.schedule, self.stages, self.loss = schedule, list(stages), loss
        self.replicas = None if self.partners is None else self.partners.comm
        self.pipe.process.pipelines += 1
        self.name = f"pipeline {self.pipe.process.pipelines} ({schedule.name})"  # the how many-th of this rank
        numbers = schedule.stages_of(self.rank)
        self.tags = Tags(schedule.placement, schedule.microbatches, runtime.tag_upper_bound(self.comm))
        self.device = devices[self.rank]
        verdict = gpu_aware.detect(self.comm, self.pipe) if "cuda" in devices else None
        transport = make_transport(
            self.comm, self.tags.channels, settings.synchronous_sends(), self.device, verdict, self.pipe
        )
        self.mailbox = Mailbox(transport, self.pipe)
        self.agreement = Agreement(self.pipe, self.partners, self.name)
        self.executor = Executor(self.rank, self.stages, self.mailbox, loss, recompute, self.replicas, self.device)
        for stage, number in zip(self.stages, numbers):
            if isinstance(stage, Stage):
                stage.index, stage.poll = number, self.executor.poll
                stage.position.replica = self.replicas.rank if self.replicas else 0
        self.ties = Ties(self.pipe, self.stages, numbers, partners.ties)
        self.plans = {"step": Plan(schedule, self.rank, self.tags)}
        self.known: dict = {}  # input signature -> wires
        self.itineraries: dict = {}  # (input signature, plan) -> itinerary
        self.trains = any(action.op != "F" for action in schedule.orders[self.rank])
        self.steps_taken = 0
        self.host_elapsed = 0.0
        self.state = "open"
        self.running = False
        watched = weakref.ref(self.agreement)  # a pipeline that nobody closed can be freed, if its groups cannot
        for group in self._groups():
            group.progress = lambda name=self.name: f"call {count(watched)} of {name}"
            group.related = self._groups()

    # -- what users call ----------------------------------------------------------------------------------------

    def step(self, inputs, targets, scale: float = 1.0) -> StepResult:
        """Forward and backward of one batch; leaves its gradients in the stages.

        Parameters
        ----------
        inputs : on the rank of stage 0 an array, tuple or dict of C-contiguous arrays (rows, ...), cut along axis 0
            into M micro-batches whose sizes differ by one at most, or a list of M such, whose shapes may differ;
            None on the other ranks
        targets : the same on the rank of the last stage, for the loss
        scale : factor on the loss where the backward begins, the same on every rank, against underflow of float16
            (optim.LossScaler); the gradients in the stages carry it, loss and input gradients in the result do not

        Gradients are zeroed first, and are those of the mean loss over all rows of all replicas. Returns StepResult.
        """
        agreed, feeds, goals = self._agree("step", inputs, targets, scale)
        with self._failing():
            for stage in self.stages:
                if getattr(stage, "gradients", None) is not None:
                    arrays.set_zero(stage.gradients.flat)
            outcome, shares = self._run("step", feeds, goals, agreed, scale)
            loss, losses = self._share_losses(agreed.microbatches, shares)
            for pending in self.executor.sums:
                self.partners.wait(pending, "the sum of gradients over the replicas", everyone=True)
            self.ties.sum_gradients()
            self.steps_taken += 1
        self.host_elapsed = perf_counter() - self.started
        grads = outcome.input_grads
        return StepResult(loss, losses, [grads[m] for m in range(agreed.microbatches)] if grads else None)

    def evaluate(self, inputs, targets) -> float:
        """Mean loss of a batch, on every rank; nothing is kept. Arguments as for `step`.

        A batch with fewer rows than M is cut into as many micro-batches as it has rows.
        """
        agreed, feeds, goals = self._agree("evaluate", inputs, targets)
        with self._failing():
            _, shares = self._run("evaluate", feeds, goals, agreed)
            loss, _ = self._share_losses(agreed.microbatches, shares)
        self.host_elapsed = perf_counter() - self.started
        return loss

    def forward(self, inputs):
        """Outputs of the last stage for a batch, on its rank; None on the others.

        They are put together along axis 0, unless the inputs were a list of micro-batches: then they are one as well.
        """
        agreed, feeds, goals = self._agree("forward", inputs, None)
        with self._failing():
            outcome, _ = self._run("forward", feeds, goals, agreed)
        self.host_elapsed = perf_counter() - self.started
        if not outcome.outputs:
            return None
        pieces = [outcome.outputs[m] for m in range(agreed.microbatches)]
        return pieces if agreed.listed else merge(pieces)

    def durations(self) -> Costs:
        """Mean measured seconds per stage over all training steps, for `schedules.simulate`; collective."""
        self._agree("durations", None, None)
        mine = np.zeros((3, self.schedule.stages))
        self.executor.clock.settle()
        for (op, stage), (total, count) in self.executor.clock.totals.items():
            mine["FBW".index("B" if op == "I" else op), stage] += total / count
        everyone = np.zeros((self.comm.size, *mine.shape))
        with self._failing():
            self.pipe.wait(own(self.comm.Iallgather(mine, everyone)), "the durations of all stages", everyone=True)
        forward, input_grad, weight_grad = everyone.sum(0).tolist()
        return Costs(forward=forward, input_grad=input_grad, weight_grad=weight_grad)

    @property
    def peak_activations(self) -> int:
        return self.executor.peak

    @property
    def busy(self) -> float:
        self.executor.clock.settle()
        return self.executor.clock.busy

    @property
    def elapsed(self) -> float:
        self.executor.clock.settle()
        return max(self.host_elapsed, self.executor.clock.span)

    @property
    def bytes_sent(self) -> int:
        return sum(self.mailbox.bytes_sent.values())

    @property
    def bytes_per_edge(self) -> dict:
        return {(edge, ("forward", "backward")[way]): n for (edge, way), n in self.mailbox.bytes_sent.items()}

    @property
    def recorder(self):
        return self.executor.clock.recorder

    @recorder.setter
    def recorder(self, recorder):
        self.executor.clock.recorder = recorder

    def close(self):
        """Free the communicators; collective, may be called twice. After a failure nothing collective is done."""
        if self.state == "open":
            self._agree("close", None, None)
            self.state = "closed"
            self.ties.close()
            self.mailbox.transport.close()
            for group in self._groups():
                group.close()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if kind is None:
            self.close()
        elif self.state == "open" and all(group.agreed_on(error) for group in self._groups()):
            try:  # all ranks raise this error, so they may all come here
                self.close()
            except MpipipeError:
                self._fail(error)
        elif self.state == "open":
            self._fail(error)

    # -- one call -----------------------------------------------------------------------------------------------

    def _agree(self, call, inputs, targets, scale=1.0):
        """Agree with the peers on a call; returns what was agreed, and this rank's micro-batches (inputs, targets)."""
        if self.state != "open":
            raise ArgumentError(
                f"the pipeline is {self.state}",
                rank=self.rank,
                remedy="start the job anew" if self.state == "failed" else "call step before close",
            )
        if self.running:
            raise ArgumentError(
                f"{call} was called within another call of {self.name}",
                rank=self.rank,
                remedy="a stage, or a loss, must not call the pipeline that runs it",
            )
        self.started = perf_counter()
        error = feeds = goals = None
        batch = Batch()
        try:
            if call in ("step", "evaluate", "forward"):
                feeds, goals, batch = self._accept(call, inputs, targets)
            if not isinstance(scale, (int, float, np.number)) or not (scale > 0 and math.isfinite(scale)):
                raise ArgumentError("scale", found=repr(scale), expected="a finite number above 0")
        except Exception as caught:
            error, scale = caught, 1.0
        with self._failing():
            agreed, problem = self.agreement.reach(call, batch, error, scale)
        if problem is not None:
            raise problem
        return agreed, feeds, goals

    def _accept(self, call, inputs, targets):
        """Check and cut this rank's inputs and targets."""
        placement = self.schedule.placement
        first, last = placement[0] == self.rank, placement[-1] == self.rank
        if call == "step" and not self.trains:
            raise ArgumentError(
                "a schedule without backward passes cannot train",
                found=self.schedule.name,
                remedy="use evaluate or forward, or another schedule",
            )
        check_present("inputs", inputs, first, f"rank {placement[0]}, which holds stage 0")
        wants = last and call != "forward"
        check_present("targets", targets, wants, f"rank {placement[-1]}, which holds the last stage")
        if wants and self.loss is None:
            raise ArgumentError(
                "no loss on the rank of the last stage",
                rank=self.rank,
                stage=self.schedule.stages - 1,
                remedy="pass loss=... to Pipeline, for example mpipipe.nn.mean_squared_error",
            )
        feeds = goals = None
        batch = Batch()
        if first:
            feeds, rows = self._cut(call, inputs)
            batch = Batch(signature_of(inputs), rows, 0, len(feeds), isinstance(inputs, list))
        if wants:
            goals, rows = self._cut(call, targets)
            batch = batch._replace(target_rows=rows)
        return feeds, goals, batch

    def _cut(self, call, batch):
        microbatches = self.schedule.microbatches
        if call != "step" and not isinstance(batch, list):
            microbatches = max(1, min(microbatches, rows_of(batch)))
        pieces = split(batch, microbatches)
        return pieces, sum(rows_of(piece) for piece in pieces) if isinstance(batch, list) else rows_of(batch)

    def _run(self, call, feeds, goals, agreed, scale=1.0):
        """Run the plan of a call; returns (outcome, weight of each micro-batch or None)."""
        plan = self._plan(call, agreed.microbatches)
        known = agreed.signature in self.known
        if not known and len(self.known) == KNOWN_SHAPES:
            self._forget_shapes()
        wires = self.known.get(agreed.signature, {})
        self.mailbox.expect(self._itinerary(plan, agreed.signature, wires) if known else [], plan.window)
        training = call == "step"
        shares = None if goals is None else [rows_of(goal) / agreed.total_rows for goal in goals]
        for position in self.executor.positions:
            if position is not None:
                position.step, position.training = self.steps_taken, training
        for stage in self.stages:
            if isinstance(stage, Stage):
                stage.refresh()
        job = Job(training, feeds or [], goals, shares or [], scale, wires, known)
        outcome = self.executor.run(plan.steps, job)
        self.mailbox.flush()
        self.known[agreed.signature] = wires
        return outcome, shares

    def _forget_shapes(self):
        """Drop all known shapes and the buffers kept for them; every rank does so at the same call."""
        self.known.clear()
        self.itineraries.clear()
        self.mailbox.forget()

    def _plan(self, mode, microbatches):
        key = "step" if mode == "step" else microbatches
        if key not in self.plans:
            self.plans[key] = Plan(self.schedule.forward_only_part(microbatches), self.rank, self.tags)
        return self.plans[key]

    def _itinerary(self, plan, signature, wires):
        key = signature, id(plan)
        if key not in self.itineraries:
            leaves = []
            for envelope in plan.receives:
                wire = wires[envelope.edge, envelope.microbatch]
                leaves.append(wire.gradients if envelope.direction else wire.leaves)
            self.itineraries[key] = self.mailbox.itinerary(plan.receives, leaves)
        return self.itineraries[key]

    def _share_losses(self, microbatches, shares):
        """(mean loss over all replicas, list of this pipeline's losses), on every rank."""
        table = np.zeros(microbatches + 1)
        if shares is not None:
            losses = self.executor.losses(self.schedule.stages - 1)
            table[:-1] = [losses[m] for m in range(microbatches)]
            table[-1] = sum(share * losses[m] for m, share in enumerate(shares))
        if self.comm.size > 1:
            self.pipe.wait(own(self.comm.Ibcast(table, self.schedule.placement[-1])), "the loss", everyone=True)
        total = table[-1:].copy()
        if self.replicas is not None:
            self.partners.wait(AllReduce(self.replicas, total), "the loss of the replicas", everyone=True)
        return float(total[0]), table[:-1].tolist()

    # -- failure ------------------------------------------------------------------------------------------------

    @contextmanager
    def _failing(self):
        """Whatever is raised within ends the life of the pipeline, and is told to the peers."""
        self.running = True
        try:
            yield
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self.running = False

    def _fail(self, error):
        """Tell the peers, once, and give up: messages of the broken call may still be under way."""
        self.state = "failed"
        if not is_rank():  # a process that a stage forked ends: MPI is none of its business
            return
        text = f"{self.executor.place} ({runtime.whoami()}) failed: {type(error).__name__}: {error}"
        for group in self._groups():
            group.fail(error, text)
        self.mailbox.cancel()
        for pending in self.executor.sums:
            pending.Cancel()

    def _groups(self):
        return [group for group in (self.pipe, self.partners) if group is not None]


def count(agreement) -> int:
    """Calls so far, by a weak reference to an Agreement."""
    found = agreement()
    return 0 if found is None else found.count
