"""Pinned host memory that messages of device arrays pass through, one chunk at a time, used again and again."""

from __future__ import annotations

from collections import defaultdict

from mpipipe import arrays

SMALLEST = 4096  # bytes: one page, what a header needs


class PinnedPool:
    """Pages of pinned memory, of one power of two each.

    Parameters
    ----------
    limit : bytes in use up to which `take` hands out pages to whoever has one already

    Who has none gets one, however many are in use: so nobody waits for a page that another holds (StagedTransport says
    why). In use are never more than `limit` bytes and one page for each message under way.
    """

    def __init__(self, limit: int):
        self.limit, self.used = limit, 0
        self.free: dict = defaultdict(list)  # size -> pages

    def take(self, nbytes: int, first: bool):
        """A page of at least `nbytes`; None where the limit is reached and it is not the `first` page of its owner."""
        size = max(SMALLEST, 1 << (nbytes - 1).bit_length())
        if not first and self.used + size > self.limit:
            return None
        self.used += size
        free = self.free[size]
        return free.pop() if free else arrays.pinned(size)

    def give(self, page):
        """Take a page back that neither MPI nor the device touches any more."""
        self.used -= page.size
        self.free[page.size].append(page)

    def forget(self):
        """Drop the pages that nobody uses."""
        self.free.clear()
