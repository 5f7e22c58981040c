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
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mpipipe.checkpoint.owner_taking import CLAIM, NAME, Record, Taking, read, this_process, write_over
from mpipipe.errors import MpipipeError, OwnerError
from mpipipe.job.context import current_rank, is_rank
from mpipipe.job.exit import Stop
from mpipipe.job.group import Group
from mpipipe.job.wait import wait_locally

RENEW_SECONDS = 10.0  # between two writes of an owner that lives
FRESH_SECONDS = 1.0  # after a look at its token an owner need not look again: nobody takes over that fast


class Owner:
    """What one rank knows of a folder that its job owns.

    Parameters
    ----------
    folder : that the job owns
    token : of the job
    made : folders that were made for it, the innermost first; they go at the release, if they are empty

    Attributes
    ----------
    users : how many share the ownership; the last one releases it
    """

    def __init__(self, folder: Path, token: str, made: Iterable[Path] = ()) -> None:
        self.folder, self.token, self.made, self.users = folder, token, list(made), 1
        self._checked = time.monotonic()
        self._record: Record | None = None  # of the rank that renews the file
        self._descriptor, self._ended = -1, threading.Event()
        self._lock = threading.Lock()  # held while the descriptor is in use: its number may soon be another file's
        current_rank().owners.append(self)

    def check(self) -> None:
        """Raise OwnerError if the folder is not this job's any more; to be called before a write."""
        if time.monotonic() - self._checked < FRESH_SECONDS:
            return
        token, text = self._found()
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
        return self._found()[0] not in (self.token, "")

    def _found(self) -> tuple[str, str]:
        """Return the token in the file and what else it says; "" where the file is gone."""
        try:
            found = Record.parse(read(self.folder / NAME))
        except FileNotFoundError:
            return "", "no owner.json"
        except OwnerError as error:
            return "none", str(error)
        except OSError:  # the write that follows will say what is wrong
            found = None
        return (self.token, "") if found is None else (found.token, str(found))

    # -- the rank that keeps the file alive ---------------------------------------------------------------------------

    def renew_by(self, descriptor: int, record: Record) -> None:
        """Keep the file alive from this rank, in a thread: also while a program compiles, validates or saves."""
        self._descriptor, self._record, self._ended = descriptor, record, threading.Event()
        atexit.register(self._release_all)  # in a program that ends without closing its saver
        thread = threading.Thread(target=self._renew, args=(self._ended,), name="mpipipe owner", daemon=True)
        with suppress(RuntimeError):  # the system has no thread left: jobs on other hosts may take this one for dead
            thread.start()

    def _renew(self, ended: threading.Event) -> None:
        while not ended.wait(RENEW_SECONDS):
            with self._lock, suppress(OSError):
                if self._record is not None and not ended.is_set():
                    self._record = self._record.renewed_now()
                    # into the file that was opened: where another job has taken over, it has no name any more
                    write_over(self._descriptor, self._record.content())

    def hand_on(self, group: Group, holder: int) -> None:
        """After ranks have died: let one of the ranks that are left keep the file alive; collective over them."""
        self._stop()
        processes = group.gather("the owner of a folder: its processes", this_process())
        with group.raise_together("the owner of a folder: who keeps it"):
            if group.rank == holder:
                self._checked = float("-inf")
                self.check()
                record = Record.of_this_job(self.token, processes)
                descriptor = os.open(self.folder / NAME, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
                os.ftruncate(descriptor, 0)
                write_over(descriptor, record.content())
                self.renew_by(descriptor, record)

    def _stop(self) -> None:
        self._ended.set()
        with self._lock:
            descriptor, self._descriptor, self._record = self._descriptor, -1, None
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
        if self._record is None or not is_rank():
            return
        with suppress(OSError):
            if self._found()[0] == self.token:
                (self.folder / NAME).unlink()
            for folder in self.made:
                folder.rmdir()  # only where nothing is in it
        self._stop()


@contextmanager
def released_at_end(owner: Owner, group: Group | None) -> Iterator[None]:
    """Release a folder at the end of the block. Where a group comes to that end alike, each rank knows that it is free.

    `group` is None where ranks may die on the way.
    """
    ends: BaseException | None = None
    try:
        yield
    except BaseException as error:
        ends = error
        raise
    finally:
        owner.release()
        if group is not None and group.failure is None and (ends is None or group.agreed_on(ends)):
            group.agree("the owner of a folder: it has left")


def covering(path: Path) -> Owner | None:
    """Return what this rank knows of the ownership of `path`, or of a folder above it; None if its job has none."""
    return next((each for each in current_rank().owners if each.folder == path or each.folder in path.parents), None)


def check(path: Path) -> None:
    """Raise OwnerError if `path` is in a folder that this job has lost to another one."""
    owner = covering(path)
    if owner is not None:
        owner.check()


def keep(path: Path) -> None:
    """Let the folder that this job owns, and in which `path` is, stay after the release, even if it is empty."""
    owner = covering(path)
    if owner is not None:
        owner.made.clear()


def is_ours(name: str) -> bool:
    """Whether a file of this name says who owns a folder."""
    return name == NAME or name.startswith(CLAIM)


def share(folder: Path, group: Group, explain: Callable[[Path, OSError], MpipipeError]) -> Owner:
    """Take part in the ownership of a folder that this job has already, or take it; collective. See `take`."""
    place = None
    if group.rank == 0:
        known = covering(folder.absolute())
        place = (folder.absolute(), None) if known is None else (known.folder, known.token)
    folder, token = group.broadcast("the owner of a folder", place)
    if token is None:
        return take(folder, group, explain)
    owner = covering(folder)
    if owner is None:
        return Owner(folder, token)
    owner.users += 1
    return owner


def take(folder: Path, group: Group, explain: Callable[[Path, OSError], MpipipeError]) -> Owner:
    """Make a folder this job's; collective.

    Raises, on every rank, OwnerError where another job keeps it, Stop with the code 1 where that is an earlier start of
    this job (a later start may find it gone), and what `explain` makes of an OSError.

    Parameters
    ----------
    folder : of rank 0; made where it is missing
    group : all ranks of the job
    explain : makes an error of the folder and an OSError
    """
    processes, taken = group.gather("the owner of a folder: its processes", this_process()), None
    outcome: tuple[Path, str, list[Path], str] | None = None
    with group.raise_together("the owner of a folder"):
        if group.rank == 0:
            token = secrets.token_hex(8)
            try:
                made = _make(folder)
                taken = Taking(folder, Record.of_this_job(token, processes))
                wait_locally(taken.ended, taken)
            except OSError as error:
                raise explain(folder, error) from error
            outcome = folder, token, made, taken.stop
    folder, token, made, stop = group.broadcast("the owner of a folder", outcome)
    if stop:
        raise Stop(stop, 1)
    owner = Owner(folder, token, made)
    if taken is not None:
        owner.renew_by(taken.descriptor, taken.record)
    return owner


def _make(folder: Path) -> list[Path]:
    """Make a folder, and return those that were not there, the innermost first. Raises OSError."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return missing
