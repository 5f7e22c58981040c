"""Clipping by the global norm, and the step of an optimizer with it: at once, or begun and ended.

    rank 0   gradients whole | begin: squares -->           ... log, fetch data ... | end: norm, update
    rank 3             gradients whole | begin: squares --> ................ | end: norm, update

No rank waits between the two. Norms are those of `norm.GlobalNorm`, to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, Protocol

from mpipipe.arrays import DeviceArray
from mpipipe.errors import ArgumentError
from mpipipe.job import Communicator
from mpipipe.nn import rescale
from mpipipe.optim.norm import GlobalNorm, MeasuredNorm, Norm, NormOnDevice, norm_of
from mpipipe.stages import StageAdapter, check_finished, mark_begun


def clip_by_global_norm(
    stages: Sequence[Any],
    max_norm: float,
    comm: Communicator | None = None,
    skip: Collection[str] = (),
    scale: float = 1.0,
    over: GlobalNorm | None = None,
) -> float:
    """Scale the gradients in place so that their norm is at most `max_norm`; return the norm before that.

    Parameters
    ----------
    stages : sequence of stages
        The stages of this rank, as for an optimizer.
    max_norm : float
        Above 0; infinity only measures.
    comm, skip : communicator or None, collection of str
        As for `gradient_norm`, whose norm this is.
    scale : float
        Factor that the gradients carry, and go on carrying. Both norms are those of gradients / scale.
    over : GlobalNorm, optional
        In place of `comm` and `skip`: the ranks may keep the norm on their GPUs.

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
    norm, adapters = norm_of(stages, comm, skip, over), StageAdapter.of(stages)
    if norm.on_device:
        asked = NormOnDevice(norm, max_norm, scale)
        try:
            for stage in adapters:
                rescale(stage.gradients.flat, asked.factor)  # not where it is NaN
        finally:  # after an error too: until then the device writes to memory of the host that others would get
            measured = asked.result()
    else:
        measured = norm.measure(scale)
        if measured.bad is None and measured.norm > max_norm:
            for stage in adapters:
                stage.kernels.scale(stage.gradients.flat, max_norm / measured.norm, stage.gradients.flat)
    if measured.bad is not None:
        measured.bad.refuse(norm.comm)
    return measured.norm


# -- Scaling of the loss, for gradients too small for float16 ---------------------------------------------------------
#
# The loss, and with it every gradient, is multiplied by a scale before the backward; the optimizer divides by it. An
# infinite or NaN gradient tells that the scale was too large: the step is left out and the scale made smaller. It grows
# after many good steps in a row (Micikevicius et al., "Mixed precision training", 2018).


SMALLEST, LARGEST = 1.0, 2.0**64  # scale


class LossScaler:
    """The scale of the loss from step to step. It depends on nothing but the outcomes that `update` gets.

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
        if not (SMALLEST <= initial <= LARGEST and 1 <= growth < math.inf and 0 < backoff < 1 and interval >= 1):
            raise ArgumentError(
                "wrong scaling of the loss",
                found=f"initial={initial}, growth={growth}, backoff={backoff}, interval={interval}",
                expected="1 <= initial <= 2^64, growth >= 1 and finite, 0 < backoff < 1, interval >= 1",
            )
        self.scale, self.growth, self.backoff, self.interval = float(initial), growth, backoff, interval
        self.dynamic = dynamic
        self.good = self.skipped = 0

    def update(self, finite: bool) -> None:
        """Take note of a step, and whether all its gradients were `finite`."""
        factor = 1.0 if finite else self.backoff
        self.good, self.skipped = self.good + 1 if finite else 0, self.skipped + (not finite)
        if self.good == self.interval:
            self.good, factor = 0, self.growth
        if self.dynamic:
            self.scale = min(LARGEST, max(SMALLEST, self.scale * factor))


# -- A step with clipping and scaling ---------------------------------------------------------------------------------


def check_max_norm(max_norm: float) -> None:
    """Raise ArgumentError unless it is above 0."""
    if not max_norm > 0:
        raise ArgumentError("max_norm must be above 0", found=repr(max_norm), expected="above 0")


class Stepping(Protocol):
    """What a scaled step asks of an optimizer; AdamW and SGD have it."""

    steps: int

    @property
    def stages(self) -> Sequence[Any]: ...

    def step(self, lr: float | None = None, scale: float | DeviceArray = 1.0) -> None: ...


class _OptimizerStep(NamedTuple):
    """A step of an optimizer with all that it depends on."""

    optimizer: Stepping
    scaler: LossScaler
    max_norm: float
    lr: float | None
    norm: Norm

    def on_device(self) -> float | None:
        """Measure, and make the step or leave it out there, before the host knows the norm."""
        asked = NormOnDevice(self.norm, self.max_norm, self.scaler.scale, divisor=self.scaler.scale)
        try:
            self.optimizer.step(lr=self.lr, scale=asked.factor)
        finally:  # after an error too: until then the device writes to memory of the host that others would get
            measured = asked.result()
        if measured.bad is not None:
            self.optimizer.steps -= 1  # the device has not made it
        return measured.norm if self._is_good(measured) else None

    def with_norm(self, measured: MeasuredNorm) -> float | None:
        """Make the step once the norm is known, or the parameter whose gradient is not finite."""
        factor = (self.max_norm / measured.norm if measured.norm > self.max_norm else 1.0) / self.scaler.scale
        if not self._is_good(measured):
            return None
        self.optimizer.step(lr=self.lr, scale=factor)
        return measured.norm

    def _is_good(self, measured: MeasuredNorm) -> bool:
        """Let the scaler know; raise NonFiniteError where no smaller scale can help."""
        if measured.bad is not None and not (self.scaler.dynamic and self.scaler.scale > SMALLEST):
            measured.bad.refuse(self.norm.comm)
        self.scaler.update(measured.bad is None)
        return measured.bad is None


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

    If a gradient is infinite or NaN, on whichever rank, no rank makes the step. The gradients stay as they are. The
    norm of the gradients, without scale and before clipping, is returned; None if no step was made.

    Parameters
    ----------
    optimizer, scaler : SGD or AdamW, LossScaler
        The optimizer of this rank's stages; the scaler is equal on all ranks.
    max_norm : float
        Above 0: larger gradients are clipped to it, without a pass of their own.
    lr : float, optional
        Overrides the learning rate for this step.
    comm, skip, over : optional
        As for `clip_by_global_norm`.

    Raises
    ------
    NonFiniteError
        A gradient is infinite or NaN, and no smaller scale can help: the scale is 1 already, or not dynamic. All ranks
        raise it, and it names rank, stage and parameter.
    ArgumentError
        As `clip_by_global_norm`; or another step of these stages has not ended (see `begin_step`). The scaler is as it
        was.

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
    return begin_step(optimizer, max_norm, scaler=scaler, lr=lr, comm=comm, skip=skip, over=over).wait()


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

    With `wait` this is `scaled_step`, to the bit. Without `max_norm` and `scaler` the step is made at once, as by
    `optimizer.step`. Where the optimizer has `replicas`, the step is collective over them. Between the two calls
    gradients and parameters must be left alone, and `wait` must come first: until then no training step of a pipeline
    and no other step of an optimizer of these stages begins.

    Parameters
    ----------
    optimizer : SGD or AdamW
        The optimizer of this rank's stages, whose gradients are whole.
    max_norm : float, optional
        Above 0: larger gradients are clipped to it; infinity for the norm alone.
    scaler : LossScaler, optional
        Equal on all ranks; its scale is in the gradients.
    lr, comm, skip, over : optional
        As for `scaled_step`. Where `over` keeps the norm on the GPUs, all is done in `wait`.

    Examples
    --------
    >>> from mpipipe import nn, optim
    >>> stage = nn.Stage([nn.RMSNorm(4)])
    >>> optimizer = optim.SGD([stage], lr=0.5)
    >>> stage.gradients["0.gain"][...] = 1
    >>> update = optim.begin_step(optimizer, max_norm=1.0)
    >>> update.wait()
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
    step = _OptimizerStep(optimizer, scaler, max_norm, lr, norm_of(optimizer.stages, comm, skip, over))
    if step.norm.on_device:
        return PendingUpdate(step.on_device, optimizer.stages)
    measured = step.norm.begin(scaler.scale)
    return PendingUpdate(lambda: step.with_norm(measured()), optimizer.stages)


class PendingUpdate:
    """What `begin_step` returns: an optimizer step that `wait` ends.

    Parameters
    ----------
    end, stages : callable, sequence of stages
        What waits for the norm, makes the step, and returns the norm; and stages, whose next steps may not begin
        until then.
    """

    def __init__(self, end: Callable[[], float | None], stages: Sequence[Any] = ()) -> None:
        self._end: Callable[[], float | None] | None = end
        self._norm: float | None = None
        mark_begun(stages, self)

    @property
    def has_ended(self) -> bool:
        """Whether `wait` was called."""
        return self._end is None

    def wait(self) -> float | None:
        """Wait for the norm, and make the step; collective where the norm is. A second call does nothing more.

        The norm of the gradients, without scale and before clipping, is returned; None where no norm was asked for, or
        no step was made.

        Raises
        ------
        NonFiniteError
            As `scaled_step`; without a scaler wherever a gradient is infinite or NaN.
        """
        end, self._end = self._end, None
        if end is not None:
            self._norm = end()
        return self._norm
