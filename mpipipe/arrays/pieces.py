"""The bytes of arrays as pieces in host memory, one after the other, for whoever writes them somewhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mpipipe.arrays.streams import record
from mpipipe.arrays.transfer import copy_to_host, pinned
from mpipipe.arrays.types import Array, Event

DEPTH = 2  # pinned buffers: one that the caller looks at, and one into which the next piece is copied


class _Copy(NamedTuple):
    """A piece of a device array on its way to the host."""

    which: int
    piece: np.ndarray
    buffer: np.ndarray
    arrived: Event


def host_pieces(several: Sequence[Array], nbytes: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the bytes of arrays in order, in pieces that are in host memory, without a copy of a whole array.

    From a GPU each piece passes through one of two pinned buffers, in the order of the current stream: while the caller
    looks at one piece, the next one is copied.

    Parameters
    ----------
    several : sequence of cupy.ndarray or numpy.ndarray
        C-contiguous arrays of any shape and dtype.
    nbytes : int
        The most bytes of a piece.

    Yields
    ------
    int
        Which of the arrays.
    numpy.ndarray
        Bytes of it, uint8; those of a device array stay until the next iteration.

    Examples
    --------
    >>> import numpy as np
    >>> from mpipipe import arrays
    >>> [(which, piece.nbytes) for which, piece in arrays.host_pieces([np.zeros(3), np.zeros(1)], 16)]
    [(0, 16), (0, 8), (1, 8)]
    """
    copies: deque[_Copy] = deque()
    free: list[np.ndarray] = []
    try:
        for which, piece in _cut(several, nbytes):
            if isinstance(piece, np.ndarray):
                yield from _arrived(copies, free, leave=0)
                yield which, piece
                continue
            yield from _arrived(copies, free, leave=DEPTH - 1)
            buffer = free.pop() if free else pinned(nbytes)
            copy_to_host(buffer[: piece.size], piece)
            copies.append(_Copy(which, buffer[: piece.size], buffer, record()))
        yield from _arrived(copies, free, leave=0)
    finally:  # where the caller stops early: until then the device writes to memory of the host that others would get
        for copy in copies:
            copy.arrived.synchronize()


def _cut(several: Sequence[Array], nbytes: int) -> Iterator[tuple[int, Array]]:
    for which, array in enumerate(several):
        if array.size:  # numpy has no bytes of an array without elements
            content = array.reshape(-1).view(np.uint8)
            for start in range(0, array.nbytes, nbytes):
                yield which, content[start : start + nbytes]


def _arrived(copies: deque[_Copy], free: list[np.ndarray], leave: int) -> Iterator[tuple[int, np.ndarray]]:
    """Wait for the oldest copies, all but `leave`; a buffer is free once the caller has come back."""
    while len(copies) > leave:
        copies[0].arrived.synchronize()
        which, piece, buffer, _ = copies.popleft()
        yield which, piece
        free.append(buffer)
