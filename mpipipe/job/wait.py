"""The one loop in which ranks wait, for whatever it is.

    poll        100 times at once, for small messages
    give way    poll and yield the core, for some milliseconds
    long wait   poll, look around, sleep 50 microseconds (500 where ranks share cores), and so on

No rank waits inside MPI, where it could neither learn of a failure nor give up. In a long wait, a
rank

- reads the control messages of all its groups: one that says that a peer has failed, or has left
  before the call that this rank is in, ends the wait with PeerError;
- lets the watchdog look around, which knows where the other ranks are (watch/watchdog.py);
- after WARNING_SECONDS logs what it waits for, and who is to blame; after MPIPIPE_TIMEOUT seconds
  raises StallError.

Every poll also advances what this thread has registered (context.register_progress): the peer may
wait for it.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Generic, TypeVar

from mpipipe.errors import MismatchError, StallError
from mpipipe.job import settings
from mpipipe.job.context import (
    Failure,
    RankContext,
    calling_thread,
    current_rank,
    peer_error,
    whoami,
)
from mpipipe.job.types import Meeting, Ranks, Testable

if TYPE_CHECKING:
    from mpipipe.job.group import RankGroup

logger = logging.getLogger("mpipipe")
SPIN_POLLS = 100  # polls without a pause: some tens of microseconds, the time of a small message
WARNING_SECONDS = 60.0
# At the limit, a rank that knows who is to blame speaks first.
GRACE_SECONDS = 3.0


def wait_for(
    request: Testable, what: object = None, group: RankGroup | None = None, peer: int | None = None
) -> None:
    """Return once `request` tests true.

    `what` names the request in texts. `group` is the one whose call this wait belongs to. For the
    request to complete, all its ranks must come, or the rank `peer` alone, where it is given.
    Raises PeerError when a message of failure comes first, in any group of this rank; MismatchError
    where ranks wait for each other in different calls; StallError after MPIPIPE_TIMEOUT seconds.
    """
    if group is None:
        context = current_rank()
    else:
        context = group.context
    if not context.recorders:
        return _wait(request.Test, context, lambda: LongWait(context, what, group, peer))
    key = None
    if group is not None and peer is None:
        key = group.key
    with ExitStack() as stack:
        for recorder in context.recorders.copy():  # a pipeline may be freed meanwhile
            stack.enter_context(recorder.waiting(what, key))
        _wait(request.Test, context, lambda: LongWait(context, what, group, peer))


def _wait(test: Callable[[], bool], context: RankContext, begin: Callable[[], LongWait]) -> None:
    """Return once `test` returns true; `begin` makes a long wait of it."""
    if context.advancing:
        test = _advancing_first(context, test)
    for _ in range(SPIN_POLLS):
        if test():
            return
    start = time.perf_counter()
    while time.perf_counter() - start < context.patience:
        if test():
            return
        os.sched_yield()
    with begin() as long_wait:
        while not test():
            long_wait.look()
            time.sleep(context.pause)


def _advancing_first(context: RankContext, test: Callable[[], bool]) -> Callable[[], bool]:
    """Return `test`, preceded by a call that advances what this thread has registered."""

    def advance_and_test() -> bool:
        context.advance()
        return test()

    return advance_and_test


class LongWait:
    """A wait that has become long: a rank looks around meanwhile. Arguments as of `wait_for`.

    The watchdog reads which ranks, `members`, must come, and the call to which all of them must
    come, `meeting`; None is a message of one. An `error` that it finds ends the wait.

    Before there is a group, `members` make a communicator together. Such a rank can send nothing
    but word of its end. The wait may still last `grace` seconds then, for what the rank has sent
    before.
    """

    def __init__(
        self,
        context: RankContext,
        what: object,
        group: RankGroup | None = None,
        peer: int | None = None,
        members: Ranks = (),
        meeting: Meeting | None = None,
        grace: float = 0.0,
    ) -> None:
        self.what = what or "other ranks"
        self.members = members
        self.meeting = meeting
        self.note = ""  # others read it after `what`
        self.start = time.perf_counter()
        self.error: MismatchError | None = None
        if group is not None and peer is not None:
            member = group.members[peer]
            self.members = (member,)
            if member != peer:
                self.note = f", which is rank {member} of the job"
        elif group is not None:
            self.members = group.members
            self.meeting = (group.key, group.calls)
        self.context = context
        self.group = group
        self.grace = grace
        self.absent_since = math.inf  # when a rank was missed first
        self.known = len(context.failures)
        self.warned = False

    def __enter__(self) -> LongWait:
        self.context.long_waits_begun += 1
        self.context.long_waits.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.context.long_waits.remove(self)

    def look(self) -> None:
        """Read control messages; raise where they, the watchdog or the clock end the wait."""
        context = self.context
        if context.watchdog is not None:
            context.watchdog.look()
        with context.lock:
            for known in (*context.groups, *context.failed):
                known.read_messages()
        self.raise_news()
        if self.error is not None:
            for group in tuple(context.groups):
                group.fail(self.error, f"MismatchError: {self.error}")
            raise self.error
        waited = time.perf_counter() - self.start
        if waited > settings.TIMEOUT.limit:
            self._give_up(waited)
        if waited > WARNING_SECONDS and not self.warned:
            self.warned = True
            blame = self._blame()
            if self.meeting is None or blame or self.group is None or self.group.rank == 0:
                logger.warning(
                    "%s has waited %d s for %s%s", whoami(), WARNING_SECONDS, self.what, blame
                )

    def raise_news(self) -> None:
        """Raise PeerError where this wait cannot end: a peer has failed, or has left."""
        group = self.group
        now = time.perf_counter()
        news = self.context.failures[self.known :]
        # A rank with several threads listens to the groups of this wait alone: another thread may
        # go on after a failure in its own.
        alone = group is None or self.context.single_threaded(calling_thread())
        if news and alone and now - self.start >= self.grace:
            for failure in news:
                if failure.number > 0:
                    raise peer_error(failure)
            raise peer_error(news[0])
        if group is not None:
            for concerned in (group, *group.related):
                if concerned.failure is not None:
                    raise peer_error(concerned.failure)
            return
        for rank in self.members:
            if rank in self.context.withdrawn:
                raise peer_error(self.context.withdrawn[rank])
            if rank in self.context.left:
                self.absent_since = min(self.absent_since, now)
                if now - self.absent_since >= self.grace:
                    raise peer_error(Failure(-1 - rank, self.context.left[rank]))

    def _blame(self) -> str:
        watchdog = self.context.watchdog
        if watchdog is None:
            return ""
        return watchdog.blame()

    def _give_up(self, waited: float) -> None:
        blame = self._blame()
        limit = settings.TIMEOUT.limit
        if self.meeting is not None and not blame and waited <= limit + GRACE_SECONDS:
            return
        rank = None
        if self.group is not None:
            rank = self.group.rank
        raise StallError(
            f"nothing came within {limit:g} s",
            rank=rank,
            found=f"waiting for {self.what}{blame}",
            remedy="look at what the other ranks do; MPIPIPE_TIMEOUT sets this limit",
        )


def wait_for_ranks(
    request: Testable, what: str, members: Ranks, grace: float = 0.0, meeting: Meeting | None = None
) -> None:
    """Wait, before there is a group, while the world ranks `members` make a communicator together.

    Messages of other groups, also of those that have failed, say that a rank does not come: it
    raised in such a wait, or its script has ended `grace` seconds ago.
    """
    context = current_rank()

    def made() -> bool:
        return context.withdrawn.keys().isdisjoint(members) and request.Test()

    try:
        _wait(made, context, lambda: LongWait(context, what, None, None, members, meeting, grace))
    except BaseException as error:
        context.withdraw(members, error)
        raise


class Condition:
    """A request that is complete once a function returns true."""

    def __init__(self, test: Callable[[], bool]) -> None:
        self.Test = test


LOOK_SECONDS = 2e-3  # between two looks around


def wait_locally(ended: Callable[[float], bool], what: object) -> None:
    """Return once something of this rank has ended, as one of its threads; raise as `wait_for`.

    `ended(seconds)` says whether it has, and waits so long at most. A watchdog blames a rank that
    waits for no other. Recorders note waits for others alone.
    """
    context = current_rank()
    _wait(lambda: ended(LOOK_SECONDS), context, lambda: LongWait(context, what))


Result = TypeVar("Result")


class ThreadTask(Generic[Result]):
    """A call of `work` in a thread of this name, which can be waited for and given up.

    The thread is a daemon: the end of the interpreter does not wait for it.
    """

    result: Result  # returned by the work, once it has ended well

    def __init__(self, work: Callable[[], Result], name: str) -> None:
        self._work = work
        self._ended = threading.Event()
        self.error: BaseException | None = None  # the error that ended the work, if one did
        self.seconds = 0.0  # how long the work took, once it has ended
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        start = time.monotonic()
        try:
            self.result = self._work()
        except BaseException as error:  # whatever it is, the ranks are to learn of it
            self.error = error
        finally:
            self.seconds = time.monotonic() - start
            self._ended.set()

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    @property
    def problem(self) -> Exception | None:
        """The error, as one that can be raised for all ranks."""
        if self.error is None or isinstance(self.error, Exception):
            return self.error
        return RuntimeError(f"{type(self.error).__name__} in a thread: {self.error}")

    def wait(self, seconds: float) -> bool:
        """Wait for the end, so long at most; return whether it has come."""
        return self._ended.wait(seconds)
