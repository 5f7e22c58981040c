"""The output folder of a training: one for all ranks, and where the training begins.

In it config.toml and environment.json say where the numbers come from.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import fields
from datetime import datetime
from itertools import filterfalse
from pathlib import Path
from typing import Any

from mpipipe import checkpoint, files, nn
from mpipipe.checkpoint import Checkpoint
from mpipipe.comm import Mesh
from mpipipe.errors import ConfigError, OwnerError, StorageError
from mpipipe.job import Communicator, group_of
from mpipipe.options import Values
from mpipipe.train import report
from mpipipe.train.config import TaskConfig, toml_line
from mpipipe.train.config_fields import option_of, written
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
        place = os.path.abspath(path or f"runs/{datetime.now():%Y%m%d-%H%M%S}")
        if path is None:
            with using(Path(place)):
                place = str(new_folder(Path(place)))
        return place

    return group_of(comm).from_one("the path of a folder", find)


def new_folder(path: Path) -> Path:
    """Make the folder `path`, or the first of path-2, path-3, ... that is new; return it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    place = path
    number = 1
    while True:
        with suppress(FileExistsError):
            place.mkdir()
            return place
        number += 1
        place = Path(f"{path}-{number}")


def names_in(out: Path) -> set[str]:
    """Return what is in an output folder besides what any job has there from its start."""
    with using(out):
        return set(filterfalse(checkpoint.is_owner_file, os.listdir(out)))


def using(out: Path) -> AbstractContextManager[None]:
    """Turn an OSError into the error for a folder that cannot be used."""
    return files.reading(
        "the folder for metrics",
        out,
        ConfigError,
        expected="a folder that can be made and written to",
        remedy="choose another one with --out",
        done="used",
    )


def make_folder(out: Path, comm: Communicator) -> None:
    """Make the folder on rank 0, which each rank is to see; collective.

    Raises ConfigError on every rank if the folder cannot be made, or a rank sees another folder or
    none, as with a disk that each host has for itself: weights would be lost or
    scattered.
    """
    with group_of(comm).raise_together("making the output folder"), using(out):
        if comm.rank == 0:
            out.mkdir(parents=True, exist_ok=True)
            # A training that goes on is not finished any more.
            (out / FINISHED).unlink(missing_ok=True)
        if not _sees(out):
            raise ConfigError(
                "the output folder of rank 0 is not there on this rank",
                found=f"no such {out} on {socket.gethostname()}",
                expected="one folder that all ranks see and may write to",
                remedy="choose one on a file system that all hosts share, with --out",
            )


def _sees(out: Path) -> bool:
    """True if this rank finds the file of this job's owner in the folder, and may write there."""
    stop = time.monotonic() + PATIENCE
    while time.monotonic() < stop:
        with suppress(OwnerError):
            checkpoint.check_owned(out)
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
    with (
        group.raise_together("train: the file of the end"),
        files.writing(
            "the file that says that a training has ended",
            path,
            error=StorageError,
            remedy="the training has ended well, and what it saved is there; make room, and write "
            "this file yourself",
        ),
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


def resolved(config: TaskConfig, task: Task, chosen: Values) -> Values:
    """Return the configuration as keys of a file, with what was `chosen` for open options.

    Paths are absolute, so that the file works in any working folder, but that of the task, which is
    next to the file: a run folder can be moved. A training with these keys begins anew: `out` and
    `resume = "auto"` are left out.
    """
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


def write(out: Path, keys: Values, environment: Values, task: Task) -> None:
    """Write both files on rank 0, and copies of the file and modules of a task. Raises OSError."""
    path = out / CONFIG
    content = (
        "# This training as it was resolved. Train it again:\n"
        f"#   mpiexec -n {environment['ranks']} python -m mpipipe train "
        f"--config {shlex.quote(str(path))} --out NEW\n"
    )
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
        environment = environment | {
            "task": {
                "file": str(source.path),
                "class": source.name,
                "sha256": source.checksum,
                "modules": sorted(source.modules),
            }
        }
        for name, code in source.copies.items():
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            files.write_whole(out / name, code)
    files.write_whole(out / ENVIRONMENT, (json.dumps(environment, indent=1) + "\n").encode())


# -- Where a training begins: anew, with the weights of another one, or after a checkpoint ---------
#
# What must stay the same over a resume decides which numbers come out (`Option.decides`).


CHECKPOINTS = "checkpoints"


def facts_of(config: TaskConfig, task: Task) -> Values:
    """Return what a checkpoint remembers of the training's configuration, as plain values."""
    return plain(
        {"configuration": written(config), "model": task.sizes(), "fingerprint": task.fingerprint}
    )


def find_start(config: TaskConfig, task: Task, mesh: Mesh, out: Path) -> Checkpoint | None:
    """Return the checkpoint after which the training continues, None if it begins; collective.

    Raises, on every rank and before anything is written, ArgumentError for a checkpoint that is
    damaged or missing, and ConfigError for one of another training, and for an output folder that
    this training may not go on in.
    """

    def find() -> Checkpoint | None:
        with using(out):
            # A killed job may have left them half replaced.
            for name in task.folders:
                checkpoint.restore_folder(out / name)
        newest = checkpoint.newest(out)
        path: Path | str | None = config.resume
        if config.resume == "auto":
            path = newest
        start = None
        if path not in (None, "no"):
            start = checkpoint.read(path)
            _check_same(start, config, task)
        is_in = start is None or start.path.parent.resolve() == (out / CHECKPOINTS).resolve()
        if config.resume == "no" or not is_in:
            if names_in(out):
                go_on = ""
                if newest is not None:
                    go_on = "go on from its checkpoints with --resume auto, "
                # Nothing is overwritten.
                raise ConfigError(
                    "the folder for metrics is not empty",
                    found=str(out),
                    expected="a new or empty folder",
                    remedy=f"{go_on}choose another one with --out, or move the old run away",
                )
            return start
        # Raises where they are no metrics.
        report.records_until(out, 0)
        if start is None:
            _check_unfinished(out, task)
        return start

    return group_of(mesh.comm).from_one("train: where to begin", find)


def newest_state(run: Path) -> Checkpoint:
    """Return the weights of a run folder, or its newest checkpoint if that is of a later step."""
    path = checkpoint.newest_state(run)
    if path is None:
        raise ConfigError(
            "the run folder has neither weights nor a checkpoint",
            found=str(run),
            expected="the --out folder of `mpipipe train FILE.py`",
            remedy="weights are written at the end of a training, checkpoints with --save-every",
        )
    return checkpoint.read(path)


def begin(config: TaskConfig, task: Task, mesh: Mesh, stages: Sequence[nn.Stage]) -> None:
    """Set the parameters with which a new training begins; collective."""
    task.load(stages, mesh)
    init = getattr(config, "init", None)
    if init is not None:
        path = Path(init)
        with group_of(mesh.comm).raise_together("train: the weights to begin with"):
            is_run = (path / "weights").is_dir() or (path / CHECKPOINTS).is_dir()
            if mesh.rank == 0 and is_run:
                path = newest_state(path).path
        checkpoint.load(path, mesh, stages)


# Files and folders that a training may leave before its first checkpoint, besides copies of a task.
UNFINISHED = re.compile(
    r"((config|environment|metrics|train)\.(toml|json|jsonl|log)(\.partial)?"
    r"|tensorboard|checkpoints|__pycache__|.*\.py.*)"
)


def _check_unfinished(out: Path, task: Task) -> None:
    """Raise ConfigError for a folder with more than a training leaves before a checkpoint."""
    known: set[str] = set()
    if task.file is not None:
        known.update(name.partition("/")[0] for name in task.file.copies)
    # Their description is written last: without it they are not whole.
    if not any(out.glob("weights/**/*.json")):
        known.add("weights")
    others = set(filterfalse(UNFINISHED.fullmatch, names_in(out) - known))
    if others:
        raise ConfigError(
            "there is no checkpoint to go on from, and the folder is not empty",
            found=f"{', '.join(sorted(others)[:5])} in {out}",
            expected="checkpoints, or what a training leaves that ended before its first one",
            remedy="choose another folder with --out, or move the old run away",
        )


def _check_same(start: Checkpoint, config: TaskConfig, task: Task) -> None:
    """Raise ConfigError unless this is a checkpoint of the same training, not yet past its end."""
    place = str(start.path)
    now = facts_of(config, task)
    others = [entry.name for entry in fields(config) if not option_of(entry).decides]
    try:
        # Sizes are those of the model, where options leave them.
        saved = start.state["configuration"] | start.state["model"]
        before = plain(written(type(config)())) | saved
        fingerprint = start.state["fingerprint"]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            "the checkpoint is not one of `mpipipe train`",
            found=place,
            remedy="load it with mpipipe.checkpoint",
        ) from error
    after = now["configuration"] | now["model"]
    then = []
    expected = []
    for key, value in after.items():
        if key not in others and before.get(key) != value:
            then.append(f"{key} = {before.get(key)!r}"[:80])
            expected.append(f"{key} = {value!r}"[:80])
    if then:
        raise ConfigError(
            "the checkpoint is of a training with another configuration",
            found=f"{', '.join(then)} in {place}",
            expected=", ".join(expected),
            remedy=f"what may change over a resume is {', '.join(others)}; give all else as it "
            "was, or begin a new training with --from, or of a task with --init",
        )
    if fingerprint != now["fingerprint"] and not getattr(config, "changed_task", False):
        kind = "on other data"
        if task.file is not None:
            kind = f"of another file: {task.file.path.name}, or a module next to it, has changed"
        raise ConfigError(
            f"the checkpoint is of a training {kind}",
            found=f"fingerprint {now['fingerprint']}",
            expected=f"{fingerprint!s:.80}, as in {place}; copies of files are in "
            f"{start.path.parent.parent}",
            remedy="give the same files, or begin a new training with --from, or of a task with "
            "--init; that a file of a task was changed is said with --changed-task",
        )
    if start.step > config.steps:
        raise ConfigError(
            "the checkpoint is past the end of the training",
            found=f"step {start.step} in {place}",
            expected=f"at most steps = {config.steps}",
            remedy="raise steps, or resume an earlier checkpoint",
        )


def plain(values: Any) -> Any:
    """Return values as they come back from a file: tuples become lists."""
    return json.loads(json.dumps(values))


def leave_behind(start: Checkpoint | None, out: Path) -> Iterator[Path]:
    """Rename what was saved after the resumed checkpoint, which would be the newest else.

    Yields the new names.
    """
    if start is None:
        return
    for path in [*checkpoint.find(out / CHECKPOINTS), *checkpoint.find(out / "weights")]:
        if checkpoint.step_of(path) >= start.step and path.name != start.path.name:
            yield checkpoint.set_aside(path)
