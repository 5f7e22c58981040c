"""An optimizer step in two parts: begun when the gradients of this rank are complete, ended when their norm is known.

    rank 0   gradients whole | begin: squares -->           ... log, fetch data ... | end: norm, update
    rank 3             gradients whole | begin: squares --> ................ | end: norm, update

No rank waits between the two. The ranks exchange one row of numbers of fixed length: each sends the exact sum of its
squares (exact_sum.py). So the norm has the same bits as that of `gradient_norm`, which gathers the squares of all
parameters. If a gradient is not finite, all squares are gathered here, too, so that an error can name the parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from mpipipe.job.consensus import VALUES, Ballot
from mpipipe.job.group import Vote, group_of
from mpipipe.job.types import Communicator
from mpipipe.nn.kernels.cuda.optimizer import rescale
from mpipipe.optim.norm import (
    Culprit,
    GlobalNorm,
    NormOnDevice,
    Squares,
    check_max_norm,
    local_squares,
    measure,
    resolved,
    squares_of_one,
)
from mpipipe.optim.scaling import LossScaler, Stepping, scaled_step, step_with_norm
from mpipipe.optim.stages import measured
from mpipipe.stages import check_finished, mark_begun

PARTS = VALUES - 1  # numbers that hold the exact sum of one rank: enough for 700 binary digits
UNKNOWN = -1  # sent in place of how many parts there are: then all squares are gathered


class PendingUpdate:
    """What `begin_step` returns: an optimizer step that `finish` ends.

    Parameters
    ----------
    end : callable
        Waits for the norm, makes the step, and returns the norm.
    stages : sequence
        Stages of the optimizer. Until the end no training step and no other optimizer step of them may begin.
    """

    def __init__(self, end: Callable[[], float | None], stages: Sequence[Any] = ()) -> None:
        self._end: Callable[[], float | None] | None = end
        self._norm: float | None = None
        mark_begun(stages, self)

    @property
    def has_ended(self) -> bool:
        """Whether `finish` was called."""
        return self._end is None

    def finish(self) -> float | None:
        """Wait for the norm, and make the step; collective where the norm is. A second call does nothing more.

        Returns
        -------
        float or None
            The norm of the gradients, without scale and before clipping; None where no norm was asked for, or no step
            was made.

        Raises
        ------
        NonFiniteError
            As `scaled_step`; without a scaler wherever a gradient is infinite or NaN.
        """
        end, self._end = self._end, None
        if end is not None:
            self._norm = end()
        return self._norm


def begin_step(
    optimizer: Stepping,
    max_norm: float | None = None,
    *,
    scaler: LossScaler | None = None,
    lr: float | None = None,
    comm: Communicator | None = None,
    skip: Collection[str] = (),
    over: GlobalNorm | None = None,
) -> PendingUpdate:
    """Begin a step of the optimizer, and of the sum over all ranks that clipping needs. Nothing waits.

    With `finish` this is `scaled_step`, to the bit. Without `max_norm` and `scaler` no rank needs another one: the step
    is made at once, as by `optimizer.step`. Between the two calls gradients and parameters must be left alone, and
    `finish` must come first: until then no training step of a pipeline and no other step of an optimizer of these
    stages begins.

    Parameters
    ----------
    optimizer : SGD or AdamW
        The optimizer of this rank's stages, whose gradients are whole.
    max_norm : float, optional
        Above 0: larger gradients are clipped to it; infinity for the norm alone.
    scaler : LossScaler, optional
        Equal on all ranks; its scale is in the gradients.
    lr : float, optional
        Overrides the learning rate for this step.
    comm : communicator, optional
        Over which the stages of the model are spread: a collective call. None: all of them are here.
    skip : collection of str
        Names of parameters that do not count in the norm.
    over : GlobalNorm, optional
        In place of `comm` and `skip`. Where the ranks keep the norm on their GPUs, all is done in `finish`.

    Returns
    -------
    PendingUpdate
        Whose `finish()` makes the step.

    Raises
    ------
    ArgumentError
        `max_norm` is not above 0, or `over` comes with `comm` or `skip`, or is of other stages; or another step of
        these stages has not ended.

    Examples
    --------
    >>> from mpipipe import nn, optim
    >>> stage = nn.Stage([nn.RMSNorm(4)])
    >>> optimizer = optim.SGD([stage], lr=0.5)
    >>> stage.gradients["0.gain"][...] = 1
    >>> update = optim.begin_step(optimizer, max_norm=1.0)
    >>> update.finish()
    2.0
    >>> stage.parameters["0.gain"]
    array([0.75, 0.75, 0.75, 0.75], dtype=float32)
    """
    check_finished(optimizer.stages)
    if max_norm is None and scaler is None:
        optimizer.step(lr=lr)
        return PendingUpdate(lambda: None)
    max_norm = math.inf if max_norm is None else max_norm
    check_max_norm(max_norm)
    scaler = LossScaler(1.0, dynamic=False) if scaler is None else scaler
    stages = optimizer.stages
    if _on_device(stages, comm, skip, over):
        end_all = partial(scaled_step, optimizer, scaler, max_norm, lr=lr, comm=comm, skip=skip, over=over)
        return PendingUpdate(end_all, stages)
    if over is not None:
        comm, skip, _ = resolved(stages, comm, skip, over)
    measured = _begin(stages, comm, skip, scaler.scale)

    def end() -> float | None:
        norm, culprit = measured()
        return step_with_norm(optimizer, scaler, max_norm, lr, comm, norm, culprit)

    return PendingUpdate(end, stages)


def _on_device(
    stages: Sequence[Any], comm: Communicator | None, skip: Collection[str], over: GlobalNorm | None
) -> bool:
    """Return whether the norm is computed on GPUs."""
    if over is not None:
        return over.on_device
    try:
        return squares_of_one(stages, comm, skip) is not None
    except Exception:  # `measure` will raise it again, on all ranks
        return False


def _begin(
    stages: Sequence[Any], comm: Communicator | None, skip: Collection[str], scale: float
) -> Callable[[], tuple[float, Culprit | None]]:
    """Begin what `norm.measure` does, and return a function that waits for the result."""
    if comm is None:
        return partial(measure, stages, comm, skip, scale)
    group = group_of(comm)
    vote = Vote(group, Ballot("norm of the gradients: the squares"), _row(stages, skip))

    def end() -> tuple[float, Culprit | None]:
        table = vote.settle()
        counts = table[:, 0].tolist()
        if UNKNOWN in counts:
            return measure(stages, comm, skip, scale)
        rows = table[:, 1:].view(np.float64).tolist()
        return math.sqrt(math.fsum(part for row, count in zip(rows, counts) for part in row[:count])) / scale, None

    return end


def _row(stages: Sequence[Any], skip: Collection[str]) -> list[int]:
    """Return the row of this rank: the number of parts of its sum of squares, and their bits as integers."""
    try:
        squares = local_squares(stages, skip)
        parts = expansion(squares) if all(map(math.isfinite, squares)) else None
    except Exception:  # `measure` will raise it again, on all ranks
        parts = None
    if parts is None or len(parts) > PARTS:
        return [UNKNOWN] + [0] * PARTS
    return [len(parts), *np.array(parts + [0.0] * (PARTS - len(parts))).view(np.int64).tolist()]


# -- Clipping by the global norm --------------------------------------------------------------------------------------


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


# -- Exact sums of floating-point numbers, as few numbers that others can go on adding to -----------------------------
#
# A sum of doubles is in general no double, but it is the sum of a few: its value rounded, what rounding has left out,
# rounded, and so on (an expansion; Shewchuk, "Adaptive precision floating-point arithmetic", 1997). `math.fsum` over
# these and those of other ranks rounds once, to the same bits as over all numbers.


def expansion(numbers: Iterable[float]) -> list[float]:
    """Return few numbers, of falling size, whose exact sum is that of the given ones.

    Examples
    --------
    >>> from mpipipe.optim.step import expansion
    >>> expansion([1e16, 1.0, 1.0])
    [1.0000000000000002e+16]
    >>> expansion([1e16, 1.0])
    [1e+16, 1.0]
    """
    left, parts = list(numbers), []
    while total := math.fsum(left):
        parts.append(total)
        left.append(-total)
    return parts
