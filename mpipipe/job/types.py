"""The interfaces of this room: communicators, requests, waits, and what a wait keeps going."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpipipe.job.threads import ThreadCommunicator

# What MPI reads or fills: an array, memory with its type, or its word for "in place".
Buffer: TypeAlias = Any
# Where threads will not do: the end of a job, measurements of MPI itself.
MpiCommunicator: TypeAlias = "MPI.Intracomm"
MpiRequest: TypeAlias = "MPI.Request"
# Only this room asks which of the two it is; others call `runtime.in_process`.
Communicator: TypeAlias = "MPI.Comm | ThreadCommunicator"


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


class Snapshot(NamedTuple):
    """How far an object that follows a plan has come, as values that can be pickled."""

    doing: str = ""  # the action under way, in words; "" between calls
    # Whether that action runs code of the user, or of a layer, rather than waits for a message.
    computes: bool = False
    thread: int = 0  # the one that runs it
    # Messages that have left by the plan, as their receivers wait for them, each with its action.
    made: tuple[tuple[str, str], ...] = ()


class Inspectable(Protocol):
    """An object that follows a plan; it is asked how far it has come only when a job hangs."""

    def progress_token(self) -> object:
        """Return a value that changes with every progress; called often, from any thread."""

    def snapshot(self) -> Snapshot:
        """Return how far it has come; called from any thread, while it runs."""
