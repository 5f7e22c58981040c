"""Several ranks in one process, a thread each.

For unit tests, and for trying a pipeline on a machine without MPI; it is never chosen in place of
MPI. Their communicator is in threads.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from mpipipe.errors import ArgumentError, HangError, MpipipeError, PeerError
from mpipipe.job.context import Failure, RankContext, adopt
from mpipipe.job.threads import InProcessError, ThreadCommunicator, World
from mpipipe.job.watch import verdict
from mpipipe.job.watch.dump import make_dump

__all__ = ["InProcessError", "run"]
__dir__ = __all__.copy

LOOK_SECONDS = 0.2  # between two looks at the ranks
GRACE_SECONDS = 1.0  # once ranks hang: for each of them to learn of it
Result = TypeVar("Result")


def run(
    ranks: int,
    function: Callable[[ThreadCommunicator], Result],
    *,
    synchronous: bool = False,
    tag_ub: int = 32767,
) -> list[Result]:
    """Call `function(comm)` on `ranks` threads: each is a rank.

    Parameters
    ----------
    ranks : int
        Number of ranks, at least 1.
    function : callable
        What every rank runs. Its argument is this rank's communicator of all ranks.
    synchronous : bool
        Whether every Isend behaves as Issend.
    tag_ub : int
        The largest tag.

    Returns
    -------
    list
        The results of all ranks, in rank order.

    Raises
    ------
    ArgumentError, InProcessError
        For a number of ranks that is no integer of at least 1; where a rank breaks a rule of
        message passing.
    Exception
        The error of the first rank that failed, rather than the PeerError of another.

    Examples
    --------
    >>> from mpipipe.job import inprocess
    >>> inprocess.run(3, lambda comm: comm.allgather(comm.rank**2))
    [[0, 1, 4], [0, 1, 4], [0, 1, 4]]
    """
    if not isinstance(ranks, int) or ranks < 1:
        raise ArgumentError("ranks", found=repr(ranks), expected="an integer of at least 1")
    world = World(ranks, synchronous, tag_ub)
    results: dict[int, Result] = {}
    errors: dict[int, BaseException] = {}

    def body(rank: int) -> None:
        adopt(world.contexts[rank])
        try:
            results[rank] = function(
                ThreadCommunicator(world, ("world",), tuple(range(ranks)), rank)
            )
        except BaseException as error:
            errors[rank] = error
            world.broken = True
        world.leave(rank, rank in results)

    threads = []
    for rank in range(ranks):
        name = f"mpipipe rank {rank}"
        thread = threading.Thread(target=body, args=(rank,), name=name, daemon=True)
        threads.append(thread)
        thread.start()
    token: object = None
    since = 0.0
    while any(thread.is_alive() for thread in threads):
        for thread in threads:
            thread.join(LOOK_SECONDS / ranks)
        before = token
        token = [context.progress_token() for context in world.contexts]
        if token != before or world.broken:
            since = time.monotonic()
        _look_for_hang(world.contexts, threads, time.monotonic() - since)
    if errors:
        first = min(errors, key=lambda rank: (isinstance(errors[rank], PeerError), rank))
        raise errors[first]
    world.read_farewells()
    world.check_nothing_left()
    return [results[rank] for rank in range(ranks)]


def _look_for_hang(
    contexts: Sequence[RankContext], threads: Sequence[threading.Thread], quiet: float
) -> None:
    """Raise an error where no rank has made progress for the limit, or some wait for each other.

    This is the watchdog of ranks that are threads: it looks at them in their own memory. It does
    not watch ranks while all of them compute.
    """
    limit = max(context.watch_limit for context in contexts)
    waiting = any(context.long_waits for context in contexts)
    if quiet < min(limit, verdict.TELL_SECONDS) or not waiting:
        return
    dumps = {rank: make_dump(context, rank, quiet) for rank, context in enumerate(contexts)}
    error: MpipipeError | None = verdict.mismatch(dumps)
    if error is None and quiet > limit:
        error = HangError(
            f"no rank has made progress for {quiet:.1f} s",
            found="\n    ".join(verdict.report_lines(dumps)),
            remedy=verdict.REMEDY,
        )
    if error is None:
        return
    for context in contexts:
        context.add_failure(Failure(1, str(error)))
    for thread in threads:
        thread.join(GRACE_SECONDS)  # a rank that hangs keeps none waiting
    raise error
