"""Clipping by the global norm: of all stages on all ranks together."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np

from mpipipe.errors import ArgumentError, NonFiniteError
from mpipipe.nn import Stage
from mpipipe.nn.blocks import blocks


def clip_by_global_norm(stages: Sequence[Stage], max_norm: float, comm=None, skip: Collection[str] = ()) -> float:
    """Scale the gradients in place so that their norm is at most `max_norm`; return the norm before.

    Parameters
    ----------
    stages : of this rank
    max_norm : above 0; infinity only measures
    comm : communicator over which the stages of the model are spread (its allgather is called once); None: all are here
    skip : names of parameters that do not count; copies of tied parameters (Stage.tied_copies) never count twice

    The squares of each parameter are summed in float64 and the sums of all parameters are added exactly, so the result
    does not depend on how the model is cut into stages and ranks.

    Raises NonFiniteError on all ranks, naming rank, stage and parameter, if a gradient is NaN or infinite.
    """
    if not max_norm > 0:
        raise ArgumentError("max_norm must be above 0", found=repr(max_norm), expected="above 0")
    here = [
        (_sum_of_squares(gradient), stage.index, name)
        for stage in stages
        for name, gradient in stage.gradients.items()
        if name not in stage.tied_copies and name not in skip
    ]
    bad = next(((stage, name) for square, stage, name in here if not math.isfinite(square)), None)
    report = ([square for square, _, _ in here], bad)
    reports = [report] if comm is None else comm.allgather(report)
    for rank, (_, culprit) in enumerate(reports):
        if culprit is not None:
            error = NonFiniteError(
                f"the gradient of parameter {culprit[1]} is not finite",
                rank=None if comm is None else rank,
                stage=culprit[0],
                remedy="lower the learning rate, lengthen the warm-up, or look for bad data in this step",
            )
            error.echo = comm is not None and comm.rank != rank
            raise error
    norm = math.sqrt(math.fsum(square for squares, _ in reports for square in squares))
    if norm > max_norm:
        for stage in stages:
            np.multiply(stage.gradients.flat, max_norm / norm, out=stage.gradients.flat)
    return norm


def _sum_of_squares(array: np.ndarray) -> float:
    flat = array.reshape(-1)
    total = 0.0
    for at in blocks(flat.size):
        wide = flat[at].astype(np.float64, copy=False)
        total += float(np.dot(wide, wide))
    return total
