"""Names of types that stand in annotations."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

Communicator: TypeAlias = Any  # mpi4py.MPI.Intracomm, or a communicator of comm.inprocess


class Request(Protocol):
    """An operation under way: of MPI, of a transport, or several of them as one."""

    def Test(self) -> bool:
        """Whether it is complete; lets it advance, and never waits."""

    def Cancel(self) -> None:
        """Give it up after a failure."""
