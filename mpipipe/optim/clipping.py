"""Clipping by the global norm."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from mpipipe.errors import ArgumentError
from mpipipe.nn import Stage
from mpipipe.optim.norm import measured


def clip_by_global_norm(
    stages: Sequence[Stage], max_norm: float, comm=None, skip: Collection[str] = (), scale: float = 1.0
) -> float:
    """Scale the gradients in place so that their norm is at most `max_norm`; return the norm before.

    Parameters
    ----------
    max_norm : above 0; infinity only measures
    scale : factor that the gradients carry, and go on carrying: both norms are those of gradients / scale

    The others, and how the norm is measured, are those of `gradient_norm`. Raises NonFiniteError on all ranks, naming
    rank, stage and parameter, if a gradient is NaN or infinite.
    """
    check_max_norm(max_norm)
    norm, culprit = measured(stages, comm, skip, scale)
    if culprit is not None:
        raise culprit.error()
    if norm > max_norm:
        for stage in stages:
            stage.kernels.scale(stage.gradients.flat, max_norm / norm, stage.gradients.flat)
    return norm


def check_max_norm(max_norm: float) -> None:
    """Raise ArgumentError unless it is above 0."""
    if not max_norm > 0:
        raise ArgumentError("max_norm must be above 0", found=repr(max_norm), expected="above 0")
