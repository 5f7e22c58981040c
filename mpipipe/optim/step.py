"""Clipping by the global norm, scaling of the loss, and the step of an optimizer with both."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mpipipe.errors import ArgumentError
from mpipipe.job import Communicator
from mpipipe.nn import rescale
from mpipipe.optim.norm import Norm, NormOfStep
from mpipipe.optim.optimizers import FlatOptimizer
from mpipipe.stages import StageLike, as_stages


def clip_by_global_norm(
    stages: Sequence[StageLike],
    max_norm: float,
    comm: Communicator | None = None,
    scale: float = 1.0,
) -> float:
    """Scale the gradients in place to a norm of at most `max_norm`; return the norm before that.

    The squares of each parameter are summed in float64, and the sums of all parameters are added
    exactly. So the norm does not depend on how the model is cut into stages and ranks, and is the
    same on all of them.

    Parameters
    ----------
    stages : sequence of stages
        The stages of this rank, as for an optimizer.
    max_norm : float
        Above 0; infinity only measures.
    comm : communicator, optional
        Over which the stages of the model are spread: a collective call. None: all of them are
        here. Copies of tied parameters (`Stage.tied_copies`) do not count twice.
    scale : float
        Factor that the gradients carry, and go on carrying. Both norms are those of gradients /
        scale.

    Raises
    ------
    NonFiniteError
        A gradient is NaN or infinite. All ranks raise it, and it names rank, stage and parameter.
    ArgumentError
        `max_norm` is not above 0.

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
    norm = Norm(stages, comm, max_norm)
    adapters = as_stages(stages)
    if norm.on_device:
        begun = NormOfStep(norm, max_norm, scale)
        for stage in adapters:
            rescale(stage.gradients.flat, begun.factor)  # leaves them where the factor is NaN
        measured = begun.result()
    else:
        measured = norm.measure(scale)
    if measured.bad is not None:
        measured.bad.refuse(norm.comm)
    if not norm.on_device and measured.norm > max_norm:
        factor = max_norm / measured.norm
        for stage in adapters:
            stage.kernels.scale(stage.gradients.flat, factor, stage.gradients.flat)
    return measured.norm


# -- Scaling of the loss, for gradients too small for float16 --------------------------------------
#
# The loss, and with it every gradient, is multiplied by a scale before the backward; the optimizer
# divides by it. An infinite or NaN gradient tells that the scale was too large: the step is left
# out and the scale made smaller. It grows after many good steps in a row (Micikevicius et al.,
# "Mixed precision training", 2018).


# scale
SMALLEST = 1.0
LARGEST = 2.0**64


class LossScaler:
    """The scale of the loss from step to step, which follows from the outcomes of steps.

    Parameters
    ----------
    initial : float
        First scale, in 1 ... 2^64.
    growth : float
        At least 1: the scale is multiplied by it after `interval` steps in a row without overflow,
        up to 2^64.
    backoff : float
        Between 0 and 1: the scale is multiplied by it after an overflow, down to 1.
    interval : int
        At least 1.
    dynamic : bool
        False: the scale stays what it is. `LossScaler(1.0, dynamic=False)` is no scaling at all,
        which is enough for bfloat16.

    Attributes
    ----------
    scale : float
        The scale for the next step.
    good, skipped : int
        Steps in a row without overflow at this scale, and steps with overflow so far.

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
        if not (
            SMALLEST <= initial <= LARGEST
            and 1 <= growth < math.inf
            and 0 < backoff < 1
            and interval >= 1
        ):
            raise ArgumentError(
                "wrong scaling of the loss",
                found=f"initial={initial}, growth={growth}, backoff={backoff}, interval={interval}",
                expected="1 <= initial <= 2^64, growth >= 1 and finite, 0 < backoff < 1, interval "
                ">= 1",
            )
        self.scale = float(initial)
        self.growth = growth
        self.backoff = backoff
        self.interval = interval
        self.dynamic = dynamic
        self.good = self.skipped = 0
        self.unread: list[NormOfStep] = []  # norms that are still on the GPU

    def read_norms(self, wait: bool) -> None:
        """Read the norms that earlier steps have left on the GPU: all, or those that are ready."""
        while self.unread and (wait or self.unread[0].is_here()):
            float(self.unread.pop(0))

    def update(self, finite: bool) -> None:
        """Take note of a step, and whether all its gradients were `finite`."""
        factor = 1.0
        if finite:
            self.good += 1
        else:
            self.good = 0
            self.skipped += 1
            factor = self.backoff
        if self.good == self.interval:
            self.good = 0
            factor = self.growth
        if self.dynamic:
            self.scale = min(LARGEST, max(SMALLEST, self.scale * factor))


# -- A step with clipping and scaling --------------------------------------------------------------


def scaled_step(
    optimizer: FlatOptimizer,
    scaler: LossScaler,
    max_norm: float = math.inf,
    lr: float | None = None,
    comm: Communicator | None = None,
) -> float | NormOfStep | None:
    """Make a step of the optimizer with gradients that carry `scaler.scale`, and update the scaler.

    If a gradient is infinite or NaN, on whichever rank, no rank makes the step. The gradients stay
    as they are. The norm of the gradients, without scale and before clipping, is returned; None if
    no step was made. Where one GPU holds the whole model and the scale is not dynamic, it is a
    `NormOfStep`, which waits for the GPU where it is read.

    Parameters
    ----------
    optimizer, scaler : SGD or AdamW, LossScaler
        The optimizer of this rank's stages; the scaler is equal on all ranks.
    max_norm : float
        Above 0: larger gradients are clipped to it, without a pass of their own.
    lr : float, optional
        Overrides the learning rate for this step.
    comm : communicator, optional
        As for `clip_by_global_norm`.

    Raises
    ------
    NonFiniteError
        A gradient is infinite or NaN, and no smaller scale can help: the scale is 1 already, or not
        dynamic. All ranks raise it, and it names rank, stage and parameter.
    ArgumentError
        As `clip_by_global_norm`. The scaler is as it was.

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
    norm = Norm(optimizer.stages, comm, max_norm)
    scale = scaler.scale
    if norm.on_device:
        # On the GPU: compute the norm, then step or skip, without waiting for the host.
        scaler.read_norms(wait=False)
        begun = NormOfStep(norm, max_norm, scale, scale, optimizer)
        optimizer.step(lr=lr, scale=begun.factor)
        if not scaler.dynamic:
            scaler.update(finite=True)
            scaler.unread.append(begun)
            return begun
        # The scale of the next step depends on this norm.
        measured = begun.result()
    else:
        measured = norm.measure(scale)
    can_shrink = scaler.dynamic and scale > SMALLEST
    if measured.bad is not None and not can_shrink:
        measured.bad.refuse(norm.comm)
    scaler.update(measured.bad is None)
    if measured.bad is not None:
        return None
    if not norm.on_device:
        factor = 1.0
        if measured.norm > max_norm:
            factor = max_norm / measured.norm
        optimizer.step(lr=lr, scale=factor / scale)
    return measured.norm
