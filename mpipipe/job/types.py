"""The interfaces that this room is built on: a communicator, a request, and what a wait keeps
going.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

if TYPE_CHECKING:
    from mpi4py import MPI

MpiCommunicator: TypeAlias = (
    "MPI.Intracomm"  # where threads will not do: the end of a job, measurements of MPI itself
)
AnyCommunicator = TypeVar("AnyCommunicator", bound="Communicator")  # one type, whichever it is


class Testable(Protocol):
    """Anything that can be waited for."""

    def Test(self) -> bool:
        """Whether it is complete. Lets it advance; never waits."""


class Request(Testable, Protocol):
    """An operation under way: of MPI, of a transport, or several of them as one."""

    def Cancel(self) -> None:
        """Give the operation up after a failure."""


class ReplicaSum(Request, Protocol):
    """A sum over replicas under way."""

    def progress(self) -> object:
        """Let it advance; the current stream waits for nothing."""


class Advancing(Protocol):
    """Something that advances only while somebody calls it: see context.register_progress."""

    def progress(self) -> object:
        """Let everything under way advance; never waits."""


class Communicator(Protocol):
    """What this package uses of a communicator: `mpi4py.MPI.Intracomm`, or
    `job.inprocess.ThreadCommunicator`.

    Only `runtime.in_process` asks which of the two it is.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def Isend(self, buf: Any, dest: int, tag: int = ..., /) -> Request: ...
    def Issend(self, buf: Any, dest: int, tag: int = ..., /) -> Request: ...
    def Irecv(self, buf: Any, source: int = ..., tag: int = ..., /) -> Request: ...
    def Iprobe(self, source: int = ..., tag: int = ..., /) -> bool: ...
    def Ibcast(self, buf: Any, root: int = ..., /) -> Request: ...
    def Iallgather(self, sendbuf: Any, recvbuf: Any, /) -> Request: ...
    def Iallgatherv(self, sendbuf: Any, recvbuf: Any, /) -> Request: ...
    def Iallreduce(self, sendbuf: Any, recvbuf: Any, /) -> Request: ...
    def Idup(self: AnyCommunicator) -> tuple[AnyCommunicator, Request]: ...
    def Split(self, color: int = ..., key: int = ..., /) -> Communicator: ...
    def Split_type(self, split_type: int, key: int = ..., /) -> Communicator: ...
    def Get_attr(self, keyval: int, /) -> Any: ...
    def Set_attr(self, keyval: int, attrval: Any, /) -> None: ...
    def Set_name(self, name: str, /) -> None: ...
    def Free(self) -> None: ...
