"""The deadline of what a rank runs now, and the way out of a job that cannot go on."""

import faulthandler
import os
import signal
import socket
import threading
import time

from mpi4py import MPI

from mpipipe.job.report import abort_job

LIMIT = float(os.environ.get("MPIPIPE_TEST_TIMEOUT", "120"))  # seconds for one test on one rank; 0: no limit
GRACE = min(10.0, LIMIT / 2 or 10.0)  # seconds that a failed rank waits for its peers
TICK = 0.25  # seconds between two looks at the deadline


class Watchdog:
    """One thread per rank; at the deadline the stacks of all ranks are printed and the job is aborted.

    The thread looks at the deadline every `TICK` seconds: tests are many and short, and a timer for each would cost
    more than most of them. MPIEXEC_TIMEOUT ends what keeps the interpreter's lock.
    """

    def __init__(self, control):
        self.rank = control.rank
        self.stderr = os.dup(2)  # the real one: pytest has lifted its capture while plugins are configured
        host = socket.gethostname()
        everyone = enumerate(control.allgather((host, os.getpid())))
        self.peers = [(rank, pid) for rank, (name, pid) in everyone if name == host and rank != self.rank]
        self.due = None  # (time, what, seconds) of what runs now
        faulthandler.register(signal.SIGUSR1, file=self.stderr)  # works in C, also inside a blocking MPI call
        if LIMIT:
            threading.Thread(target=self._watch, name="mpipipe watchdog of tests", daemon=True).start()

    def arm(self, what, seconds=LIMIT):
        turn = 1.5 * self.rank  # the lowest stuck rank speaks for all
        self.due = (time.monotonic() + seconds + turn, what, seconds)

    def disarm(self):
        self.due = None

    def _watch(self):
        never = threading.Event()  # waited for instead of time.sleep, which tests replace
        while True:
            due = self.due
            if due is not None and time.monotonic() >= due[0]:
                self.give_up(f"no end of {due[1]} after {due[2]:g} s", True)
            never.wait(TICK)

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
        abort_job(MPI.COMM_WORLD, 1)

    def say(self, text):
        os.write(self.stderr, text.encode(errors="replace"))
