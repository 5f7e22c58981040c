"""The interfaces of this room: communicators, requests, waits, and what a wait keeps going."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from mpipipe.errors import MismatchError

if TYPE_CHECKING:
    from mpi4py import MPI

# Where threads will not do: the end of a job, measurements of MPI itself.
# What MPI reads or fills: an array, memory with its type, or its word for "in place".
Buffer: TypeAlias = Any
MpiCommunicator: TypeAlias = "MPI.Intracomm"
MpiRequest: TypeAlias = "MPI.Request"
AnyCommunicator = TypeVar("AnyCommunicator", bound="Communicator")


class Testable(Protocol):
    """Anything that can be waited for."""

    def Test(self) -> bool:
        """Let it advance, without waiting; return whether it is complete."""


class Request(Testable, Protocol):
    """An operation under way: of MPI, of a transport, or several of them as one."""

    def Cancel(self) -> None:
        """Give the operation up after a failure."""


class Advancing(Protocol):
    """Something that advances only while somebody calls it: see context.register_progress."""

    def progress(self) -> object:
        """Let everything under way advance; never waits."""


class ReplicaSum(Request, Advancing, Protocol):
    """A sum over replicas under way; `progress` lets the current stream wait for nothing."""


# The ranks of a communicator in COMM_WORLD.
Ranks: TypeAlias = tuple[int, ...]
# Names a group, or a communicator that is made, alike on all its ranks.
GroupName: TypeAlias = tuple[int, ...]
# A group, and the number of a call of all its ranks.
Meeting: TypeAlias = tuple[GroupName, int]


@dataclass(eq=False)
class RankWait:
    """A long wait, as the watchdog sees it."""

    what: object
    members: Sequence[int]  # the world ranks that must come
    meeting: Meeting | None  # the call to which they all must come; None: a message of one
    start: float  # time.perf_counter() then
    note: str = ""  # others read it after `what`
    error: MismatchError | None = None  # found by the watchdog; ends the wait


class Communicator(Protocol):
    """What this package uses of a communicator, of mpi4py or of `job.threads`.

    Only `runtime.in_process` asks which of the two it is.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def Isend(self, buf: Buffer, dest: int, tag: int = ..., /) -> Request: ...
    def Issend(self, buf: Buffer, dest: int, tag: int = ..., /) -> Request: ...
    def Irecv(self, buf: Buffer, source: int = ..., tag: int = ..., /) -> Request: ...
    def Iprobe(self) -> bool: ...
    def Ibcast(self, buf: Buffer, root: int, /) -> Request: ...
    def Iallgather(self, sendbuf: Buffer, recvbuf: Buffer, /) -> Request: ...
    def Iallgatherv(self, sendbuf: Buffer, recvbuf: Buffer, /) -> Request: ...
    def Iallreduce(self, sendbuf: Buffer, recvbuf: Buffer, /) -> Request: ...
    def Idup(self: AnyCommunicator) -> tuple[AnyCommunicator, Request]: ...
    def Split(self, color: int = ..., key: int = ..., /) -> Communicator: ...
    def Split_type(self, split_type: int, /) -> Communicator: ...
    def Get_attr(self, keyval: int, /) -> Any: ...
    def Set_attr(self, keyval: int, attrval: object, /) -> None: ...
    def Set_name(self, name: str, /) -> None: ...
    def Free(self) -> None: ...
