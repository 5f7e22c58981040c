"""Where a training begins: anew, with the weights of another one, or after a checkpoint of its own.

What must stay the same over a resume decides which numbers come out (`Option.decides`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from mpipipe import checkpoint
from mpipipe.checkpoint import Checkpoint
from mpipipe.comm import Mesh
from mpipipe.errors import ConfigError
from mpipipe.files import PARTIAL
from mpipipe.job import Preemption, group_of
from mpipipe.nn import Stage
from mpipipe.options import option_of, written
from mpipipe.train import metrics, output_folder
from mpipipe.train.config import OutputOptions, RunOptions, TaskConfig
from mpipipe.train.progress import Progress
from mpipipe.train.report import NullReporter, Reporter
from mpipipe.train.task import Task
from mpipipe.train.task_file import TaskFileConfig


def checkpoints_of(out: Path) -> Path:
    """Return the folder for the checkpoints of the training with the output folder `out`."""
    return out / "checkpoints"


def facts_of(config: TaskConfig, task: Task) -> dict[str, Any]:
    """Return what a checkpoint remembers of the training's configuration, as plain values."""
    return {
        "configuration": plain(written(config)),
        "model": plain(task.sizes()),
        "fingerprint": task.fingerprint,
    }


def find_start(config: TaskConfig, task: Task, mesh: Mesh, out: Path) -> Checkpoint | None:
    """Return the checkpoint after which the training continues, None if it begins; collective.

    Raises, on every rank and before anything is written, ArgumentError for a checkpoint that is
    damaged or missing, and ConfigError for one of another training, and for an output folder that
    this training may not go on in.
    """

    def start() -> Checkpoint | None:
        found = checkpoint_of(config, out)
        if found is not None:
            _check_same(found, config, task)
        if config.resume == "no" or (found is not None and not _is_in(found, out)):
            output_folder.check_vacant(out, checkpoint.newest(checkpoints_of(out)) is not None)
        else:
            metrics.kept_records(
                out, 0 if found is None else found.step
            )  # raises where they are no metrics
            if found is None:
                _check_unfinished(out, task)
        return found

    return group_of(mesh.comm).from_one("train: where to begin", start)


def checkpoint_of(config: OutputOptions, out: Path) -> Checkpoint | None:
    """Return the checkpoint that the configuration wants to go on from, None if the training
    begins.
    """
    if config.resume == "no":
        return None
    if config.resume != "auto":
        return checkpoint.read(config.resume)
    newest = checkpoint.newest(checkpoints_of(out))
    return None if newest is None else checkpoint.read(newest)


def newest_state(run: Path) -> Checkpoint:
    """Return the weights of a run folder or its newest checkpoint, whichever was written last;
    ConfigError for none.
    """
    there = [
        path
        for path in (checkpoint.newest(run / "weights"), checkpoint.newest(checkpoints_of(run)))
        if path
    ]
    if not there:
        raise ConfigError(
            "the run folder has neither weights nor a checkpoint",
            found=str(run),
            expected="the --out folder of `mpipipe train FILE.py`",
            remedy="weights are written at the end of a training, checkpoints with --save-every",
        )
    return checkpoint.read(max(there, key=lambda path: path.stat().st_mtime))


def beginning(config: TaskConfig) -> str:
    """Return what a new training of a task in a file begins with; "" for values that are drawn."""
    return (
        f"the weights in {config.init}"
        if isinstance(config, TaskFileConfig) and config.init
        else ""
    )


def begin(config: TaskConfig, task: Task, mesh: Mesh, stages: Sequence[Stage]) -> None:
    """Set the parameters with which a new training begins; collective."""
    task.load(stages, mesh)
    if isinstance(config, TaskFileConfig) and config.init is not None:
        path = Path(config.init)
        with group_of(mesh.comm).raise_together("train: the weights to begin with"):
            if mesh.rank == 0 and any(
                place.is_dir() for place in (path / "weights", checkpoints_of(path))
            ):
                path = newest_state(path).path
        checkpoint.load(path, mesh, stages)


def _is_in(found: Checkpoint, out: Path) -> bool:
    return found.path.parent.resolve() == checkpoints_of(out).resolve()


def _check_unfinished(out: Path, task: Task) -> None:
    """Raise ConfigError for a folder that holds more than a training leaves that ended before its
    first checkpoint.
    """
    ours = {metrics.NAME, metrics.NAME + PARTIAL, checkpoints_of(out).name, *task.unfinished(out)}
    others = sorted(
        name
        for name in output_folder.names_in(out) - ours
        if not output_folder.OURS.fullmatch(name)
    )
    if others:
        raise ConfigError(
            "there is no checkpoint to go on from, and the folder is not empty",
            found=f"{', '.join(others[:5])} in {out}",
            expected="checkpoints, or nothing but what a training leaves that ended before its "
            "first checkpoint",
            remedy="choose another folder with --out, or move the old run away",
        )


def _check_same(found: Checkpoint, config: TaskConfig, task: Task) -> None:
    """Raise ConfigError unless this is a checkpoint of the same training, not yet past its end."""
    place = str(found.path)
    now = facts_of(config, task)
    others = [
        entry.name for entry in fields(config) if not option_of(entry).decides
    ]  # paths of data, too

    def fixed(facts: Mapping[str, Any]) -> dict[str, Any]:
        """Return what must stay the same. Sizes are those of the model, with what the options have
        left open.
        """
        defaults = plain(written(type(config)()))
        values = {**defaults, **facts["configuration"], **plain(task.compared(facts["model"]))}
        return {key: value for key, value in values.items() if key not in others}

    try:
        before = fixed(found.state)
        fingerprint = found.state["fingerprint"]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            "the checkpoint is not one of `mpipipe train`",
            found=place,
            remedy="load it with mpipipe.checkpoint",
        ) from error
    after = fixed(now)
    different = [key for key in after if before.get(key) != after[key]]
    if different:
        raise ConfigError(
            "the checkpoint is of a training with another configuration",
            found=", ".join(f"{key} = {before.get(key)!r}"[:80] for key in different)
            + f" in {place}",
            expected=", ".join(f"{key} = {after[key]!r}"[:80] for key in different),
            remedy=f"what may change over a resume is {', '.join(others)}; give all else as it "
            "was, or begin "
            "a new training with --from, or of a task with --init",
        )
    if task.file is not None and fingerprint and fingerprint != now["fingerprint"]:
        if not getattr(config, "changed_task", False):
            raise ConfigError(
                f"{task.file.path.name}, or a module next to it, has changed since the checkpoint",
                found=f"{task.file.path}, SHA-256 of all {task.file.checksum[:12]}",
                expected=f"{fingerprint[:12]}, as in {place}; copies are in "
                f"{found.path.parent.parent}",
                remedy="resume with the file as it was, or say that it is meant with "
                "--changed-task",
            )
    elif fingerprint != now["fingerprint"]:
        raise ConfigError(
            "the checkpoint is of a training on other data",
            found=f"fingerprint {now['fingerprint']}",
            expected=f"{fingerprint!s:.80}, as in {place}",
            remedy="give the same files with --data, or begin a new training with --from, or of a "
            "task with --init",
        )
    if found.step > config.steps:
        raise ConfigError(
            "the checkpoint is past the end of the training",
            found=f"step {found.step} in {place}",
            expected=f"at most steps = {config.steps}",
            remedy="raise steps, or resume an earlier checkpoint",
        )


def plain(values: Any) -> Any:
    """Return values as they come back from a file: tuples become lists."""
    return json.loads(json.dumps(values))


def leave_behind(found: Checkpoint | None, out: Path) -> list[Path]:
    """Rename what was saved after the resumed checkpoint, or it would be the newest; return the new
    names.
    """
    if found is None or not _is_in(found, out):
        return []
    there = [
        path for place in (checkpoints_of(out), out / "weights") for path in checkpoint.find(place)
    ]
    later = [path for path in there if checkpoint.step_of(path) >= found.step]
    return [checkpoint.set_aside(path) for path in later if path.name != found.path.name]


# -- The checkpoints of a training while it runs: written meanwhile --------------------------------


@dataclass(eq=False)
class Checkpoints:
    """Saves the progress of a training.

    Every method is collective. `saver` is a context manager, whose end finishes what is in flight.
    Where a checkpoint cannot be written, all ranks raise StorageError.

    The metrics of `reporter` must not end before a checkpoint does, and `preemption` learns how
    long a save takes.
    """

    config: RunOptions
    root: Path
    progress: Progress
    facts: Mapping[str, Any]
    reporter: Reporter | NullReporter
    preemption: Preemption

    def __post_init__(self) -> None:
        progress = self.progress
        self.saver = checkpoint.Saver(
            self.root,
            progress.mesh,
            progress.pipeline.stages,
            progress.optimizer,
            keep=self.config.keep,
        )

    def follow(self, leaves: bool) -> None:
        """After a step: look at the checkpoint in flight; begin another where it is time, or the
        job `leaves`.
        """
        self._note(self.saver.poll())
        config = self.config
        step = self.progress.step
        if leaves or (
            config.save_every and (step % config.save_every == 0 or step == config.steps)
        ):
            self._note(self.saver.wait())  # an earlier one may turn out to have failed
            self.saver.save(step, self.progress.state(self.facts), beforehand=self.reporter.sync)
        if leaves:
            self.finish()

    def finish(self) -> None:
        """Wait until nothing is in flight."""
        self._note(self.saver.wait())

    def _note(self, saved: Path | None) -> None:
        """Tell `preemption` how long a save has taken."""
        if saved is not None:
            self.preemption.save_took(self.saver.seconds)
