"""How the bytes of an array reach another rank.

A transport starts sends and receives of whole arrays and hands back requests with two methods, `Test()` and `Cancel()`.
Whoever takes one owns it: see comm.requests, and the mailbox for the many of a step.
It knows peers, channels and tags; what a message means is the mailbox's business. The one here takes host arrays; those
of `device_transport` take device arrays as well:

    empty(shape, dtype)                   a receive buffer in the memory where this rank computes
    isend(array, peer, channel, tag)      the array must stay as it is until the request tests true
    irecv(array, peer, channel, tag)      the array holds the message once the request tests true
    retire(array)                         work queued so far is the last that reads this receive buffer
    progress()                            let everything under way advance, if that is this object's business
    forget(), abandon(), close()          drop spare memory; give up after a failure; free the communicators

All ranks of a communicator cut long arrays in the same way, so a rank that computes on the host and one that computes
on a GPU understand each other.
"""

from __future__ import annotations

import logging

import numpy as np

from mpipipe import arrays
from mpipipe.comm import communicators
from mpipipe.comm.group import group_of
from mpipipe.comm.requests import own
from mpipipe.errors import ArgumentError

logger = logging.getLogger("mpipipe")
MPI_TYPES = "?bBhHiIlLqQfdFD"  # dtype characters that every MPI knows; others travel as bytes
PIECE_BYTES = 1 << 30  # counts above 2^31 - 1 are refused by some MPI libraries
CHUNK_BYTES = 2 << 20  # where a rank stages: MPI over shared memory is at its best, and two chunks overlap well


def make_transport(comm, channels: int = 1, synchronous: bool = False, device: str = "cpu", verdict=None, group=None):
    """The transport for arrays on this rank's device; collective.

    Parameters
    ----------
    comm, channels, synchronous : as for HostTransport
    device : "cpu" or "cuda", where this rank computes; ranks may differ
    verdict : what gpu_aware.detect said; by default it is asked where a rank computes on a GPU
    group : the comm.group.Group in which the ranks agree; by default that of `comm`
    """
    group = group_of(comm) if group is None else group
    facts = group.gather("making a transport", (device, verdict))
    if all(other == "cpu" for other, _ in facts):
        return HostTransport(comm, channels, synchronous)
    from mpipipe.comm import gpu_aware
    from mpipipe.comm.device_transport import DirectTransport, StagedTransport

    given = [other for _, other in facts if other is not None] or [gpu_aware.detect(comm, group)]
    verdict = next((other for other in given if not other.direct), given[0])
    if comm.rank == 0:
        logger.info("device arrays travel %s: %s", "directly" if verdict.direct else "by the host", verdict.reason)
    if device == "cpu":
        return HostTransport(comm, channels, synchronous, PIECE_BYTES if verdict.direct else CHUNK_BYTES, typed=False)
    return (DirectTransport if verdict.direct else StagedTransport)(comm, channels, synchronous)


class HostTransport:
    """Non-blocking messages of C-contiguous host arrays.

    Parameters
    ----------
    comm : communicator to duplicate; the duplicates are private to this object
    channels : how many duplicates the tags need
    synchronous : use synchronous sends (Issend)
    piece_bytes : a longer array travels as several messages under one tag, which MPI keeps in order
    typed : send what MPI has a type for as such; False where a peer sends all as bytes
    """

    def __init__(
        self, comm, channels: int = 1, synchronous: bool = False, piece_bytes: int = PIECE_BYTES, typed: bool = True
    ):
        self.channels = [communicators.duplicate(comm) for _ in range(channels)]
        self.senders = [channel.Issend if synchronous else channel.Isend for channel in self.channels]
        self.receivers = [channel.Irecv for channel in self.channels]
        self.piece_bytes = piece_bytes
        self.types = MPI_TYPES if typed else ""

    def empty(self, shape, kind):
        """A receive buffer; its content is undefined."""
        return arrays.aligned_empty(shape, kind)

    def retire(self, array):
        """On the host, what was read is read."""

    def progress(self) -> bool:
        """False: MPI does all by itself whenever it is called, with a test of any request for example."""
        return False

    def forget(self):
        """Nothing is kept between messages."""

    def abandon(self):
        """After a failure: requests under way are the business of their owners."""

    def isend(self, array, peer: int, channel: int, tag: int):
        """Start sending; the array must stay as it is until the request tests true."""
        if not isinstance(array, np.ndarray):
            raise ArgumentError(
                "an array on a GPU, from a rank whose stages are on the host", found=type(array).__name__,
                expected="numpy.ndarray", remedy="give your stage the attribute device = 'cuda'",
            )
        if array.nbytes <= self.piece_bytes and array.dtype.char in self.types:
            return self.senders[channel](array, peer, tag)
        return start_all(self.senders[channel], self._pieces(array), peer, tag)

    def irecv(self, array, peer: int, channel: int, tag: int):
        """Start receiving into `array`, which must have the sender's size in bytes."""
        if array.nbytes <= self.piece_bytes and array.dtype.char in self.types:
            return self.receivers[channel](array, peer, tag)
        return start_all(self.receivers[channel], self._pieces(array), peer, tag)

    def _pieces(self, array):
        flat = array.reshape(-1).view(np.uint8)
        return [flat[start : start + self.piece_bytes] for start in range(0, max(1, flat.size), self.piece_bytes)]

    def close(self):
        """Free the communicators; collective."""
        for channel in self.channels:
            channel.Free()
        self.channels, self.senders, self.receivers = [], [], []


def check_sendable(array):
    """Raise ArgumentError for what cannot travel: other types, masked arrays, arrays of objects, records or text, and
    arrays that are not C-contiguous.

    mpi4py sends a Fortran-ordered array without a word, and the receiver then holds its transpose.
    """
    if not arrays.is_array(array):
        raise ArgumentError("not an array", found=type(array).__name__, expected="numpy.ndarray or cupy.ndarray")
    arrays.refuse_mask(array)
    kind = array.dtype
    if kind.hasobject:
        raise ArgumentError("an object array", found=f"dtype {kind}", expected="a numeric dtype")
    if kind.type is np.void or kind.kind in "SU":
        raise ArgumentError(
            "an array of records or text", found=f"dtype {kind}", expected="a numeric dtype",
            remedy="pass its fields as a dict of arrays, such as {name: numpy.ascontiguousarray(x[name]) for name in "
            "x.dtype.names}",
        )
    if not kind.isnative:
        raise ArgumentError(
            "an array in the byte order of another machine", found=f"dtype {kind}", expected="native byte order",
            remedy="pass x.astype(x.dtype.newbyteorder('='))",
        )
    if not array.flags.c_contiguous:
        raise ArgumentError(
            "an array that is not C-contiguous",
            found=f"shape {array.shape}, strides {array.strides}",
            expected="C order",
            remedy="pass numpy.ascontiguousarray(x), or cupy's",
        )


class Together:
    """Several requests as one."""

    def __init__(self, requests):
        self.requests = requests

    def Test(self):
        while self.requests and self.requests[-1].Test():
            self.requests.pop()
        return not self.requests

    def Cancel(self):
        for request in self.requests:
            request.Cancel()


def start_all(operation, pieces, peer, tag, *buffers):
    """One request for one operation on each piece; `buffers` own the memory of pieces that are mere addresses."""
    requests = [own(operation(piece, peer, tag), *buffers) for piece in pieces]
    return requests[0] if len(requests) == 1 else Together(requests)
