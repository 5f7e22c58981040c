"""Pipeline: the object that users hold. It agrees on each step with its peers, runs it, and brings results home."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from mpipipe.comm import departure, runtime, share
from mpipipe.comm.alarm import Alarm, wait
from mpipipe.comm.mailbox import Mailbox
from mpipipe.comm.reduce import PendingSum
from mpipipe.comm.tags import Tags
from mpipipe.comm.transport import HostTransport
from mpipipe.errors import ArgumentError, MismatchError, MpipipeError, PeerError
from mpipipe.nn import Stage
from mpipipe.pipeline.agreement import Agreement, Batch, signature_of
from mpipipe.pipeline.arguments import check_arguments, check_present, describe
from mpipipe.pipeline.executor import Executor, Job
from mpipipe.pipeline.microbatches import merge, rows_of, split
from mpipipe.pipeline.plan import Plan
from mpipipe.pipeline.ties import Ties
from mpipipe.schedules import Costs, Schedule

KNOWN_SHAPES = 256  # input signatures whose message shapes are remembered


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
        or dict of arrays. A stage may keep x until its backward, and must not write to x or dy.
    schedule : what `mpipipe.schedules` makes or reads; it is checked here, before the first message
    comm : communicator with one rank for each rank of the schedule; None means COMM_WORLD. It is duplicated.
    loss : `loss(output, target) -> (value, doutput)`, needed on the rank of the last stage; value is the mean over the
        micro-batch, doutput its gradient, which is then the pipeline's to overwrite
    recompute : keep only the input of each stage, and run its forward again before its backward
    replicas : communicator of the ranks with the same stages, over which gradients are summed; None for a single one

    Collective, as are `step`, `evaluate`, `forward`, `durations` and `close`. Wrong or disagreeing arguments raise the
    same error on every rank; a failure inside a step raises on the rank where it happened (StageError,
    NonFiniteError) and as PeerError on the others, and ends the life of the pipeline.

    Attributes
    ----------
    peak_activations : largest number of (stage, micro-batch) activations held at once in the last training step
    bytes_sent : bytes of activations and gradients that this rank sent in the last call
    bytes_per_edge : the same by (edge, "forward" or "backward"); edge e joins stage e-1 to stage e
    busy, elapsed : seconds of the last call spent in stages and loss, and in all
    recorder : a trace.Recorder, or None
    """

    def __init__(self, stages, schedule: Schedule, comm=None, loss=None, recompute: bool = False, replicas=None):
        comm = runtime.resolve(comm)
        self.comm = comm.Dup()
        self.comm.Set_name("mpipipe pipeline")
        self.rank = self.comm.rank
        self._constructed(stages, schedule, loss, recompute)
        self.schedule = schedule
        self.stages, self.loss = list(stages), loss
        self.replicas = replicas.Dup() if replicas is not None and replicas.size > 1 else None
        numbers = schedule.stages_of(self.rank)
        self.alarm = Alarm([self.comm] if self.replicas is None else [self.comm, self.replicas])
        self.tags = Tags(schedule.placement, schedule.microbatches, runtime.tag_upper_bound(self.comm))
        transport = HostTransport(self.comm, self.tags.channels, runtime.synchronous_sends())
        self.mailbox = Mailbox(transport)
        self.agreement = Agreement(self.comm, self.replicas)
        self.executor = Executor(self.rank, self.stages, self.mailbox, loss, recompute, self.replicas)
        for stage, number in zip(self.stages, numbers):
            _prepare(stage, number, self.executor.poll, self.replicas.rank if self.replicas else 0)
        self.ties = Ties(self.comm, self.stages, numbers)
        self.plans = {"step": Plan(schedule, self.rank, self.tags)}
        self.known: dict = {}  # input signature -> wires
        self.itineraries: dict = {}  # (input signature, plan) -> itinerary
        self.steps_taken = 0
        self.elapsed = 0.0
        self.state = "open"
        departure.register(self, self._leave)

    def _constructed(self, stages, schedule, loss, recompute):
        """Check the arguments with all ranks; a wrong one raises everywhere."""
        error = None
        try:
            check_arguments(stages, schedule, loss, self.comm)
        except Exception as caught:
            error = caught
        facts = None if error else (schedule.fingerprint, schedule.microbatches, bool(recompute), schedule.name)
        try:
            everyone = share.agree(self.comm, error, facts)
            for rank, other in enumerate(everyone):
                if other[:3] != everyone[0][:3]:  # the name does not count: it may have come from a file
                    raise MismatchError(
                        "ranks were given different pipelines",
                        rank=rank, found=describe(other), expected=f"{describe(everyone[0])}, as on rank 0",
                        remedy="build the same schedule with the same arguments on every rank",
                    )
        except MpipipeError as caught:
            caught.echo = caught.echo or (error is None and self.rank != 0)
            self.comm.Free()
            raise

    # -- what users call ----------------------------------------------------------------------------------------

    def step(self, inputs, targets) -> StepResult:
        """Forward and backward of one batch; leaves its gradients in the stages.

        Parameters
        ----------
        inputs : on the rank of stage 0 an array, tuple or dict of C-contiguous arrays (rows, ...), cut along axis 0
            into M micro-batches whose sizes differ by one at most, or a list of M such, whose shapes may differ;
            None on the other ranks
        targets : the same on the rank of the last stage, for the loss

        Gradients are zeroed first, and are those of the mean loss over all rows of all replicas. Returns StepResult.
        """
        for stage in self.stages:
            if hasattr(stage, "gradients"):
                stage.gradients.flat.fill(0)
        outcome, agreed, shares = self._call("step", inputs, targets)
        losses = self._share_losses(outcome.losses, agreed.microbatches, shares)
        start = perf_counter()
        for pending in self.executor.sums:
            wait(pending)
        self.ties.sum_gradients()
        self.elapsed += perf_counter() - start
        self.steps_taken += 1
        grads = outcome.input_grads
        ordered = [grads[m] for m in range(agreed.microbatches)] if grads else None
        return StepResult(losses[0], losses[1], ordered)

    def evaluate(self, inputs, targets) -> float:
        """Mean loss of a batch, on every rank; nothing is kept. Arguments as for `step`.

        A batch with fewer rows than M is cut into as many micro-batches as it has rows.
        """
        outcome, agreed, shares = self._call("evaluate", inputs, targets)
        return self._share_losses(outcome.losses, agreed.microbatches, shares)[0]

    def forward(self, inputs):
        """Outputs of the last stage for a batch, put together along axis 0, on its rank; None on the others."""
        outcome, agreed, _ = self._call("forward", inputs, None)
        if not outcome.outputs:
            return None
        return merge([outcome.outputs[m] for m in range(agreed.microbatches)])

    def durations(self) -> Costs:
        """Mean measured seconds per stage over all training steps, for `schedules.simulate`; collective."""
        mine = {key: total / count for key, (total, count) in self.executor.clock.items()}
        seconds: dict = {}
        for entry in share.agree(self.comm, None, mine):
            seconds.update(entry)
        columns = []
        for ops in ("F", "BI", "W"):
            columns.append([sum(seconds.get((op, stage), 0.0) for op in ops) for stage in range(self.schedule.stages)])
        return Costs(forward=columns[0], input_grad=columns[1], weight_grad=columns[2])

    @property
    def peak_activations(self) -> int:
        return self.executor.peak

    @property
    def busy(self) -> float:
        return self.executor.busy

    @property
    def bytes_sent(self) -> int:
        return sum(self.mailbox.bytes_sent.values())

    @property
    def bytes_per_edge(self) -> dict:
        return {(edge, ("forward", "backward")[way]): n for (edge, way), n in self.mailbox.bytes_sent.items()}

    @property
    def recorder(self):
        return self.executor.recorder

    @recorder.setter
    def recorder(self, recorder):
        self.executor.recorder = recorder

    def close(self):
        """Free the communicators; collective, may be called twice. After a failure nothing collective is done."""
        if self.state == "open":
            self.ties.close()
            self.mailbox.transport.close()
            self.alarm.close()
            if self.replicas is not None:
                self.replicas.Free()
            self.comm.Free()
        if self.state != "closed":
            self.state = "closed"
            departure.unregister(self)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if kind is None:
            self.close()
        elif self.state == "open":
            self._fail(error)

    # -- one call -----------------------------------------------------------------------------------------------

    def _call(self, mode, inputs, targets):
        """Agree with the peers, run, and return (outcome, what was agreed, weight of each micro-batch or None)."""
        self._check_usable()
        start = perf_counter()
        self.alarm.call += 1
        error = feeds = goals = None
        batch = Batch()
        try:
            feeds, goals, batch = self._accept(mode, inputs, targets)
        except Exception as caught:
            error = caught
        try:
            agreed = self.agreement.reach(mode, batch, error)
        except PeerError:
            self._fail(None)
            raise
        try:
            outcome, shares = self._run(mode, feeds, goals, agreed)
        except BaseException as caught:
            self._fail(caught)
            raise
        self.elapsed = perf_counter() - start
        return outcome, agreed, shares

    def _accept(self, mode, inputs, targets):
        """Check and cut this rank's inputs and targets."""
        placement = self.schedule.placement
        first, last = placement[0] == self.rank, placement[-1] == self.rank
        check_present("inputs", inputs, first, f"rank {placement[0]}, which holds stage 0")
        wants = last and mode != "forward"
        check_present("targets", targets, wants, f"rank {placement[-1]}, which holds the last stage")
        if wants and self.loss is None:
            raise ArgumentError(
                "no loss on the rank of the last stage", rank=self.rank, stage=self.schedule.stages - 1,
                remedy="pass loss=... to Pipeline, for example mpipipe.nn.mean_squared_error",
            )
        feeds = goals = None
        batch = Batch()
        if first:
            feeds, rows = self._cut(mode, inputs)
            batch = Batch(signature_of(inputs), rows, 0, len(feeds))
        if wants:
            goals, rows = self._cut(mode, targets)
            batch = batch._replace(target_rows=rows)
        return feeds, goals, batch

    def _cut(self, mode, batch):
        microbatches = self.schedule.microbatches
        if mode != "step" and not isinstance(batch, list):
            microbatches = max(1, min(microbatches, rows_of(batch)))
        pieces = split(batch, microbatches)
        return pieces, sum(rows_of(piece) for piece in pieces) if isinstance(batch, list) else rows_of(batch)

    def _run(self, mode, feeds, goals, agreed):
        plan = self._plan(mode, agreed.microbatches)
        known = agreed.signature in self.known
        wires = self.known.get(agreed.signature, {})
        self.mailbox.expect(self._itinerary(plan, agreed.signature, wires) if known else [], plan.window)
        training = mode == "step"
        shares = None if goals is None else [rows_of(goal) / agreed.total_rows for goal in goals]
        for position in self.executor.positions:
            if position is not None:
                position.step, position.training = self.steps_taken, training
        outcome = self.executor.run(plan.steps, Job(training, feeds or [], goals, shares or [], wires, known))
        self.mailbox.flush()
        if not known:
            self._remember(agreed.signature, wires)
        return outcome, shares

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

    def _remember(self, signature, wires):
        """Keep the shapes of this signature; every rank keeps the same ones, and drops them at the same time."""
        if len(self.known) == KNOWN_SHAPES:
            self.known.clear()
            self.itineraries.clear()
            self.mailbox.forget()
        self.known[signature] = wires

    def _share_losses(self, losses, microbatches, shares):
        """(mean loss over all replicas, list of this pipeline's losses), on every rank."""
        start = perf_counter()
        table = np.zeros(microbatches + 1)
        if shares is not None:
            table[:-1] = [losses[m] for m in range(microbatches)]
            table[-1] = sum(share * losses[m] for m, share in enumerate(shares))
        if self.comm.size > 1:
            wait(self.comm.Ibcast(table, self.schedule.placement[-1]))
        total = table[-1:].copy()
        if self.replicas is not None:
            wait(PendingSum(self.replicas, total))
        self.elapsed += perf_counter() - start
        return float(total[0]), table[:-1].tolist()

    # -- failure ------------------------------------------------------------------------------------------------

    def _check_usable(self):
        if self.state != "open":
            raise ArgumentError(
                f"the pipeline is {self.state}", rank=self.rank,
                remedy="make a new job" if self.state == "failed" else "call step before close",
            )

    def _fail(self, error):
        """Tell the peers, once, and give up: messages of the broken step may still be under way."""
        if error is not None and not isinstance(error, PeerError):
            summary = str(error) or type(error).__name__
            self.alarm.sound(f"rank {self.rank} ({socket.gethostname()}) failed: {type(error).__name__}: {summary}")
        self.alarm.silence()
        self.mailbox.cancel()
        self.state = "failed"
        departure.unregister(self)

    def _leave(self):
        """At the end of the script: peers that still call must not wait for this rank."""
        if self.state == "open" and not runtime.finalized(self.comm):
            self.alarm.leave(f"rank {self.rank} ({socket.gethostname()}) left the job after call {self.alarm.call}")


def _prepare(stage, number, poll, replica):
    """Tell a stage of this package where it stands; stages of users are left alone."""
    if isinstance(stage, Stage):
        stage.index, stage.poll = number, poll
        stage.position.replica = replica
