"""The global norm of gradients: of all stages on all ranks together."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from types import TracebackType
from typing import Any, NamedTuple, NoReturn

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import DeviceArray
from mpipipe.comm.nccl.channel import agree_on_nccl
from mpipipe.comm.nccl.sums import NcclRow
from mpipipe.errors import ArgumentError, NonFiniteError
from mpipipe.job.consensus import raise_on_all
from mpipipe.job.group import Group, group_of
from mpipipe.job.types import Communicator
from mpipipe.nn.kernels.cuda.optimizer import clip_factor
from mpipipe.optim.stages import Updated, measured

REMEDY = "lower the learning rate, lengthen the warm-up, or look for bad data in this step"


class Culprit(NamedTuple):
    """A parameter whose gradient is not finite. `rank` is None without a communicator."""

    rank: int | None
    stage: int | None
    name: str

    def refuse(self, comm: Communicator | None) -> NoReturn:
        """Raise the NonFiniteError that names it: on all ranks of `comm`, which have all found it."""
        error = NonFiniteError(
            f"the gradient of parameter {self.name} is not finite", rank=self.rank, stage=self.stage, remedy=REMEDY
        )
        if comm is None or self.rank is None:
            raise error
        raise_on_all(self.rank, error, group_of(comm))


class _Report(NamedTuple):
    """What one rank knows: sums of squares, and (stage, name) of its first gradient that is not finite."""

    squares: list[float]
    bad: tuple[int | None, str] | None


def gradient_norm(
    stages: Sequence[Any], comm: Communicator | None = None, skip: Collection[str] = (), scale: float = 1.0
) -> float:
    """Return the norm of all gradients of the model.

    The squares of each parameter are summed in float64, and the sums of all parameters are added exactly. So the result
    does not depend on how the model is cut into stages and ranks, and is the same on all of them.

    Parameters
    ----------
    stages : sequence of stages
        The stages of this rank, as for an optimizer.
    comm : communicator, optional
        Over which the stages of the model are spread: a collective call. None: all of them are here.
    skip : collection of str
        Names of parameters that do not count. Copies of tied parameters (`Stage.tied_copies`) never count twice.
    scale : float
        Factor that the gradients carry; the result is without it.

    Returns
    -------
    float
        The norm; infinite or NaN where a gradient is.

    Examples
    --------
    >>> from mpipipe import nn, optim
    >>> stage = nn.Stage([nn.RMSNorm(4)])
    >>> stage.gradients["0.gain"][...] = 3
    >>> optim.gradient_norm([stage])
    6.0
    """
    return measure(stages, comm, skip, scale)[0]


def measure(
    stages: Sequence[Any], comm: Communicator | None, skip: Collection[str], scale: float
) -> tuple[float, Culprit | None]:
    """Return `gradient_norm`, and the first parameter that makes it infinite or NaN; both the same on all ranks."""
    reports = [_report(stages, skip)] if comm is None else _gathered_reports(comm, stages, skip)
    squares = [square for report in reports for square in report.squares]
    for rank, report in enumerate(reports):
        if report.bad is not None:
            return math.sqrt(sum(squares)), Culprit(None if comm is None else rank, *report.bad)
    return math.sqrt(math.fsum(squares)) / scale, None


def _report(stages: Sequence[Any], skip: Collection[str]) -> _Report:
    squares = _squares(stages, skip)
    bad = next(((stage.index, name) for stage, name, square in squares if not math.isfinite(square)), None)
    return _Report([square for _, _, square in squares], bad)


def _gathered_reports(comm: Communicator, stages: Sequence[Any], skip: Collection[str]) -> list[_Report]:
    """Return the reports of all ranks; an error on one is raised on all."""
    error = report = None
    try:
        report = _report(stages, skip)
    except Exception as caught:
        error = caught
    return group_of(comm).gather("norm of the gradients", report, error)


def _squares(stages: Sequence[Any], skip: Collection[str]) -> list[tuple[Updated, str, float]]:
    """Return (stage, name, sum of squares) of each parameter that counts; wait for the device once, where one is."""
    counted = counted_pieces(stages, skip)
    sums = arrays.download_all([stage.kernels.sums_of_squares(stage.gradients.flat, at) for stage, _, at in counted])
    return [
        (stage, name, square)
        for (stage, names, _), squares in zip(counted, sums)
        for name, square in zip(names, squares.tolist())
    ]


def local_squares(stages: Sequence[Any], skip: Collection[str]) -> list[float]:
    """Return the sum of squares of each parameter of this rank that counts."""
    return [square for _, _, square in _squares(stages, skip)]


def counted_pieces(
    stages: Sequence[Any], skip: Collection[str]
) -> list[tuple[Updated, list[str], list[tuple[int, int]]]]:
    """Return (stage, names of parameters that count, where each starts and stops in the flat buffer)."""
    counted = [
        (stage, [name for name in stage.gradients if name not in stage.tied_copies and name not in skip])
        for stage in measured(stages)
    ]
    return [(stage, names, _offsets(stage, names)) for stage, names in counted if names]


def _offsets(stage: Updated, names: Sequence[str]) -> list[tuple[int, int]]:
    """Return where each parameter starts and stops in the flat buffer."""
    starts = [stage.gradients.offsets[name] for name in names]
    return [(start, start + stage.gradients[name].size) for start, name in zip(starts, names)]


# -- The norm of gradients over ranks that keep it on their GPUs: opened once, used in every step ---------------------


WHAT = "the norm of the gradients"


class GlobalNorm:
    """Over which stages and ranks a norm is taken, for `clip_by_global_norm` and `scaled_step`.

    Where each rank has a GPU of its own and NCCL is used, the ranks put the norm together on their GPUs: the host asks
    for the update before it knows the norm. Everywhere else MPI gathers it, as without this object. Norm and update
    have the same bits either way.

    The constructor and `close` are collective. A context manager; after an error nothing collective is done.

    Parameters
    ----------
    stages : sequence of stages
        The stages of this rank, those of the optimizer. Where they belong to a pipeline, it must have been built.
    comm : communicator, optional
        Over which the stages of the model are spread. None: all of them are here.
    skip : collection of str
        Names of parameters that do not count.
    replicas : communicator, optional
        The ranks with the same stages, as for `Pipeline`. They are asked as well whether NCCL can be used.

    Raises
    ------
    BackendError
        On all ranks, where `MPIPIPE_NCCL=on` and NCCL cannot be used.

    Examples
    --------
    >>> from mpipipe import nn, optim
    >>> from mpipipe.job import inprocess
    >>> def on_each_rank(comm):
    ...     stage = nn.Stage([nn.RMSNorm(2)], first=comm.rank)
    ...     stage.gradients[f"{comm.rank}.gain"][...] = 3 + comm.rank
    ...     optimizer, scaler = optim.SGD([stage], lr=0.5), optim.LossScaler(1.0)
    ...     with optim.GlobalNorm([stage], comm) as over:
    ...         return optim.scaled_step(optimizer, scaler, max_norm=1.0, over=over)
    >>> [round(norm, 4) for norm in inprocess.run(2, on_each_rank)]
    [7.0711, 7.0711]
    """

    def __init__(
        self,
        stages: Sequence[Any],
        comm: Communicator | None = None,
        skip: Collection[str] = (),
        replicas: Communicator | None = None,
    ):
        self.stages, self.comm, self.skip = tuple(stages), comm, frozenset(skip)
        self._row: NcclRow | None = None
        self._owners: list[Culprit] = []
        self._start = self._stop = 0
        self._group = None if comm is None or comm.size == 1 else group_of(comm)
        if self._group is not None:
            others = [] if replicas is None or replicas.size == 1 else [group_of(replicas)]
            if agree_on_nccl([self._group, *others], "cpu" if gpu_of(self.stages) is None else "cuda").sums:
                self._open(self._group)

    def _open(self, group: Group) -> None:
        mine = owners_of(counted_pieces(self.stages, self.skip), group.rank)
        everyone = group.gather(WHAT, mine)
        self._owners = [owner for some in everyone for owner in some]
        self._start = sum(map(len, everyone[: group.rank]))
        self._stop = self._start + len(mine)
        if self._owners:
            self._row = NcclRow(group, len(self._owners), WHAT)

    @property
    def on_device(self) -> bool:
        """Whether the norm stays on the device; the same on all ranks."""
        return self._row is not None or squares_of_one(self.stages, self.comm, self.skip) is not None

    def _squares(self, stages: Sequence[Any]) -> Squares | None:
        """The squares of these stages and those of other ranks, on the device; None if MPI is to gather them.

        Raises ArgumentError if the stages are not those of the constructor, or count other parameters than then.
        The other ranks are told, since they will wait for this one.
        """
        if self._group is None:
            return self._checked(stages)
        self._group.begin()
        with self._group.failing(WHAT):
            return self._checked(stages)

    def _checked(self, stages: Sequence[Any]) -> Squares | None:
        if list(map(id, stages)) != list(map(id, self.stages)):
            raise ArgumentError(
                "the stages of an optimizer are not those of the norm",
                found=f"{len(stages)} stages",
                expected=f"the same {len(self.stages)} that the GlobalNorm was made with, in their order",
            )
        if self._row is None:
            return squares_of_one(stages, self.comm, self.skip)
        counted = counted_pieces(stages, self.skip)
        if owners_of(counted, self._row.group.rank) != self._owners[self._start : self._stop]:
            raise ArgumentError(
                "the parameters that count in a norm have changed",
                found=f"{sum(len(names) for _, names, _ in counted)} on this rank",
                expected=f"the {self._stop - self._start} that there were when the GlobalNorm was made",
                remedy="make it once the pipeline has been built",
            )
        return Squares(counted, self._owners, self._start, self._row)

    def close(self) -> None:
        """Free what NCCL has opened; collective, may be called twice."""
        row, self._row = self._row, None
        if row is not None:
            row.close()

    def __enter__(self) -> GlobalNorm:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()


def resolved(
    stages: Sequence[Any], comm: Communicator | None, skip: Collection[str], over: GlobalNorm | None
) -> tuple[Communicator | None, Collection[str], Squares | None]:
    """Return (comm, skip) of a norm, and the squares on the device; None if MPI, or this rank, is to gather them."""
    if over is None:
        return comm, skip, squares_of_one(stages, comm, skip)
    if comm is not None or skip:
        raise ArgumentError(
            "a GlobalNorm has its own communicator and names to skip",
            found="over with " + " and ".join(["comm"] * (comm is not None) + ["skip"] * bool(skip)),
            expected="over alone",
        )
    return over.comm, over.skip, over._squares(stages)


# -- Clipping on GPUs: what comes behind the norm is asked of the device before the host knows it ---------------------
#
# The device computes the factor of the gradients, and a kernel takes it from the device's memory. The host fetches the
# sums of squares meanwhile, to return the norm and to name a gradient that is not finite. It waits for these sums
# alone, so the device goes on working.
#
#     one GPU     squares of each parameter ............................ factor, update
#     several     squares of each parameter   NCCL: those of all ranks   factor, update
#
# Every rank has the squares of all parameters then, in one order, and adds them up in the same way. So norm and factor
# have the same bits on all ranks, and those that the host finds by `optim.norm`.


class Squares(NamedTuple):
    """The sums of squares of all parameters of a model, as a row on the device.

    Attributes
    ----------
    counted : list
        What `counted_pieces` returned: the parameters of this rank.
    owners : list of Culprit
        Rank, stage and name of each number of the row.
    start : int
        Where the numbers of this rank start.
    row : NcclRow or None
        Brings in those of other ranks; None if there are none.
    """

    counted: list[tuple[Updated, list[str], list[tuple[int, int]]]]
    owners: list[Culprit]
    start: int = 0
    row: NcclRow | None = None


def squares_of_one(stages: Sequence[Any], comm: Communicator | None, skip: Collection[str]) -> Squares | None:
    """The row where all stages of the model are on one GPU of this rank and no other has a part; None elsewhere."""
    if gpu_of(stages) is None or (comm is not None and comm.size > 1):
        return None
    counted = counted_pieces(stages, skip)
    return Squares(counted, owners_of(counted, None if comm is None else comm.rank))


def gpu_of(stages: Sequence[Any]) -> int | None:
    """The GPU that all these stages are on; None if there is not one."""
    gpus = {stage.gpu for stage in measured(stages)}
    return gpus.pop() if len(gpus) == 1 else None


def owners_of(counted: Sequence[tuple[Updated, list[str], list[tuple[int, int]]]], rank: int | None) -> list[Culprit]:
    """Rank, stage and name of each number that a rank has a part with."""
    return [Culprit(rank, stage.index, name) for stage, names, _ in counted for name in names]


class NormOnDevice:
    """The norm of all gradients, begun on the device.

    Parameters
    ----------
    squares : whose norm
    scale : factor that the gradients carry
    max_norm : to which gradients are clipped
    divisor : of the factor

    Attributes
    ----------
    factor : cupy.ndarray
        () of float64: what the gradients are to be multiplied by; NaN where one is not finite.
    """

    def __init__(self, squares: Squares, scale: float, *, max_norm: float, divisor: float):
        self._squares, self._scale = squares, scale
        with nullcontext() if squares.row is None else squares.row.failing():
            row = _row(squares)
        self.factor = clip_factor(row, max_norm, scale, divisor)
        self._download = arrays.Download([row])

    def result(self) -> tuple[float, Culprit | None]:
        """Return the norm, and the first parameter that makes it infinite or NaN; wait for the norm alone."""
        if self._squares.row is not None:  # whose other ranks may fail; the host must not wait for its device then
            self._squares.row.wait(self._download.is_done, keeping=self)
        squares = self._download.result()[0].tolist()
        for owner, square in zip(self._squares.owners, squares):
            if not math.isfinite(square):
                return math.sqrt(sum(squares)), owner
        return math.sqrt(math.fsum(squares)) / self._scale, None


def _row(squares: Squares) -> DeviceArray:
    """The numbers of all ranks, for later work on the current stream."""
    make = arrays.empty if squares.row is None else arrays.zeros
    row = make((len(squares.owners),), np.dtype(np.float64), "cuda")
    ends = np.cumsum([squares.start] + [len(names) for _, names, _ in squares.counted]).tolist()
    for (stage, _, pieces), start, stop in zip(squares.counted, ends, ends[1:]):
        stage.kernels.sums_of_squares(stage.gradients.flat, pieces, out=row[start:stop])
    if squares.row is not None:
        squares.row.share(row)
    return row


# -- Checks of arguments that several functions make ------------------------------------------------------------------


def check_max_norm(max_norm: float) -> None:
    """Raise ArgumentError unless it is above 0."""
    if not max_norm > 0:
        raise ArgumentError("max_norm must be above 0", found=repr(max_norm), expected="above 0")
