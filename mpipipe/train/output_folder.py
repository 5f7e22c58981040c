"""The output folder of a training: one for all ranks, new or empty, and visible to every rank that writes weights."""

from __future__ import annotations

import os
import secrets
import socket
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from mpipipe import files
from mpipipe.comm.group import group_of
from mpipipe.comm.types import Communicator
from mpipipe.errors import ConfigError

PATIENCE = 10.0  # seconds in which a network file system shows one host what another one wrote
PAUSE = 0.1
MARKER = ".mpipipe-marker"


def shared_path(comm: Communicator, path: str | None) -> str:
    """Return, on every rank, the absolute path that `path` is on rank 0; None is runs/ and the time. Collective.

    The ranks may have different working folders. Raises ConfigError if the working folder of rank 0 is gone.
    """
    absolute, group = None, group_of(comm)
    with group.together("the path of a folder"):
        if comm.rank == 0:
            try:
                absolute = os.path.abspath(_free(f"runs/{datetime.now():%Y%m%d-%H%M%S}") if path is None else path)
            except OSError as error:
                raise ConfigError(
                    f"the working folder is gone: {error.strerror}",
                    found=str(path),
                    expected="an absolute path",
                    remedy="start the job in a folder that exists, or name an absolute path",
                ) from error
    return group.broadcast("the path of a folder", absolute)


def _free(path: str) -> str:
    """Return `path`, or where it exists the first of path-2, path-3, ... that does not: two jobs may begin at once."""
    numbered, number = path, 1
    while os.path.lexists(numbered):
        number += 1
        numbered = f"{path}-{number}"
    return numbered


def check_vacant(out: Path) -> None:
    """Raise ConfigError for a folder that holds anything: no run overwrites another."""
    try:
        vacant = not out.exists() or not any(out.iterdir())
    except OSError as error:
        raise unusable(out, error) from error
    if not vacant:
        raise ConfigError(
            "the folder for metrics is not empty",
            found=str(out),
            expected="a new or empty folder",
            remedy="choose another one with --out, or move the old run away",
        )


def unusable(out: Path, error: OSError) -> ConfigError:
    """Make the error for a folder that cannot be used."""
    return ConfigError(
        f"the folder for metrics cannot be used: {error.strerror}",
        found=str(out),
        expected="a folder that can be made and written to",
        remedy="choose another one with --out",
    )


def make_folder(out: Path, comm: Communicator, writes: bool) -> None:
    """Make the folder on rank 0, and check on each rank that writes that it sees the same one; collective.

    Raises ConfigError on every rank if the folder cannot be made. So it does where a rank that writes sees another
    folder or none, as with a disk that each host has for itself: weights would be lost or scattered.

    Parameters
    ----------
    out : the folder
    comm : all ranks of the training
    writes : whether this rank writes into the folder; the others need not see it
    """
    group = group_of(comm)
    token = group.broadcast("the marker of the output folder", secrets.token_hex(16) if comm.rank == 0 else None)
    marker = out / MARKER
    with group.together("making the output folder"):
        if comm.rank == 0:
            try:
                out.mkdir(parents=True, exist_ok=True)
                marker.write_text(token)
            except OSError as error:
                raise unusable(out, error) from error
    try:
        with group.together("looking at the output folder"):
            if writes and not _sees(marker, token):
                raise ConfigError(
                    "the output folder of rank 0 is not there on this rank",
                    found=f"no such {out} on {_host()}",
                    expected="one folder that all ranks which write weights see and may write to",
                    remedy="choose one on a file system that all hosts share, with --out",
                )
    finally:
        if comm.rank == 0:
            with suppress(OSError):
                marker.unlink()


def _sees(marker: Path, token: str) -> bool:
    """Whether this rank reads the token in the marker, and may write beside the marker."""
    stop = time.monotonic() + PATIENCE
    while True:
        with suppress(OSError, UnicodeDecodeError):
            if files.read_text(marker, len(token)) == token and os.access(marker.parent, os.W_OK):
                return True
        if time.monotonic() > stop:
            return False
        time.sleep(PAUSE)


def _host() -> str:
    return socket.gethostname()
