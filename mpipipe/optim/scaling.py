"""Scaling of the loss, for gradients too small for float16 (Micikevicius et al., "Mixed precision training", 2018).

The loss, and with it every gradient, is multiplied by a scale before the backward; the optimizer divides by it. An
infinite or NaN gradient tells that the scale was too large: the step is left out and the scale made smaller. It grows
after many good steps in a row.

    result = pipeline.step(inputs, targets, scale=scaler.scale)
    norm = optim.scaled_step(optimizer, scaler, max_norm=1.0, comm=mesh.pipe)
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any, Protocol

from mpipipe.arrays import DeviceArray
from mpipipe.errors import ArgumentError
from mpipipe.job.types import Communicator
from mpipipe.optim.norm import Culprit, GlobalNorm, NormOnDevice, Squares, check_max_norm, measure, resolved
from mpipipe.stages import check_finished

SMALLEST, LARGEST = 1.0, 2.0**64  # scale


class Stepping(Protocol):
    """What a scaled step asks of an optimizer; AdamW and SGD have it."""

    steps: int

    @property
    def stages(self) -> Sequence[Any]: ...

    def step(self, lr: float | None = None, scale: float | DeviceArray = 1.0) -> None: ...


class LossScaler:
    """The scale of the loss from step to step. It depends on nothing but the outcomes that `update` is told.

    Parameters
    ----------
    initial : float
        First scale, in 1 ... 2^64.
    growth : float
        At least 1: the scale is multiplied by it after `interval` steps in a row without overflow, up to 2^64.
    backoff : float
        Between 0 and 1: the scale is multiplied by it after an overflow, down to 1.
    interval : int
        At least 1.
    dynamic : bool
        False: the scale stays what it is. `LossScaler(1.0, dynamic=False)` is no scaling at all, which is enough for
        bfloat16.

    Attributes
    ----------
    scale : float
        The scale for the next step.
    good : int
        Steps in a row without overflow at this scale.
    skipped : int
        Steps with overflow so far.

    Raises
    ------
    ArgumentError
        A parameter is out of its range.

    Examples
    --------
    >>> from mpipipe import optim
    >>> scaler = optim.LossScaler(initial=1024.0)
    >>> scaler.update(finite=False)
    >>> scaler.scale, scaler.skipped
    (512.0, 1)
    """

    def __init__(
        self,
        initial: float = 65536.0,
        growth: float = 2.0,
        backoff: float = 0.5,
        interval: int = 2000,
        dynamic: bool = True,
    ):
        if not (SMALLEST <= initial <= LARGEST and 1 <= growth < math.inf and 0 < backoff < 1 and interval >= 1):
            raise ArgumentError(
                "wrong scaling of the loss",
                found=f"initial={initial}, growth={growth}, backoff={backoff}, interval={interval}",
                expected="1 <= initial <= 2^64, growth >= 1 and finite, 0 < backoff < 1, interval >= 1",
            )
        self.scale, self.growth, self.backoff, self.interval = float(initial), growth, backoff, interval
        self.dynamic = dynamic
        self.good = self.skipped = 0

    @property
    def can_shrink(self) -> bool:
        """Whether a smaller scale may cure an overflow."""
        return self.dynamic and self.scale > SMALLEST

    def update(self, finite: bool) -> None:
        """Take note of a step.

        Parameters
        ----------
        finite : bool
            Whether all gradients of the step were finite.
        """
        if not finite:
            self.skipped += 1
            self.good = 0
            if self.dynamic:
                self.scale = max(SMALLEST, self.scale * self.backoff)
            return
        self.good += 1
        if self.good == self.interval:
            self.good = 0
            if self.dynamic:
                self.scale = min(LARGEST, self.scale * self.growth)


def scaled_step(
    optimizer: Stepping,
    scaler: LossScaler,
    max_norm: float = math.inf,
    lr: float | None = None,
    comm: Communicator | None = None,
    skip: Collection[str] = (),
    over: GlobalNorm | None = None,
) -> float | None:
    """Make a step of the optimizer with gradients that carry `scaler.scale`, and update the scaler.

    If a gradient is infinite or NaN, on whichever rank, no rank makes the step. The gradients stay as they are.

    Parameters
    ----------
    optimizer : SGD or AdamW
        The optimizer of this rank's stages.
    scaler : LossScaler
        Equal on all ranks.
    max_norm : float
        Above 0: larger gradients are clipped to it, as by `clip_by_global_norm`, but without a pass of their own.
    lr : float, optional
        Overrides the learning rate for this step.
    comm : communicator, optional
        Over which the stages of the model are spread: a collective call. None: all of them are here.
    skip : collection of str
        Names of parameters that do not count in the norm.
    over : GlobalNorm, optional
        In place of `comm` and `skip`: the ranks may keep the norm on their GPUs.

    Returns
    -------
    float or None
        The norm of the gradients, without scale and before clipping; None if no step was made.

    Raises
    ------
    NonFiniteError
        A gradient is infinite or NaN, and no smaller scale can help: the scale is 1 already, or not dynamic. All ranks
        raise it, and it names rank, stage and parameter.
    ArgumentError
        `max_norm` is not above 0, or `over` comes with `comm` or `skip`, or is of other stages; or another step of
        these stages has not ended (see `begin_step`). The scaler is as it was.

    Examples
    --------
    >>> from mpipipe import nn, optim
    >>> stage = nn.Stage([nn.RMSNorm(4)])
    >>> optimizer, scaler = optim.SGD([stage], lr=0.5), optim.LossScaler(initial=8.0)
    >>> stage.gradients["0.gain"][...] = 8
    >>> optim.scaled_step(optimizer, scaler)
    2.0
    >>> stage.parameters["0.gain"]
    array([0.5, 0.5, 0.5, 0.5], dtype=float32)
    """
    check_finished(optimizer.stages)
    check_max_norm(max_norm)
    comm, skip, squares = resolved(optimizer.stages, comm, skip, over)
    if squares is not None:
        return _step_on_device(optimizer, scaler, max_norm, lr, comm, squares)
    norm, culprit = measure(optimizer.stages, comm, skip, scaler.scale)
    return step_with_norm(optimizer, scaler, max_norm, lr, comm, norm, culprit)


def step_with_norm(
    optimizer: Stepping,
    scaler: LossScaler,
    max_norm: float,
    lr: float | None,
    comm: Communicator | None,
    norm: float,
    culprit: Culprit | None,
) -> float | None:
    """Do what `scaled_step` does once the norm is known, or the parameter whose gradient is not finite."""
    if culprit is not None and not scaler.can_shrink:
        culprit.refuse(comm)
    clipping = max_norm / norm if norm > max_norm else 1.0
    factor = clipping / scaler.scale
    scaler.update(culprit is None)
    if culprit is not None:
        return None
    optimizer.step(lr=lr, scale=factor)
    return norm


def _step_on_device(
    optimizer: Stepping,
    scaler: LossScaler,
    max_norm: float,
    lr: float | None,
    comm: Communicator | None,
    squares: Squares,
) -> float | None:
    """Do the same with a step that the device makes or leaves out by itself, before the host knows the norm."""
    scale = scaler.scale
    asked = NormOnDevice(squares, scale, max_norm=max_norm, divisor=scale)
    try:
        optimizer.step(lr=lr, scale=asked.factor)
    finally:  # after an error too: until then the device writes to memory of the host that others would get
        norm, culprit = asked.result()
    if culprit is not None:
        optimizer.steps -= 1  # the device has not made it
        if not scaler.can_shrink:
            culprit.refuse(comm)
    scaler.update(culprit is None)
    return norm if culprit is None else None
