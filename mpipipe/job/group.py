"""A group: ranks that agree on their calls, wait for each other, and learn of each other's end.

A group brings four things together, each in a file of its own: a private communicator
(communicators.py), agreement (consensus.py), what is known of the other ranks (context.OpenGroup),
and the wait that reads their messages (wait.py).
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import numpy as np

from mpipipe.errors import PeerError
from mpipipe.job import communicators, runtime
from mpipipe.job.communicators import cached
from mpipipe.job.consensus import Ballot, Facts, spread
from mpipipe.job.context import OpenGroup, current_rank
from mpipipe.job.requests import own
from mpipipe.job.types import Communicator, Testable
from mpipipe.job.wait import wait_for
from mpipipe.job.watch.watchdog import watch_over

T = TypeVar("T")


def group_of(comm: Communicator | None = None) -> RankGroup:
    """Return the group of a user's communicator; None means COMM_WORLD.

    It serves all calls without a group of their own.

    Collective the first time. It is closed when `comm` is freed. One that has failed is never made
    anew: not all ranks would come to that in the same call.
    """
    users = runtime.resolve(comm)
    return cached(users, "group", lambda: RankGroup(users))


class RankGroup(OpenGroup):
    """The ranks of a communicator, on a private duplicate of it.

    Every method here but `wait` is collective. One that raises on this rank alone, because a peer
    has failed for example, ends the life of the group, and the other ranks are told. Control
    messages are the only point-to-point messages on `comm`; its collectives are those of this
    group's calls.
    """

    def __init__(self, comm: Communicator) -> None:
        watchdog = watch_over(comm)
        members = communicators.world_ranks(comm)
        watched = watchdog is None or watchdog.covers(members)
        private, name, watched = communicators.make(comm, watched)
        super().__init__(private, members, current_rank())
        self.key = name
        if watchdog is not None and not watched:
            watchdog.open_channel(comm, members)  # type: ignore[arg-type]  # ranks of MPI
        self.context.groups.append(self)

    def agreed_on(self, error: BaseException) -> bool:
        """Whether all ranks of this group raise this same error."""
        return getattr(error, "agreed", frozenset()).issuperset(self.members)

    def agree(
        self,
        call: str,
        facts: Facts = (),
        values: Sequence[int] = (),
        error: Exception | None = None,
        message: str | None = None,
        remedy: str | None = None,
    ) -> np.ndarray:
        """Find that all ranks make this call with the same facts; return (size, values) of all.

        `facts` are named values of plain types, the same on every rank. `values` are up to
        consensus.VALUES integers of this rank. `error` is why this rank cannot take part: all ranks
        raise it. Where calls or facts differ, all raise the same MismatchError, whose `message` and
        `remedy` a caller may choose.
        """
        ballot = Ballot(call, facts, error, message, remedy)
        table = ballot.cast(self, values)
        ballot.decide()
        return table

    def gather(self, call: str, value: object) -> list[Any]:
        """Return the `value` of every rank, any picklable object, in rank order."""
        content, error = _pickled(value)
        sizes = self.agree(call, values=[len(content)], error=error)[:, 0].tolist()
        return spread(self, content, sizes, call)

    def broadcast(self, call: str, value: object, root: int = 0) -> Any:
        """Return the `value` of rank `root`, any picklable object, on every rank."""
        content = b""
        error = None
        if self.rank == root:
            content, error = _pickled(value)
        size = int(self.agree(call, (("root", root),), [len(content)], error)[root, 0])
        if self.size == 1:
            return value
        buffer = np.empty(size, np.uint8)
        buffer[: len(content)] = np.frombuffer(content, np.uint8)
        with self.failing(call):
            self.wait(own(self.comm.Ibcast(buffer, root)), call)
        if self.rank == root:
            return value
        return pickle.loads(buffer.tobytes())

    def from_one(self, call: str, make: Callable[[], T]) -> T:
        """Return on every rank what `make` returns, or raise what it raises, on rank 0."""
        value = None
        with self.raise_together(call):
            if self.rank == 0:
                value = make()
        return cast(T, self.broadcast(call, value))

    @contextmanager
    def raise_together(self, call: str) -> Iterator[None]:
        """Run the block on every rank; at its end, an error of any rank is raised on all."""
        error = None
        try:
            yield
        except Exception as caught:
            if isinstance(caught, PeerError) or self.failure is not None:
                raise
            error = caught
        self.agree(call, error=error)

    def wait(self, request: Testable, what: object = None, peer: int | None = None) -> None:
        """Wait for a request of the call under way; `peer`, or else all ranks, must come for it."""
        wait_for(request, what, self, peer)

    def split(self, color: int, key: int, name: str) -> Communicator:
        """Return a communicator of the ranks with the same `color`, ordered by `key`.

        Others use it, and free it.
        """
        self.agree(f"making the communicator {name!r}")
        return communicators.split(self.comm, color, key, name)

    def close(self) -> None:
        """Free the communicator; may be called twice. After a failure messages may be under way."""
        if self.closed or self.failure is not None:
            return
        self.agree("close")
        self._detach()
        self.closed = True
        self.comm.Free()


def _pickled(value: object) -> tuple[bytes, Exception | None]:
    """Return (`value` in bytes, error); one of them is empty."""
    try:
        return pickle.dumps(value), None
    except Exception as caught:
        return b"", caught


def collect(group: RankGroup, comm: Communicator, value: object) -> list[Any] | None:
    """Return the values of all ranks in rank order on rank 0, and None on the others; collective.

    Unlike those of `RankGroup.gather`, they may be too large to be on all ranks. `comm` has the
    ranks of the group, and no other messages are under way on it.
    """
    content = np.frombuffer(pickle.dumps(value), np.uint8)
    sizes = group.agree("collecting what all ranks have", values=[content.size])[:, 0].tolist()
    with group.failing("collecting what all ranks have"):
        if comm.rank > 0:
            group.wait(own(comm.Isend(content, 0, 0)), "rank 0, to take what this rank has", peer=0)
            return None
        values = [value]
        for peer in range(1, comm.size):
            buffer = np.empty(sizes[peer], np.uint8)
            group.wait(own(comm.Irecv(buffer, peer, 0)), f"what rank {peer} has", peer=peer)
            values.append(pickle.loads(buffer.tobytes()))
    return values
