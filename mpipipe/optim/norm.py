"""The global norm of gradients: of all stages on all ranks together."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

from mpipipe import arrays
from mpipipe.comm.group import group_of
from mpipipe.errors import NonFiniteError
from mpipipe.nn import Stage


class Culprit(NamedTuple):
    """A parameter whose gradient is not finite. `rank` is None without a communicator; `here`: whether it is ours."""

    rank: int | None
    stage: int | None
    name: str
    here: bool

    def error(self, remedy: str = "lower the learning rate, lengthen the warm-up, or look for bad data in this step"):
        """The NonFiniteError that names it."""
        error = NonFiniteError(
            f"the gradient of parameter {self.name} is not finite", rank=self.rank, stage=self.stage, remedy=remedy
        )
        error.reported_elsewhere = not self.here
        return error


def gradient_norm(stages: Sequence[Stage], comm=None, skip: Collection[str] = (), scale: float = 1.0) -> float:
    """The norm of all gradients over `scale`; infinite or NaN where a gradient is.

    Parameters
    ----------
    stages : of this rank
    comm : communicator over which the stages of the model are spread, to which this is a collective call; None: all are
        here
    skip : names of parameters that do not count; copies of tied parameters (Stage.tied_copies) never count twice
    scale : factor that the gradients carry

    The squares of each parameter are summed in float64 and the sums of all parameters are added exactly, so the result
    does not depend on how the model is cut into stages and ranks, and is the same on all of them.
    """
    return measured(stages, comm, skip, scale)[0]


def measured(stages, comm, skip, scale) -> tuple[float, Culprit | None]:
    """`gradient_norm`, and the first parameter that makes it infinite or NaN; both the same on all ranks."""
    reports = [_report(stages, skip)] if comm is None else _reports(group_of(comm), stages, skip)
    squares = [square for squares, _ in reports for square in squares]
    for rank, (_, found) in enumerate(reports):
        if found is not None:
            ours = comm is None or comm.rank == rank
            stage, name = found
            return math.sqrt(sum(squares)), Culprit(None if comm is None else rank, stage, name, ours)
    return math.sqrt(math.fsum(squares)) / scale, None


def _report(stages, skip):
    """(sums of squares, (stage, name) of the first that is not finite or None) of this rank."""
    here = [(square, stage.index, name) for stage, name, square in _squares(stages, skip)]
    bad = next(((stage, name) for square, stage, name in here if not math.isfinite(square)), None)
    return [square for square, _, _ in here], bad


def _reports(group, stages, skip):
    error = report = None
    try:
        report = _report(stages, skip)
    except Exception as caught:
        error = caught
    return group.gather("norm of the gradients", report, error)


def _squares(stages, skip):
    """(stage, name, sum of squares) of each parameter that counts; waits for the device once, where one is."""
    counted = [(s, [name for name in s.gradients if name not in s.tied_copies and name not in skip]) for s in stages]
    counted = [(stage, names) for stage, names in counted if names]
    vectors = [stage.kernels.sums_of_squares(stage.gradients.flat, _places(stage, names)) for stage, names in counted]
    found = [arrays.download(*vectors)] if len(vectors) == 1 else arrays.download(*vectors)
    return [
        (stage, name, square)
        for (stage, names), vector in zip(counted, found)
        for name, square in zip(names, vector.tolist())
    ]


def _places(stage, names):
    starts = [stage.gradients.offsets[name] for name in names]
    return [(start, start + stage.gradients[name].size) for start, name in zip(starts, names)]
