"""The global norm of gradients: of all stages on all ranks together.

    several ranks   each sends the exact sum of its squares as few numbers
    one GPU         squares of each parameter, factor of the gradients, update

The squares of each parameter are summed in float64, and the sums of all parameters are added
exactly. So both have the same bits, on all ranks and however the model is cut. If one GPU has the
whole model, it computes the factor of the gradients, and a kernel takes it from the device's
memory: the update is asked for before the host knows the norm. The host fetches the sums of squares
meanwhile, to return the norm and to name a gradient that is not finite.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import total_ordering
from typing import NamedTuple, NoReturn, Protocol, TypeAlias

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array
from mpipipe.errors import ArgumentError, NonFiniteError
from mpipipe.job import VALUES, Communicator, group_of, raise_on_all
from mpipipe.nn import clip_factor
from mpipipe.stages import PipelineStage, as_stages

WHAT = "the norm of the gradients"


class NonFiniteParameter(NamedTuple):
    """A parameter whose gradient is not finite. `rank` is None without a communicator."""

    rank: int | None
    stage: int | None
    name: str

    def refuse(self, comm: Communicator | None, when: str = "") -> NoReturn:
        """Raise the NonFiniteError that names it, on all ranks of `comm`."""
        remedy = "lower the learning rate, lengthen the warm-up, or look for bad data in this step"
        message = f"the gradient of parameter {self.name} is not finite{when}"
        error = NonFiniteError(message, rank=self.rank, stage=self.stage, remedy=remedy)
        if comm is None or self.rank is None:
            raise error
        raise_on_all(self.rank, error, group_of(comm))


class MeasuredNorm(NamedTuple):
    """A norm, and the first parameter that makes it infinite or NaN; both the same on all ranks."""

    norm: float
    bad: NonFiniteParameter | None


class Steps(Protocol):
    """An optimizer that counts its steps."""

    steps: int


# Squares of each parameter of a rank, and whose they are.
Report: TypeAlias = "tuple[list[float], list[NonFiniteParameter]]"


class Norm:
    """The norm over stages of this rank and of the ranks of `comm`.

    Raises ArgumentError for a largest norm that is not above 0.
    """

    def __init__(
        self, stages: Sequence[object], comm: Communicator | None = None, max_norm: float = math.inf
    ) -> None:
        if not max_norm > 0:
            raise ArgumentError(
                "max_norm must be above 0", found=repr(max_norm), expected="above 0"
            )
        self.stages = tuple(stages)
        self.comm = comm
        self._group = None  # None if no rank is asked
        self._rank = None
        if comm is not None:
            self._rank = comm.rank
            if comm.size > 1:
                self._group = group_of(comm)

    @property
    def on_device(self) -> bool:
        """Whether the norm stays on the device: no other rank is asked, and all is on one GPU."""
        gpus = {stage.gpu for stage in as_stages(self.stages)}
        return self._group is None and len(gpus) == 1 and None not in gpus

    def measure(self, scale: float) -> MeasuredNorm:
        """Add up the squares of all ranks; an error on one rank is raised on all.

        The ranks exchange one row of numbers of fixed length. If a gradient is not finite, or a sum
        too long, all squares are gathered, so that an error can name the parameter.
        """
        group = self._group
        if group is None:
            return _measured(*self._report(), scale)
        report = None
        values: list[int] = []
        error = None
        try:
            report = self._report()
            # They are enough for 700 binary digits. NaN: the sum is longer, or not finite.
            parts = [math.nan]
            if math.isfinite(sum(report[0])):
                parts = expansion(report[0])
            if len(parts) > VALUES:
                parts = [math.nan]
            values = np.array(parts + [0.0] * (VALUES - len(parts))).view(np.int64).tolist()
        except Exception as caught:
            error = caught
        rows = group.agree(WHAT, values=values, error=error)
        total = math.fsum(rows.view(np.float64).ravel())
        if not math.isnan(total):
            return MeasuredNorm(math.sqrt(total) / scale, None)
        squares = []
        owners = []
        for more, their_owners in group.gather(f"{WHAT}: the squares of all parameters", report):
            squares += more
            owners += their_owners
        return _measured(squares, owners, scale)

    def _report(self) -> Report:
        """Measure the squares of the parameters of this rank."""
        rows = [self.squares(stage) for stage in as_stages(self.stages)]
        squares = []
        for row in arrays.download_all(rows):
            squares += row.tolist()
        return squares, self.owners()

    def names(self, stage: PipelineStage) -> list[str]:
        """Return the names of the parameters of a stage that count."""
        return [name for name in stage.gradients if name not in stage.tied_copies]

    def owners(self) -> list[NonFiniteParameter]:
        """Return rank, stage and name of each parameter of this rank that counts."""
        owners = []
        for stage in as_stages(self.stages):
            for name in self.names(stage):
                owners.append(NonFiniteParameter(self._rank, stage.index, name))
        return owners

    def squares(self, stage: PipelineStage, out: Array | None = None) -> Array:
        """Sum up the squares of each parameter of a stage that counts."""
        gradients = stage.gradients
        ranges = []
        for name in self.names(stage):
            start = gradients.offsets[name]
            ranges.append((start, start + gradients[name].size))
        return stage.kernels.sums_of_squares(gradients.flat, ranges, out=out)


def _measured(
    squares: Sequence[float], owners: Sequence[NonFiniteParameter], scale: float
) -> MeasuredNorm:
    """Return the norm of gradients / scale, from the squares of all parameters."""
    for owner, square in zip(owners, squares):
        if not math.isfinite(square):
            return MeasuredNorm(math.sqrt(sum(squares)), owner)
    return MeasuredNorm(math.sqrt(math.fsum(squares)) / scale, None)


def expansion(numbers: Iterable[float]) -> list[float]:
    """Return few numbers, of falling size, whose exact sum is that of the given ones.

    A sum of doubles is in general no double, but it is the sum of a few: its value rounded, what
    rounding has left out, rounded, and so on (Shewchuk, "Adaptive precision floating-point
    arithmetic", 1997). `math.fsum` over these and those of other ranks rounds once, to the same
    bits as over all numbers.
    """
    left = list(numbers)
    parts = []
    while total := math.fsum(left):
        parts.append(total)
        left.append(-total)
    return parts


@total_ordering
class NormOfStep:
    """A norm that is begun on a GPU; reading it by `float()` or comparing waits for the GPU.

    It is no number of Python: `round`, `sum` and `json.dumps` take `float(norm)`.

    Where a gradient was not finite, the device has left the step out. Reading raises NonFiniteError
    then, and so does the next step with the same scaler that finds this one done.

    Parameters
    ----------
    norm : Norm
        Over which stages and ranks.
    max_norm, scale, divisor : float
        As for `clip_factor`.
    optimizer : SGD or AdamW, optional
        Which is asked for a step right after; its count is put right where the device has left the
        step out.

    Attributes
    ----------
    factor : cupy.ndarray
        What to multiply gradients by, () of float64; NaN where a gradient is not finite. It is
        there until the norm is read.
    """

    def __init__(
        self,
        norm: Norm,
        max_norm: float,
        scale: float,
        divisor: float = 1.0,
        optimizer: Steps | None = None,
    ) -> None:
        self._comm = norm.comm
        self._owners = norm.owners()
        self._scale = scale
        self._optimizer = optimizer
        self._step = 0
        if optimizer is not None:
            self._step = optimizer.steps + 1
        self._measured: MeasuredNorm | None = None
        squares = arrays.zeros((len(self._owners),), np.dtype(np.float64), "cuda")
        start = 0
        for stage in as_stages(norm.stages):
            stop = start + len(norm.names(stage))
            norm.squares(stage, out=squares[start:stop])
            start = stop
        self.factor = clip_factor(squares, max_norm, scale, divisor)
        self._download: arrays.Download | None = arrays.Download([squares])

    def is_here(self) -> bool:
        """Return whether reading will not wait."""
        return self._download is None or self._download.is_done()

    def result(self) -> MeasuredNorm:
        """Wait for the norm alone."""
        if self._measured is None:
            assert self._download is not None  # until it is measured
            squares = self._download.result()[0].tolist()
            self._measured = _measured(squares, self._owners, self._scale)
            # Norms of many steps may be kept, once they are read.
            self._download = None
            self._owners = []
            del self.factor
            if self._measured.bad is not None and self._optimizer is not None:
                self._optimizer.steps -= 1  # the device has not made it
        return self._measured

    def __float__(self) -> float:
        norm, bad = self.result()
        if bad is not None:
            bad.refuse(self._comm, f" in step {self._step} of the optimizer")
        return norm

    def __eq__(self, other: object) -> bool:
        return float(self) == other

    def __lt__(self, other: float) -> bool:
        return float(self) < other

    __hash__ = None  # type: ignore[assignment]  # a number that is read, never a key

    def __format__(self, how: str) -> str:
        return format(float(self), how)

    def __repr__(self) -> str:
        return repr(float(self))
