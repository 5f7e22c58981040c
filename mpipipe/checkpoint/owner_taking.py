"""How a job becomes the owner of a folder: it creates the file, waits for its owner, or takes over; see owner.py."""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import stat
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path

from mpipipe import files
from mpipipe.errors import OwnerError
from mpipipe.job.context import current_rank
from mpipipe.job.flight import Snapshot
from mpipipe.job.report import write

NAME, CLAIM = "owner.json", "owner.json.after-"
MOST_BYTES = 1 << 20
STALE_SECONDS = 60.0  # of looking, in which the file of an owner on another host stays as it is: the owner is dead
LIVING_SECONDS = 10.0  # that a job waits for an owner that lives: it may be about to leave
PREDECESSOR_SECONDS = 300.0  # the same for an earlier start of the same job, which its scheduler ends
LOOK_SECONDS = 0.2  # between two looks


class Taking:
    """A try to become the owner of a folder, which goes on until it has succeeded, or has to be given up.

    Parameters
    ----------
    folder : that is wanted
    record : of this job

    Attributes
    ----------
    descriptor : the file of the owner that this job has become
    stop : what is said where an earlier start of this job does not leave
    """

    def __init__(self, folder: Path, record: Record) -> None:
        self.path, self.record, self.stop = folder / NAME, record, ""
        self.descriptor, self.looks = -1, 0
        self._begin = self._last = self._next = time.monotonic()
        self._seen: dict[Path, tuple[bytes, float, bool]] = {}  # content, seconds it has stayed, whether it has changed
        self._told = False
        current_rank().add_inspectable(self)

    def ended(self, seconds: float) -> bool:
        """Look once more, where it is time to, and return whether that is decided. Raises OSError and OwnerError."""
        now = time.monotonic()
        if now < self._next:
            time.sleep(min(seconds, self._next - now))
            return False
        self.looks, self._next = self.looks + 1, now + LOOK_SECONDS
        gone, self._last = min(now - self._last, 2 * LOOK_SECONDS), now  # a file system that hangs counts for nothing
        self.descriptor = _create(self.path, self.record.content())
        if self.descriptor < 0:
            self._look(self.path, gone)
        if self.descriptor >= 0:
            _remove_claims(self.path.parent)
        return self.descriptor >= 0 or bool(self.stop)

    def _look(self, path: Path, gone: float) -> None:
        """Find out whether the owner of a file lives; take over from one that is dead."""
        try:
            content = read(path)
        except FileNotFoundError:  # it was released
            self._next = 0.0
            return
        before, stayed, changed = self._seen.get(path, (content, 0.0, False))
        owner, earlier = Record.parse(content), Record.parse(before)
        if content == before:
            stayed += gone
        else:
            same = owner is not None and earlier is not None and owner.token == earlier.token
            stayed, changed = 0.0, same
        self._seen[path] = content, stayed, changed
        living = owner.living() if owner is not None and owner.machine == this_machine() else None
        if stayed >= STALE_SECONDS if living is None else not living:
            self._take_over(path, owner, gone)
        elif living or changed:
            self._wait_for(owner, living)
        elif not self._told:
            self._tell(owner, f"looks for {STALE_SECONDS:g} s whether it is alive")

    def _wait_for(self, owner: Record | None, living: list[int] | None) -> None:
        """Wait for an owner that lives, so long; then give up."""
        predecessor = owner is not None and owner.precedes(self.record)
        leaving = living and owner is not None and living[0] != owner.processes[0][0]  # its rank 0 has died
        limit = PREDECESSOR_SECONDS if predecessor or leaving else LIVING_SECONDS
        if time.monotonic() - self._begin <= limit:
            if not self._told:
                self._tell(owner, f"waits up to {limit:g} s for it to leave")
            return
        error = OwnerError(
            "another job owns the folder",
            found=f"{owner}, in {self.path}",
            expected="a folder that no other job writes to",
            remedy="wait for the end of that job, or choose another folder; if it hangs, end its processes",
        )
        if not predecessor:
            raise error
        self.stop = f"mpipipe: an earlier start of this job does not leave after {limit:g} s\n  {error}\n"

    def _tell(self, owner: Record | None, then: str) -> None:
        self._told = True
        write(f"mpipipe: {self.path.parent} is owned by {owner or 'a job that has not said who it is'}; {then}\n")

    def _take_over(self, path: Path, owner: Record | None, gone: float) -> None:
        """Take over from a dead owner: by a claim that one job can create, which becomes the file of the owner."""
        if path != self.path:  # the claim of a job that has died while it took over
            with suppress(FileNotFoundError):
                path.unlink()
            return
        claim = path.with_name(f"{CLAIM}{'none' if owner is None else owner.token}")
        descriptor = _create(claim, self.record.content())
        if descriptor < 0:
            self._look(claim, gone)
            return
        try:
            now = Record.parse(read(path))
            if (now and now.token) == (owner and owner.token):
                with suppress(FileNotFoundError):  # another job has taken this one for dead
                    claim.rename(path)
            if os.path.samestat(os.lstat(path), os.fstat(descriptor)):
                write(f"mpipipe: {path.parent} was owned by {owner or 'a job'}, which is dead: taken over\n")
                self.descriptor = descriptor
        except FileNotFoundError:  # another job was faster, or the owner has left after all
            self._next = 0.0
        finally:
            if self.descriptor < 0:
                os.close(descriptor)
                with suppress(OSError):
                    claim.unlink()

    # -- for the report of a hang ---------------------------------------------------------------------------------

    def progress_token(self) -> object:
        """See job.flight.Inspectable: to look is progress."""
        return self.looks

    def snapshot(self) -> Snapshot:
        """See job.flight.Inspectable."""
        return Snapshot((-1, -1), operations=(str(self),))

    def __str__(self) -> str:
        return f"the owner of {self.path.parent} to leave"


def _create(path: Path, content: bytes) -> int:
    """Create a file, and return its descriptor; -1 where there is one. Raises OSError."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        return -1
    try:
        write_over(descriptor, content)
    except OSError:
        os.close(descriptor)
        with suppress(OSError):
            path.unlink()
        raise
    return descriptor


def write_over(descriptor: int, content: bytes) -> None:
    """Write a file anew and let other hosts see it. Raises OSError."""
    os.pwrite(descriptor, content, 0)
    getattr(os, "fdatasync", os.fsync)(descriptor)


def read(path: Path) -> bytes:
    """Read the file of an owner. Raises OwnerError for a link, a folder and alike, which no job has made."""
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise OwnerError(
            "what says who owns a folder is no file", found=str(path), expected=files.REGULAR, remedy=f"remove {path}"
        )
    with open(files.open_regular(path), "rb") as file:
        return file.read(MOST_BYTES)


def _remove_claims(folder: Path) -> None:
    """Remove what jobs have left that died while they took over: there is another owner by now."""
    with suppress(OSError):
        for path in folder.glob(f"{CLAIM}*"):
            path.unlink()


# -- What a job says of itself in the file by which it owns a folder, and whether its processes live; see owner.py ----


# the id of a job, and the variable that counts its starts where there is one
JOBS = {"SLURM_JOB_ID": "SLURM_RESTART_COUNT", "PBS_JOBID": "", "LSB_JOBID": "", "FLUX_JOB_ID": ""}
TOKEN = re.compile(r"[0-9a-f]{16}")
HIDDEN = "hidden"  # in place of the start time of a process that another user has, where the system hides it


@dataclass(frozen=True)
class Record:
    """The content of owner.json.

    Attributes
    ----------
    token : names the owner
    host : its name, for people
    machine : names the boot of the host and the space of process ids, in which `processes` are
    processes : (id, start time) of the owner's processes on that machine
    job : number of the scheduler's job with the variable that has it, "" without one
    starts : how often the scheduler has started the job again
    since, renewed : times, for people
    renewals : number that grows while the owner lives, in digits of one length
    """

    token: str
    host: str
    machine: str
    processes: tuple[tuple[int, str], ...]
    job: str
    starts: str
    since: str
    renewed: str
    renewals: str = "0" * 12

    @classmethod
    def of_this_job(cls, token: str, processes: Iterable[tuple[str, int, str]]) -> Record:
        """Describe this job, of whose (machine, id, start time) those on this machine count."""
        machine, now, (job, starts) = this_machine(), _now(), _job(os.environ)
        own = tuple(dict.fromkeys((number, start) for where, number, start in processes if where == machine))
        host = socket.gethostname()
        return cls(token, host, machine, own, job=job, starts=starts, since=now, renewed=now)

    @classmethod
    def parse(cls, content: bytes) -> Record | None:
        """Return what a file says; None for one that is none, such as one that is being written."""
        try:
            facts = json.loads(content)
            pairs = tuple((int(number), str(start)) for number, start in facts.pop("processes"))
            texts = {name: str(value) for name, value in facts.items()}
            return cls(**texts, processes=pairs) if TOKEN.fullmatch(texts["token"]) else None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None

    def content(self) -> bytes:
        """Return the bytes of the file, as many after each renewal."""
        return (json.dumps(asdict(self)) + "\n").encode()

    def renewed_now(self) -> Record:
        """Return the record after one more renewal."""
        return replace(self, renewals=f"{int(self.renewals) + 1:012d}", renewed=_now())

    def living(self) -> list[int] | None:
        """Return which of its processes live, if they are of this machine; None where the system hides one of them."""
        starts = [_start_of(number) for number, _ in self.processes]
        if HIDDEN in starts:
            return None
        return [number for (number, start), now in zip(self.processes, starts) if now == start]

    def precedes(self, other: Record) -> bool:
        """Whether this is an earlier start of the same job."""
        earlier = not other.starts or (self.starts.isdigit() and int(self.starts) < int(other.starts))
        return bool(other.job) and self.job == other.job and earlier

    def __str__(self) -> str:
        numbers = ", ".join(str(number) for number, _ in self.processes[:3])
        job = f"{self.job}, " if self.job else ""
        several = "es" if len(self.processes) > 1 else ""
        return f"{job}process{several} {numbers} on {self.host}, since {self.since}, last seen alive {self.renewed}"


def this_process() -> tuple[str, int, str]:
    """Return machine, id and start time of this process."""
    return this_machine(), os.getpid(), _start_of(os.getpid()) or ""


def _start_of(number: int) -> str | None:
    """Return when a process of this machine began, in ticks since the boot; None if it has ended."""
    try:
        fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return HIDDEN if _exists(number) else None
    return None if fields[0] in "ZX" else fields[19]


def _exists(number: int) -> bool:
    """Whether there is such a process, also one of another user in a /proc that is mounted with hidepid."""
    try:
        os.kill(number, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        pass
    return True


def this_machine() -> str:
    """Name this boot of this host, and the space of process ids; "" unless all of that is known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"unknown {secrets.token_hex(8)}"  # like no other: nothing is known of its processes


def _job(environment: Mapping[str, str]) -> tuple[str, str]:
    for name, count in JOBS.items():
        if environment.get(name):
            index = environment.get("LSB_JOBINDEX", "0") if name == "LSB_JOBID" else "0"
            tail = "" if index == "0" else f"[{index}]"
            return f"{name} {environment[name]}{tail}", environment.get(count, "0" if count else "")
    return "", ""


def _now() -> str:
    return f"{datetime.now():%Y-%m-%d %H:%M:%S}"
