"""Clipping by the global norm."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from mpipipe.comm.types import Communicator
from mpipipe.nn.kernels.cuda.clipping import rescale
from mpipipe.optim.checks import check_max_norm
from mpipipe.optim.global_norm import GlobalNorm, resolved
from mpipipe.optim.norm import measure
from mpipipe.optim.on_device import NormOnDevice, Squares
from mpipipe.optim.stages import measured


def clip_by_global_norm(
    stages: Sequence[Any],
    max_norm: float,
    comm: Communicator | None = None,
    skip: Collection[str] = (),
    scale: float = 1.0,
    over: GlobalNorm | None = None,
) -> float:
    """Scale the gradients in place so that their norm is at most `max_norm`.

    The norm is that of `gradient_norm`.

    Parameters
    ----------
    stages : sequence of stages
        The stages of this rank, as for an optimizer.
    max_norm : float
        Above 0; infinity only measures.
    comm : communicator, optional
        Over which the stages of the model are spread: a collective call. None: all of them are here.
    skip : collection of str
        Names of parameters that do not count.
    scale : float
        Factor that the gradients carry, and go on carrying. Both norms are those of gradients / scale.
    over : GlobalNorm, optional
        In place of `comm` and `skip`: the ranks may keep the norm on their GPUs.

    Returns
    -------
    float
        The norm before clipping.

    Raises
    ------
    NonFiniteError
        A gradient is NaN or infinite. All ranks raise it, and it names rank, stage and parameter.
    ArgumentError
        `max_norm` is not above 0, or `over` comes with `comm` or `skip`, or is of other stages.

    Examples
    --------
    >>> from mpipipe import nn, optim
    >>> stage = nn.Stage([nn.RMSNorm(4)])
    >>> stage.gradients["0.gain"][...] = 1
    >>> optim.clip_by_global_norm([stage], max_norm=1.0)
    2.0
    >>> stage.gradients["0.gain"]
    array([0.5, 0.5, 0.5, 0.5], dtype=float32)
    """
    check_max_norm(max_norm)
    comm, skip, squares = resolved(stages, comm, skip, over)
    if squares is not None:
        return _clip_on_device(stages, max_norm, comm, scale, squares)
    norm, culprit = measure(stages, comm, skip, scale)
    if culprit is not None:
        culprit.refuse(comm)
    if norm > max_norm:
        for stage in measured(stages):
            stage.kernels.scale(stage.gradients.flat, max_norm / norm, stage.gradients.flat)
    return norm


def _clip_on_device(
    stages: Sequence[Any], max_norm: float, comm: Communicator | None, scale: float, squares: Squares
) -> float:
    asked = NormOnDevice(squares, scale, max_norm=max_norm, divisor=1.0)
    try:
        for stage in measured(stages):
            rescale(stage.gradients.flat, asked.factor)  # not where it is NaN
    finally:  # after an error too: until then the device writes to memory of the host that others would get
        norm, culprit = asked.result()
    if culprit is not None:
        culprit.refuse(comm)
    return norm
