"""What a stage allocates for one micro-batch: measured with the layers themselves, on a stage that may be shorter.

    layers of the stage      E A F A F A F A F H        a run of 4 times (A F)
    rehearsed                E A F H    E A F A F H     so many bytes, and so many more for each time

All sums of bytes grow by the same amount with each repetition, so two rehearsals say what any number of them takes.
The Python allocator counts (tracemalloc): numpy tells it of each array.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import astuple, dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from mpipipe import nn
from mpipipe.arrays import Array
from mpipipe.nn import Position
from mpipipe.nn.freezing import is_frozen
from mpipipe.pipeline import Loss
from mpipipe.planning import memory


@dataclass(frozen=True)
class StageBytes:
    """Bytes of one stage; the input of a micro-batch is in none of them.

    Attributes
    ----------
    buffers : parameters, gradients and copies for computing, as the stage makes them
    tables : what the first micro-batch leaves for all others
    drawing : most that is there beside the buffers while initial values are drawn
    output : what a forward returns
    saved : what is kept from a forward for its backward; behind the last stage the gradient of the loss, too
    pending : what is kept from the input gradient for the weight gradient
    forward, backward, input_grad, weight_grad : most that the action allocates at once, its results included
    """

    buffers: float
    tables: float
    drawing: float
    output: float
    saved: float
    pending: float
    forward: float
    backward: float
    input_grad: float
    weight_grad: float

    def longer(self, more: StageBytes, times: int) -> StageBytes:
        """Return the bytes of a stage with `times` further repetitions, where `more` has one more than this one."""
        return StageBytes(*(low + times * (high - low) for low, high in zip(astuple(self), astuple(more))))


class Run(NamedTuple):
    """Layers that repeat: `times` times the `period` layers from `start` on."""

    start: int
    period: int
    times: int


def longest_run(kinds: Sequence[Any]) -> Run:
    """Return the repetition that leaves the fewest layers where it is cut to two; of equals the shortest period.

    Examples
    --------
    >>> from mpipipe.planning.rehearsal import longest_run
    >>> longest_run("EAFAFAFAFH")
    Run(start=1, period=2, times=4)
    """
    best = Run(0, len(kinds), 1)
    for period in range(1, len(kinds) // 3 + 1):
        same = [kinds[i] == kinds[i + period] for i in range(len(kinds) - period)] + [False]
        start = 0
        for place, holds in enumerate(same):
            if holds:
                continue
            count = (place - start) // period + 1
            if count > 2 and (count - 2) * period > max(0, best.times - 2) * best.period:
                best = Run(start, period, count)
            start = place + 1
    return best


def kind_of(layer: nn.Layer) -> tuple:
    """Return what tells layers apart that compute in different ways or sizes."""
    return tuple(
        (name, type(each).__qualname__, tuple((key, p.shape, p.frozen) for key, p in each.declared.items()),
         getattr(getattr(each, "attend", None), "window", None))
        for name, each in layer.walk("")
    )  # fmt: skip


class Rehearsal:
    """Measures stages; each kind of stage once.

    Parameters
    ----------
    build : makes the unbound layers of the whole model
    dtype : of activations
    frozen : patterns, as for nn.Stage
    loss_for : makes the loss behind the last stage
    """

    def __init__(
        self,
        build: Callable[[], list[nn.Layer]],
        dtype: str,
        frozen: Sequence[str],
        loss_for: Callable[[nn.Stage], Callable[..., Any]],
    ) -> None:
        self.make, self.dtype, self.frozen, self.loss_for = build, dtype, frozen, loss_for
        self.kinds = [kind_of(layer) for layer in self.build()]
        self._known: dict[tuple, tuple[StageBytes, tuple[int, ...]]] = {}

    def stage(
        self, start: int, stop: int, x: np.ndarray, targets: np.ndarray, ends: bool
    ) -> tuple[StageBytes, tuple[int, ...]]:
        """Return the bytes of the layers from `start` to before `stop`, and the shape of the output.

        Parameters
        ----------
        start, stop : of the layers in the model
        x : input of a micro-batch
        targets : what the loss compares with, behind the last layer
        ends : whether nobody wants the gradient of the input
        """
        kinds = self.kinds[start:stop]
        key = tuple(kinds), x.shape, x.dtype.name, ends, stop == len(self.kinds)
        if key in self._known:
            return self._known[key]
        run = longest_run(kinds)
        times = (1, 2) if run.times > 2 else (run.times,)
        behind = start + run.start + run.period * run.times
        cuts = [[*range(start, start + run.start + run.period * count), *range(behind, stop)] for count in times]
        if not self._known:  # what the first use of anything leaves behind is no part of a stage
            self._measure(cuts[0], x[:1], targets[:1], ends)
        (short, shape), *more = [self._measure(cut, x, targets, ends) for cut in cuts]
        self._known[key] = (short.longer(more[0][0], run.times - 1) if more else short), shape
        return self._known[key]

    def build(self) -> list[nn.Layer]:
        """Return all layers, whose parameters say themselves whether they are frozen: a shorter stage renames them."""
        layers = self.make()
        for place, top in enumerate(layers):
            for name, layer in top.walk(str(place)):
                layer.declared = {
                    key: replace(entry, frozen=entry.frozen or is_frozen(f"{name}.{key}", self.frozen))
                    for key, entry in layer.declared.items()
                }
        return layers

    def _measure(
        self, places: Sequence[int], x: np.ndarray, targets: np.ndarray, ends: bool
    ) -> tuple[StageBytes, tuple[int, ...]]:
        with _counting():
            layers = self.build()
            chosen = [layers[place] for place in places]
            del layers
            memory.check_rehearsal(chosen, self.dtype, x.nbytes)
            before = _now()
            stage = nn.Stage(chosen, self.dtype)
            drawing, buffers = _peak() - before, _now() - before
            drawing -= buffers
            stage.optimizer_writes_compute()
            stage.end_backward(ends or stage.first_layer.uploads_integers)
            loss = Loss(self.loss_for(stage)) if places[-1] == len(self.kinds) - 1 else None
            one = _MicroBatch(stage, loss, x, targets)
            one.whole()
            tables = _now() - before - buffers
            return StageBytes(max(0, buffers), max(0, tables), drawing, *one.measure()), one.shape


class _MicroBatch:
    """One micro-batch through one stage, as the executor runs it."""

    def __init__(self, stage: nn.Stage, loss: Loss | None, x: np.ndarray, targets: np.ndarray) -> None:
        self.stage, self.loss, self.x, self.targets = stage, loss, x, targets
        self.dy: Array | None = None
        self.shape: tuple[int, ...] = ()
        stage.position = Position(0, 0, 0, True)
        self.trains = any(not layer.frozen for layer in stage.layers)

    def forward(self) -> tuple[Any, Array | None, int]:
        """Return (saved, gradient of the output, bytes of the output)."""
        y, saved = self.stage.forward(self.x)
        self.shape = y.shape
        if self.loss is None:
            if self.dy is None:
                self.dy = np.zeros(y.shape, y.dtype)
            return saved, self.dy, y.nbytes
        _, gradient, _ = self.loss.checked(self.loss.call(y, self.targets, 1.0))
        return saved, self.loss.scaled(gradient, 1.0, y), y.nbytes

    def whole(self) -> None:
        """Run all once, so that what is made once is there."""
        with np.errstate(all="ignore"), self._head():
            self.stage.begin_gradients()
            saved, dy, _ = self.forward()
            self.stage.backward(dy, saved)

    def _head(self) -> Any:
        return nullcontext() if self.loss is None else self.loss.taking_head()

    def measure(self) -> tuple[float, ...]:
        """Return output, saved, pending, and the most of forward, backward, input and weight gradient."""
        with np.errstate(all="ignore"), self._head():
            start = _now()
            saved, dy, output = self.forward()
            forward, kept = _peak() - start, _now() - start
            held = _now()
            self.stage.backward(dy, saved)
            backward = _peak() - held
            saved = dy = None
            start = _now()
            saved, dy, output = self.forward()
            held = _now()
            waiting = self.stage.backward_input(dy, saved)[1]
            input_grad = _peak() - held
            saved = dy = None
            pending = _now() - start
            held = _now()
            self.stage.backward_weight(waiting)
            weight_grad = _peak() - held
        return output, kept, pending, forward, backward, input_grad, weight_grad


@contextmanager
def _counting() -> Iterator[None]:
    """Let the allocator count within this context."""
    mine = not tracemalloc.is_tracing()
    if mine:
        tracemalloc.start()
    try:
        yield
    finally:
        if mine:
            tracemalloc.stop()


def _now() -> int:
    """Return the bytes that are allocated; the peak begins anew here."""
    now = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    return now


def _peak() -> int:
    return tracemalloc.get_traced_memory()[1]
