"""Clipping of gradients that one GPU has all of: what comes behind the norm is asked of it before the host knows it.

The device computes the factor of the gradients, and a kernel takes it from the device's memory. The host fetches the
sums of squares meanwhile, to return the norm and to name a gradient that is not finite. It waits for these sums alone,
so the device goes on working.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np

from mpipipe import arrays
from mpipipe.comm.types import Communicator
from mpipipe.nn import Stage
from mpipipe.nn.kernels.cuda.clipping import clip_factor
from mpipipe.optim.norm import Culprit, counted_pieces


def has_all(stages: Sequence[Stage], comm: Communicator | None) -> bool:
    """Whether all stages of the model are on one GPU of this rank, so that no other has a part in the norm."""
    gpus = {stage.gpu for stage in stages}
    return len(gpus) == 1 and None not in gpus and (comm is None or comm.size == 1)


class NormOnDevice:
    """The norm of all gradients, begun on the device.

    Parameters
    ----------
    stages, comm, skip, scale : as of `gradient_norm`, where `has_all` is true
    max_norm : to which gradients are clipped
    divisor : of the factor

    Attributes
    ----------
    factor : cupy.ndarray
        () of float64: what the gradients are to be multiplied by; NaN where one is not finite.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        comm: Communicator | None,
        skip: Collection[str],
        scale: float,
        *,
        max_norm: float,
        divisor: float,
    ):
        self._counted = counted_pieces(stages, skip)
        self._rank, self._scale = None if comm is None else comm.rank, scale
        ends = np.cumsum([0] + [len(names) for _, names, _ in self._counted]).tolist()
        squares = arrays.empty((ends[-1],), np.dtype(np.float64), "cuda")
        for (stage, _, pieces), start, stop in zip(self._counted, ends, ends[1:]):
            stage.kernels.sums_of_squares(stage.gradients.flat, pieces, out=squares[start:stop])
        self.factor = clip_factor(squares, max_norm, scale, divisor)
        self._squares = arrays.Download([squares])

    def result(self) -> tuple[float, Culprit | None]:
        """Return the norm, and the first parameter that makes it infinite or NaN; wait for the norm alone."""
        squares = self._squares.result()[0].tolist()
        named = [(stage.index, name) for stage, names, _ in self._counted for name in names]
        for place, square in zip(named, squares):
            if not math.isfinite(square):
                return math.sqrt(sum(squares)), Culprit(self._rank, *place)
        return math.sqrt(math.fsum(squares)) / self._scale, None
