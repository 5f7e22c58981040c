"""Where a training begins: anew, with the weights of another one, or after a checkpoint of its own.

What must stay the same over a resume decides which numbers come out (`Option.decides`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import fields
from itertools import filterfalse
from pathlib import Path
from typing import Any

from mpipipe import checkpoint
from mpipipe.checkpoint import Checkpoint
from mpipipe.comm import Mesh
from mpipipe.errors import ConfigError
from mpipipe.job import group_of
from mpipipe.nn import Stage
from mpipipe.options import Values, option_of, written
from mpipipe.train import output_folder, report
from mpipipe.train.config import TaskConfig
from mpipipe.train.task import Task
from mpipipe.train.task_file import TaskFileConfig


def checkpoints_of(out: Path) -> Path:
    """Return the folder for the checkpoints of the training with the output folder `out`."""
    return out / "checkpoints"


def facts_of(config: TaskConfig, task: Task) -> Values:
    """Return what a checkpoint remembers of the training's configuration, as plain values."""
    facts = {
        "configuration": written(config),
        "model": task.sizes(),
        "fingerprint": task.fingerprint,
    }
    return plain(facts)


def find_start(config: TaskConfig, task: Task, mesh: Mesh, out: Path) -> Checkpoint | None:
    """Return the checkpoint after which the training continues, None if it begins; collective.

    Raises, on every rank and before anything is written, ArgumentError for a checkpoint that is
    damaged or missing, and ConfigError for one of another training, and for an output folder that
    this training may not go on in.
    """

    def find() -> Checkpoint | None:
        newest = checkpoint.newest(out)
        path: Path | str | None = config.resume
        if config.resume == "auto":
            path = newest
        start = None
        if path not in (None, "no"):
            start = checkpoint.read(path)
            _check_same(start, config, task)
        if config.resume == "no" or (start is not None and not _is_in(start, out)):
            output_folder.check_vacant(out, resumable=newest is not None)
            return start
        # Raises where they are no metrics.
        report.records_until(out, 0 if start is None else start.step)
        if start is None:
            _check_unfinished(out, task)
        return start

    return group_of(mesh.comm).from_one("train: where to begin", find)


def newest_state(run: Path) -> Checkpoint:
    """Return the weights of a run folder or its newest checkpoint, whichever was written last."""
    states = [checkpoint.newest(run / "weights"), checkpoint.newest(run)]
    paths = list(filter(None, states))
    if not paths:
        raise ConfigError(
            "the run folder has neither weights nor a checkpoint",
            found=str(run),
            expected="the --out folder of `mpipipe train FILE.py`",
            remedy="weights are written at the end of a training, checkpoints with --save-every",
        )
    return checkpoint.read(max(paths, key=lambda path: path.stat().st_mtime))


def begin(config: TaskConfig, task: Task, mesh: Mesh, stages: Sequence[Stage]) -> None:
    """Set the parameters with which a new training begins; collective."""
    task.load(stages, mesh)
    if isinstance(config, TaskFileConfig) and config.init is not None:
        path = Path(config.init)
        folders = path / "weights", checkpoints_of(path)
        with group_of(mesh.comm).raise_together("train: the weights to begin with"):
            if mesh.rank == 0 and any(folder.is_dir() for folder in folders):
                path = newest_state(path).path
        checkpoint.load(path, mesh, stages)


# Files and folders that a training may leave before its first checkpoint, besides copies of a task.
UNFINISHED = re.compile(
    r"((config|environment|metrics|train)\.(toml|json|jsonl|log)(\.partial)?"
    r"|tensorboard|checkpoints|__pycache__|.*\.py.*)"
)


def _is_in(start: Checkpoint, out: Path) -> bool:
    return start.path.parent.resolve() == checkpoints_of(out).resolve()


def _check_unfinished(out: Path, task: Task) -> None:
    """Raise ConfigError for a folder with more than a training leaves before a checkpoint."""
    known: set[str] = set()
    if task.file is not None:
        known.update(name.partition("/")[0] for name in task.file.copies)
    # Their description is written last: without it they are not whole.
    if not any(out.glob("weights/**/*.json")):
        known.add("weights")
    others = set(filterfalse(UNFINISHED.fullmatch, output_folder.names_in(out) - known))
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
        before = _fixed(start.state, config, task, others)
        fingerprint = start.state["fingerprint"]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            "the checkpoint is not one of `mpipipe train`",
            found=place,
            remedy="load it with mpipipe.checkpoint",
        ) from error
    after = _fixed(now, config, task, others)
    different = [key for key in after if before.get(key) != after[key]]
    if different:
        then = ", ".join(f"{key} = {before.get(key)!r}"[:80] for key in different)
        raise ConfigError(
            "the checkpoint is of a training with another configuration",
            found=f"{then} in {place}",
            expected=", ".join(f"{key} = {after[key]!r}"[:80] for key in different),
            remedy=f"what may change over a resume is {', '.join(others)}; give all else as it "
            "was, or begin "
            "a new training with --from, or of a task with --init",
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


def _fixed(facts: Values, config: TaskConfig, task: Task, others: Sequence[str]) -> Values:
    """Return what must stay the same: sizes are those of the model, where options leave them."""
    sizes = plain(task.compared(facts["model"]))
    values = {**plain(written(type(config)())), **facts["configuration"], **sizes}
    return {key: value for key, value in values.items() if key not in others}


def plain(values: Any) -> Any:
    """Return values as they come back from a file: tuples become lists."""
    return json.loads(json.dumps(values))


def leave_behind(start: Checkpoint | None, out: Path) -> list[Path]:
    """Rename what was saved after the resumed checkpoint, which would be the newest else."""
    if start is None or not _is_in(start, out):
        return []
    renamed = []
    for path in [*checkpoint.find(checkpoints_of(out)), *checkpoint.find(out / "weights")]:
        if checkpoint.step_of(path) >= start.step and path.name != start.path.name:
            renamed.append(checkpoint.set_aside(path))
    return renamed
