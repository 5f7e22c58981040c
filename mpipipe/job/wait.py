"""The one loop in which ranks wait, for whatever it is.

    poll        100 times at once, for small messages
    give way    poll and yield the core, for some milliseconds
    long wait   poll, look around, sleep 50 microseconds (500 where ranks share cores), and so on

No rank waits inside MPI, where it could neither learn of a failure nor give up. In a long wait, a
rank

- reads the control messages of all its groups: one that says that a peer has failed, or has left
  before the call that this rank is in, ends the wait with PeerError;
- after TELL_SECONDS sends rank 0 of its group word that it waits, so that rank 0 knows who is
  missing;
- after WARNING_SECONDS logs what it waits for, and who is missing; after MPIPIPE_TIMEOUT seconds
  raises StallError;
- lets the watchdog look around, where that has no thread of its own (watch/watchdog.py).

Every poll also advances what this thread has registered (context.register_progress): the peer may
wait for it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from mpipipe.errors import MismatchError, StallError
from mpipipe.job import settings
from mpipipe.job.context import (
    Failure,
    Making,
    OpenGroup,
    RankContext,
    current_rank,
    peer_error,
    whoami,
)
from mpipipe.job.types import Testable

logger = logging.getLogger("mpipipe")
SPIN_POLLS = 100  # polls without a pause: some tens of microseconds, the time of a small message
TELL_SECONDS = 2.0  # then a waiting rank tells rank 0 that it waits
WARNING_SECONDS = 60.0
# In which a communicator is made once all its ranks wait for it: some milliseconds in truth.
MEETING_SECONDS = 5.0
GRACE_SECONDS = 3.0  # rank 0 knows most about who is missing: at the limit it speaks first
SPOKESMEN = 4  # ranks that warn where rank 0 is missing: not all of thousands


def wait_for(
    request: Testable,
    what: object = None,
    group: OpenGroup | None = None,
    everyone: bool = False,
    peer: int | None = None,
) -> None:
    """Return once `request` tests true.

    `what` names the request in texts. `group` is the one whose call this wait belongs to. For the
    request to complete, all its ranks must come (`everyone`), or the rank `peer`, where it is one.
    Raises PeerError when a message of failure comes first, in any group of this rank; MismatchError
    where ranks wait for each other in different calls; StallError after MPIPIPE_TIMEOUT seconds.
    """
    context = current_rank() if group is None else group.context
    if not context.recorders:
        return _wait(request, what, group, everyone, peer, context)
    with ExitStack() as stack:
        for recorder in context.recorders.copy():  # a pipeline may be freed meanwhile
            stack.enter_context(
                recorder.waiting(what, group.key if everyone and group is not None else None)
            )
        _wait(request, what, group, everyone, peer, context)


def _wait(
    request: Testable,
    what: object,
    group: OpenGroup | None,
    everyone: bool,
    peer: int | None,
    context: RankContext,
) -> None:
    test = advancing_first(context, request.Test) if context.advancing else request.Test
    for _ in range(SPIN_POLLS):
        if test():
            return
    start = time.perf_counter()
    while time.perf_counter() - start < context.patience:
        if test():
            return
        os.sched_yield()
    with LongWait(context, what or "other ranks", group, everyone, start, peer=peer) as long_wait:
        while not test():
            long_wait.look()
            time.sleep(context.pause)


def advancing_first(context: RankContext, test: Callable[[], bool]) -> Callable[[], bool]:
    """Return `test`, preceded by a call that advances what this thread has registered."""

    def advance_and_test() -> bool:
        context.advance()
        return test()

    return advance_and_test


@dataclass(eq=False)
class LongWait:
    """A wait that has become long: what the rank reads and sends meanwhile.

    Fields are those of `wait_for`, and: `start`, time.perf_counter() at its beginning, now by
    default; `absent`, world ranks without which this wait cannot end, and which can send nothing
    but word of their end; `grace`, the seconds that it may still last once such a rank has left or
    failed, for what the rank has sent before; `making`, the communicator that this rank waits to
    have made.
    """

    context: RankContext
    what: object
    group: OpenGroup | None = None
    everyone: bool = False
    start: float = field(default_factory=time.perf_counter)
    absent: frozenset[int] = frozenset()
    grace: float = 0.0
    peer: int | None = None
    making: Making | None = None

    def __post_init__(self) -> None:
        self.absent_since: float | None = None
        self.met_since = 0.0  # since when all wait to have a communicator made; 0.0 before
        self.known = len(self.context.failures)
        self.warned = False
        self.limit = settings.timeout()
        self.tell_after = TELL_SECONDS if self.limit is None else min(TELL_SECONDS, self.limit / 3)

    def __enter__(self) -> LongWait:
        self.context.long_waits_begun += 1
        self.context.long_waits.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.context.long_waits.remove(self)

    def look(self) -> None:
        """Read control messages; raise where they or the clock end the wait."""
        context = self.context
        group = self.group
        if context.watchdog is not None:
            context.watchdog.look()
        with context.lock:
            for known in (*context.groups, *context.failed):
                known.read_messages()
        waited = time.perf_counter() - self.start
        news = context.failures[self.known :] if waited >= self.grace else ()
        if news and (
            group is None or context.single_threaded
        ):  # else those of groups concerned alone
            raise peer_error(
                next((failure for failure in news if failure.number > 0), news[0])
            )  # failed, before left
        for concerned in () if group is None else (group, *group.related):
            if concerned.failure is not None:
                raise peer_error(concerned.failure)
        for rank in self.absent.intersection(context.withdrawn):
            raise peer_error(context.withdrawn[rank])
        for rank in self.absent.intersection(context.left):
            self.absent_since = waited if self.absent_since is None else self.absent_since
            if waited - self.absent_since >= self.grace:
                raise peer_error(Failure(-1 - rank, context.left[rank]))
        if waited > self.tell_after and group is not None:
            if self.everyone:
                group.tell_leader(str(self.what))
            if context.single_threaded:
                self._look_for_a_circle(group, self.everyone)
        elif waited > self.tell_after and self.making is not None and context.single_threaded:
            self._look_for_makers(self.making)
        if self.limit is not None and waited > self.limit:
            self._give_up(waited, self.limit)
        if waited > WARNING_SECONDS and not self.warned:
            self.warned = True
            self._warn()

    def _look_for_a_circle(self, mine: OpenGroup, concerns_all: bool) -> None:
        """Raise MismatchError if this rank and another wait for each other in different groups.

        With one thread each they would wait for ever. Rank 0 of group A knows who waits in A. While
        rank 0 itself waits in group B, it sends one of those ranks a message of that in B. If that
        rank has not come to this call of B, each of the two waits for the other. So do a rank that
        waits for all of this group, and one that had not come to that call when it said that it
        waits for the first to make a communicator.
        """
        for peer in tuple(mine.makers) if concerns_all else ():
            maker = mine.absent_maker(peer)
            if maker is not None and maker.calls < mine.calls:
                error = self._circle_error(mine, peer, maker.text)
                mine.fail(error, f"{type(error).__name__}: {error}")
                raise error
        for group in tuple(self.context.groups):
            if group is mine:
                continue
            if concerns_all:
                group.tell_who_waits_here(mine, str(self.what))
            message = group.elsewhere
            if message is not None and message.call > group.calls:
                error = self._circle_error(group, message.source, message.text)
                group.fail(error, f"{type(error).__name__}: {error}")
                raise error

    def _look_for_makers(self, making: Making) -> None:
        """Raise MismatchError if this rank and another wait for each other to make different
        communicators.

        Each tells the other which one it waits for, and again once it knows that this is not that
        of the other. Where all are of the same ranks, and none comes to its end, they are made of
        different communicators.
        """
        same = set()
        for group in tuple(self.context.groups):
            group.tell_making(making, str(self.what), self.absent)
            for peer, last in tuple(group.makers.items()):
                if last.making == making:
                    same.add(group.members[peer])
                maker = group.absent_maker(peer)
                is_first = group.world_rank < group.members[peer]  # the other learns of it
                is_over = len(same) == len(self.absent) - 1 and self._have_met()
                if is_first and (is_over or (maker is not None and maker.answered == making)):
                    raise self._circle_error(group, peer, last.text)

    def _have_met(self) -> bool:
        """Return whether all have been here for MEETING_SECONDS."""
        now = time.perf_counter()
        self.met_since = self.met_since or now
        return now - self.met_since > MEETING_SECONDS

    def _circle_error(self, group: OpenGroup, peer: int, text: str) -> MismatchError:
        return MismatchError(
            "ranks wait for each other in different calls",
            rank=group.rank,
            found=str(self.what),
            expected=f"{text}, in which rank {peer} waits",
            remedy="make the same calls on the same objects, in the same order on all ranks",
        )

    def _missing(self) -> str:
        """Name who is missing, after "; "; "" where that cannot be known."""
        missing = self.group.describe_missing() if self.group is not None and self.everyone else ""
        return f"; {missing}" if missing else ""

    def _warn(self) -> None:
        group = self.group
        missing = self._missing()
        if (
            self.everyone
            and group is not None
            and group.rank > 0
            and (not missing or group.rank >= SPOKESMEN)
        ):
            return  # rank 0 is there and knows more, or others say the same
        logger.warning("%s has waited %d s for %s%s", whoami(), WARNING_SECONDS, self.what, missing)

    def _give_up(self, waited: float, limit: float) -> None:
        missing = self._missing()
        patience = (
            GRACE_SECONDS if self.everyone and self.group is not None and self.group.rank > 0 else 0
        )
        if waited > limit + patience:
            raise StallError(
                f"nothing came within {limit:g} s",
                rank=None if self.group is None else self.group.rank,
                found=f"waiting for {self.what}{missing}",
                remedy="look at what the other ranks do; MPIPIPE_TIMEOUT sets this limit",
            )


class Condition:
    """A request that is complete once a function returns true."""

    def __init__(self, test: Callable[[], bool]) -> None:
        self.Test = test


LOOK_SECONDS = 2e-3  # between two looks around


def wait_locally(ended: Callable[[float], bool], what: object) -> None:
    """Return once something of this rank itself has ended, such as one of its threads; raise as
    `wait_for` does.

    `ended(seconds)` says whether it has, and waits so long at most. A watchdog blames a rank that
    waits for no other.
    """
    if ended(0.0):
        return
    context = current_rank()
    with LongWait(context, what) as long_wait:
        while not ended(LOOK_SECONDS):
            context.advance()
            long_wait.look()


Result = TypeVar("Result")


class ThreadTask(Generic[Result]):
    """A call of `work` in a thread of this name, which can be waited for, asked for its error, and
    given up.

    The thread is a daemon: the end of the interpreter does not wait for it.
    """

    def __init__(self, work: Callable[[], Result], name: str) -> None:
        self._work = work
        self._ended = threading.Event()
        self._results: list[Result] = []
        self.error: BaseException | None = None  # what ended the work, if it did not end well
        self.seconds = 0.0  # how long the work took, once it has ended
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # the system has no thread left
            self.error = error
            self._ended.set()

    def _run(self) -> None:
        start = time.monotonic()
        try:
            self._results.append(self._work())
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

    @property
    def result(self) -> Result:
        """What the work returned, once it has ended well."""
        return self._results[0]

    def wait(self, seconds: float) -> bool:
        """Wait for the end, so long at most; return whether it has come."""
        return self._ended.wait(seconds)
