"""The output folder of a training: one for all ranks, which every rank that writes sees.

In it config.toml and environment.json say where the numbers come from.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import datetime
from itertools import filterfalse
from pathlib import Path

from mpipipe import files
from mpipipe.checkpoint import check_owned, is_owner_file, restore_folder
from mpipipe.errors import ConfigError, OwnerError, StorageError
from mpipipe.job import Communicator, group_of
from mpipipe.options import Values, written
from mpipipe.planning import LayerPlan
from mpipipe.train.config import TaskConfig, toml_line
from mpipipe.train.task import Task

# Seconds in which a network file system shows one host what another one wrote.
PATIENCE = 10.0
PAUSE = 0.1
# Left once all ranks have ended well; batch scripts look at it.
FINISHED = "finished"


def shared_path(comm: Communicator, path: str | None) -> str:
    """Make a path on rank 0 absolute, and known to all ranks; collective.

    None stands for a new folder, runs/ and the time.
    """

    def find() -> str:
        try:
            place = os.path.abspath(path or f"runs/{datetime.now():%Y%m%d-%H%M%S}")
        except OSError as error:
            raise ConfigError(
                f"the working folder is gone: {error.strerror}",
                found=str(path),
                expected="an absolute path",
                remedy="start the job in a folder that exists, or name an absolute path",
            ) from error
        if path is None:
            with using(Path(place)):
                place = str(files.new_folder(Path(place)))
        return place

    return group_of(comm).from_one("the path of a folder", find)


def mend(out: Path, replaced: Sequence[str]) -> None:
    """Mend what a killed job has left in the folder, of which some are replaced as a whole."""
    with using(out):
        for name in replaced:
            restore_folder(out / name)


def names_in(out: Path) -> set[str]:
    """Return what is in an output folder besides what any job has there from its start."""
    with using(out):
        return set(filterfalse(is_owner_file, os.listdir(out)))


def check_vacant(out: Path, resumable: bool) -> None:
    """Raise ConfigError for a folder that holds anything: nothing is overwritten."""
    if names_in(out):
        go_on = ""
        if resumable:
            go_on = "go on from its checkpoints with --resume auto, "
        raise ConfigError(
            "the folder for metrics is not empty",
            found=str(out),
            expected="a new or empty folder",
            remedy=f"{go_on}choose another one with --out, or move the old run away",
        )


def using(out: Path) -> AbstractContextManager[None]:
    """Turn an OSError into the error for a folder that cannot be used."""
    expected = "a folder that can be made and written to"
    remedy = "choose another one with --out"
    return files.reading(
        "the folder for metrics", out, ConfigError, expected=expected, remedy=remedy, done="used"
    )


def make_folder(out: Path, comm: Communicator, writes: bool) -> None:
    """Make the folder on rank 0, which each rank that writes is to see; collective.

    Raises ConfigError on every rank if the folder cannot be made, or a rank that writes sees
    another folder or none, as with a disk that each host has for itself: weights would be lost or
    scattered.
    """
    group = group_of(comm)
    with group.raise_together("making the output folder"), using(out):
        if comm.rank == 0:
            out.mkdir(parents=True, exist_ok=True)
            # A training that goes on is not finished any more.
            (out / FINISHED).unlink(missing_ok=True)
    with group.raise_together("looking at the output folder"):
        if writes and not _sees(out):
            raise ConfigError(
                "the output folder of rank 0 is not there on this rank",
                found=f"no such {out} on {socket.gethostname()}",
                expected="one folder that all ranks which write weights see and may write to",
                remedy="choose one on a file system that all hosts share, with --out",
            )


def _sees(out: Path) -> bool:
    """True if this rank finds the file of this job's owner in the folder, and may write there."""
    stop = time.monotonic() + PATIENCE
    while time.monotonic() < stop:
        with suppress(OwnerError):
            check_owned(out)
            if os.access(out, os.W_OK):
                return True
        time.sleep(PAUSE)
    return False


def finish(out: Path, comm: Communicator) -> None:
    """Leave the file `finished` once all ranks have come to the end; collective.

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


# -- Where the numbers come from: config.toml and environment.json ---------------------------------
#
# config.toml is the configuration with every open option filled in, so `train --config` makes the
# same numbers again. environment.json is what else the numbers and their times depend on. Both
# files describe the newest start.


CONFIG = "config.toml"
ENVIRONMENT = "environment.json"


def resolved(config: TaskConfig, task: Task, plan: LayerPlan, device: str, pipe: int) -> Values:
    """Return the configuration as keys of a file, with values of this training for open options.

    Paths are absolute, so that the file works in any working folder, but that of the task, which is
    next to the file: a run folder can be moved. A training with these keys begins anew: `out` and
    `resume = "auto"` are left out.
    """
    chosen = {"device": device, "pipe": pipe, "microbatches": plan.schedule.microbatches}
    values = task.resolve(written(config) | chosen)
    if task.file is not None:
        values["task"] = f"{task.file.path.name}:{task.file.name}"
        values["init"] = values.get("init") and absolute(values["init"])
        values.pop("changed_task", None)
    values.pop("out")
    if values["resume"] in ("auto", "no"):
        values.pop("resume")
    else:
        values["resume"] = absolute(values["resume"])
    return {name.rstrip("_"): value for name, value in values.items() if value is not None}


def absolute(path: str) -> str:
    """Return an absolute path for one that exists, and any other text unchanged."""
    if os.path.exists(path):
        return os.path.abspath(path)
    return path


def write(
    out: Path, keys: Mapping[str, object], environment: Mapping[str, object], task: Task
) -> None:
    """Write both files on rank 0, and copies of the file and modules of a task. Raises OSError."""
    path = out / CONFIG
    command = f"mpiexec -n {environment['ranks']} python -m mpipipe train --config"
    content = "# This training as it was resolved. Train it again:\n"
    content += f"#   {command} {shlex.quote(str(path))} --out NEW\n"
    if task.handed_over is not None:
        content += (
            "# but for the data, which the caller of train handed over: fingerprint "
            f"{task.handed_over}\n"
        )
    content += "".join(toml_line(*key) for key in keys.items())
    # A path may be no text.
    files.write_whole(path, content.encode(errors="surrogateescape"))
    source = task.file
    if source is not None:
        facts = {"file": str(source.path), "class": source.name, "sha256": source.checksum}
        environment = {**environment, "task": facts | {"modules": sorted(source.modules)}}
        for name, code in source.copies.items():
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            files.write_whole(out / name, code)
    files.write_whole(out / ENVIRONMENT, (json.dumps(environment, indent=1) + "\n").encode())
