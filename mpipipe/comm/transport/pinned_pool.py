"""Pinned host memory that messages of device arrays pass through, one chunk at a time, used again and again."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from mpipipe import arrays

SMALLEST = 4096  # bytes: what a header needs


class PinnedPool:
    """Buffers of pinned memory; the size of each is a power of two.

    A message's first buffer is granted even above the limit, so no message ever waits for a buffer that another one
    holds (StagedTransport says why). So never more is in use than `limit` bytes and one buffer for each message.

    Parameters
    ----------
    limit : int
        Bytes in use up to which a message gets a second buffer, and further ones.

    Attributes
    ----------
    used : int
        Bytes in use.
    free : dict
        Size -> buffers that nobody uses.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.used = limit, 0
        self.free: dict[int, list[np.ndarray]] = defaultdict(list)

    def take(self, nbytes: int, first: bool) -> np.ndarray | None:
        """A buffer of at least `nbytes`; None if it is not its message's `first` and the limit is reached."""
        size = max(SMALLEST, 1 << (nbytes - 1).bit_length())
        if not first and self.used + size > self.limit:
            return None
        self.used += size
        free = self.free[size]
        return free.pop() if free else arrays.pinned(size)

    def give(self, buffer: np.ndarray) -> None:
        """Take a buffer back that neither MPI nor the device touches any more."""
        self.used -= buffer.size
        self.free[buffer.size].append(buffer)

    def drop_buffers(self) -> None:
        """Free the buffers that nobody uses."""
        self.free.clear()
