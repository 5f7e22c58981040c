"""The output folder of a training: one for all ranks, new or empty, and visible to every rank that writes weights."""

from __future__ import annotations

import errno
import os
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from itertools import count
from pathlib import Path

from mpipipe import files
from mpipipe.checkpoint import Owner, is_owner_file, keep_folder, restore_folder, take_folder
from mpipipe.errors import ConfigError
from mpipipe.job import Communicator, group_of

PATIENCE = 10.0  # seconds in which a network file system shows one host what another one wrote
PAUSE = 0.1
MARKER = ".mpipipe-marker"


def shared_path(comm: Communicator, path: str | None) -> str:
    """Return, on every rank, the absolute path that `path` is on rank 0; None is runs/ and the time. Collective.

    The ranks may have different working folders. Raises ConfigError if the working folder of rank 0 is gone.
    """
    absolute, group = None, group_of(comm)
    with group.raise_together("the path of a folder"):
        if comm.rank == 0:
            try:
                absolute = os.path.abspath(f"runs/{datetime.now():%Y%m%d-%H%M%S}" if path is None else path)
            except OSError as error:
                raise ConfigError(
                    f"the working folder is gone: {error.strerror}",
                    found=str(path),
                    expected="an absolute path",
                    remedy="start the job in a folder that exists, or name an absolute path",
                ) from error
            if path is None:
                absolute = _new(absolute)
    return group.broadcast("the path of a folder", absolute)


def _new(path: str) -> str:
    """Make the folder `path`, or the first of path-2, path-3, ... that another job has not made in the same second."""
    numbered = path
    with using(Path(path)):
        os.makedirs(os.path.dirname(path), exist_ok=True)
    for number in count(2):
        with using(Path(numbered)), suppress(FileExistsError):
            os.mkdir(numbered)
            break
        numbered = f"{path}-{number}"
    return numbered


def own(comm: Communicator, path: str | None, replaced: Sequence[str] = ()) -> Owner:
    """Make the output folder this job's, and mend what a job that was killed has left there; collective.

    `replaced` are folders in it that are replaced as a whole. For `path` see `shared_path`.

    Raises what `take_folder` raises; ConfigError for a folder that cannot be used.
    """
    group, out = group_of(comm), Path(shared_path(comm, path))
    owned = take_folder(out, group, using)
    if path is None:
        owned.made.insert(0, out)
    try:
        with group.raise_together("train: what a killed job has left"), using(out):
            if comm.rank == 0:
                for name in replaced:
                    restore_folder(out / name)
                for marker in out.glob(f"{MARKER}-*"):
                    marker.unlink()
    except BaseException:
        owned.release()
        raise
    return owned


def is_ours(name: str) -> bool:
    """Whether a job has a file or folder of this name in its output folder, whatever it has done there so far."""
    return is_owner_file(name) or name.startswith(MARKER)


def check_vacant(out: Path, resumable: bool) -> None:
    """Raise ConfigError for a folder that holds anything, such as a `resumable` training: none is overwritten."""
    with using(out):
        vacant = not out.exists() or all(is_ours(path.name) for path in out.iterdir())
    if not vacant:
        raise ConfigError(
            "the folder for metrics is not empty",
            found=str(out),
            expected="a new or empty folder",
            remedy=f"{'go on from its checkpoints with --resume auto, ' if resumable else ''}choose another one with "
            "--out, or move the old run away",
        )


@contextmanager
def using(out: Path) -> Iterator[None]:
    """Turn an OSError into the error for a folder that cannot be used."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"the folder for metrics cannot be used: {error.strerror}",
            found=str(out),
            expected="a folder that can be made and written to",
            remedy="choose another one with --out",
        ) from error


def make_folder(out: Path, comm: Communicator, writes: bool) -> None:
    """Make the folder on rank 0, and check on each rank that writes that it sees the same one; collective.

    Raises ConfigError on every rank if the folder cannot be made, or a rank that writes sees another folder or none, as
    with a disk that each host has for itself: weights would be lost or scattered.
    """
    group = group_of(comm)
    token = group.broadcast("the marker of the output folder", secrets.token_hex(16) if comm.rank == 0 else None)
    marker = out / f"{MARKER}-{token}"
    with group.raise_together("making the output folder"), using(out):
        if comm.rank == 0:
            out.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(marker, flags, 0o644), "w") as file:
                file.write(token)
            keep_folder(out)
    try:
        with group.raise_together("looking at the output folder"):
            if writes and not _sees(marker, token):
                raise ConfigError(
                    "the output folder of rank 0 is not there on this rank",
                    found=f"no such {out} on {socket.gethostname()}",
                    expected="one folder that all ranks which write weights see and may write to",
                    remedy="choose one on a file system that all hosts share, with --out",
                )
    finally:
        if comm.rank == 0:
            with suppress(OSError):
                marker.unlink()


def _sees(marker: Path, token: str) -> bool:
    """Whether this rank reads the token in the marker, and may write next to the marker."""
    stop = time.monotonic() + PATIENCE
    while True:
        try:
            if files.read_text(marker, len(token)) == token and os.access(marker.parent, os.W_OK):
                return True
        except (OSError, UnicodeDecodeError) as error:
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):  # of this process
                with using(marker.parent):
                    raise
        if time.monotonic() > stop:
            return False
        time.sleep(PAUSE)
