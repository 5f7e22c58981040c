"""The agreement of all ranks on the pipeline that they are about to build, before anything is built."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import blake2b
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array
from mpipipe.comm.tags import Tags, neighbours
from mpipipe.errors import ArgumentError, MismatchError, MpipipeError, PeerError
from mpipipe.job import runtime, settings
from mpipipe.job.communicators import attributes
from mpipipe.job.consensus import agreed_by, raise_for_partners, raise_on_all
from mpipipe.job.group import Group
from mpipipe.job.types import Communicator
from mpipipe.pipeline.batch import BatchReader
from mpipipe.pipeline.plan import Plan
from mpipipe.pipeline.ties import Place, TieNames, check_ties, tie_facts
from mpipipe.schedules import Schedule
from mpipipe.schedules.proof import check_part, digest
from mpipipe.stages import FlatView, StageAdapter, flat_if_any
from mpipipe.text import counted

CALL = "construction of a Pipeline"
REPLICAS = "pipeline"  # name of the fact whether there are replicas


class Partners(NamedTuple):
    """The ranks that a pipeline is built with, and what they have said.

    Attributes
    ----------
    pipe : group of the ranks of the pipeline
    replicas : group of the ranks with the same stages; None for a single pipeline
    ties : tie facts of each rank of the pipe
    devices : "cpu" or "cuda", of each rank of the pipe
    stages : of this rank
    check : whether all ranks look at all arrays
    """

    pipe: Group
    replicas: Group | None
    ties: list[dict[str, list[Place]]]
    devices: list[str]
    stages: list[StageAdapter]
    check: bool

    @property
    def groups(self) -> list[Group]:
        """All groups."""
        return [group for group in (self.pipe, self.replicas) if group is not None]


def agree_on_construction(
    comm: Communicator,
    replicas: Communicator | None,
    stages: Any,
    schedule: Any,
    loss: Any,
    recompute: bool,
    check: bool,
) -> Partners:
    """Check the arguments of a Pipeline on every rank; raises the same error on all of them where one is wrong.

    Parameters
    ----------
    comm : the user's communicator of the pipeline
    replicas : the user's communicator of the ranks with the same stages, or None
    """
    known = attributes(comm).get("group")
    if known is not None:  # it can say who is missing, which a new communicator cannot
        known.agree(CALL)
    groups = [Group(comm)]
    try:
        return _agree(groups, replicas, stages, schedule, loss, recompute, check)
    except BaseException as error:
        end_groups(groups, error, "a pipeline could not be built")
        raise


def end_groups(groups: Sequence[Group], error: BaseException, what: str) -> None:
    """Free groups after an error that all their ranks raise; tell the other ranks of any other error.

    A rank may fail elsewhere before it comes to the close. `error` is raised all the same, for this rank may be the one
    that is to report it.
    """
    for group in groups:
        if group.agreed_on(error):
            with suppress(PeerError):
                group.close()
        else:
            told = f"{what}: {error}" if isinstance(error, MpipipeError) else f"{what}: {error!r}"
            group.fail(error, told, making=True)


def _agree(
    groups: list[Group],
    replicas: Communicator | None,
    stages: Any,
    schedule: Any,
    loss: Any,
    recompute: bool,
    check: bool,
) -> Partners:
    (pipe,) = groups
    error: MpipipeError | None = None
    ties: list[dict[str, list[Place]]] = []
    devices: list[str] = []
    adapters: list[StageAdapter] = []
    try:
        ties, devices, adapters = _agree_in_pipe(pipe, replicas, stages, schedule, loss, recompute, check)
    except MpipipeError as caught:
        if not caught.agreed:
            raise
        error = caught
    if replicas is None or _size(replicas) == 1:
        if error is not None:
            raise error
        return Partners(pipe, None, ties, devices, adapters, check)
    others = Group(replicas)
    groups.insert(0, others)
    _agree_with_replicas(pipe, others, adapters, schedule, recompute, check, error)
    return Partners(pipe, others, ties, devices, adapters, check)


def _size(replicas: Communicator) -> int:
    """The number of replicas; 1 for what cannot be their communicator, which is an error by now."""
    try:
        return runtime.resolve(replicas).size
    except MpipipeError:
        return 1


def _agree_in_pipe(
    pipe: Group, replicas: Communicator | None, stages: Any, schedule: Any, loss: Any, recompute: bool, check: bool
) -> tuple[list[dict[str, list[Place]]], list[str], list[StageAdapter]]:
    """Return (tie facts of each rank, device of each rank, stages of this rank)."""
    error: Exception | None = None
    adapters: list[StageAdapter] = []
    facts: tuple = ()
    mine = None
    try:
        settings.check_settings()
        _check_carrier(check)
        if replicas is not None:
            runtime.resolve(replicas)
        adapters = check_arguments(stages, schedule, loss, pipe.comm, replicas)
        largest_tag = runtime.tag_upper_bound(pipe.comm)
        Tags(schedule.placement, schedule.microbatches, largest_tag, schedule.skip_ends)
        facts = (
            ("schedule", f"{schedule.name} {digest(schedule)}"),
            ("number of micro-batches", schedule.microbatches),
            ("recompute", bool(recompute)),
            ("check", check),
            (REPLICAS, "with replicas" if replicas is not None else "without replicas"),
            ("setting MPIPIPE_TAG_UB", largest_tag),
            ("setting MPIPIPE_NCCL=on", settings.nccl_is_demanded()),
            ("setting MPIPIPE_GRAPHS", settings.graphs()),
        )
        mine = tie_facts(adapters, schedule.stages_of(pipe.rank)), device_of(adapters)
    except Exception as caught:
        error = caught
    pipe.agree(
        CALL,
        facts,
        error=error,
        message="ranks were given different pipelines",
        remedy="build the same schedule with the same arguments, and set the same environment, on every rank",
    )
    everyone = pipe.gather(f"{CALL}: ties and devices", mine)
    ties, devices = [ties for ties, _ in everyone], [device for _, device in everyone]
    try:
        check_ties(ties)
    except MpipipeError as problem:  # every rank finds it in the same facts
        raise_on_all(0, problem, pipe)
    return ties, devices, adapters


def _check_carrier(check: bool) -> None:
    """Refuse check mode where messages must go by NCCL: the host would wait for a device that waits for other ranks."""
    if check and settings.nccl_is_demanded():
        raise ArgumentError(
            "check mode looks at arrays on the host, between messages",
            found="MPIPIPE_NCCL=on",
            expected="messages and sums by MPI",
            remedy="MPIPIPE_NCCL=auto, which leaves NCCL out in check mode; or check=False",
        )


def _agree_with_replicas(
    pipe: Group,
    others: Group,
    stages: Sequence[StageAdapter],
    schedule: Schedule,
    recompute: bool,
    check: bool,
    error: MpipipeError | None,
) -> None:
    """Raise an error on all ranks of all pipes, or on none.

    Where only some ranks of another pipe were given replicas, a rank of this pipe waits in vain for the rank with the
    same stages there. So whoever hears of that from a partner raises by itself, and its pipe is told.
    """
    halved = isinstance(error, MismatchError) and error.fact == REPLICAS
    try:
        apart = bool(others.agree(f"{CALL}: whether all have partners", values=[int(halved)]).any())
    except PeerError:
        if error is None:
            raise
        apart = True  # a partner has raised already, for what this rank has said: its own error is the one to report
    if apart:
        problem: MpipipeError = error or PeerError("some ranks of another pipeline were given no replicas")
        raise_for_partners(problem, problem.reported_elsewhere or error is None)
    facts: tuple = ()
    problem_here: Exception | None = error
    if error is None:
        try:
            shapes, values = _digests(stages)
        except Exception as caught:  # a stage of the user's own may not give its arrays
            problem_here = caught
    if problem_here is None:
        facts = (
            ("schedule", f"{schedule.name} {digest(schedule)}"),
            ("recompute", bool(recompute)),
            ("check", check),
            ("setting MPIPIPE_GRAPHS", settings.graphs()),
            ("parameters' names, shapes and dtypes", shapes),
            ("parameters' values", values),
        )
    remedy = "give the stages of all replicas the same seed and sizes, and all ranks the same schedule"
    try:
        others.agree(f"{CALL}: replicas", facts, (), problem_here, "the replicas of a pipeline differ", remedy)
    except MpipipeError as caught:
        if not caught.agreed:
            raise
        error = caught
    try:
        pipe.agree(f"{CALL}: the replicas of all stages", error=error)
    except MpipipeError as caught:
        if caught.agreed:  # in this pipe, and by the same steps in those of all partners
            agreed_by(caught, others)
        raise


def _digests(stages: Sequence[StageAdapter]) -> list[str]:
    """Two short texts: of the names, shapes and dtypes of this rank's parameters, and of their values."""
    shapes, values = blake2b(digest_size=8), blake2b(digest_size=8)
    for stage in stages:
        text, flats = _parameter_facts(stage)
        shapes.update(text.encode())
        for flat in flats:
            values.update(flat.reshape(-1).view(np.uint8).data)  # bfloat16 is no type that hashes know
    return [shapes.hexdigest(), values.hexdigest()]


def _parameter_facts(stage: StageAdapter) -> tuple[str, list[np.ndarray]]:
    """Return (names, shapes and dtypes; values on the host) of parameters, as far as known."""
    if stage.models:
        lines = [
            f"{name} {model.dtype} {array.dtype} {array.shape} {'frozen' * (name in model.frozen)}"
            for model in stage.models
            for name, array in model.parameters.items()
        ]
        flats = [flat for model in stage.models for flat in (model.parameters.flat, model.buffers.held.flat)]
        return "".join(lines), [arrays.download(flat) for flat in flats]
    text = "".join(f"{flat.dtype} {flat.shape}" for flat in stage.gradient_arrays)
    holder, give = getattr(stage.given, "parameters", None), getattr(stage.given, "state_dict", dict)
    view = None if flat_if_any(holder) is None else FlatView.of(holder)
    trained: dict[str, Array] = dict(view or {})
    rest = {name: array for name, array in give().items() if name not in trained and arrays.is_array(array)}
    shapes = "".join(f"{name} {array.dtype} {array.shape}" for name, array in (trained | rest).items())
    flats = [*([] if view is None else [view.flat]), *rest.values()]
    return text + shapes, [arrays.download(flat) for flat in flats]


# -- What a pipeline may be given, checked on each rank before the ranks agree ----------------------------------------


def device_of(stages: Sequence[StageAdapter]) -> str:
    """Where the stages of this rank compute: "cpu" or "cuda", by their attribute `device`; "cpu" for those without.

    Raises ArgumentError if they differ.
    """
    devices = [stage.device for stage in stages]
    kinds = {device.partition(":")[0] for device in devices}
    if len(kinds) > 1 or not kinds <= {"cpu", "cuda"}:
        raise ArgumentError(
            "the stages of one rank are on different devices",
            found=devices,
            expected="all 'cpu' or all 'cuda'",
            remedy="build all stages of a rank with the same device",
        )
    numbers = {stage.gpu for stage in stages if stage.gpu is not None}
    if numbers and numbers != {arrays.current_gpu()}:
        raise ArgumentError(
            "the stages of a rank are not all on its current GPU",
            found=f"stages on {sorted(numbers)}",
            expected=f"GPU {arrays.current_gpu()} alone",
            remedy="one GPU for each rank: mpipipe.select_device() once, and device='cuda' for all stages",
        )
    return kinds.pop()


def check_arguments(
    stages: Any, schedule: Any, loss: Any, comm: Communicator, replicas: Communicator | None
) -> list[StageAdapter]:
    """Return this rank's stages; raise ArgumentError or ScheduleError for arguments of Pipeline that are wrong."""
    if not isinstance(schedule, Schedule):
        raise ArgumentError("schedule", found=type(schedule).__name__, expected="a mpipipe.schedules.Schedule")
    if schedule.ranks != comm.size:
        raise ArgumentError(
            "the schedule has another number of ranks than the communicator",
            found=f"{counted(schedule.ranks, 'rank')} in the schedule",
            expected=f"{comm.size}, the size of the communicator",
            remedy="build the schedule for this communicator, or split the communicator with mpipipe.Mesh",
        )
    check_part(schedule, comm.rank)
    numbers = schedule.stages_of(comm.rank)
    if not isinstance(stages, (list, tuple)) or len(stages) != len(numbers):
        count = len(stages) if isinstance(stages, (list, tuple)) else type(stages).__name__
        raise ArgumentError(
            "wrong number of stages on this rank",
            rank=comm.rank,
            found=count,
            expected=f"a list of {len(numbers)}: logical stages {', '.join(map(str, numbers))}",
            remedy="pass one stage for each chunk of this rank",
        )
    adapters = [StageAdapter(stage) for stage in stages]
    ops = {action.op for action in schedule.orders[comm.rank]}
    for number, stage in zip(numbers, adapters):
        try:
            stage.check(ops, replicas is not None and replicas.size > 1)
            stage.check_skips([skip.name for skip in schedule.skips if number in (skip.source, skip.target)])
            if not schedule.has_backward(number) and stage.has_parameters:
                raise ArgumentError(
                    "a stage has parameters to train, and the schedule has no backward for it",
                    found=f"trained_from = {schedule.trained_from}",
                    expected="stages before that whose parameters are all frozen",
                    remedy="freeze them: nn.Stage(frozen=['*']), or give schedules.with_frozen the frozen stages",
                )
        except ArgumentError as error:
            error.rank, error.stage = comm.rank, number
            raise
    device_of(adapters)
    if replicas is not None and replicas.size > 1:
        _check_own_gradients(numbers, adapters)
    if loss is not None and not callable(loss):
        raise ArgumentError(
            "loss", found=type(loss).__name__, expected="a function (output, target) -> (value, doutput)"
        )
    return adapters


def _check_own_gradients(numbers: Sequence[int], stages: Sequence[StageAdapter]) -> None:
    """Refuse stages with gradients in one memory: replicas sum those of each stage, one stage after the other."""
    for (number, stage), (other, beside) in combinations(zip(numbers, stages), 2):
        if any(arrays.shares_memory(flat, there) for flat in stage.gradient_arrays for there in beside.gradient_arrays):
            raise ArgumentError(
                "two stages of a rank have their gradients in the same memory, which replicas would sum twice",
                stage=other,
                found=f"{beside.name} with gradients of stage {number}",
                expected="gradients of its own",
                remedy="give each an array of its own; nn.Stage ties a parameter of several stages (tie=...)",
            )


# -- The construction of a Pipeline on one rank of a large job, without MPI: all that grows with the size of the job
#
# `bench schedules` measures its time and memory.


PROMISED_TAG_UB = 32767  # what every MPI offers


def construct_on_paper(build: Callable[[], Schedule], rank: int) -> Plan:
    """Build a schedule, and do with it what one rank does in the constructor of a Pipeline.

    Parameters
    ----------
    build : callable
        Returns the schedule.
    rank : int
        The rank.

    Returns
    -------
    Plan
        The plan of a training step on this rank.

    Raises
    ------
    ScheduleError
        The part of the proof that belongs to this rank fails.
    ArgumentError
        The messages of two ranks do not fit the tags.

    Examples
    --------
    >>> from mpipipe import schedules
    >>> from mpipipe.pipeline.construction import construct_on_paper
    >>> len(construct_on_paper(lambda: schedules.one_f_one_b(ranks=1024, microbatches=4096), rank=7).steps)
    8192
    """
    schedule = build()
    check_part(schedule, rank)
    digest(schedule)
    tags = Tags(schedule.placement, schedule.microbatches, PROMISED_TAG_UB, schedule.skip_ends)
    TieNames([{} for _ in range(schedule.ranks)], tags.channels, tags.base)
    neighbours(schedule.placement, schedule.skip_ends)
    BatchReader(schedule, rank, loss=None)
    return Plan(schedule, rank, tags)
