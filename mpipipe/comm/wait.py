"""The one loop in which ranks wait, for whatever it is.

A rank that waits reads the notes of all its groups: one that says that a peer has failed, or has left before the call
that this rank is in, ends the wait with PeerError. After a while the rank tells rank 0 of its group that it waits, so
that a warning after a minute, and the error at the limit MPIPIPE_TIMEOUT, can say who is missing.
"""

from __future__ import annotations

import logging
import os
import time

from mpipipe.comm import runtime, settings
from mpipipe.comm.process import Failure, Process, here
from mpipipe.errors import MismatchError, PeerError, StallError

logger = logging.getLogger("mpipipe")
SPIN_POLLS = 100  # poll so often at once: some tens of microseconds, the time of a small message
PAUSE_SECONDS = 5e-5  # between polls once the wait has become long; short beside any real stage
TELL_SECONDS = 2.0  # then a waiting rank tells rank 0 that it waits
WARNING_SECONDS = 60.0
GRACE_SECONDS = 3.0  # rank 0 knows most about who is missing: at the limit it speaks first
SPOKESMEN = 4  # ranks that warn where rank 0 is missing: not all of thousands


def wait(request, what=None, group=None, everyone: bool = False):
    """Return once `request` tests true.

    Parameters
    ----------
    request : anything with `Test()`
    what : what the rank waits for, as text or something with a text
    group : the group.Group whose call this wait belongs to, where there is one
    everyone : whether all ranks of the group must come for the request to complete

    Raises PeerError when a note of failure comes first, in any group of this rank; MismatchError where ranks wait for
    each other in different calls; StallError after MPIPIPE_TIMEOUT seconds where that is set.
    """
    process = here() if group is None else group.process
    test = _driving(process, request.Test) if process.engines else request.Test
    for _ in range(SPIN_POLLS):
        if test():
            return
    start = time.perf_counter()
    while time.perf_counter() - start < process.patience:
        if test():
            return
        os.sched_yield()
    vigil = Vigil(process, what or "other ranks", group, everyone, start)
    while not test():
        vigil.look()
        time.sleep(PAUSE_SECONDS)


def _driving(process, test):
    """`test`, with the progress of this thread's engines before it."""

    def drive_and_test():
        process.drive()
        return test()

    return drive_and_test


class Vigil:
    """A wait that has become long: what the rank hears and says meanwhile.

    Parameters
    ----------
    process : of this rank
    what, group, everyone : as for `wait`
    start : time.perf_counter() at its beginning
    absent : world ranks without which this wait cannot end, of which nothing but their end will ever be heard
    grace : seconds that the wait may still last once such a rank has left, for what it has sent before
    """

    def __init__(
        self, process: Process, what, group=None, everyone=False, start: float | None = None, absent=(), grace=0.0
    ):
        self.process, self.what, self.group, self.everyone = process, what, group, everyone
        self.start = time.perf_counter() if start is None else start
        self.absent, self.grace = frozenset(absent), grace
        self.absent_since: float | None = None
        self.heard = len(process.failures)
        self.warned = False
        self.limit = settings.timeout()
        self.tell_after = TELL_SECONDS if self.limit is None else min(TELL_SECONDS, self.limit / 3)

    def look(self):
        """Read notes, and raise what they or the clock ask for."""
        process, group = self.process, self.group
        with process.lock:
            for each in tuple(process.groups):
                each.read_notes()
        self._listen()
        waited = time.perf_counter() - self.start
        for rank in self.absent.intersection(process.left):
            self.absent_since = waited if self.absent_since is None else self.absent_since
            if waited - self.absent_since >= self.grace:
                raise heard(Failure(-1 - rank, process.left[rank]))
        if waited > self.tell_after and group is not None:
            self._tell_others()
        if self.limit is not None and waited > self.limit:
            self._give_up(waited)
        if waited > WARNING_SECONDS and not self.warned:
            self.warned = True
            self._warn()

    def _listen(self):
        """Raise for a failure that was heard of: any, on a rank with one thread; else those that this wait is about."""
        group, news = self.group, self.process.failures[self.heard :]
        if news and (group is None or self.process.single_threaded):
            raise heard(next((failure for failure in news if failure.number > 0), news[0]))  # failed, rather than left
        if group is not None:
            for each in (group, *group.related):
                if each.failure is not None:
                    raise heard(each.failure)

    def _tell_others(self):
        if self.everyone:
            self.group.presence.tell_leader(str(self.what))
        if self.process.single_threaded:
            self._look_for_a_circle()

    def _look_for_a_circle(self):
        """Two ranks of one thread each that wait for each other in different groups would wait for ever.

        Rank 0 of a group knows who waits in it. While it waits in another group itself, it tells one of those, who can
        be sure then: rank 0 will not come before it has come itself, and the other way round.
        """
        for group in tuple(self.process.groups):
            if group is self.group:
                continue
            there = group.presence
            if self.everyone:
                there.tell_who_waits_here(self.group.presence, str(self.what))
            note = there.elsewhere
            if note is not None and note.call > there.calls:
                error = MismatchError(
                    "ranks wait for each other in different calls",
                    rank=there.rank,
                    found=str(self.what),
                    expected=f"{note.text}, in which rank {note.source} waits",
                    remedy="make the same calls on the same objects, in the same order on all ranks",
                )
                group.fail(error, f"{type(error).__name__}: {error}")
                raise error

    def _missing(self) -> str:
        """Who is missing, where that can be known; else nothing."""
        if self.group is None or not self.everyone:
            return ""
        return self.group.presence.describe_missing()

    def _warn(self):
        group, missing = self.group, self._missing()
        if self.everyone and group is not None and group.rank > 0 and (not missing or group.rank >= SPOKESMEN):
            return  # rank 0 is there and knows more, or others say the same
        text = f"; {missing}" if missing else ""
        logger.warning("%s has waited %d s for %s%s", runtime.whoami(), WARNING_SECONDS, self.what, text)

    def _give_up(self, waited):
        missing = self._missing()
        patience = GRACE_SECONDS if self.everyone and self.group is not None and self.group.rank > 0 else 0
        if waited > self.limit + patience:
            raise StallError(
                f"nothing came within {self.limit:g} s",
                rank=None if self.group is None else self.group.rank,
                found=f"waiting for {self.what}" + (f"; {missing}" if missing else ""),
                remedy="look at what the other ranks do; MPIPIPE_TIMEOUT sets this limit",
            )


def heard(failure: Failure, remedy=None) -> PeerError:
    """The error of a rank that has heard of a failure, which another rank reports."""
    error = PeerError(failure.text, remedy=remedy)
    error.reported_elsewhere = True
    error.failure = failure
    return error


def wait_for_ranks(request, what, members, grace: float = 0.0):
    """As `wait`, before there is a group: while these world ranks make a communicator together.

    Nobody can send a note on a communicator that is not there yet, so nothing is known of who is missing, unless a rank
    says on another one that its script has ended; then the wait ends after `grace` seconds.
    """
    process = here()
    test = _driving(process, request.Test) if process.engines else request.Test
    vigil = Vigil(process, what, absent=members, grace=grace)
    while not test():
        if time.perf_counter() - vigil.start < process.patience:
            os.sched_yield()
            continue
        vigil.look()
        time.sleep(PAUSE_SECONDS)
