"""What SelfAttention attends with: the interface, and an adapter for objects that have only a part of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import numpy as np

from mpipipe.arrays import Array
from mpipipe.nn.layers.redefined import keep_redefined


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


def _no_poll() -> None:
    """The poll that does nothing."""
