"""One owner of a folder: the file owner.json in it names the job that writes there.

The first job creates the file (O_EXCL). Where there is one, its owner

    lives, or may live on another host          OwnerError
    has died, or its host has started anew      is replaced
    is an earlier start of the same SLURM job   is replaced: SLURM ends one before the next

Whether it lives can be known on its own host alone, by the id and start time of the process that
leads the job. Of several jobs that replace a dead owner the last one has the folder: each looks
again after SETTLING_SECONDS. A job that has lost its folder, as one that was stopped or whose
owner.json was removed, finds another token before it gives a file its name.
"""

from __future__ import annotations

import atexit
import json
import os
import secrets
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from weakref import WeakKeyDictionary

from mpipipe import files
from mpipipe.errors import OwnerError
from mpipipe.job import RankContext, RankGroup, current_rank, is_rank, process_fields, write

# turns an OSError of a folder into an error of this package
Explain = Callable[[Path], AbstractContextManager[None]]
NAME = "owner.json"
MOST_BYTES = 1 << 20
SETTLING_SECONDS = 1.0
_owners: WeakKeyDictionary[RankContext, list[Owner]] = WeakKeyDictionary()


class Owner:
    """What one rank knows of a folder that its job owns by `token`; one rank `holds` the file.

    A folder that was `made` for it goes at the release if it is empty. The last of `users`, who
    share the ownership, releases it.
    """

    def __init__(self, folder: Path, token: str, made: bool = False, holds: bool = False) -> None:
        self.folder = folder
        self.token = token
        self.made = made
        self.holds = holds
        self.users = 1
        _owners.setdefault(current_rank(), []).append(self)
        if holds:
            atexit.register(self._release_all)  # a program may end without closing its saver

    def check(self) -> None:
        """Raise OwnerError if the folder is not this job's any more; call it before a write."""
        try:
            owner = read(self.folder / NAME)
        except FileNotFoundError:
            owner = None
        except OSError:  # the write that follows says what is wrong
            return
        if owner is None or owner.token != self.token:
            raise OwnerError(
                "another job has taken the folder from this one",
                found=str(owner or "no owner.json"),
                expected=f"the token {self.token} of this job in {self.folder / NAME}",
                remedy="let one job at a time write there; this one was stopped, or its "
                "owner.json was removed",
            )

    def is_taken(self) -> bool:
        """True if another job has the folder, not if this one has released it elsewhere."""
        try:
            record = read(self.folder / NAME)
        except OSError:
            return False
        return record is None or record.token != self.token

    def _release_all(self) -> None:
        self.users = 1
        self.release()

    def release(self) -> None:
        """Let other jobs have the folder, where this rank holds the file. Never raises OSError."""
        self.users -= 1
        owners = _owners.get(current_rank(), [])
        if self.users > 0 or self not in owners:
            return
        owners.remove(self)
        if not self.holds or not is_rank():
            return
        atexit.unregister(self._release_all)
        with suppress(OSError, OwnerError):
            self.check()
            (self.folder / NAME).unlink()
            if self.made:
                self.folder.rmdir()  # only where nothing is in it


@contextmanager
def released_at_end(owner: Owner, group: RankGroup) -> Iterator[None]:
    """Release a folder at the end of the block; if all ranks come to it, each knows it is free."""
    together = True
    try:
        yield
    except BaseException as error:
        together = group.agreed_on(error)
        raise
    finally:
        owner.release()
        if together and group.failure is None:
            group.agree("the owner of a folder: it has left")


def owner_of(path: Path) -> Owner | None:
    """Return the ownership of `path`, or of a folder above it; None if this job has none."""
    for owner in _owners.get(current_rank(), []):
        if owner.folder == path or owner.folder in path.parents:
            return owner
    return None


def check_owned(path: Path) -> None:
    """Raise OwnerError if `path` is in a folder that this job has lost to another one."""
    owner = owner_of(path)
    if owner is not None:
        owner.check()


def is_owner_file(name: str) -> bool:
    """True for the file that says who owns a folder, also while it is written."""
    return name.startswith(NAME)


def take_folder(folder: Path, group: RankGroup, explained: Explain) -> Owner:
    """Make the folder that rank 0 names this job's, and make it where it is missing; collective.

    Where the job has it already, or one above it, that ownership is shared. Raises, on every rank,
    OwnerError where another job has it, and what `explained` makes of an OSError.
    """

    def take_it() -> tuple[Path, str, bool]:
        path = folder.absolute()
        known = owner_of(path)
        if known is not None:
            return known.folder, known.token, False
        record = OwnerRecord.of_this_job()
        with explained(path):
            made = not path.exists()
            path.mkdir(parents=True, exist_ok=True)
            take(path / NAME, record)
        return path, record.token, made

    path, token, made = group.from_one("the owner of a folder", take_it)
    known = owner_of(path)
    if known is not None and known.token == token:
        known.users += 1
        return known
    return Owner(path, token, made, holds=group.rank == 0)


def take(path: Path, record: OwnerRecord) -> None:
    """Make the job of `record` the owner by the file `path`. Raises OSError and OwnerError."""
    new = path.with_name(f"{NAME}.{record.token}")
    while not _create(path, record):
        try:
            _dead_owner(path, record)
            _create(new, record)
            owner = _dead_owner(path, record)  # again: the disk may have been slow
            new.rename(path)
            time.sleep(SETTLING_SECONDS)
            winner = read(path)
        except FileNotFoundError:  # another job has released the folder meanwhile
            continue
        finally:
            new.unlink(missing_ok=True)
        if winner is not None and winner.token == record.token:
            was = owner or "a job"
            write(f"mpipipe: {path.parent} was owned by {was}, which is dead: taken over\n")
            return


def _dead_owner(path: Path, record: OwnerRecord) -> OwnerRecord | None:
    """Return the owner that the file names, which has ended; None if it was cut short.

    Raises OSError, and OwnerError for an owner that may still write.
    """
    owner = read(path)
    if owner is None:  # just made by another job, or cut short by one that died
        time.sleep(SETTLING_SECONDS)
        owner = read(path)
    if owner is not None and not owner.has_ended(record):
        raise OwnerError(
            "another job owns the folder",
            found=f"{owner}, in {path}",
            expected="a folder that no other job writes to",
            remedy="wait for the end of that job, or choose another folder; if it hangs, end "
            f"its processes; if it has died on another host, remove {path}",
        )
    return owner


def _create(path: Path, record: OwnerRecord) -> bool:
    """Create a file with a record; return False where there is one. Raises OSError."""
    try:
        file = open(path, "x")
    except FileExistsError:
        return False
    with file:
        file.write(f"{json.dumps(asdict(record))}\n")
        file.flush()
        os.fsync(file.fileno())
    return True


def read(path: Path) -> OwnerRecord | None:
    """Read the file of an owner; None for one that is cut short, as while it is written.

    Raises OSError, and OwnerError for a link, a folder and alike, which no job has made.
    """
    if not stat.S_ISREG(os.lstat(path).st_mode):
        what = "what says who owns a folder is no file"
        raise OwnerError(what, found=str(path), expected=files.REGULAR, remedy=f"remove {path}")
    with open(files.open_regular(path), "rb") as file:
        content = file.read(MOST_BYTES)
    try:
        return OwnerRecord(**json.loads(content))
    except (ValueError, TypeError, RecursionError):
        return None


@dataclass(frozen=True)
class OwnerRecord:
    """The content of owner.json; host and since are for people."""

    token: str
    host: str
    machine: str  # names the boot of the host and the space of process ids, in which `process` is
    process: int  # the one that leads the job
    start: str  # when that process began
    job: str  # number of the job of SLURM, with its variable; "" without one
    starts: int  # how often SLURM has started the job again
    since: str

    @classmethod
    def of_this_job(cls) -> OwnerRecord:
        """Describe the job that this process leads."""
        job = os.environ.get("SLURM_JOB_ID", "")
        starts = os.environ.get("SLURM_RESTART_COUNT", "")
        return cls(
            token=secrets.token_hex(8),
            host=socket.gethostname(),
            machine=this_machine(),
            process=os.getpid(),
            start=start_of(os.getpid()) or "",
            job=f"SLURM_JOB_ID {job}" if job else "",
            starts=int(starts) if starts.isdigit() else 0,
            since=f"{datetime.now():%Y-%m-%d %H:%M:%S}",
        )

    def has_ended(self, other: OwnerRecord) -> bool:
        """True if this owner writes no more, as far as `other`, on this host, can know."""
        if self.machine == other.machine:
            return start_of(self.process) not in (self.start, HIDDEN)
        boot = self.machine.rpartition(" ")[0]
        other_boot = other.machine.rpartition(" ")[0]
        if boot and other_boot and boot != other_boot and self.host == other.host:
            return True
        return bool(other.job) and self.job == other.job and self.starts < other.starts

    def __str__(self) -> str:
        job = ""
        if self.job:
            job = f"{self.job}, "
        return f"{job}process {self.process} on {self.host}, since {self.since}"


# In place of the start time of a process that another user has, where the system hides it.
HIDDEN = "hidden"


def start_of(process: int) -> str | None:
    """Return when a process of this machine began, in ticks since the boot; None if it is gone."""
    with suppress(OSError):
        fields = process_fields(process)
        if fields[0] in "ZX":
            return None
        return fields[19]
    try:  # it may be that of another user in a /proc that is mounted with hidepid
        os.kill(process, 0)
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
        return secrets.token_hex(8)  # like no other: nothing is known of its processes
