"""The agreement of all ranks on the pipeline that they are about to build, before anything is built."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np

from mpipipe.comm import runtime, settings
from mpipipe.comm.attributes import attributes
from mpipipe.comm.consensus import agreed_by, raise_for_partners, raise_on_all
from mpipipe.comm.group import Group
from mpipipe.comm.tags import Tags
from mpipipe.comm.types import Communicator
from mpipipe.errors import ArgumentError, MismatchError, MpipipeError, PeerError
from mpipipe.pipeline.arguments import check_arguments, device_of
from mpipipe.pipeline.stage import StageAdapter
from mpipipe.pipeline.ties import Place, check_ties, tie_facts
from mpipipe.schedules import Schedule
from mpipipe.schedules.distributed_proof import digest

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
        text, flats = stage.parameter_facts()
        shapes.update(text.encode())
        for flat in flats:
            values.update(flat.reshape(-1).view(np.uint8).data)  # bfloat16 is no type that hashes know
    return [shapes.hexdigest(), values.hexdigest()]
