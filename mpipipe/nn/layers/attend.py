"""What SelfAttention attends with: an interface, and an adapter for objects with a part of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np

from mpipipe.arrays import Array
from mpipipe.errors import ArgumentError
from mpipipe.nn.layers.layer import Position, Saved, WithSaved

# Queries, keys and values, or their gradients.
ThreeArrays: TypeAlias = "tuple[Array, Array, Array]"


@runtime_checkable
class Attend(Protocol):
    """Attention over one sequence, or over a part of a sequence that is spread over ranks.

    q and `out` are (batch, seq, heads, head_dim), k and v (batch, seq, kv_heads, head_dim);
    gradients have the shapes of what they belong to. `poll` is called while attention computes, to
    keep messages moving; SelfAttention sets it.
    """

    poll: Callable[[], object]
    # Here of each slice of a sequence, for an object that attends to slices.
    slice_rows: Sequence[int] | None = None

    def forward(self, q: Array, k: Array, v: Array) -> WithSaved:
        """Return (out, saved): all that `backward` needs."""

    def backward(self, dout: Array, saved: Saved, room: ThreeArrays | None = None) -> ThreeArrays:
        """Return the gradients of q, k and v.

        Parameters
        ----------
        dout, saved : array, object
            Gradient of `out`, and what `forward` saved.
        room : tuple of array, optional
            Arrays like q, k and v, with any strides along all axes but the last, whose values are
            not set yet. The results may be these three, or other arrays.

        Returns
        -------
        dq, dk, dv : array
            Gradients.
        """

    def positions(self, rows: int) -> np.ndarray | None:
        """Return the positions (rows,) of the next rows; None for 0 ... rows - 1."""
        return None

    def advance(self, rows: int) -> None:
        """Count rows as done, without their keys and values, for a layer that needs positions."""
        return None

    def check_positions(self, positions: np.ndarray) -> None:
        """Raise ArgumentError where the positions of a layer are known not to be those of its rows.

        Parameters
        ----------
        positions : numpy.ndarray
            (rows,), integers. A layer calls this before each forward.
        """
        return None

    def begin(self, position: Position) -> None:
        """Note step and micro-batch; a layer calls it before each forward and backward."""
        return None

    def for_layer(self) -> Attend:
        """Return this object or, if it has a state, another one for one layer alone."""
        return self

    def with_window(self, window: int) -> Attend:
        """Return an object that attends as this one with another window.

        A query sees itself and the window - 1 positions before it. Raises ArgumentError where there
        is no such object.
        """
        raise ArgumentError(
            f"{type(getattr(self, 'inner', self)).__name__} cannot be given a window for each "
            "layer",
            found=f"window {window}",
            expected="an object that has with_window, such as attention.Local or attention.Ring",
            remedy="give the model a function that makes one for each layer, such as "
            "lambda window=None: attention.KVCache(capacity, window=window)",
        )


@runtime_checkable
class ForwardAndBackward(Protocol):
    """The least that a user's own object has; it may have the other functions of `Attend`, too."""

    def forward(self, q: Array, k: Array, v: Array) -> WithSaved:
        """As `Attend.forward`."""

    def backward(self, dout: Array, saved: Saved) -> ThreeArrays:
        """As `Attend.backward`."""


class AttendAdapter(Attend):
    """An object with forward and backward, and perhaps more functions of `Attend`."""

    def __init__(self, inner: ForwardAndBackward) -> None:
        self.inner = inner
        for name in ("positions", "advance", "begin"):
            if hasattr(inner, name):
                setattr(self, name, getattr(inner, name))

    def forward(self, q: Array, k: Array, v: Array) -> WithSaved:
        return self.inner.forward(q, k, v)

    def backward(self, dout: Array, saved: Saved, room: ThreeArrays | None = None) -> ThreeArrays:
        return self.inner.backward(dout, saved)

    def with_window(self, window: int) -> Attend:
        make = getattr(self.inner, "with_window", super().with_window)
        return as_attend(make(window))

    @property
    def poll(self) -> Callable[[], object]:
        return getattr(self.inner, "poll", lambda: None)

    @poll.setter
    def poll(self, poll: Callable[[], object]) -> None:
        if hasattr(self.inner, "poll"):
            self.inner.poll = poll


def as_attend(attend: ForwardAndBackward) -> Attend:
    """Return the object itself if it is an `Attend`, else an adapter for it."""
    if isinstance(attend, Attend):
        return attend
    return AttendAdapter(attend)


def why_unrecordable(attend: ForwardAndBackward) -> str:
    """Return why CUDA graphs cannot record a layer that attends with this object, or ""."""
    kind = type(attend)
    if vars(kind).get("recordable"):
        return ""
    return f"{kind.__name__} does not say that it can be recorded"
