"""Clipping on GPUs: what comes behind the norm is asked of the device before the host knows it.

The device computes the factor of the gradients, and a kernel takes it from the device's memory. The host fetches the
sums of squares meanwhile, to return the norm and to name a gradient that is not finite. It waits for these sums alone,
so the device goes on working.

    one GPU     squares of each parameter ............................ factor, update
    several     squares of each parameter   NCCL: those of all ranks   factor, update

Every rank has the squares of all parameters then, in one order, and adds them up in the same way. So norm and factor
have the same bits on all ranks, and those that the host finds by `optim.norm`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import DeviceArray
from mpipipe.comm.nccl.row import NcclRow
from mpipipe.comm.types import Communicator
from mpipipe.nn.kernels.cuda.clipping import clip_factor
from mpipipe.optim.norm import Culprit, counted_pieces
from mpipipe.optim.stages import Updated, measured


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
