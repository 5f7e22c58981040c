"""What SelfAttention attends with: the interface, and an adapter for objects that have only a part of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import numpy as np

from mpipipe.arrays import Array
from mpipipe.errors import ArgumentError
from mpipipe.nn.layers.layer import keep_redefined
from mpipipe.nn.position import Position


@runtime_checkable
class Attend(Protocol):
    """Attention over one sequence, or over a part of a sequence that is spread over ranks.

    poll : called while attention computes, to keep messages moving; SelfAttention sets it
    """

    poll: Callable[[], object]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        keep_redefined(cls, Attend, {"backward": ("backward_into",)})

    def forward(self, q: Array, k: Array, v: Array) -> tuple[Array, Any]:
        """Attend.

        Parameters
        ----------
        q : array
            (batch, seq, heads, head_dim).
        k, v : array
            (batch, seq, kv_heads, head_dim).

        Returns
        -------
        out : array
            (batch, seq, heads, head_dim).
        saved : object
            All that `backward` needs.
        """

    def backward(self, dout: Array, saved: Any) -> tuple[Array, Array, Array]:
        """Return the gradients of the inputs.

        Parameters
        ----------
        dout : array
            Gradient of `out`.
        saved : object
            What `forward` saved.

        Returns
        -------
        dq, dk, dv : array
            In the shapes of q, k and v.
        """

    def backward_into(self, dout: Array, saved: Any, room: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        """Return the gradients of the inputs, in memory that is given for them, or in other memory.

        Parameters
        ----------
        dout : array
            Gradient of `out`.
        saved : object
            What `forward` saved.
        room : tuple of array
            Arrays like q, k and v, with any strides along all axes but the last; what they hold is nothing yet.

        Returns
        -------
        dq, dk, dv : array
            Either the arrays of `room` themselves, all three, or others, as from `backward`.
        """
        return self.backward(dout, saved)

    def positions(self, rows: int) -> np.ndarray | None:
        """Return the positions of the next rows in the whole sequence.

        Parameters
        ----------
        rows : int
            Number of rows.

        Returns
        -------
        numpy.ndarray or None
            (rows,), integers; None for 0 ... rows - 1.
        """
        return None

    def advance(self, rows: int) -> None:
        """Count rows as done, without their keys and values: said by a layer that asks for positions alone.

        Parameters
        ----------
        rows : int
            Number of rows.
        """
        return None

    def check_positions(self, positions: np.ndarray) -> None:
        """Compare positions that a layer was given with those of the rows that this object attends with.

        A layer calls this when it is made, and before each forward.

        Parameters
        ----------
        positions : numpy.ndarray
            (rows,), integers.

        Raises
        ------
        ArgumentError
            They are known to be others.
        """
        return None

    def begin(self, position: Position) -> None:
        """Hear of what the next forward is: said by the layer before each.

        Parameters
        ----------
        position : Position
            Step and micro-batch.
        """
        return None

    def with_window(self, window: int) -> Attend:
        """Return what attends as this object does, but with another window; the same object for the same window.

        Parameters
        ----------
        window : int
            A query sees itself and the window - 1 positions before it.

        Returns
        -------
        Attend
            The object.

        Raises
        ------
        ArgumentError
            There is no such object.
        """
        raise _without_windows(self, window)


class ForwardAndBackward(Protocol):
    """The least that a user's own object has."""

    def forward(self, q: Array, k: Array, v: Array) -> tuple[Array, Any]:
        """As `Attend.forward`."""

    def backward(self, dout: Array, saved: Any) -> tuple[Array, Array, Array]:
        """As `Attend.backward`."""


@runtime_checkable
class HasPositions(Protocol):
    """An object that knows its positions."""

    def positions(self, rows: int) -> np.ndarray | None:
        """As `Attend.positions`."""


@runtime_checkable
class HasAdvance(Protocol):
    """An object that counts rows."""

    def advance(self, rows: int) -> None:
        """As `Attend.advance`."""


@runtime_checkable
class HasBegin(Protocol):
    """An object that hears of positions."""

    def begin(self, position: Position) -> None:
        """As `Attend.begin`."""


@runtime_checkable
class HasWindows(Protocol):
    """An object that makes others of its kind with other windows."""

    def with_window(self, window: int) -> ForwardAndBackward:
        """As `Attend.with_window`."""


@runtime_checkable
class HasPoll(Protocol):
    """An object that polls while it computes."""

    poll: Callable[[], object]


class AttendAdapter(Attend):
    """An object with forward and backward, and perhaps more, as an `Attend`."""

    def __init__(self, inner: ForwardAndBackward) -> None:
        self.inner = inner

    def forward(self, q: Array, k: Array, v: Array) -> tuple[Array, Any]:
        """As `Attend.forward`."""
        return self.inner.forward(q, k, v)

    def backward(self, dout: Array, saved: Any) -> tuple[Array, Array, Array]:
        """As `Attend.backward`."""
        return self.inner.backward(dout, saved)

    def positions(self, rows: int) -> np.ndarray | None:
        """As `Attend.positions`."""
        return self.inner.positions(rows) if isinstance(self.inner, HasPositions) else None

    def advance(self, rows: int) -> None:
        """As `Attend.advance`."""
        if isinstance(self.inner, HasAdvance):
            self.inner.advance(rows)

    def begin(self, position: Position) -> None:
        """As `Attend.begin`."""
        if isinstance(self.inner, HasBegin):
            self.inner.begin(position)

    def with_window(self, window: int) -> Attend:
        """As `Attend.with_window`."""
        if not isinstance(self.inner, HasWindows):
            raise _without_windows(self.inner, window)
        return as_attend(self.inner.with_window(window))

    @property
    def poll(self) -> Callable[[], object]:
        """The inner object's poll, if it has one."""
        return self.inner.poll if isinstance(self.inner, HasPoll) else _no_poll

    @poll.setter
    def poll(self, poll: Callable[[], object]) -> None:
        if isinstance(self.inner, HasPoll):
            self.inner.poll = poll


def as_attend(given: ForwardAndBackward) -> Attend:
    """Return the object itself if it is an `Attend`, else an adapter for it."""
    return given if isinstance(given, Attend) else AttendAdapter(given)


def _without_windows(attend: ForwardAndBackward, window: int) -> ArgumentError:
    return ArgumentError(
        f"{type(attend).__name__} cannot be given a window for each layer",
        found=f"window {window}",
        expected="an object that has with_window, such as attention.Local or attention.Ring",
        remedy="give the model a function that makes one for each layer, such as "
        "lambda window=None: attention.Cached(capacity, window=window)",
    )


def _no_poll() -> None:
    """The poll that does nothing."""
