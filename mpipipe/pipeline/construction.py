"""The agreement of all ranks on a pipeline, before anything is built."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from hashlib import blake2b
from itertools import combinations
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mpipipe import arrays
from mpipipe.comm import Tags, agree_on_nccl
from mpipipe.errors import ArgumentError, MismatchError, MpipipeError, PeerError
from mpipipe.job import (
    Ballot,
    Communicator,
    RankGroup,
    attributes,
    digest,
    raise_on_all,
    runtime,
    settings,
)
from mpipipe.pipeline.ties import TiedPlace, own_places, shared_places
from mpipipe.schedules import Schedule, check
from mpipipe.stages import PipelineStage, arrays_to_compare, as_stages, check_stage, gradient_arrays
from mpipipe.text import counted

logger = logging.getLogger("mpipipe")

CALL = "construction of a Pipeline"
DIGESTS = ("parameters' names, shapes and dtypes", "parameters' values")


Facts: TypeAlias = tuple[tuple[str, object], ...]


class Arguments(NamedTuple):
    """What a Pipeline is to be built of; nothing is known of it yet."""

    stages: Any
    schedule: Any
    loss: Any
    recompute: bool
    replicas: Communicator | None  # the user's
    check: bool
    input_grads: bool
    slice_lengths: Any

    @property
    def has_replicas(self) -> bool:
        """True if there are several; False for what cannot be their communicator."""
        try:
            return self.replicas is not None and runtime.resolve(self.replicas).size > 1
        except MpipipeError:
            return False


class AgreedRanks(NamedTuple):
    """The ranks that a pipeline is built with, and what they have agreed on."""

    pipe: RankGroup  # the ranks of the pipeline
    stages: dict[int, PipelineStage]  # this rank's, by number
    device: str  # "cpu" or "cuda", of all ranks of the pipe
    tags: Tags
    ties: list[list[TiedPlace]]  # the places of each tied parameter
    replicas: RankGroup | None  # the ranks with the same stages; None for a single pipeline
    groups: list[RankGroup]  # both of these
    sums_by_nccl: bool  # whether NCCL carries the sums over replicas

    @property
    def replica(self) -> int:
        """Number of this pipeline among its replicas."""
        if self.replicas is None:
            return 0
        return self.replicas.rank


# -- The agreement ---------------------------------------------------------------------------------
#
#     pipe 0    rank 0 . rank 1 . rank 2
#     pipe 1    rank 0 . rank 1 . rank 2
#
# Every rank first agrees within its pipe. Then it tells its pipe and its partners, which are the
# ranks below and above it, what came of that: so an error on one rank comes out on all ranks of all
# pipes.
#
# Where only some ranks of a pipe were given replicas, the others have no partners to tell. Then all
# ranks of the pipe raise at once, and partners in other pipes learn it as they learn of a failure.


def agree_on_construction(
    comm: Communicator, arguments: Arguments, groups: list[RankGroup]
) -> AgreedRanks:
    """Check the arguments of a Pipeline on all ranks of `comm`; all raise the same error.

    `groups` takes the groups that are made.
    """
    known = attributes(comm).get("group")
    if known is not None:  # it can say who is missing, which a new communicator cannot
        known.agree(CALL)
    pipe = RankGroup(comm)
    groups.append(pipe)
    schedule = arguments.schedule
    facts: Facts = ()
    # Facts that all replicas have in common.
    common_facts = facts
    digests = [0, 0]
    places = None
    error: Exception | None = None
    try:
        stages = check_arguments(arguments, comm)
        largest_tag = runtime.tag_upper_bound(pipe.comm)
        tags = Tags(schedule.placement, schedule.units, largest_tag, schedule.skip_ends)
        device = device_of(stages.values())
        with_replicas = "without replicas"
        if arguments.has_replicas:
            with_replicas = "with replicas"
            digests = _digests(stages.values())
        common_facts = (
            ("schedule", f"{schedule.name} {schedule.fingerprint:x}"),
            ("recompute", arguments.recompute),
            ("check", arguments.check),
            ("input_grads", arguments.input_grads),
            ("setting MPIPIPE_GRAPHS", settings.GRAPHS.is_on),
        )
        facts = (
            *common_facts,
            ("device of the stages", device),
            ("cut of the layers", getattr(arguments.stages, "layer_ranges", None)),
            ("number of micro-batches", schedule.microbatches),
            ("slice_lengths", arguments.slice_lengths and tuple(arguments.slice_lengths)),
            ("pipeline", with_replicas),
            ("setting MPIPIPE_NCCL=on", settings.NCCL.is_on),
        )
        places = own_places(stages, pipe.rank)
    except Exception as caught:
        error = caught
    message = "ranks were given different pipelines"
    remedy = (
        "build the same schedule with the same arguments, and set the same environment, on "
        "every rank"
    )
    ballot = Ballot(CALL, facts, error, message, remedy)
    table = ballot.cast(pipe, [arguments.has_replicas, *digests])
    problem: MpipipeError | None = None
    try:
        ballot.decide()
        of_ranks = pipe.gather(f"{CALL}: ties", places)
        try:
            ties = shared_places(of_ranks, tags)
        except MpipipeError as found:  # every rank finds it in the same facts
            raise_on_all(0, found, pipe)
    except MpipipeError as caught:
        if not caught.agreed or not arguments.has_replicas:
            raise
        problem = caught
    replicas = None
    if arguments.replicas is not None and arguments.has_replicas:
        replicas = RankGroup(arguments.replicas)
        groups.insert(0, replicas)
        if not table[:, 0].all():
            assert problem is not None  # some ranks of this pipe have no partners
            raise problem
        _compare_replicas(groups, common_facts, problem, table.tolist(), digests)
        _share_state(replicas, stages.values())
    sums_by_nccl = False
    # In check mode the host would wait for a device that waits for another rank.
    if not arguments.check and (replicas is not None or device == "cuda" or settings.NCCL.is_on):
        choice = agree_on_nccl(groups, device)
        sums_by_nccl = choice.sums
        if device == "cuda" and pipe.rank == 0:
            logger.info("NCCL: %s", choice)
    return AgreedRanks(pipe, stages, device, tags, ties, replicas, groups, sums_by_nccl)


def _compare_replicas(
    groups: Sequence[RankGroup],
    facts: Facts,
    problem: MpipipeError | None,
    of_pipe: list[list[int]],
    digests: Sequence[int],
) -> None:
    """Raise the problem of any pipe on all ranks, or MismatchError if replicas differ.

    `digests` are those of this rank, which are in `of_pipe`, too.
    """
    message = "the replicas of a pipeline differ"
    remedy = (
        "give the stages of all replicas the same seed and sizes, and all ranks the same schedule"
    )
    ballot = Ballot(f"{CALL}: replicas", facts, problem, message, remedy)
    replicas, pipe = groups
    ballot.cast(pipe)
    whole = digest(CALL, (("digests", of_pipe),))
    wholes, *columns = ballot.cast(replicas, [whole, *digests]).T.tolist()
    if not ballot.failed and len(set(wholes)) > 1:
        ballot.failed = True
        for name, column, own_digest in zip(DIGESTS, columns, digests):
            if own_digest != column[0]:
                ballot.refuse(
                    MismatchError(
                        message,
                        found=f"{name} {own_digest:016x}",
                        expected=f"{name} {column[0]:016x}, as in replica 0",
                        remedy=remedy,
                    )
                )
    ballot.decide()


def end_groups(groups: Sequence[RankGroup], error: BaseException) -> None:
    """Free groups after an error that all their ranks raise; tell the other ranks of any other."""
    for group in groups:
        if group.agreed_on(error):
            # A rank may have failed elsewhere, and this one be the one to report `error`.
            with suppress(PeerError):
                group.close()
        else:
            text = f"{type(error).__name__}: {error}"
            group.fail(error, f"a pipeline could not be built: {text}", making=True)


def _share_state(others: RankGroup, stages: Iterable[PipelineStage]) -> None:
    """Let the state of modules, such as batch norm's, begin as that of replica 0."""
    state: list[arrays.Array] = []
    for stage in stages:
        for inner in stage.inner_stages:
            state += inner.state.values()
    values = others.broadcast(f"{CALL}: state", arrays.download_all(state))
    for array, value in zip(state, values, strict=True):
        if arrays.is_device(array):
            value = arrays.upload(value)
        array[...] = value


def _digests(stages: Iterable[PipelineStage]) -> list[int]:
    """Return hashes of this rank's parameters, from 0 to 2^63 - 1, in the order of DIGESTS."""
    shapes = blake2b(digest_size=8)
    values = blake2b(digest_size=8)
    for stage in stages:
        named, flats = arrays_to_compare(stage)
        for name, array in named:
            shapes.update(f"{name} {array.dtype} {array.shape}".encode())
        for flat in flats:
            # Hashes do not know bfloat16.
            values.update(arrays.download(flat).reshape(-1).view(np.uint8).data)
    return [int.from_bytes(each.digest(), "big") >> 1 for each in (shapes, values)]


# -- What a pipeline may be given, checked on each rank before the ranks agree ---------------------


def device_of(stages: Iterable[PipelineStage]) -> str:
    """Return "cpu" or "cuda", where this rank's stages compute; ArgumentError if they differ."""
    kinds = {stage.device for stage in stages}
    if len(kinds) > 1 or not kinds <= {"cpu", "cuda"}:
        raise ArgumentError(
            "the stages of one rank are on different devices",
            found=sorted(kinds),
            expected="all 'cpu' or all 'cuda'",
            remedy="build all stages of a rank with the same device",
        )
    numbers = {stage.gpu for stage in stages if stage.gpu is not None}
    if numbers and numbers != {arrays.current_gpu()}:
        raise ArgumentError(
            "the stages of a rank are not all on its current GPU",
            found=f"stages on {sorted(numbers)}",
            expected=f"GPU {arrays.current_gpu()} alone",
            remedy="one GPU for each rank: mpipipe.select_device() once, and device='cuda' for "
            "all stages",
        )
    return kinds.pop()


def check_arguments(arguments: Arguments, comm: Communicator) -> dict[int, PipelineStage]:
    """Return this rank's stages by number; ArgumentError or ScheduleError for wrong arguments."""
    stages = arguments.stages
    schedule = arguments.schedule
    loss = arguments.loss
    settings.check_settings()
    if arguments.replicas is not None:
        runtime.resolve(arguments.replicas)
    if not isinstance(schedule, Schedule):
        raise ArgumentError(
            "schedule", found=type(schedule).__name__, expected="a mpipipe.schedules.Schedule"
        )
    if schedule.ranks != comm.size:
        raise ArgumentError(
            "the schedule has another number of ranks than the communicator",
            found=f"{counted(schedule.ranks, 'rank')} in the schedule",
            expected=f"{comm.size}, the size of the communicator",
            remedy="build the schedule for this communicator, or split the communicator with "
            "mpipipe.Mesh",
        )
    check(schedule)
    numbers = schedule.stages_of(comm.rank)
    count: int | str = type(stages).__name__
    if isinstance(stages, (list, tuple)):
        count = len(stages)
    if count != len(numbers):
        raise ArgumentError(
            "wrong number of stages on this rank",
            rank=comm.rank,
            found=count,
            expected=f"a list of {len(numbers)}: logical stages {', '.join(map(str, numbers))}",
            remedy="pass one stage for each chunk of this rank",
        )
    # Stages that mpipipe.cut has made know their placement.
    placement = getattr(stages, "placement", schedule.placement)
    if placement != schedule.placement:
        raise ArgumentError(
            "the stages were cut for another schedule",
            found=f"stages on the ranks {', '.join(map(str, placement))}",
            expected=f"on {', '.join(map(str, schedule.placement))}, where this schedule has them",
            remedy="give mpipipe.cut and Pipeline the same schedule",
        )
    checked = dict(zip(numbers, as_stages(stages)))
    ops = {action.op for action in schedule.orders[comm.rank]}
    for number, stage in checked.items():
        try:
            check_stage(stage, ops, arguments.has_replicas)
            takes = [skip.name for skip in schedule.skips if skip.target == number]
            stage.check_skips(number, takes, names_given(schedule, number))
            if not schedule.has_backward(number) and gradient_arrays(stage):
                raise ArgumentError(
                    "a stage has parameters to train, and the schedule has no backward for it",
                    found=f"trained_from = {schedule.trained_from}",
                    expected="stages before that whose parameters are all frozen",
                    remedy="freeze them: nn.Stage(frozen=['*']), or give schedules.with_frozen "
                    "the frozen stages",
                )
        except ArgumentError as error:
            error.rank = comm.rank
            error.stage = number
            raise
    if arguments.has_replicas:
        _check_own_gradients(checked)
    if getattr(loss, "over_batch", False) and comm.rank == schedule.placement[-1]:
        check_forwards_first(schedule, "a loss over the batch")
    _check_slices(arguments, checked)
    return checked


def _check_slices(arguments: Arguments, stages: dict[int, PipelineStage]) -> None:
    """Raise ArgumentError if lengths, a stage or the loss do not fit a schedule with slices."""
    count = arguments.schedule.slices
    lengths = arguments.slice_lengths
    loss = arguments.loss
    if lengths is not None and (
        [*map(type, lengths)] != [int] * count or min(lengths) < 1 or count == 1
    ):
        raise ArgumentError(
            "slice_lengths",
            found=lengths,
            expected="None, or of a schedule with several slices a whole number of at least 1 for "
            f"each; this one has {counted(count, 'slice')}",
        )
    slices = counted(count, "slice")
    if lengths:
        slices = f"lengths {', '.join(map(str, lengths))}"
    for number, stage in stages.items():
        names = stage.unsliceable(tuple(lengths or ()) or count)
        if not names:
            continue
        listed = ", ".join(names)
        raise ArgumentError(
            "a stage cannot take the slices of a sequence that the schedule has, one after the "
            "other",
            stage=number,
            found=listed,
            expected="layers for which positions are alike, and nn.SelfAttention with "
            f"attention.Sliced of {slices}",
            remedy="attend with attention.Sliced(attention.Local(), lengths); set slices = True in "
            "a stage of your own that treats each position by itself; or take a schedule with "
            "other slices, or none",
        )
    unfit = None
    if getattr(loss, "mean_over_entries", None) is False:
        unfit = "loss.mean_over_entries = False"
    if getattr(loss, "over_batch", False):
        unfit = "loss.over_batch"
    if count > 1 and arguments.schedule.stages - 1 in stages and unfit is not None:
        raise ArgumentError(
            "the loss does not go together with the slices of sequences",
            found=unfit,
            expected="a mean over target entries, of one slice at a time",
            remedy="set loss.mean_over_entries = True where that is so, or return (value, doutput, "
            "weight); or take a schedule without slices",
        )


def names_given(schedule: Schedule, stage: int) -> list[str]:
    """Return the names that a stage hands on over skips, each once."""
    return [*dict.fromkeys(skip.name for skip in schedule.skips if skip.source == stage)]


def check_forwards_first(schedule: Schedule, what: str) -> None:
    """Raise ArgumentError unless the last stage has all forwards before its first backward."""
    last = schedule.stages - 1
    order = schedule.orders[schedule.placement[last]]
    ops = "".join(action.op for action in order if action.stage == last)
    backward = re.search("[BI].*F", ops)
    if backward is not None:
        before = ops[: backward.start()]
        raise ArgumentError(
            f"{what} needs all outputs before the first backward",
            stage=last,
            found=f"{schedule.name}, whose first backward comes after "
            f"{counted(before.count('F'), 'forward')}",
            expected="an order with all forwards of the last stage first",
            remedy="schedules.gpipe, or schedules.looped_bfs with several stages on a rank",
        )


def _check_own_gradients(stages: dict[int, PipelineStage]) -> None:
    """Refuse stages with gradients in one memory, which replicas would sum twice."""
    for (number, stage), (other, second) in combinations(stages.items(), 2):
        for flat in gradient_arrays(second):
            if arrays.shares_any(flat, gradient_arrays(stage)):
                raise ArgumentError(
                    "two stages of a rank have their gradients in the same memory, which replicas "
                    "would sum twice",
                    stage=other,
                    found=f"gradients of stage {number}",
                    expected="gradients of its own",
                    remedy="give each an array of its own; nn.Stage ties a parameter of several "
                    "stages (tie=...)",
                )
