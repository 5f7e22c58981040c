"""The ranks that live: where MPI has ULFM, a dead rank is named, and the others can go on without it.

ULFM (user-level failure mitigation) is an extension of MPI: an operation that a dead rank keeps from ending raises
MPI_ERR_PROC_FAILED, one on a revoked communicator MPI_ERR_REVOKED. See docs.open-mpi.org, "User-Level Fault
Mitigation", for what Open MPI 5 has of it, and `mpiexec --with-ft ulfm`, which switches it on.

    a rank dies      operations with it raise; long waits look for the dead and raise LostRankError
    gather           revoke: ranks inside MPI wake up; agree: is the work over, or to be gone on with; shrink
    go on            on the communicator of the survivors, with new groups and a new watchdog

Three things of Open MPI 5.0.11 were found not to work after a death: Ishrink ends in a segmentation fault, MPI_Finalize
hangs now and then, and MPI_Abort leaves ranks alive or its launcher stuck. So survivors shrink by the blocking call,
with a deadline, and leave by os._exit.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NoReturn

from mpipipe.errors import BackendError, LostRankError, PeerError
from mpipipe.job import communicators, rank_list, report, runtime
from mpipipe.job.context import current_rank
from mpipipe.job.group import group_of
from mpipipe.job.report import write
from mpipipe.job.types import Communicator, MpiCommunicator

ENABLED = "OMPI_MCA_mpi_ft_enable"  # set by `mpiexec --with-ft ulfm`
PATIENCE = 2.0  # seconds in which a rank that had an error of MPI hears that another one has died
ELSEWHERE = 1.0  # seconds for a rank of another host to report and leave
DEADLINE = 60.0  # seconds for the survivors to come together, where there is no watchdog to say another limit
REMEDY = "start the job with Open MPI 5 and `mpiexec --with-ft ulfm`, or leave --survive out and use checkpoints"


class Lifeline:
    """A communicator of all ranks, for nothing but their deaths; the constructor is collective over COMM_WORLD."""

    def __init__(self) -> None:
        world = runtime.world()
        self.MPI = runtime.mpi()
        self.comm: MpiCommunicator = communicators.duplicate(world)
        here = socket.gethostname(), os.getpid()
        self.places: list[tuple[str, int]] = group_of(world).gather("the places of all ranks", here)
        self.lost: tuple[int, ...] = ()  # world ranks whose death the survivors have agreed on
        self._revoked: list[Communicator] = []  # what to revoke when a rank is lost

    # -- who has died -------------------------------------------------------------------------------------------

    def dead(self) -> tuple[int, ...]:
        """Return the dead ranks of COMM_WORLD that MPI has told this process of; never waits."""
        failed = self.comm.Get_failed()
        try:
            if failed.size == len(self.lost):
                return self.lost
            world = self.comm.Get_group()
            numbers = self.MPI.Group.Translate_ranks(failed, None, world)
            world.Free()
            return tuple(sorted(int(number) for number in numbers))
        finally:
            failed.Free()

    @property
    def is_broken(self) -> bool:
        """Whether a rank has died since the survivors last came together."""
        return self.dead() != self.lost

    def look(self) -> None:
        """Raise LostRankError if a rank has died since the survivors last came together."""
        if self.is_broken:
            raise LostRankError(self.name([rank for rank in self.dead() if rank not in self.lost]))

    def lowest(self) -> int:
        return min(set(range(self.comm.size)).difference(self.dead()))

    def name(self, ranks: Sequence[int]) -> str:
        """Say in words that these ranks of COMM_WORLD have died, and where they were."""
        hosts = rank_list.by_text((rank, self.places[rank][0]) for rank in ranks)
        return ", ".join(f"{rank_list.named(some)} on {host}" for host, some in hosts.items()) + " died"

    def explains(self, error: BaseException) -> bool:
        """Return whether an error is what a rank meets when another one has died; wait for news that may be late."""
        MPI, link, seen = self.MPI, error, []
        while link is not None and link not in seen:
            seen.append(link)
            link = link.__cause__ or link.__context__  # type: ignore[assignment]  # None at the end
        if any(isinstance(link, LostRankError) for link in seen):
            return True
        of_mpi = [link for link in seen if isinstance(link, MPI.Exception)]
        if any(link.Get_error_class() == MPI.ERR_REVOKED for link in of_mpi):
            return True
        if not of_mpi and not any(isinstance(link, PeerError) for link in seen):
            return False
        stop = time.monotonic() + PATIENCE
        while not self.is_broken:
            if time.monotonic() > stop:
                return False
            with suppress(MPI.Exception):
                self.comm.Iprobe()  # the news come while MPI is called
            time.sleep(1e-3)
        return True

    # -- going on -----------------------------------------------------------------------------------------------

    def revoke_on_loss(self, *comms: Communicator) -> None:
        """Wake ranks up that block in a call on these communicators, once a rank is lost."""
        self._revoked = list(comms)

    def gather(self) -> Communicator:
        """Return the communicator of all that live; every survivor calls this, or `finish`, after a loss."""
        with _deadline(self):
            for comm in self._revoked:
                with suppress(self.MPI.Exception):
                    comm.Revoke()  # type: ignore[attr-defined]  # of MPI, where this is called
            _forget_groups()
            self._agree(0)
            return self._shrink()

    def finish(self) -> Communicator | None:
        """Return None if all that live have come to the end of their work, else what `gather` returns."""
        with _deadline(self):
            if self._agree(1):
                return None
            _forget_groups()
            return self._shrink()

    def _shrink(self) -> Communicator:
        comm = self.comm.Shrink()
        alive = set(communicators.world_ranks(comm))
        self.lost = tuple(rank for rank in range(self.comm.size) if rank not in alive)
        return comm

    def _agree(self, flag: int) -> int:
        """Return the least of the flags of all that live, the same on all of them, whichever rank dies meanwhile."""
        while True:
            self.comm.Ack_failed()
            try:
                return int(self.comm.Agree(flag))
            except self.MPI.Exception as error:
                if error.Get_error_class() != self.MPI.ERR_PROC_FAILED:
                    raise

    # -- the end ------------------------------------------------------------------------------------------------

    def let_leave_first(self, rank: int, seconds: float) -> None:
        """Wait until a rank of COMM_WORLD, which reports a failure, has left; at most `seconds`.

        Once one rank has left, the launcher may end the others, and lose a report that is being written. MPI does not
        tell in time who has left. So this looks for the process, which it can on one host alone.
        """
        host, pid = self.places[rank]
        stop = time.monotonic() + (seconds if host == self.places[self.comm.rank][0] else min(seconds, ELSEWHERE))
        with suppress(OSError):  # that there is no such process
            while time.monotonic() < stop:
                os.kill(pid, 0)
                time.sleep(1e-2)

    def end_job(self, code: int) -> NoReturn:
        """End all ranks of this host, and this one with `code`. Those of other hosts find that it has died."""
        current_rank().ended = True
        host, own = self.places[self.comm.rank]
        for place, pid in self.places:
            if place == host and pid != own:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        leave(code)


def start() -> Lifeline | None:
    """Return the lifeline of this process, made where the job can outlive a rank; collective over COMM_WORLD then."""
    context, enabled = current_rank(), os.environ.get(ENABLED, "").lower() in ("1", "true", "yes", "on")
    if context.lifeline is None and enabled and not context.alone and runtime.world().size > 1:
        context.lifeline = Lifeline()
    return context.lifeline


def demand() -> Lifeline:
    """Do what `start` does; raise BackendError if the job cannot outlive a rank."""
    if current_rank().alone:
        raise BackendError("ranks that are threads cannot outlive each other", remedy=REMEDY)
    line = start()
    if line is None:
        raise BackendError(
            "this job cannot outlive a rank",
            found=runtime.mpi().Get_library_version().partition("\n")[0][:60],
            expected="several ranks, and an MPI with ULFM that is switched on",
            remedy=REMEDY,
        )
    return line


def leave(code: int) -> NoReturn:
    """End this process without MPI_Finalize, which may hang after a death."""
    report.stop_watching()
    report.flush()
    _exit(code)


_exit = os._exit  # as it was before `run_or_abort` watches it


def _forget_groups() -> None:
    """Let go of all groups: each of them has dead ranks, or is to be made anew."""
    context = current_rank()
    with context.lock:
        for known in (context.groups, context.failed, context.failures):
            known.clear()
        for table in (context.withdrawn, context.advancing, context.left):
            table.clear()
    if context.watchdog is not None:
        context.watchdog.forget()


@contextmanager
def _deadline(line: Lifeline) -> Iterator[None]:
    """End the job with a report where survivors do not come together in time."""
    watchdog = current_rank().watchdog
    limit = None if watchdog is None else watchdog.limit
    seconds = DEADLINE if limit is None else max(10.0, limit)

    def give_up() -> None:
        write(f"mpipipe: {line.name(line.dead())}, and the others did not come together in {seconds:g} s\n")
        line.end_job(1)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
