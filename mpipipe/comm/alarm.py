"""News of failure among the ranks of a pipeline, and the one loop in which ranks wait.

A rank that fails sends a note to the ranks it shares a communicator with; one whose script ends sends a note that
says after which call. Whoever waits listens now and then, and raises PeerError instead of waiting for ever. Notes
travel on communicators of their own. What advances only when it is called (see `drive`) is called in that loop, too.
"""

from __future__ import annotations

import logging
import os
import threading
import time

import numpy as np

from mpipipe.comm import runtime
from mpipipe.errors import PeerError, StallError

logger = logging.getLogger("mpipipe")
WARNING_SECONDS = 60
NOTE_BYTES = 1024  # small enough for every MPI to send at once, without waiting for the receiver
FAILED = -1
SPIN_POLLS = 100  # poll so often at once: some tens of microseconds, the time of a small message
YIELD_SECONDS = 2e-2  # then so long while giving way to others that want the core: the time of a large message
CROWDED_YIELD_SECONDS = 1e-3  # the same where ranks share cores, and another rank has better use for this one
PAUSE_SECONDS = 5e-5  # then with a sleep between polls; short beside any real stage


class Alarm:
    """Notes over the given communicators (the pipe, and the replicas where there are several).

    Attributes
    ----------
    call : number of the collective call that this rank is in; a peer that left after an earlier one is missed
    """

    def __init__(self, comms):
        self.comms = [comm.Dup() for comm in comms]
        self.call = 0
        self.raised = False
        self.departed: dict[int, str] = {}  # calls finished -> note
        _open().append(self)

    def sound(self, text: str):
        """Tell every other rank of a failure, once. Returns without waiting."""
        if not self.raised:
            self.raised = True
            self._send(FAILED, text)

    def leave(self, text: str):
        """Tell every other rank that this one takes part in no call after the current one."""
        if not self.raised:
            self._send(self.call, text)

    def _send(self, calls, text):
        note = np.zeros(NOTE_BYTES, np.uint8)
        note[:8].view(np.int64)[0] = calls
        data = text.encode()[: NOTE_BYTES - 8]
        note[8 : 8 + len(data)] = np.frombuffer(data, np.uint8)
        for comm in self.comms:
            for peer in range(comm.size):
                if peer != comm.rank:
                    keep((comm.Isend(note, peer, 0), note))

    def listen(self):
        """Raise PeerError when a rank has failed, or has left before the call that this rank is in."""
        for comm in self.comms:
            if comm.Iprobe():
                note = np.zeros(NOTE_BYTES, np.uint8)
                comm.Recv(note)
                calls = int(note[:8].view(np.int64)[0])
                text = note[8:].tobytes().rstrip(b"\0").decode(errors="replace")
                if calls == FAILED:
                    self.sound(text)
                    self._raise(text)
                self.departed[calls] = text
        for calls, text in self.departed.items():
            if calls < self.call:
                self.sound(text)
                self._raise(text)

    def _raise(self, text):
        error = PeerError(text)
        error.echo = True
        raise error

    def silence(self):
        """Listen no more: after a failure, or before `close`."""
        if self in _open():
            _open().remove(self)

    def close(self):
        """Free the communicators; collective, and only after a life without failure."""
        self.silence()
        for comm in self.comms:
            comm.Free()
        self.comms = []


_kept: list = []


def keep(thing):
    """Never free `thing`: after a failure MPI may still read or write buffers whose owners are gone."""
    _kept.append(thing)


_local = threading.local()  # ranks may be threads of one process


def drive(engine):
    """Call `engine.progress()` in every wait of this rank, until `rest(engine)`: a peer may wait for what it does."""
    if engine not in _engines():
        _engines().append(engine)


def rest(engine):
    """End `drive`."""
    if engine in _engines():
        _engines().remove(engine)


def _engines() -> list:
    if not hasattr(_local, "engines"):
        _local.engines = []
    return _local.engines


def _driving(test):
    """`test` with the progress of all engines before it; `test` itself where there are none."""
    if not getattr(_local, "engines", None):
        return test

    def drive_and_test():
        for engine in tuple(_local.engines):
            engine.progress()
        return test()

    return drive_and_test


def _open() -> list[Alarm]:
    """The alarms of this rank."""
    if not hasattr(_local, "alarms"):
        _local.alarms = []
        _local.patience = CROWDED_YIELD_SECONDS if runtime.crowded() else YIELD_SECONDS
    return _local.alarms


def wait(request, what=None):
    """Return once `request` tests true.

    Raises PeerError when a note of failure comes first, on any alarm, and StallError after MPIPIPE_TIMEOUT seconds
    where that is set. `what` is what the rank waits for, as text or something with a text, for the warning after a
    minute and for that error.
    """
    test = _driving(request.Test)
    for _ in range(SPIN_POLLS):
        if test():
            return
    alarms = _open()
    start, patience = time.perf_counter(), _local.patience
    while time.perf_counter() - start < patience:
        if test():
            return
        os.sched_yield()
    warned, limit = False, runtime.integer_setting("MPIPIPE_TIMEOUT", 0)
    while not test():
        for alarm in alarms:
            alarm.listen()
        waited = time.perf_counter() - start
        if limit and waited > limit:
            raise StallError(
                f"nothing came within {limit} s", found=f"waiting for {what or 'other ranks'}",
                remedy="look at what the other ranks do; MPIPIPE_TIMEOUT sets this limit",
            )
        if waited > WARNING_SECONDS and not warned:
            warned = True
            logger.warning("%s has waited %d s for %s", runtime.whoami(), WARNING_SECONDS, what or "other ranks")
        time.sleep(PAUSE_SECONDS)
