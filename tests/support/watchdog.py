"""The deadline of what a rank runs now, and the way out of a job that cannot go on."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import threading
import time

from mpi4py import MPI

LIMIT = float(os.environ.get("MPIPIPE_TEST_TIMEOUT", "120"))  # seconds for one test on one rank; 0: no limit
GRACE = min(10.0, LIMIT / 2 or 10.0)  # seconds that a failed rank waits for its peers


class Watchdog:
    """One timer per rank; when it fires, the stacks of all ranks are printed and the job is aborted."""

    def __init__(self, control):
        self.rank = control.rank
        self.stderr = os.dup(2)  # the real one: pytest has lifted its capture while plugins are configured
        host = socket.gethostname()
        everyone = enumerate(control.allgather((host, os.getpid())))
        self.peers = [(rank, pid) for rank, (name, pid) in everyone if name == host and rank != self.rank]
        self.timer = None
        faulthandler.register(signal.SIGUSR1, file=self.stderr)  # works in C, also inside a blocking MPI call

    def arm(self, what, seconds=LIMIT):
        self.disarm()
        if not LIMIT:
            return
        turn = 1.5 * self.rank  # the lowest stuck rank speaks for all
        self.timer = threading.Timer(seconds + turn, self.give_up, (f"no end of {what} after {seconds:g} s", True))
        self.timer.daemon = True
        self.timer.start()
        faulthandler.dump_traceback_later(seconds + turn + 30, exit=True, file=self.stderr)  # when the GIL is stuck

    def disarm(self):
        if self.timer:
            self.timer.cancel()
            self.timer = None
            faulthandler.cancel_dump_traceback_later()

    def give_up(self, why, own_stack=False):
        """Print `why`, the stacks of the ranks on this host, and abort the job."""
        self.say(f"\n[rank {self.rank}] {why}\n")
        if own_stack:
            self.say(f"[rank {self.rank}] stack:\n")
            faulthandler.dump_traceback(file=self.stderr)
        for rank, pid in self.peers:
            self.say(f"[rank {rank}] stack:\n")
            try:
                os.kill(pid, signal.SIGUSR1)
            except ProcessLookupError:
                self.say("  gone\n")
            time.sleep(0.3)  # keeps the stacks apart
        MPI.COMM_WORLD.Abort(1)

    def say(self, text):
        os.write(self.stderr, text.encode(errors="replace"))
