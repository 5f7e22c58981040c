"""Requests that advance piece by piece: messages of device arrays, and sums over replicas."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from itertools import islice

from mpipipe import arrays
from mpipipe.arrays import Array, Event
from mpipipe.job import Advancing, Buffer, Testable, keep_forever, unregister_progress


class PieceLine:
    """Pieces that MPI gets in their order, whichever of them is ready first."""

    def __init__(self, depth: int = 1 << 30) -> None:
        self.depth = depth  # pieces that are under way at once
        self.waiting: deque[ArrayPiece] = deque()
        self.posted: deque[ArrayPiece] = deque()  # MPI has them

    @property
    def is_empty(self) -> bool:
        return not self.waiting and not self.posted

    def advance(self) -> None:
        """Let pieces advance; never waits."""
        for piece in tuple(islice(self.waiting, self.depth - len(self.posted))):
            is_next = piece is self.waiting[0]
            if not piece.prepare(is_first=is_next and not self.posted):
                break
            if is_next and piece.post():
                self.posted.append(self.waiting.popleft())
        while self.posted and self.posted[0].request.Test():
            self.posted.popleft().finish()

    def progress(self) -> None:
        """Advance, as something that waits of this thread call (register_progress)."""
        self.advance()
        if self.is_empty:
            unregister_progress(self)

    def abort(self) -> None:
        """After a failure: advance no more, and free nothing."""
        unregister_progress(self)
        keep_forever((self, *self.waiting, *self.posted))
        self.waiting.clear()
        self.posted.clear()


class PieceRequest(ABC):
    """What the pieces of one array in a line belong to.

    `ready` is what must be done before MPI may touch the array; None for a host array.
    """

    def __init__(self, owner: Advancing, line: PieceLine, ready: Event | None) -> None:
        self.owner = owner
        self.line = line
        self.ready = ready
        self.left = 0  # pieces that are not complete
        self.arrived: Event | None = None  # after the last copy from the host

    def add(self, piece: ArrayPiece) -> None:
        self.line.waiting.append(piece)
        self.left += 1

    def Test(self) -> bool:
        """Whether nothing is left to do; then later work on the current stream finds the data.

        Everything of the owner advances.
        """
        if self.left:
            self.owner.progress()
        if self.left:
            return False
        if self.arrived is not None:
            arrays.wait_for(self.arrived)
        return True

    def progress(self) -> None:
        self.owner.progress()

    def Cancel(self) -> None:
        """Give up all that is in the line after a failure, and free no memory of it."""
        self.line.abort()

    @abstractmethod
    def start(self, piece: ArrayPiece) -> Testable:
        """Let MPI have a piece."""

    def end(self, piece: ArrayPiece) -> None:
        """MPI has done its part of the first piece that was not complete."""
        self.left -= 1


class ArrayPiece:
    """A part of an array, which goes to MPI once an event is done."""

    request: Testable  # MPI's

    def __init__(self, whole: PieceRequest, part: Array, start: int = 0) -> None:
        self.whole = whole
        self.part = part
        self.start = start  # its first element in the whole
        self.memory: Buffer = part  # handed to MPI

    def prepare(self, is_first: bool) -> bool:
        """Do what comes before MPI, but for waiting; False where all later ones must wait."""
        return self.whole.ready is None or arrays.is_done(self.whole.ready)

    def post(self) -> bool:
        """Let MPI have the piece, if it may; return whether it has."""
        self.request = self.whole.start(self)
        return True

    def finish(self) -> None:
        """Do what comes after MPI."""
        self.whole.end(self)
