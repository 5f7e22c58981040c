"""The watchdog of ranks that are threads (comm.inprocess): whoever waits looks at all of them, in their own memory."""

from __future__ import annotations

import time
from pathlib import Path

from mpipipe.comm import settings
from mpipipe.comm.inprocess_world import World
from mpipipe.comm.process import Process
from mpipipe.comm.watch.dump import make_dump
from mpipipe.comm.watch.report import REMEDY
from mpipipe.comm.watch.verdict import judge
from mpipipe.comm.watch.watchdog import STAGGER
from mpipipe.errors import HangError


class ThreadWatchdog:
    """Watches while one rank waits. It has no thread: ranks that all compute are not watched.

    Parameters
    ----------
    world : World
        All ranks of one `inprocess.run`.
    process : Process
        Of this rank.
    """

    def __init__(self, world: World, process: Process) -> None:
        self.world, self.process = world, process
        self.limit = settings.watchdog()
        self.folder: Path | None = None
        self._sign: object = None
        self._since = self._now = time.monotonic()

    def configure(self, limit: float | None, folder: Path | None) -> None:
        """Set the limit in seconds, None for no watchdog; reports of ranks that are threads need no folder."""
        self.limit, self.folder = limit, folder

    def forget(self) -> None:
        """Ranks that are threads do not outlive each other."""

    def stop(self) -> None:
        """There is no thread."""

    def ended_neighbours(self) -> set[int]:
        """None: a thread that has ended is known by its error."""
        return set()

    def attend(self) -> None:
        """In a long wait: raise HangError if no rank has made progress for too long."""
        now = time.monotonic()
        if self.limit is None or now - self._now < self.limit / 20:
            return
        processes: dict[int, Process] = dict(self.world.processes)
        sign = {rank: process.sign() for rank, process in processes.items()}
        if sign != self._sign or now - self._now > self.limit / 2:  # the second: this wait is not the one before
            self._sign, self._since = sign, now
        self._now = now
        rank = next(rank for rank, process in processes.items() if process is self.process)
        if now - self._since > self.limit * (1 + STAGGER * rank) and not self.world.broken:
            quiet = now - self._since
            dumps = {other: make_dump(process, other, quiet) for other, process in processes.items()}
            raise HangError(
                f"no rank has made progress for {quiet:.1f} s", found="\n    ".join(judge(dumps).lines()), remedy=REMEDY
            )
