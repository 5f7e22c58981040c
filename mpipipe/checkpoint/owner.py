"""One owner of a folder: a file in it names the job that writes there. Another job waits, is refused, or takes over.

    owner.json                 host, processes and job of the owner, its token, and a number that it raises
    owner.json.after-TOKEN     the claim of a job that takes over from the dead owner with this token

The first job creates owner.json (O_EXCL). Where there is one, a job looks whether its owner lives: on its own host by
the ids and start times of the processes, at once; on another host by the number, which an owner that lives raises
every RENEW_SECONDS. No clocks of two hosts are compared, and no lock of the file system is needed. A dead owner is
replaced by a claim that is created (O_EXCL) and renamed to owner.json, so of two jobs that take over at once one wins.
What decides is the token in owner.json: a job that was stopped, and wakes up after another has taken over, finds
another token before it gives a file its name, and ends.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import secrets
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path

from mpipipe import files
from mpipipe.errors import OwnerError
from mpipipe.job import RankGroup, Snapshot, Stop, current_rank, is_rank, wait_locally, write

Explain = Callable[[Path], AbstractContextManager[None]]  # turns an OSError of a folder into an error of this package
NAME, CLAIM = "owner.json", "owner.json.after-"
MOST_BYTES = 1 << 20
STALE_SECONDS = 60.0  # of looking, in which the file of an owner on another host stays as it is: the owner is dead
LIVING_SECONDS = 10.0  # that a job waits for an owner that lives: it may be about to leave
PREDECESSOR_SECONDS = 300.0  # the same for an earlier start of the same job, which its scheduler ends
LOOK_SECONDS = 0.2  # between two looks
RENEW_SECONDS = 10.0  # between two writes of an owner that lives
FRESH_SECONDS = 1.0  # after a look at its token an owner need not look again: no other job takes over that fast


class Owner:
    """What one rank knows of a folder that its job owns by `token`.

    Folders that were `made` for it, the innermost first, go at the release if they are empty. The last of `users`, who
    share the ownership, releases it.
    """

    def __init__(self, folder: Path, token: str, made: Iterable[Path] = ()) -> None:
        self.folder, self.token, self.made, self.users = folder, token, list(made), 1
        self._checked = time.monotonic()
        self._descriptor, self._ended = -1, threading.Event()  # of the rank that keeps the file alive
        self._lock = threading.Lock()  # held while the descriptor is in use: its number may soon be another file's
        current_rank().owners.append(self)

    def check(self) -> None:
        """Raise OwnerError if the folder is not this job's any more; to be called before a write."""
        if time.monotonic() - self._checked < FRESH_SECONDS:
            return
        token, text = self._read()
        if token != self.token:
            raise OwnerError(
                "another job has taken the folder from this one",
                found=text,
                expected=f"the token {self.token} of this job in {self.folder / NAME}",
                remedy="let one job at a time write there; this one was stopped, or its owner.json was removed",
            )
        self._checked = time.monotonic()

    def lost(self) -> bool:
        """Whether the folder is another job's by now."""
        return self._read()[0] not in (self.token, "")

    def _read(self) -> tuple[str, str]:
        """Return the token in the file and what else it says; "" where the file is gone."""
        try:
            record = OwnerRecord.parse(read(self.folder / NAME))
        except FileNotFoundError:
            return "", "no owner.json"
        except OwnerError as error:
            return "none", str(error)
        except OSError:  # the write that follows will say what is wrong
            record = None
        return (self.token, "") if record is None else (record.token, str(record))

    def renew_by(self, descriptor: int, record: OwnerRecord) -> None:
        """Keep the file alive from this rank, in a thread: also while a program compiles, validates or saves."""
        self._descriptor, self._ended = descriptor, threading.Event()
        atexit.register(self._release_all)  # in a program that ends without closing its saver
        thread = threading.Thread(target=self._renew, args=(record, self._ended), name="mpipipe owner", daemon=True)
        with suppress(RuntimeError):  # the system has no thread left: jobs on other hosts may take this one for dead
            thread.start()

    def _renew(self, record: OwnerRecord, ended: threading.Event) -> None:
        while not ended.wait(RENEW_SECONDS):
            with self._lock, suppress(OSError):
                if not ended.is_set():
                    record = record.renewed_now()
                    # into the file that was opened: where another job has taken over, it has no name any more
                    write_over(self._descriptor, record.content())

    def _stop(self) -> None:
        self._ended.set()
        with self._lock:
            descriptor, self._descriptor = self._descriptor, -1
            if descriptor >= 0:
                os.close(descriptor)

    def _release_all(self) -> None:
        self.users = 1
        self.release()

    def release(self) -> None:
        """Let other jobs have the folder, where this rank keeps the file alive. Never raises OSError."""
        self.users -= 1
        if self.users > 0 or self not in current_rank().owners:
            return
        current_rank().owners.remove(self)
        atexit.unregister(self._release_all)
        if self._descriptor < 0 or not is_rank():
            return
        with suppress(OSError):
            if self._read()[0] == self.token:
                (self.folder / NAME).unlink()
            for folder in self.made:
                folder.rmdir()  # only where nothing is in it
        self._stop()


@contextmanager
def released_at_end(owner: Owner, group: RankGroup | None) -> Iterator[None]:
    """Release a folder at the end of the block. Where a group comes to that end alike, each rank knows that it is free.

    `group` is None where ranks may die on the way.
    """
    together = group is not None
    try:
        yield
    except BaseException as error:
        together = group is not None and group.agreed_on(error)
        raise
    finally:
        owner.release()
        if group is not None and together and group.failure is None:
            group.agree("the owner of a folder: it has left")


def owner_of(path: Path) -> Owner | None:
    """Return what this rank knows of the ownership of `path`, or of a folder above it; None if its job has none."""
    return next((each for each in current_rank().owners if each.folder == path or each.folder in path.parents), None)


def check_owned(path: Path) -> None:
    """Raise OwnerError if `path` is in a folder that this job has lost to another one."""
    owner = owner_of(path)
    if owner is not None:
        owner.check()


def keep_folder(path: Path) -> None:
    """Let the folder that this job owns, and in which `path` is, stay after the release, even if it is empty."""
    owner = owner_of(path)
    if owner is not None:
        owner.made.clear()


def is_owner_file(name: str) -> bool:
    """Whether a file of this name says who owns a folder."""
    return name == NAME or name.startswith(CLAIM)


def share_folder(folder: Path, group: RankGroup, explained: Explain) -> Owner:
    """Take part in the ownership of a folder that this job has already, or take it; collective. See `take_folder`."""
    place = None
    if group.rank == 0:
        known = owner_of(folder.absolute())
        place = (folder.absolute(), None) if known is None else (known.folder, known.token)
    folder, token = group.broadcast("the owner of a folder", place)
    if token is None:
        return take_folder(folder, group, explained)
    if (owner := owner_of(folder)) is None:
        return Owner(folder, token)
    owner.users += 1
    return owner


def take_folder(folder: Path, group: RankGroup, explained: Explain) -> Owner:
    """Make the folder that rank 0 names this job's, and make it where it is missing; collective.

    Raises, on every rank, OwnerError where another job keeps it, Stop with the code 1 where that is an earlier start of
    this job (a later start may find it gone), and what `explained` makes of an OSError.
    """
    processes, taken = group.gather("the owner of a folder: its processes", this_process()), None
    outcome: tuple[Path, str, list[Path], str] | None = None
    with group.raise_together("the owner of a folder"):
        if group.rank == 0:
            token = secrets.token_hex(8)
            with explained(folder):
                made = [each for each in (folder, *folder.parents) if not each.exists()]
                folder.mkdir(parents=True, exist_ok=True)
                taken = Taking(folder, OwnerRecord.of_this_job(token, processes))
                wait_locally(taken.ended, taken)
            outcome = folder, token, made, taken.stop
    folder, token, made, stop = group.broadcast("the owner of a folder", outcome)
    if stop:
        raise Stop(stop, 1)
    owner = Owner(folder, token, made)
    if taken is not None:
        owner.renew_by(taken.descriptor, taken.record)
    return owner


# -- How a job becomes the owner: it creates the file, waits for its owner, or takes over ----------------------------


class Taking:
    """A try to become the owner of a folder: it ends with a `descriptor` of the owner's file, or a reason to `stop`."""

    def __init__(self, folder: Path, record: OwnerRecord) -> None:
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
            with suppress(OSError):  # claims of jobs that died while they took over: there is another owner by now
                for claim in self.path.parent.glob(f"{CLAIM}*"):
                    claim.unlink()
        return self.descriptor >= 0 or bool(self.stop)

    def _look(self, path: Path, gone: float) -> None:
        """Find out whether the owner of a file lives; take over from one that is dead."""
        try:
            content = read(path)
        except FileNotFoundError:  # it was released
            self._next = 0.0
            return
        before, stayed, changed = self._seen.get(path, (content, 0.0, False))
        owner, earlier = OwnerRecord.parse(content), OwnerRecord.parse(before)
        stayed += gone
        if content != before:
            stayed, changed = 0.0, owner is not None and earlier is not None and owner.token == earlier.token
        self._seen[path] = content, stayed, changed
        living = owner.living() if owner is not None and owner.machine == this_machine() else None
        if stayed >= STALE_SECONDS if living is None else not living:
            self._take_over(path, owner, gone)
        elif living or changed:
            self._wait_for(owner, living)
        elif not self._told:
            self._tell(owner, f"looks for {STALE_SECONDS:g} s whether it is alive")

    def _wait_for(self, owner: OwnerRecord | None, living: list[int] | None) -> None:
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

    def _tell(self, owner: OwnerRecord | None, then: str) -> None:
        self._told = True
        write(f"mpipipe: {self.path.parent} is owned by {owner or 'a job that has not said who it is'}; {then}\n")

    def _take_over(self, path: Path, owner: OwnerRecord | None, gone: float) -> None:
        """Take over from a dead owner: by a claim that one job can create, which becomes the file of the owner."""
        if path != self.path:  # the claim of a job that has died while it took over
            with suppress(FileNotFoundError):
                path.unlink()
            return
        claim = path.with_name(f"{CLAIM}{'none' if owner is None else owner.token}")
        if (descriptor := _create(claim, self.record.content())) < 0:
            return self._look(claim, gone)
        try:
            now = OwnerRecord.parse(read(path))
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

    def progress_token(self) -> object:
        return self.looks

    def snapshot(self) -> Snapshot:
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
        what = "what says who owns a folder is no file"
        raise OwnerError(what, found=str(path), expected=files.REGULAR, remedy=f"remove {path}")
    with open(files.open_regular(path), "rb") as file:
        return file.read(MOST_BYTES)


# -- What a job says of itself in the file, and whether its processes live ----------------------------------------

# the id of a job, and the variable that counts its starts where there is one
JOBS = {"SLURM_JOB_ID": "SLURM_RESTART_COUNT", "PBS_JOBID": "", "LSB_JOBID": "", "FLUX_JOB_ID": ""}
TOKEN = re.compile(r"[0-9a-f]{16}")
HIDDEN = "hidden"  # in place of the start time of a process that another user has, where the system hides it


@dataclass(frozen=True)
class OwnerRecord:
    """The content of owner.json; host, since and renewed are for people."""

    token: str
    host: str
    machine: str  # names the boot of the host and the space of process ids, in which `processes` are
    processes: tuple[tuple[int, str], ...]  # (id, start time) of the owner's processes on that machine
    job: str  # number of the scheduler's job with the variable that has it, "" without one
    starts: str  # how often the scheduler has started the job again
    since: str
    renewed: str
    renewals: str = "0" * 12  # a number that grows while the owner lives, in digits of one length

    @classmethod
    def of_this_job(cls, token: str, processes: Iterable[tuple[str, int, str]]) -> OwnerRecord:
        """Describe this job, of whose (machine, id, start time) those on this machine count."""
        machine, now, (job, starts) = this_machine(), _now(), _job(os.environ)
        own = tuple(dict.fromkeys((number, start) for where, number, start in processes if where == machine))
        return cls(token, socket.gethostname(), machine, own, job=job, starts=starts, since=now, renewed=now)

    @classmethod
    def parse(cls, content: bytes) -> OwnerRecord | None:
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

    def renewed_now(self) -> OwnerRecord:
        """Return the record after one more renewal."""
        return replace(self, renewals=f"{int(self.renewals) + 1:012d}", renewed=_now())

    def living(self) -> list[int] | None:
        """Return which of its processes live, if they are of this machine; None where the system hides one of them."""
        starts = [_start_of(number) for number, _ in self.processes]
        if HIDDEN in starts:
            return None
        return [number for (number, start), now in zip(self.processes, starts) if now == start]

    def precedes(self, other: OwnerRecord) -> bool:
        """Whether this is an earlier start of the same job."""
        earlier = not other.starts or (self.starts.isdigit() and int(self.starts) < int(other.starts))
        return bool(other.job) and self.job == other.job and earlier

    def __str__(self) -> str:
        numbers = ", ".join(str(number) for number, _ in self.processes[:3])
        job, several = f"{self.job}, " if self.job else "", "es" if len(self.processes) > 1 else ""
        return f"{job}process{several} {numbers} on {self.host}, since {self.since}, last seen alive {self.renewed}"


def this_process() -> tuple[str, int, str]:
    """Return machine, id and start time of this process."""
    return this_machine(), os.getpid(), _start_of(os.getpid()) or ""


def _start_of(number: int) -> str | None:
    """Return when a process of this machine began, in ticks since the boot; None if it has ended."""
    with suppress(OSError):
        fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    try:  # it may be that of another user in a /proc that is mounted with hidepid
        os.kill(number, 0)
    except (ProcessLookupError, OverflowError):
        return None
    except OSError:
        pass
    return HIDDEN


def this_machine() -> str:
    """Name this boot of this host, and the space of process ids."""
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
