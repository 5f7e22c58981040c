"""The global norm of gradients: of all stages on all ranks together."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, NoReturn

from mpipipe import arrays
from mpipipe.comm.consensus import raise_on_all
from mpipipe.comm.group import group_of
from mpipipe.comm.types import Communicator
from mpipipe.errors import NonFiniteError
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
