"""Pipeline: the object that users hold. It agrees on each call with its peers, runs it, and brings results home."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from types import TracebackType
from typing import Any, TypeAlias

import numpy as np

from mpipipe.arrays import Tree
from mpipipe.comm import runtime, settings
from mpipipe.comm.allreduce import AllReduce
from mpipipe.comm.mailbox import Mailbox
from mpipipe.comm.requests import own
from mpipipe.comm.tags import Tags
from mpipipe.comm.transport import gpu_aware
from mpipipe.comm.transport.choose import make_transport
from mpipipe.comm.types import Communicator
from mpipipe.errors import ArgumentError, MpipipeError
from mpipipe.nn import Position
from mpipipe.pipeline.batch import Batch, BatchReader
from mpipipe.pipeline.construction import Partners, agree_on_construction, end_groups
from mpipipe.pipeline.executor import Executor
from mpipipe.pipeline.life import Life
from mpipipe.pipeline.loss import Loss
from mpipipe.pipeline.messages import StageMessages
from mpipipe.pipeline.microbatches import merge
from mpipipe.pipeline.plan import Plan
from mpipipe.pipeline.step_agreement import Agreed, Agreement
from mpipipe.pipeline.step_state import StepInputs, StepState
from mpipipe.pipeline.ties import Ties
from mpipipe.schedules import Costs, Schedule
from mpipipe.trace import Recorder

Batched: TypeAlias = "Tree | list[Tree] | None"  # a batch, its micro-batches, or nothing on this rank


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

    def __init__(
        self,
        stages: Sequence[Any],
        schedule: Schedule,
        comm: Communicator | None = None,
        loss: Callable[..., Any] | None = None,
        recompute: bool = False,
        replicas: Communicator | None = None,
    ):
        comm = runtime.resolve(comm)
        partners = agree_on_construction(comm, replicas, stages, schedule, loss, recompute)
        self.groups = [group for group in (partners.pipe, partners.replicas) if group is not None]
        try:
            self._build(partners, stages, schedule, loss, recompute)
        except BaseException as error:
            end_groups(self.groups, error, "a pipeline could not be built")
            raise

    def _build(
        self,
        partners: Partners,
        stages: Sequence[Any],
        schedule: Schedule,
        loss: Callable[..., Any] | None,
        recompute: bool,
    ) -> None:
        """Build what is left to build once all ranks have agreed."""
        self.pipe, self.partners, devices = partners.pipe, partners.replicas, partners.devices
        self.comm, self.rank = self.pipe.comm, self.pipe.rank
        self.comm.Set_name("mpipipe pipeline")
        self.replicas = None if self.partners is None else self.partners.comm
        self.schedule, self.stages, self.device = schedule, list(stages), devices[self.rank]
        self.pipe.process.pipelines += 1
        self.name = f"pipeline {self.pipe.process.pipelines} ({schedule.name})"  # the how many-th of this rank
        self.tags = Tags(schedule.placement, schedule.microbatches, runtime.tag_upper_bound(self.comm))
        verdict = gpu_aware.detect(self.comm, self.pipe) if "cuda" in devices else None
        transport = make_transport(
            self.comm, self.tags.channels, settings.synchronous_sends(), self.device, verdict, self.pipe
        )
        self.messages = StageMessages(Mailbox(transport, self.pipe))
        self.agreement = Agreement(self.pipe, self.partners, self.name)
        self.adapters = partners.stages
        self.executor = Executor(
            self.rank,
            self.adapters,
            self.messages,
            loss=None if loss is None else Loss(loss),
            recompute=recompute,
            replicas=self.replicas,
            device=self.device,
        )
        numbers = schedule.stages_of(self.rank)
        poll = self.executor.poll if self.replicas is not None else self.messages.mailbox.poll
        for stage, number in zip(self.adapters, numbers):
            stage.attach(number, poll)
        self.ties = Ties(self.pipe, self.adapters, numbers, partners.ties)
        self.life = Life(self.name, self.rank, self.groups, self.executor)
        self.batches = BatchReader(schedule, self.rank, loss is not None)
        self.plans: dict[str | int, Plan] = {"step": Plan(schedule, self.rank, self.tags)}
        self.steps_taken = 0
        self.started = self.host_elapsed = 0.0
        watched = weakref.ref(self.agreement)  # a pipeline that nobody closed can be freed, if its groups cannot
        for group in self.groups:
            group.progress = lambda name=self.name: f"call {_count(watched)} of {name}"
            group.related = self.groups

    # -- what users call ----------------------------------------------------------------------------------------

    def step(self, inputs: Batched, targets: Batched, scale: float = 1.0) -> StepResult:
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
        batch, agreed = self._agree("step", inputs, targets, scale)
        with self.life:
            for stage in self.adapters:
                stage.zero_gradients()
            state = self._run("step", batch, agreed, scale)
            loss, losses = self._share_losses(state, agreed.microbatches)
            if self.partners is not None:
                for pending in self.executor.sums:
                    self.partners.wait(pending, "the sum of gradients over the replicas", everyone=True)
            self.ties.sum_gradients()
            self.steps_taken += 1
        self.host_elapsed = perf_counter() - self.started
        gradients = state.input_gradients
        return StepResult(loss, losses, [gradients[m] for m in range(agreed.microbatches)] if gradients else None)

    def evaluate(self, inputs: Batched, targets: Batched) -> float:
        """Compute the mean loss of a batch; no gradients are computed.

        Parameters
        ----------
        inputs, targets : as for `step`
            A batch with fewer rows than M is cut into as many micro-batches as it has rows.

        Returns
        -------
        float
            The mean loss over the batch of all replicas, on every rank.
        """
        batch, agreed = self._agree("evaluate", inputs, targets)
        with self.life:
            state = self._run("evaluate", batch, agreed)
            loss, _ = self._share_losses(state, agreed.microbatches)
        self.host_elapsed = perf_counter() - self.started
        return loss

    def forward(self, inputs: Batched) -> Batched:
        """Compute the outputs of the last stage for a batch.

        Parameters
        ----------
        inputs : as for `step`

        Returns
        -------
        array, tuple or dict of arrays, list of such, or None
            On the rank of the last stage the outputs, put together along axis 0, or a list of micro-batches where the
            inputs were one; None on the other ranks.
        """
        batch, agreed = self._agree("forward", inputs, None)
        with self.life:
            state = self._run("forward", batch, agreed)
        self.host_elapsed = perf_counter() - self.started
        if not state.outputs:
            return None
        pieces = [state.outputs[m] for m in range(agreed.microbatches)]
        return pieces if agreed.listed else merge(pieces)

    def durations(self) -> Costs:
        """Share the measured durations of all ranks; collective.

        Returns
        -------
        schedules.Costs
            Mean seconds of forward, input gradient and weight gradient of each stage over all training steps, on every
            rank: what `schedules.simulate` takes.
        """
        self._agree("durations", None, None)
        mine = np.zeros((3, self.schedule.stages))
        self.executor.clock.settle()
        for (op, stage), (total, count) in self.executor.clock.totals.items():
            mine["FBW".index("B" if op == "I" else op), stage] += total / count
        everyone = np.zeros((self.comm.size, *mine.shape))
        with self.life:
            self.pipe.wait(own(self.comm.Iallgather(mine, everyone)), "the durations of all stages", everyone=True)
        forward, input_grad, weight_grad = everyone.sum(0).tolist()
        return Costs(forward=forward, input_grad=input_grad, weight_grad=weight_grad)

    def poll(self) -> None:
        """Let messages move. A stage of your own that computes for long calls this now and then."""
        self.executor.poll()

    @property
    def peak_activations(self) -> int:
        """Largest number of (stage, micro-batch) activations held at once in the last training step."""
        return self.executor.peak

    @property
    def busy(self) -> float:
        """Seconds of the last call spent in stages and loss; on a GPU this waits for the last action."""
        self.executor.clock.settle()
        return self.executor.clock.busy

    @property
    def elapsed(self) -> float:
        """Seconds of the last call; on a GPU this waits for the last action."""
        self.executor.clock.settle()
        return max(self.host_elapsed, self.executor.clock.span)

    @property
    def bytes_sent(self) -> int:
        """Bytes of activations and gradients that this rank sent in the last call."""
        return sum(self.bytes_per_edge.values())

    @property
    def bytes_per_edge(self) -> dict[tuple[int, str], int]:
        """The same by (edge, "forward" or "backward"); edge e joins stage e - 1 to stage e."""
        return self.messages.bytes_per_edge

    @property
    def recorder(self) -> Recorder | None:
        """A trace.Recorder that notes when each action ran, or None."""
        self.executor.clock.settle()
        return self.executor.clock.recorder

    @recorder.setter
    def recorder(self, recorder: Recorder | None) -> None:
        self.executor.clock.settle()
        self.executor.clock.recorder = recorder

    def close(self) -> None:
        """Free the communicators; collective, may be called twice. After a failure nothing collective is done."""
        if self.life.is_open:
            self._agree("close", None, None)
            self.life.state = "closed"
            self.ties.close()
            self.messages.mailbox.transport.close()
            for group in self.groups:
                group.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif self.life.is_open and self.life.agreed_on(error):
            try:  # all ranks raise this error, so they may all come here
                self.close()
            except MpipipeError:
                self.life.fail(error)
        elif self.life.is_open:
            self.life.fail(error)

    # -- one call -----------------------------------------------------------------------------------------------

    def _agree(self, call: str, inputs: Any, targets: Any, scale: Any = 1.0) -> tuple[Batch, Agreed]:
        """Check this rank's arguments of a call, and agree with the peers that all ranks make it."""
        self.life.check(call)
        self.started = perf_counter()
        error, batch = None, Batch()
        try:
            if call in ("step", "evaluate", "forward"):
                batch = self.batches.read(call, inputs, targets)
            if not isinstance(scale, (int, float, np.number)) or not (scale > 0 and math.isfinite(scale)):
                raise ArgumentError("scale", found=repr(scale), expected="a finite number above 0")
        except Exception as caught:
            error, scale = caught, 1.0
        with self.life:
            agreed, problem = self.agreement.reach(call, batch.facts, error, scale)
        if problem is not None:
            raise problem
        return batch, agreed

    def _run(self, call: str, batch: Batch, agreed: Agreed, scale: float = 1.0) -> StepState:
        """Run the plan of a call."""
        plan = self._plan(call, agreed.microbatches)
        training, replica = call == "step", 0 if self.replicas is None else self.replicas.rank
        inputs = StepInputs(
            training,
            batch.inputs or [],
            batch.targets,
            weights=[] if batch.rows is None else [rows / agreed.total_rows for rows in batch.rows],
            scale=scale,
            positions=[Position(self.steps_taken, m, replica, training) for m in range(agreed.microbatches)],
        )
        for stage in self.adapters:
            stage.begin_call()
        self.messages.begin(plan, agreed.signature)
        state = self.executor.run(plan.steps, inputs)
        self.messages.end(agreed.signature)
        return state

    def _plan(self, call: str, microbatches: int) -> Plan:
        key = "step" if call == "step" else microbatches
        if key not in self.plans:
            self.plans[key] = Plan(self.schedule.forward_only_part(microbatches), self.rank, self.tags)
        return self.plans[key]

    def _share_losses(self, state: StepState, microbatches: int) -> tuple[float, list[float]]:
        """Return (mean loss over all replicas, losses of this pipeline's micro-batches), on every rank."""
        table = np.zeros(microbatches + 1)
        if state.inputs.targets is not None:
            losses = self.executor.losses(self.schedule.stages - 1)
            table[:-1] = losses
            table[-1] = sum(weight * loss for weight, loss in zip(state.inputs.weights, losses))
        if self.comm.size > 1:
            self.pipe.wait(own(self.comm.Ibcast(table, self.schedule.placement[-1])), "the loss", everyone=True)
        total = table[-1:].copy()
        if self.partners is not None:
            self.partners.wait(AllReduce(self.replicas, total), "the loss of the replicas", everyone=True)
        return float(total[0]), table[:-1].tolist()


def _count(agreement: Callable[[], Agreement | None]) -> int:
    """Calls so far, by a weak reference to an Agreement."""
    found = agreement()
    return 0 if found is None else found.count
