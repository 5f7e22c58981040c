"""The output folder of a training: one for all ranks, new or empty, and visible to every rank that
writes weights.

In it config.toml and environment.json say where the numbers come from.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shlex
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from mpipipe import files
from mpipipe.checkpoint import Owner, is_owner_file, restore_folder, take_folder
from mpipipe.errors import ConfigError, StorageError
from mpipipe.job import Communicator, group_of
from mpipipe.options import written
from mpipipe.planning import LayerPlan
from mpipipe.train.config import TaskConfig, toml_line
from mpipipe.train.task import Task

PATIENCE = 10.0  # seconds in which a network file system shows one host what another one wrote
PAUSE = 0.1
MARKER = ".mpipipe-marker"
FINISHED = "finished"  # left once all ranks have ended well; batch scripts look at it


def shared_path(comm: Communicator, path: str | None) -> str:
    """Return on every rank what `path` is on rank 0 as an absolute one; None is runs/ and the time.
    Collective.
    """

    def found() -> str:
        try:
            place = os.path.abspath(
                f"runs/{datetime.now():%Y%m%d-%H%M%S}" if path is None else path
            )
        except OSError as error:
            raise ConfigError(
                f"the working folder is gone: {error.strerror}",
                found=str(path),
                expected="an absolute path",
                remedy="start the job in a folder that exists, or name an absolute path",
            ) from error
        if path is not None:
            return place
        with using(Path(place)):
            return str(files.new_folder(Path(place)))

    return group_of(comm).from_one("the path of a folder", found)


def own(comm: Communicator, path: str | None, replaced: Sequence[str] = ()) -> Owner:
    """Make the output folder this job's, and mend what a job that was killed has left there;
    collective.

    `replaced` are folders in it that are replaced as a whole. For `path` see `shared_path`.

    Raises what `take_folder` raises; ConfigError for a folder that cannot be used.
    """
    group = group_of(comm)
    out = Path(shared_path(comm, path))
    owned = take_folder(out, group, using)
    if path is None:
        owned.made = True
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


def names_in(out: Path) -> set[str]:
    """Return what is in an output folder, but for what any job has there, whatever it has done so
    far.
    """
    with using(out):
        names = {path.name for path in out.iterdir()} if out.exists() else set()
    return {name for name in names if not is_owner_file(name) and not name.startswith(MARKER)}


def check_vacant(out: Path, resumable: bool) -> None:
    """Raise ConfigError for a folder that holds anything, such as a `resumable` training: none is
    overwritten.
    """
    if names_in(out):
        raise ConfigError(
            "the folder for metrics is not empty",
            found=str(out),
            expected="a new or empty folder",
            remedy=f"{'go on from its checkpoints with --resume auto, ' if resumable else ''}choose another one with "
            "--out, or move the old run away",
        )


def using(out: Path) -> AbstractContextManager[None]:
    """Turn an OSError into the error for a folder that cannot be used."""
    expected = "a folder that can be made and written to"
    remedy = "choose another one with --out"
    return files.reading(
        "the folder for metrics", out, ConfigError, expected=expected, remedy=remedy, done="used"
    )


def make_folder(out: Path, comm: Communicator, writes: bool) -> None:
    """Make the folder on rank 0, and check on each rank that writes that it sees the same one;
    collective.

    Raises ConfigError on every rank if the folder cannot be made, or a rank that writes sees
    another folder or none, as with a disk that each host has for itself: weights would be lost or
    scattered.
    """
    group = group_of(comm)
    token = group.broadcast(
        "the marker of the output folder", secrets.token_hex(16) if comm.rank == 0 else None
    )
    marker = out / f"{MARKER}-{token}"
    with group.raise_together("making the output folder"), using(out):
        if comm.rank == 0:
            out.mkdir(parents=True, exist_ok=True)
            (out / FINISHED).unlink(missing_ok=True)  # of a training that goes on
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(marker, flags, 0o644), "w") as file:
                file.write(token)
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


def finish(out: Path, comm: Communicator) -> None:
    """Leave the file `finished` once all ranks have come to the end of the training; collective.

    An exit code 0 is no proof of that: MPICH's launcher returns 0 where a library in C ends one
    rank by `exit(0)`.

    Raises StorageError on every rank if the file cannot be written.
    """
    group = group_of(comm)
    path = out / FINISHED
    group.agree("train: all ranks have come to the end")
    remedy = (
        "the training has ended well, and what it saved is there; make room, and write this "
        "file yourself"
    )
    what = "the file that says that a training has ended"
    with (
        group.raise_together("train: the file of the end"),
        files.writing(what, path, StorageError, remedy=remedy),
    ):
        if comm.rank == 0:
            files.write_whole(path, f"{datetime.now():%Y-%m-%d %H:%M:%S}\n".encode())


def _sees(marker: Path, token: str) -> bool:
    """Whether this rank reads the token in the marker, and may write next to the marker."""
    stop = time.monotonic() + PATIENCE
    while True:
        try:
            if files.read_text(marker, len(token)) == token and os.access(marker.parent, os.W_OK):
                return True
        except (OSError, UnicodeDecodeError) as error:
            if isinstance(error, OSError) and error.errno in (
                errno.EMFILE,
                errno.ENFILE,
            ):  # of this process
                with using(marker.parent):
                    raise
        if time.monotonic() > stop:
            return False
        time.sleep(PAUSE)


# -- Where the numbers come from: config.toml and environment.json ---------------------------------
#
# config.toml is the configuration with every open option filled in, so `train --config` makes the
# same numbers again. environment.json is what else the numbers and their times depend on. Both
# files describe the newest start.


CONFIG = "config.toml"
ENVIRONMENT = "environment.json"
# every file that a training may write before its first checkpoint, except metrics.jsonl
OURS = re.compile(r"(config\.toml|environment\.json|train\.log)(\.partial)?|tensorboard|finished")


def resolved(
    config: TaskConfig, task: Task, plan: LayerPlan, device: str, pipe: int
) -> dict[str, Any]:
    """Return the configuration as keys of a file, in which open options have the values of this
    training.

    Paths are absolute, so that the file works in any working folder, but that of the task, which is
    next to the file: a run folder can be moved. A training with these keys begins anew: `out` and
    `resume = "auto"` are left out.
    """
    given = {"device": device, "pipe": pipe, "microbatches": plan.schedule.microbatches}
    values = task.resolve(written(config) | given)
    if task.file is not None:
        values["task"] = f"{task.file.path.name}:{task.file.name}"
        values["init"] = values.get("init") and absolute(values["init"])
        values.pop("changed_task", None)
    values["resume"] = None if values["resume"] in ("auto", "no") else absolute(values["resume"])
    return {
        name.rstrip("_"): value
        for name, value in values.items()
        if value is not None and name != "out"
    }


def absolute(path: str) -> str:
    """Return an absolute path for one that exists, and any other text unchanged."""
    return os.path.abspath(path) if os.path.exists(path) else path


def write(out: Path, keys: Mapping[str, Any], environment: Mapping[str, Any], task: Task) -> None:
    """Write both files on rank 0, and copies of the file of the task and of its modules. Raises
    OSError.
    """
    command = (
        f"mpiexec -n {environment['ranks']} python -m mpipipe train --config "
        f"{shlex.quote(str(out / CONFIG))}"
    )
    content = f"# This training as it was resolved. Train it again:\n#   {command} --out NEW\n"
    if task.handed_over is not None:
        content += (
            "# but for the data, which the caller of train handed over: fingerprint "
            f"{task.handed_over}\n"
        )
    content += "".join(toml_line(*key) for key in keys.items())
    files.write_whole(
        out / CONFIG, content.encode(errors="surrogateescape")
    )  # a path may be no text
    if (source := task.file) is not None:
        facts = {"file": str(source.path), "class": source.name, "sha256": source.checksum}
        environment = {**environment, "task": facts | {"modules": sorted(source.modules)}}
        for name, code in source.copies.items():
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            files.write_whole(out / name, code)
    files.write_whole(out / ENVIRONMENT, (json.dumps(environment, indent=1) + "\n").encode())
