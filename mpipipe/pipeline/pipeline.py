"""Pipeline: the object that users hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from mpipipe.arrays import Tree, read_only
from mpipipe.job import Communicator, runtime, settings
from mpipipe.pipeline.batch import CallState
from mpipipe.pipeline.construction import Arguments, agree_on_construction, end_groups
from mpipipe.pipeline.engine import Engine
from mpipipe.pipeline.result import StepResult
from mpipipe.pipeline.units import merge
from mpipipe.schedules import Costs, Schedule
from mpipipe.text import counted

# a batch, its micro-batches, a function that gives them by their numbers, or nothing on this rank
Batched: TypeAlias = "Tree | list[Tree] | Callable[[int], Tree] | None"


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
        targets; by default they are even. See docs/stages.md.

    Attributes
    ----------
    stages, schedule, rank : list, Schedule, int
        This rank's stages, the schedule, and this rank in the communicator.

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
    A stage, such as `nn.Stage`, has `forward(x) -> (y, saved)` and `backward(dy, saved) -> dx`. Schedules that split
    the backward need `backward_input(dy, saved) -> (dx, pending)` and `backward_weight(pending)` as well. x and y are
    an array, or a tuple or dict of arrays. A stage may keep x until its backward, must not write to x or dy (on the
    host they are read-only), nor use the memory of y or dx again within the step: they are sent from where they lie.

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
        stages: Sequence[Any],
        schedule: Schedule,
        comm: Communicator | None = None,
        loss: Callable[..., Any] | None = None,
        recompute: bool = False,
        replicas: Communicator | None = None,
        check: bool | None = None,
        input_grads: bool = True,
        slice_lengths: Sequence[int] | None = None,
    ):
        comm = runtime.resolve(comm)
        check = settings.CHECK.is_on if check is None else bool(check)
        arguments = Arguments(
            stages,
            schedule,
            loss,
            recompute,
            replicas,
            check,
            input_grads=bool(input_grads),
            slice_lengths=slice_lengths,
        )
        partners = agree_on_construction(comm, arguments)
        try:
            self.engine = Engine(partners, arguments)
        except BaseException as error:
            end_groups(partners.groups, error)
            raise
        self.stages = list(stages)
        self.schedule = schedule
        self.rank = partners.pipe.rank

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
            is not kept longer than needed. All have the shapes of the first, or as many rows as an
            attribute `rows` of the function, M numbers, says.
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
        return self.engine.step(inputs, targets, scale, accumulate)

    def forward_train(self, inputs: Batched) -> Batched:
        """Run the forwards of a training step, for gradients that the caller makes from the
        outputs.

        `backward` follows, and no other call of this pipeline comes between the two, nor an
        optimizer. The schedule has all forwards of the last stage before its first backward, as
        GPipe and looped breadth-first have: else every rank raises ArgumentError. Inputs are those
        of `step`, outputs those of `forward`, read-only on the host where the inputs were a list or
        function. docs/stages.md has an example.
        """
        agreed, state = self.engine.forward_train(inputs)
        with self.engine.state:
            return _outputs(self.engine, agreed.listed, state)

    def backward(
        self, gradients: Batched, scale: float = 1.0, accumulate: bool = False
    ) -> list | None:
        """Run the backwards of the step that `forward_train` has begun, and leave its gradients in
        the stages.

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
        return self.engine.backward(gradients, scale, accumulate)

    def evaluate(self, inputs: Batched, targets: Batched) -> float:
        """Compute the mean loss over the batch of all replicas, on every rank; no gradients are
        computed.

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
        engine = self.engine
        batch, agreed = engine.agree("evaluate", inputs, targets)
        with engine.state:
            shared = engine.share_losses("evaluate", engine.run("evaluate", batch, agreed))
            _, problem = engine.weighing.settle(shared)
            shared.read()
        engine.end(problem)
        return shared.mean, engine.weighing.weight_of(shared)

    def forward(self, inputs: Batched) -> Batched:
        """Compute the outputs of the last stage for a batch.

        Inputs are those of `step`; a list of fewer than M micro-batches, and a batch of fewer than
        M rows, will do as well. Outputs are on the rank of the last stage, put together along axis
        0, or a list of micro-batches where the inputs were one or came from a function; None on the
        other ranks.
        """
        engine = self.engine
        batch, agreed = engine.agree("forward", inputs)
        with engine.state:
            state = engine.run("forward", batch, agreed)
            outputs = _outputs(engine, agreed.listed, state)
        engine.end()
        return outputs

    def durations(self) -> Costs:
        """Return the mean seconds of forward, input gradient and weight gradient of each stage over
        all training steps.

        Collective: they are those of all ranks, on every rank, and what `schedules.simulate` takes.
        """
        self.engine.agree("durations")
        return Costs(*self.engine.share_durations().tolist())  # forward, input_grad, weight_grad

    def poll(self) -> None:
        """Let messages move. A stage of your own that computes for long calls this now and then."""
        self.engine.executor.poll()

    @property
    def steps_taken(self) -> int:
        """Number of training steps so far, by which dropout draws its masks. Set it where a
        training is resumed.
        """
        return self.engine.steps_taken

    @steps_taken.setter
    def steps_taken(self, steps: int) -> None:
        self.engine.steps_taken = steps

    @property
    def peak_activations(self) -> int:
        """Most activations of a unit in a stage held at once in the last training step, as
        `simulate` counts.

        That is as for the schedule that was given, without the R's of `recompute`.
        """
        return max(self._activations) if self.steps_taken else 0

    @property
    def live_activations(self) -> int:
        """(stage, micro-batch) activations held now, counted as `peak_activations`; 0 where no step
        is under way.
        """
        state = self.engine.executor.state
        if state is None or not state.inputs.training:
            return 0
        return self._activations[len(state.marks) // 2]

    @property
    def _activations(self) -> list[int]:
        plan = self.engine.training_plan
        return plan.activations_and_inputs if self.engine.recompute else plan.activations

    @property
    def busy(self) -> float:
        """Seconds of the last call spent in stages and loss; on a GPU by events, and this waits for
        the last action.
        """
        self.engine.executor.clock.settle()
        return self.engine.executor.clock.busy

    @property
    def elapsed(self) -> float:
        """Seconds of the last call, in all; on a GPU by events, and this waits for the last
        action.
        """
        self.engine.executor.clock.settle()
        return self.engine.executor.clock.elapsed

    @property
    def training_seconds(self) -> tuple[float, float]:
        """`busy` and `elapsed` of all training steps so far, added up; on a GPU this waits for the
        last action.
        """
        clock = self.engine.executor.clock
        clock.settle()
        busy, elapsed = clock.training_seconds.tolist()
        return busy, elapsed

    @property
    def bytes_sent(self) -> int:
        """Bytes of activations and gradients that this rank sent in the last call."""
        return sum(self.bytes_per_edge.values())

    @property
    def bytes_per_edge(self) -> dict[tuple[int | str, str], int]:
        """`bytes_sent` by (edge or name of a skip, "forward" or "backward"); edge e joins stage e -
        1 to stage e.
        """
        return self.engine.messages.bytes_per_edge

    def close(self) -> None:
        """Free the communicators; collective, may be called twice. After a failure nothing
        collective is done.
        """
        if self.engine.state.is_open:
            self.engine.close()

    def __repr__(self) -> str:
        state = self.engine.state
        stages = ", ".join(map(str, self.schedule.stages_of(self.rank)))
        where = f"rank {self.rank} of {counted(self.schedule.ranks, 'rank')}, stages {stages}"
        return (
            f"<Pipeline {self.schedule.name}: {where}, {counted(self.steps_taken, 'step')} "
            f"taken, {state.state}>"
        )

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.engine.state.leave(error, self.close)


def _outputs(engine: Engine, listed: int, state: CallState) -> Batched:
    """The outputs of the last stage in the form of the inputs; None on other ranks."""
    pieces = engine.slicing.whole([state.outputs[unit] for unit in range(len(state.outputs))])
    if not pieces:
        return None
    if listed:
        return list(map(read_only, pieces)) if state.inputs.training else pieces
    return merge(pieces)
