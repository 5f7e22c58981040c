"""A communicator of NCCL and the stream that is its own: what is put there runs in order, one after the other.

NCCL lets operations of one communicator run one after the other, whatever their streams. So what may have to wait for
different ranks needs different communicators: one for each ordered pair of ranks that send each other messages, one
for the sums of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpipipe import arrays
from mpipipe.arrays import Event
from mpipipe.comm.group import Group
from mpipipe.comm.nccl.choice import limit_kernels
from mpipipe.comm.nccl.task import Task
from mpipipe.comm.requests import keep_forever
from mpipipe.errors import BackendError


class Channel:
    """One rank's end of a communicator; the constructor waits for the other ranks, so it belongs into a Task.

    Parameters
    ----------
    size, rank : int
        Of the communicator, and of this process there.
    identity : bytes
        What rank 0 of the communicator got from `new_identity`.
    first : callable
        Puts an operation on (communicator, stream) that all ranks begin with. NCCL connects ranks when they first talk,
        and the host waits for that. What it returns is kept until the operation is done.

    Attributes
    ----------
    communicator : cupy.cuda.nccl.NcclCommunicator
    stream : Stream
    """

    def __init__(self, size: int, rank: int, identity: bytes, first: Callable[[Any, int], object]) -> None:
        limit_kernels()
        self.communicator = arrays.nccl().NcclCommunicator(size, identity, rank)
        keep_forever(self.communicator)  # its end is `close` or `abort`, not the collector's, which would wait there
        self.stream = arrays.side_stream()
        self.ended = False
        kept = first(self.communicator, self.stream.ptr)
        self.stream.synchronize()
        del kept

    def put(self, operation: Callable[[Any, int], object], after: Sequence[Event]) -> Event:
        """Put an operation on the stream, behind these events; returns the event behind it."""
        with self.stream:
            for event in after:
                arrays.wait_for(event)
            operation(self.communicator, self.stream.ptr)
            return arrays.record()

    def check(self) -> None:
        """Raise BackendError if NCCL has noticed a failure; never waits."""
        if self.ended:
            return
        try:
            self.communicator.check_async_error()
        except Exception as error:  # NcclError, and what CuPy makes of a code that it does not know
            raise BackendError(
                f"NCCL reports a failure ({error})",
                remedy="look at what the other ranks report; NCCL_DEBUG=INFO makes NCCL say more",
            ) from None

    def abort(self) -> None:
        """After a failure: let kernels that wait for other ranks end. Returns at once."""
        if not self.ended:
            self.ended = True
            keep_forever(self)
            Task(self.communicator.abort, "the abort of NCCL's communicators")

    def close(self) -> None:
        """Free the communicator; only when nothing is under way. May wait, so it belongs into a Task."""
        if not self.ended:
            self.ended = True
            self.communicator.destroy()


def new_identity() -> bytes:
    """What the ranks of a new communicator must all have; its rank 0 asks for it and hands it to the others."""
    limit_kernels()
    return bytes(arrays.nccl().get_unique_id())


def open_together(tasks: Sequence[Task[Channel]], group: Group, what: str) -> list[Channel]:
    """Wait for channels that are being opened; collective over the group, of which each has some ranks or all.

    Raises
    ------
    BackendError
        Where this rank cannot open one; the group ends then, and the others raise PeerError.
    """
    with group.failing(what):
        channels = []
        for task in tasks:
            group.wait(task, what, everyone=True)
            channels.append(task.result())
    group.agree(what)
    return channels


def close_together(channels: Sequence[Channel], wait: Callable[[Task[None]], object]) -> None:
    """Free channels on which nothing is under way; `wait` waits for each task."""
    for task in [Task(channel.close, "the end of NCCL's communicators") for channel in channels]:
        wait(task)
        task.result()
