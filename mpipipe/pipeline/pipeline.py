"""Pipeline: the object that users hold."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from mpipipe.arrays import read_only
from mpipipe.comm import Mailbox, make_transport
from mpipipe.errors import ArgumentError, MpipipeError, NonFiniteError
from mpipipe.job import Communicator, RankGroup, runtime, settings
from mpipipe.nn import Position
from mpipipe.pipeline.attached import AttachedStage
from mpipipe.pipeline.batch import (
    STEPS,
    Batch,
    BatchFacts,
    BatchReader,
    Call,
    LossFunction,
    check_place,
)
from mpipipe.pipeline.check import CheckedStage, Checks, checked_loss
from mpipipe.pipeline.clock import DeviceClock, HostClock
from mpipipe.pipeline.construction import (
    Arguments,
    agree_on_construction,
    check_forwards_first,
    end_groups,
)
from mpipipe.pipeline.evaluation import LossEvaluation
from mpipipe.pipeline.executor import Executor
from mpipipe.pipeline.gradient_sums import StepGradients
from mpipipe.pipeline.graphs import use_graphs
from mpipipe.pipeline.loss import Loss, SharedLoss, Weighing, unscaled
from mpipipe.pipeline.messages import StageMessages
from mpipipe.pipeline.plan import Plans
from mpipipe.pipeline.result import StepResult
from mpipipe.pipeline.state import PipelineState
from mpipipe.pipeline.ties import tie
from mpipipe.pipeline.units import Batched, Slicing, in_order, merge
from mpipipe.schedules import Costs, Schedule
from mpipipe.stages import PipelineStage, StageLike
from mpipipe.text import counted, name_slice, units
from mpipipe.trace import Recorder


class Pipeline:
    """Stages on the ranks of a communicator, run by a schedule.

    The constructor, `step`, `forward_train`, `backward`, `evaluate`, `forward`, `durations` and
    `close` are collective.

    Parameters
    ----------
    stages : sequence of stages
        This rank's stages, one for each of its logical stages in `schedule.placement`, in rising
        order; see Notes.
    schedule : Schedule
        What `mpipipe.schedules` makes or reads. It is checked here, before the first message.
    comm : mpi4py.MPI.Intracomm, optional
        Communicator with one rank for each rank of the schedule; by default COMM_WORLD. It is
        duplicated.
    loss : callable, optional
        `loss(output, target) -> (value, doutput)` or `(value, doutput, weight)`, needed on the rank
        of the last stage. `value` is a mean, `doutput` its gradient, shaped as the output, `weight`
        over how many things: a finite number; with 0 the others are not looked at. Without it a
        micro-batch counts by its rows, or by its target entries where `loss.mean_over_entries`, as
        in `nn`. A parameter `factor` multiplies doutput before it is rounded. With `loss.over_batch
        = True` it is called once, with lists of the outputs and targets of all micro-batches, and
        returns a list of gradients: for schedules in which the last stage has all forwards before
        its first backward.
    recompute : bool
        Keep only the input of each stage, and run its forward again: an R before each backward of
        the schedule.
    replicas : mpi4py.MPI.Intracomm, optional
        Communicator of the ranks with the same stages and parameters, over which gradients are
        summed; by default this is a single pipeline.
    check : bool, optional
        Look at all arrays for NaN, infinity and forbidden writes, and raise where the first is; the
        same on all ranks. By default what MPIPIPE_CHECK says. Costs time and memory:
        docs/sharp-bits.md.
    input_grads : bool
        Whether training steps compute the gradients of the inputs; the same on every rank. Without
        them the first layer saves a product, and `backward` returns None everywhere.
    slice_lengths : sequence of int, optional
        With a schedule of n slices, how many positions each has, along axis 1 of all inputs and
        targets; by default they are even. See docs/long-sequences.md.

    Attributes
    ----------
    stages, schedule : list, Schedule
        This rank's stages, and the schedule.

    Raises
    ------
    ArgumentError, ScheduleError, MismatchError
        The same error on every rank: arguments are wrong, or ranks disagree. The collective methods
        do so, too.
    StageError, NonFiniteError
        By a call, on the rank where a failure inside it happened, and PeerError on the others. The
        pipeline ends.

    Notes
    -----
    A stage, such as `nn.Stage`, has `forward(x) -> (y, saved)` and `backward(dy, saved) -> dx`.
    Schedules that split the backward need `backward_input(dy, saved) -> (dx, pending)` and
    `backward_weight(pending)` as well. x and y are an array, or a tuple or dict of arrays. A stage
    may keep x until its backward. It must not write to x or dy (on the host they are read-only),
    nor use the memory of y or dx again within the step: they are sent from where they lie.

    To take part in replicas a stage has `gradients`: None, or an object whose `flat` is one
    contiguous array of all gradients, the same in all steps: zeroed at the start of each, summed at
    its end. More of this: docs/stages.md.

    Examples
    --------
    Two threads stand for two MPI ranks here, with one linear layer on each:

    >>> import numpy as np
    >>> from mpipipe import Pipeline, nn, schedules
    >>> from mpipipe.job import inprocess
    >>> def on_each_rank(comm):
    ...     stage = nn.Stage([nn.Linear(3, 3)], first=comm.rank)
    ...     x = np.ones((8, 3), np.float32) if comm.rank == 0 else None
    ...     target = np.zeros((8, 3), np.float32) if comm.rank == 1 else None
    ...     schedule = schedules.one_f_one_b(ranks=2, microbatches=4)
    ...     with Pipeline([stage], schedule, comm, loss=nn.mean_squared_error) as pipe:
    ...         result = pipe.step(x, target)
    ...     return len(result.losses), bool(stage.gradients.flat.any())
    >>> inprocess.run(2, on_each_rank)
    [(4, True), (4, True)]
    """

    def __init__(
        self,
        stages: Sequence[StageLike],
        schedule: Schedule,
        comm: Communicator | None = None,
        loss: LossFunction | None = None,
        recompute: bool = False,
        replicas: Communicator | None = None,
        check: bool | None = None,
        input_grads: bool = True,
        slice_lengths: Sequence[int] | None = None,
    ):
        if check is None:
            check = settings.CHECK.is_on
        arguments = Arguments(
            stages,
            schedule,
            loss,
            bool(recompute),
            replicas,
            bool(check),
            bool(input_grads),
            slice_lengths,
        )
        groups: list[RankGroup] = []
        try:
            self.ranks = agree_on_construction(runtime.resolve(comm), arguments, groups)
            self.stages: list[Any] = [*stages]
            self.schedule = schedule
            self._build(arguments)
        except BaseException as error:
            end_groups(groups, error)
            raise

    def _build(self, arguments: Arguments) -> None:
        """Make all parts, now that the ranks have agreed; collective."""
        schedule = self.schedule
        ranks = self.ranks
        pipe = ranks.pipe
        stages = ranks.stages
        pipe.context.pipelines += 1
        name = f"pipeline {pipe.context.pipelines} ({schedule.name})"

        # -- Messages, and sums over ties and replicas

        tags = ranks.tags
        channels = tags.channels
        for places in ranks.ties:
            channels = max(channels, places[-1].channel + 1)
        transport = make_transport(
            pipe.comm, channels, settings.SYNC_SENDS.is_on, ranks.device, group=pipe
        )
        mailbox = Mailbox(transport, pipe)
        checks = None
        if arguments.check:
            checks = Checks(self.rank, schedule.stages - 1)
        tied = tie(pipe, transport, stages, ranks.ties)
        self._gradients = StepGradients(ranks, tied, checks)
        self._poll: Callable[[], None] = mailbox.poll
        if ranks.replicas is not None:
            self._poll = partial(self._gradients.poll, mailbox)

        # -- Stages, and what runs them

        self.plans = Plans(schedule, self.rank, tags, arguments.recompute)
        trained = self.plans.training.schedule
        attached = []
        for number, stage in stages.items():
            attached_stage = AttachedStage(
                stage, number, trained, arguments.input_grads, self._poll
            )
            if checks is not None:
                attached_stage.runner = CheckedStage(attached_stage, checks)
            elif ranks.device == "cuda" and settings.GRAPHS.is_on:
                use_graphs(attached_stage)
            attached.append(attached_stage)
        loss = None
        if arguments.loss is not None:
            loss = Loss(arguments.loss)
            if checks is not None:
                loss.function = partial(checked_loss, loss.function, checks)
        clock = HostClock()
        if ranks.device == "cuda":
            clock = DeviceClock()
        self.executor = Executor(
            self.rank,
            attached,
            StageMessages(mailbox),
            LossEvaluation(loss, Weighing(pipe, ranks.replicas, schedule.placement[-1])),
            self._gradients,
            checks,
            clock,
            arguments.input_grads,
        )

        # -- Calls

        bare = False
        for number, stage in stages.items():
            if schedule.has_backward(number) and not stage.shows_gradients:
                bare = True
        self._batches = BatchReader(
            schedule,
            self.rank,
            arguments.loss,
            bare,
            Slicing(schedule.slices, arguments.slice_lengths),
        )
        self.steps_taken = 0
        self.state = PipelineState(name, ranks, self.executor)
        # Losses of training steps that are still on the GPU.
        self._unread: list[SharedLoss] = []
        # Takes the recorder out of the process.
        self._forget: Callable[[], object] = lambda: None

    # -- Training steps

    def step(
        self, inputs: Batched, targets: Batched, scale: float = 1.0, accumulate: bool = False
    ) -> StepResult:
        """Run forward and backward of one batch, and leave its gradients in the stages.

        Gradients are zeroed first, and are those of the mean loss over all micro-batches of all
        replicas.

        Parameters
        ----------
        inputs : array, tuple or dict of arrays, list of such, function, or None
            On the rank of stage 0 C-contiguous arrays (rows, ...), cut along axis 0 into M
            micro-batches whose sizes differ by one at most, or a list of M such, whose shapes may
            differ; None on the other ranks. A function is called with the number of each
            micro-batch at its first forward (with 0 at the start of the call), and what it returns
            is not kept longer than needed. All have the shapes of the first.
        targets : array, tuple or dict of arrays, list of such, function, or None
            The same on the rank of the last stage, for the loss.
        scale : float
            Factor on the loss where the backward begins, the same on every rank, against underflow
            of float16 (optim.LossScaler). Gradients in the stages carry it; loss and input
            gradients in the result do not.
        accumulate : bool
            Whether gradients are added to those that are there, and not zeroed; the same on every
            rank. What is there counts as summed over replicas, as a step leaves it. Each step adds
            the gradients of its own mean loss times `scale`: with 1 / K, those of K batches of one
            size add up to the mean over all. A copy of the gradients is kept during the step.
        """
        call = self._call("step", inputs, targets, scale, accumulate)
        executor = self.executor
        with self.state:
            self._read_losses(wait=False)
            # All sums are there at the end of this block, before losses are fetched: the device
            # must wait for no rank that may fail.
            with self._gradients.making(executor.stages, accumulate):
                executor.run(call)
            shared = SharedLoss(self.executor.loss.weighing, call)
            total, problem = executor.loss.weighing.settle(shared, executor.stages)
            self._end_step()
        self._end(problem)
        if not shared.was_read:
            self._unread.append(shared)
        input_grads = executor.input_grads and self._input_gradients(call, total)
        return StepResult(shared, self._read_loss, input_grads)

    def forward_train(self, inputs: Batched) -> Batched:
        """Run the forwards of a training step; the caller makes gradients from the outputs.

        `backward` follows, and no other call of this pipeline comes between the two, nor an
        optimizer. The schedule has all forwards of the last stage before its first backward, as
        GPipe and looped breadth-first have: else every rank raises ArgumentError. Inputs are those
        of `step`, outputs those of `forward`, read-only on the host where the inputs were a list or
        function. docs/stages.md has an example.
        """
        call = self._call("forward_train", inputs)
        with self.state:
            ops = [action.op for action in call.plan.steps]
            self.executor.run(call, stop=len(ops) - ops[::-1].index("F"))
            # Nothing moves messages while the caller computes.
            self.executor.messages.mailbox.flush()
            outputs = self._outputs(call)
        for hooks in self._write_hooks():
            hooks.append(_refuse_write)
        return outputs

    def backward(
        self, gradients: Batched, scale: float = 1.0, accumulate: bool = False
    ) -> list | None:
        """Run the backwards of the step that `forward_train` began; leave its gradients.

        After an ArgumentError on all ranks the step is as `forward_train` left it.

        Parameters
        ----------
        gradients : array, tuple or dict of arrays, list of such, or None
            On the rank of the last stage, of a number L with respect to the outputs, in their form
            or as a list of M; None on the other ranks. Those of all replicas are summed: for the
            mean over R replicas each divides by R.
        scale, accumulate : float, bool
            As for `step`.

        Returns
        -------
        list or None
            On the rank of stage 0, the gradients of L with respect to the inputs, by micro-batch,
            without `scale`.
        """
        self._agree("backward", gradients, None, scale, accumulate)
        executor = self.executor
        call = executor.call
        assert call is not None  # agreed
        call.outputs = {}
        call.scale = scale
        for hooks in self._write_hooks():
            hooks[:] = [hook for hook in hooks if hook is not _refuse_write]
        with self.state:
            with self._gradients.making(executor.stages, accumulate):
                executor.run(call)
            self._end_step()
        self._end()
        return self._input_gradients(call, 1.0)

    # -- Calls without gradients

    def evaluate(self, inputs: Batched, targets: Batched) -> float:
        """Compute the mean loss over the batch of all replicas, on every rank, without gradients.

        Arguments and weights are as for `step`. A batch with fewer rows than M has a micro-batch
        for each row.
        """
        return self.weighed_evaluation(inputs, targets)[0]

    def weighed_evaluation(self, inputs: Batched, targets: Batched) -> tuple[float, float]:
        """Do what `evaluate` does, and also return the weight of the batch.

        Returns
        -------
        mean, weight : float
            The weight is the sum of those that the loss returns; else the rows, or entries, of all
            targets.
        """
        call = self._call("evaluate", inputs, targets)
        weighing = self.executor.loss.weighing
        with self.state:
            self.executor.run(call)
            shared = SharedLoss(self.executor.loss.weighing, call)
            _, problem = weighing.settle(shared)
            shared.read()
        self._end(problem)
        return shared.mean, weighing.weight_of(shared)

    def forward(self, inputs: Batched) -> Batched:
        """Compute the outputs of the last stage for a batch.

        Inputs are those of `step`; a list of fewer than M micro-batches, and a batch of fewer than
        M rows, will do as well. Outputs are on the rank of the last stage, put together along axis
        0, or a list of micro-batches where the inputs were one or came from a function; None on the
        other ranks.
        """
        call = self._call("forward", inputs)
        with self.state:
            self.executor.run(call)
            outputs = self._outputs(call)
        self._end()
        return outputs

    # -- What is known of the calls so far

    @property
    def rank(self) -> int:
        """The number of this rank in the pipeline."""
        return self.ranks.pipe.rank

    def durations(self) -> Costs:
        """Return mean seconds of forward, input and weight gradient of each stage so far.

        Collective: they are those of all ranks, on every rank, and what `schedules.simulate` takes.
        """
        self._agree("durations")
        own_means = self.executor.clock.means(self.schedule.stages, self.plans.recompute)
        with self.state:
            everyone = self.ranks.pipe.gather("the durations of all stages", own_means)
        return Costs(*sum(everyone).tolist())

    def poll(self) -> None:
        """Let messages move. A stage of your own that computes for long calls this now and then."""
        self._poll()

    @property
    def peak_activations(self) -> int:
        """Most activations held at once in the last training step, as `simulate` counts.

        That is as for the schedule that was given, without the R's of `recompute`.
        """
        if not self.steps_taken:
            return 0
        return self.plans.peak_activations

    @property
    def busy(self) -> float:
        """Seconds of the last call in stages and loss.

        On a GPU by events, and this waits for the last action.
        """
        self.executor.clock.settle()
        return self.executor.clock.busy

    @property
    def elapsed(self) -> float:
        """Seconds of the last call, in all.

        On a GPU by events, and this waits for the last action.
        """
        self.executor.clock.settle()
        return self.executor.clock.elapsed

    @property
    def training_seconds(self) -> tuple[float, float]:
        """`busy` and `elapsed` of all training steps so far, added up.

        On a GPU this waits for the last action.
        """
        clock = self.executor.clock
        clock.settle()
        busy, elapsed = clock.training_seconds.tolist()
        return busy, elapsed

    @property
    def bytes_sent(self) -> int:
        """Bytes of activations and gradients that this rank sent in the last call."""
        return sum(self.bytes_per_edge.values())

    @property
    def bytes_per_edge(self) -> dict[tuple[int | str, str], int]:
        """`bytes_sent` by (edge or name of a skip, "forward" or "backward").

        Edge e joins stage e - 1 to stage e.
        """
        return self.executor.messages.bytes_per_edge

    def record(self, recorder: Recorder | None) -> None:
        """Let a recorder note actions, messages, waits and steps from now on; None ends that.

        Parameters
        ----------
        recorder : Recorder or None
            See mpipipe.tracing.recording, which brings the notes of all ranks together.
        """
        self._forget()
        self.executor.record(recorder)
        recorders = self.ranks.pipe.context.recorders
        if recorder is not None:
            recorders.add(recorder)
            # This pipeline may never be closed.
            self._forget = weakref.finalize(self, recorders.discard, recorder)

    @property
    def recorder(self) -> Recorder | None:
        """What notes actions of this rank; None where nothing does."""
        return self.executor.clock.recorder

    # -- The end

    def close(self) -> None:
        """Free the communicators; collective, may be called twice.

        After a failure nothing collective is done.
        """
        if not self.state.is_open:
            return
        try:
            self._agree("close")
        except MpipipeError as error:
            # Receives of gradients are posted, which never come.
            if self._is_halfway:
                self.state.fail(error)
            raise
        with self.state:
            self._read_losses(wait=True)
        self.record(None)
        self.state.state = "closed"
        for stage in self.executor.stages:
            stage.detach()
        self._gradients.close()
        self.executor.messages.mailbox.transport.close()
        for group in self.ranks.groups:
            group.close()

    def __repr__(self) -> str:
        stages = ", ".join(map(str, self.schedule.stages_of(self.rank)))
        where = f"rank {self.rank} of {counted(self.schedule.ranks, 'rank')}, stages {stages}"
        return (
            f"<Pipeline {self.schedule.name}: {where}, {counted(self.steps_taken, 'step')} "
            f"taken, {self.state.state}>"
        )

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.close()
            return
        self.state.fail_alone(error)
        try:  # all ranks raise this error, so they may all come here
            self.close()
        except MpipipeError:
            self.state.fail(error)

    # -- The steps of a call

    def _agree(
        self,
        name: str,
        inputs: Batched = None,
        targets: Batched = None,
        scale: float = 1.0,
        accumulate: bool = False,
    ) -> tuple[Batch, BatchFacts]:
        """Check this rank's arguments of a call, and agree with the peers that all ranks make it.

        For "backward" the gradients of the outputs are in place of `inputs`.
        """
        self.state.check(name)
        self.executor.clock.enter()
        error = None
        batch = Batch()
        try:
            batch = self._checked_batch(name, inputs, targets, scale)
        except Exception as caught:
            error = caught
            scale = 1.0
        try:
            agreed = self.state.agree(name, batch.facts, error, scale, bool(accumulate))
        except BaseException as problem:
            self.state.fail_alone(problem)
            raise
        return batch, agreed

    def _checked_batch(self, name: str, inputs: Batched, targets: Batched, scale: float) -> Batch:
        """Return the batch of a call; raise for arguments that are wrong on this rank."""
        batch = Batch()
        if self._is_halfway != (name == "backward"):
            when = "without a forward_train before it"
            if self._is_halfway:
                when = "between a forward_train and its backward"
            raise ArgumentError(
                f"{name} was called {when}",
                remedy="call forward_train, then backward once, and no other method of this "
                "pipeline between them",
            )
        if name in STEPS and self.recorder is not None:
            self.recorder.begin_step()
        if name in (*STEPS, "evaluate", "forward"):
            batch = self._batches.read(name, inputs, targets)
        if name == "forward_train" and self.rank == self.schedule.placement[-1]:
            check_forwards_first(self.schedule, "forward_train")
        if name == "backward":
            self._take_gradients(inputs, scale)
        if name in (*STEPS, "backward"):
            for stage in self.executor.stages:
                stage.check_storage()
        if not isinstance(scale, (int, float, np.number)) or not 0 < scale < math.inf:
            raise ArgumentError("scale", found=repr(scale), expected="a finite number above 0")
        return batch

    @property
    def _is_halfway(self) -> bool:
        """True between forward_train and backward."""
        return self.executor.call is not None and self.state.is_open

    def _call(
        self,
        name: str,
        inputs: Batched,
        targets: Batched = None,
        scale: float = 1.0,
        accumulate: bool = False,
    ) -> Call:
        """Return a call that all ranks have agreed on."""
        batch, agreed = self._agree(name, inputs, targets, scale, accumulate)
        training = name in STEPS
        plan = self.plans.training
        if not training:
            plan = self.plans.forward(agreed.microbatches)
        slices = self._batches.slicing.count
        replica = self.ranks.replica
        positions = [
            Position(self.steps_taken, unit, replica, training, training)
            for unit in units(agreed.microbatches * slices, slices)
        ]
        self.executor.loss.weighing.begin(agreed, batch.counts or [])
        number = self.state.calls
        return Call(
            name,
            number,
            f"{name} (call {number}) of {self.state.name}",
            plan,
            agreed,
            training,
            batch.inputs or [],
            batch.targets,
            name in ("forward", "forward_train"),
            scale,
            positions,
        )

    def _end_step(self) -> None:
        self._gradients.add_earlier()
        self.steps_taken += 1
        if self.recorder is not None:
            self.recorder.end_step()

    def _end(self, problem: MpipipeError | None = None) -> None:
        """Let go of the arrays of a call; raise what all ranks have found wrong."""
        self.executor.clock.leave()
        self.executor.call = None
        if problem is not None:
            raise problem

    def _outputs(self, call: Call) -> Batched:
        """Return the outputs of the last stage in the form of the inputs; None on other ranks."""
        pieces = self._batches.slicing.whole(in_order(call.outputs))
        if not pieces:
            return None
        if not call.agreed.listed:
            return merge(pieces)
        if call.training:
            pieces = [*map(read_only, pieces)]
        return pieces

    def _input_gradients(self, call: Call, scale: float) -> list | None:
        """Return the gradients of the inputs by micro-batch, without a factor on them."""
        gradients = self._batches.slicing.whole(in_order(call.input_gradients))
        if scale != 1:
            gradients = [unscaled(gradient, scale) for gradient in gradients]
        return gradients or None

    def _read_losses(self, wait: bool) -> None:
        """Look at losses that steps have left on the GPU: all, or those that are there by now."""
        while self._unread and (wait or self._unread[0].is_here()):
            self._unread.pop(0).read()

    def _read_loss(self, shared: SharedLoss) -> None:
        """Read the losses of all steps up to one, or further; the pipeline fails for one of NaN."""
        try:
            self._read_losses(wait=True)
            shared.read()
        except NonFiniteError as error:
            self.state.fail(error)
            raise

    # -- Between forward_train and backward

    def _write_hooks(self) -> list[list]:
        """Return the lists of functions that are called before anything writes to parameters."""
        holders: list[PipelineStage] = []
        for stage in self.ranks.stages.values():
            holders += {stage, *stage.inner_stages}
        return [holder.before_write for holder in holders]

    def _take_gradients(self, gradients: Batched, scale: float) -> None:
        """Take the caller's gradients of the outputs; raise ArgumentError if they do not fit."""
        call = self.executor.call
        assert call is not None  # a step is under way
        root = self.schedule.placement[-1]
        where = f"rank {root}, which holds the last stage"
        check_place("gradients", gradients, self.rank == root, where)
        outputs = in_order(call.outputs)
        parts = self._batches.slicing.cut_as(gradients, outputs)
        for unit, (gradient, y) in enumerate(zip(parts, outputs)):
            try:
                call.loss_gradients[unit] = Loss.scaled(gradient, scale, y)
            except MpipipeError as error:
                error.microbatch = call.positions[unit].microbatch
                name_slice(error)
                raise


def _refuse_write() -> None:
    raise ArgumentError(
        "parameters would be written between forward_train and its backward, which needs them as "
        "they were",
        remedy="call backward first, and then step of the optimizer",
    )
