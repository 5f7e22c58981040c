"""One owner of a folder: the file owner.json in it names the job that writes there.

The first job creates the file (O_EXCL). Where there is one, a job looks whether its owner lives,
which can be known on the owner's own host alone, by the id and start time of the process that leads
it:

    lives, or may live on another host          wait some seconds for it to leave, then OwnerError
    has died, or its host has started anew      replace it
    an earlier start of the same job of SLURM   replace it: SLURM ends the one before it starts the next

An owner is replaced by a claim with its token in the name, which one job alone can create. It is
renamed to owner.json, and the job whose token is found there has won. A claim whose job has died is
removed by the same rules. A job that has lost its folder, as one whose owner.json was removed,
finds another token before it gives a file its name.
"""

from __future__ import annotations

import atexit
import json
import os
import secrets
import socket
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from mpipipe import files
from mpipipe.errors import OwnerError
from mpipipe.job import RankGroup, current_rank, is_rank, wait_locally, write

Explain = Callable[
    [Path], AbstractContextManager[None]
]  # turns an OSError of a folder into an error of this package
NAME = "owner.json"
CLAIM = "owner.json.after-"
MOST_BYTES = 1 << 20
LIVING_SECONDS = 10.0  # that a job waits for an owner that lives: it may be about to leave
# the id of a batch job, and the variable that counts its starts, where there is one
JOBS = {"SLURM_JOB_ID": "SLURM_RESTART_COUNT", "PBS_JOBID": ""}


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
        current_rank().owners.append(self)
        if holds:
            atexit.register(self._release_all)  # in a program that ends without closing its saver

    def check(self) -> None:
        """Raise OwnerError if the folder is not this job's any more; to be called before a
        write.
        """
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
        """Whether another job has the folder. Where no job has it, this one may have released it on
        another rank.
        """
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
        if self.users > 0 or self not in current_rank().owners:
            return
        current_rank().owners.remove(self)
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
    """Release a folder at the end of the block. Where the group comes to it alike, each rank knows
    that it is free.
    """
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
    """Return what this rank knows of the ownership of `path`, or of a folder above it; None if its
    job has none.
    """
    for owner in current_rank().owners:
        if owner.folder == path or owner.folder in path.parents:
            return owner
    return None


def check_owned(path: Path) -> None:
    """Raise OwnerError if `path` is in a folder that this job has lost to another one."""
    owner = owner_of(path)
    if owner is not None:
        owner.check()


def is_owner_file(name: str) -> bool:
    """Whether a file of this name says who owns a folder."""
    return name == NAME or name.startswith(CLAIM)


def share_folder(folder: Path, group: RankGroup, explained: Explain) -> Owner:
    """Take part in the ownership of a folder that this job has already, or take it; collective. See
    `take_folder`.
    """
    place = None
    if group.rank == 0:
        known = owner_of(folder.absolute())
        place = (folder.absolute(), None) if known is None else (known.folder, known.token)
    folder, token = group.broadcast("the owner of a folder", place)
    if token is None:
        return take_folder(folder, group, explained)
    owner = owner_of(folder)
    if owner is None:
        return Owner(folder, token)
    owner.users += 1
    return owner


def take_folder(folder: Path, group: RankGroup, explained: Explain) -> Owner:
    """Make the folder that rank 0 names this job's, and make it where it is missing; collective.

    Raises, on every rank, OwnerError where another job keeps it, and what `explained` makes of an
    OSError.
    """

    def take() -> tuple[Path, str, bool]:
        record = OwnerRecord.of_this_job()
        with explained(folder):
            made = not folder.exists()
            folder.mkdir(parents=True, exist_ok=True)
            taking = Taking(folder / NAME, record)
            wait_locally(taking.ended, f"the owner of {folder} to leave")
        return folder, record.token, made

    folder, token, made = group.from_one("the owner of a folder", take)
    return Owner(folder, token, made, holds=group.rank == 0)


class Taking:
    """A try to become the owner of a folder by the file `path`, which goes on until it has
    `ended`.
    """

    def __init__(self, path: Path, record: OwnerRecord) -> None:
        self.path = path
        self.record = record
        self._begin = time.monotonic()
        self._told = False

    def ended(self, seconds: float) -> bool:
        """Look once more, and return whether the folder is this job's. Raises OSError and
        OwnerError.
        """
        if _create(self.path, self.record):
            return True
        with suppress(FileNotFoundError):  # it was released, or another job was faster
            owner = read(self.path)
            if owner is not None and owner.token == self.record.token:
                return True
            if self._is_left(self.path, owner):
                self._replace(owner)
        time.sleep(seconds)
        return False

    def _is_left(self, path: Path, owner: OwnerRecord | None) -> bool:
        """Whether the job that a file names writes no more. Raises OwnerError for one that lives on
        after all.
        """
        late = time.monotonic() - self._begin > LIVING_SECONDS
        # a file that stays cut short is of a job that died while it wrote it
        if late if owner is None else owner.has_ended(self.record):
            return True
        if late:
            raise OwnerError(
                "another job owns the folder",
                found=f"{owner}, in {path}",
                expected="a folder that no other job writes to",
                remedy="wait for the end of that job, or choose another folder; if it hangs, end "
                "its processes; if it "
                f"has died on another host, remove {path}",
            )
        if not self._told:
            self._told = True
            owns = owner or "a job that has not said who it is"
            write(
                f"mpipipe: {path.parent} is owned by {owns}; waits {LIVING_SECONDS:g} s for it to "
                "leave\n"
            )
        return False

    def _replace(self, owner: OwnerRecord | None) -> None:
        """Put this job in the place of a dead owner, unless another job does that at the same
        time.
        """
        token = "none" if owner is None else owner.token
        claim = self.path.with_name(f"{CLAIM}{token}")
        if not _create(claim, self.record):
            if self._is_left(claim, read(claim)):
                claim.unlink()
            return
        try:
            if read(self.path) == owner:
                claim.rename(self.path)
                write(
                    f"mpipipe: {self.path.parent} was owned by {owner or 'a job'}, which is dead: "
                    "taken over\n"
                )
        finally:
            claim.unlink(missing_ok=True)


def _create(path: Path, record: OwnerRecord) -> bool:
    """Create a file with a record; return False where there is one. Raises OSError."""
    try:
        descriptor = os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644
        )
    except FileExistsError:
        return False
    try:
        os.write(descriptor, f"{json.dumps(asdict(record))}\n".encode())
        os.fsync(descriptor)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(descriptor)
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
        facts = json.loads(content)
        kinds = {name: type(value).__name__ for name, value in facts.items()}
        int(facts["token"], 16)  # it becomes part of a name
        int(facts["starts"])
        return OwnerRecord(**facts) if kinds == OwnerRecord.__annotations__ else None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


@dataclass(frozen=True)
class OwnerRecord:
    """The content of owner.json; host and since are for people."""

    token: str
    host: str
    machine: str  # names the boot of the host and the space of process ids, in which `process` is
    process: int  # that leads the job, and when it was started
    start: str
    job: str  # number of the scheduler's job with the variable that has it, "" without one
    starts: str  # how often the scheduler has started the job again, "0" where it does not count
    since: str

    @classmethod
    def of_this_job(cls) -> OwnerRecord:
        """Describe the job that this process leads."""
        own = os.getpid()
        since = f"{datetime.now():%Y-%m-%d %H:%M:%S}"
        host, (job, starts) = socket.gethostname(), _job(os.environ)
        return cls(
            secrets.token_hex(8),
            host,
            this_machine(),
            own,
            _start_of(own) or "",
            job,
            starts,
            since,
        )

    def has_ended(self, other: OwnerRecord) -> bool:
        """Whether this owner writes no more, as far as the job of `other`, on this machine, can
        know.
        """
        if self.machine == other.machine:
            return _start_of(self.process) not in (self.start, HIDDEN)
        boot, own_boot = (record.machine.rpartition(" ")[0] for record in (self, other))
        if boot and own_boot and boot != own_boot and self.host == other.host:
            return True
        return bool(other.job) and self.job == other.job and int(self.starts) < int(other.starts)

    def __str__(self) -> str:
        job = f"{self.job}, " if self.job else ""
        return f"{job}process {self.process} on {self.host}, since {self.since}"


# In place of the start time of a process that another user has, where the system hides it.
HIDDEN = "hidden"


def _start_of(number: int) -> str | None:
    """Return when a process of this machine began, in ticks since the boot; None if it has
    ended.
    """
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
        return secrets.token_hex(8)  # like no other: nothing is known of its processes


def _job(environment: Mapping[str, str]) -> tuple[str, str]:
    """Return the number of the batch job with its variable, and how often it was started again; ""
    without one.
    """
    for name, count in JOBS.items():
        if environment.get(name):
            return f"{name} {environment[name]}", environment.get(count) or "0"
    return "", "0"
