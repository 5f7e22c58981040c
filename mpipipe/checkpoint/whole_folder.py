"""A folder that is replaced as a whole or not at all: written next to its name, then renamed.

    NAME.TOKEN.partial     while it is written
    NAME.mpipipe-former    the one that is replaced, until the new one has its name
    NAME                   whole at any time

Between the two renames the former one is the model: `standing_folder` finds it for those who read,
and `restore_folder` gives it its name again where a process was killed there. No call of the system
swaps two folders on every file system.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

from mpipipe import files
from mpipipe.checkpoint import owner
from mpipipe.checkpoint.folders import newest, step_of
from mpipipe.errors import ArgumentError
from mpipipe.job import RankGroup

# After the name of a folder that is being replaced; no folder of a user ends in it.
FORMER = ".mpipipe-former"


@contextmanager
def replacing(
    target: Path, group: RankGroup | None, explained: owner.Explain, replaces: bool = True
) -> Iterator[Path]:
    """Give all ranks of a group a folder to write into, called `target` at the end.

    Without a group it is for this process alone.

    Collective. Where anything is raised, a folder that was there stays, and nothing else is left.
    Within `explained` an OSError of this folder becomes an error of this package. Unless it
    `replaces`, ArgumentError is raised for a folder with files.
    """

    def together(what: str) -> AbstractContextManager[None]:
        if group is None:
            return nullcontext()
        return group.raise_together(f"saving a model: its {what}")

    leads = group is None or group.rank == 0
    partial = target
    with together("place"), explained(target):
        if leads:
            partial = begin(target, replaces)
    place: Path = partial
    if group is not None:
        place = group.broadcast("saving a model: its place", partial)
    try:
        yield place
        with together("name"), explained(target):
            if leads:
                give_name(place, target)
    except BaseException:
        if leads:
            shutil.rmtree(place, ignore_errors=True)
        raise


def begin(target: Path, replaces: bool) -> Path:
    """Make a folder for the new content, and clean up after killed saves. Raises OSError."""
    if target.name in ("", ".."):
        raise ArgumentError(
            "the folder for the model has no name that a new one could get",
            found=str(target),
            expected="a new or empty folder, other than the working folder and those above it",
            remedy="name one, as in ./model",
        )
    restore_folder(target)
    if not replaces and target.exists() and any(target.iterdir()):
        raise ArgumentError(
            "the folder for the model is not empty",
            found=str(target),
            expected="a new or empty folder",
            remedy="choose another one, or move it away",
        )
    target = _place(target)
    partial = target.with_name(f"{target.name}.{secrets.token_hex(4)}{files.PARTIAL}")
    partial.mkdir(parents=True)
    return partial


def give_name(partial: Path, target: Path) -> None:
    """Name a whole folder; one of that name goes. Raises OSError, OwnerError."""
    files.sync_folder(partial)
    owner.check_owned(target)
    target = _place(target)
    if target.exists():
        target.rename(_former(target))
    partial.rename(target)
    files.sync_folder(target.parent)
    shutil.rmtree(_former(target), ignore_errors=True)


def restore_folder(target: Path) -> None:
    """Name a folder again that lost it to one that never came; remove leftovers."""
    owner.check_owned(target)
    target = _place(target)
    former = _former(target)
    if former.is_dir() and not target.exists():
        former.rename(target)
    leftover = re.compile(
        rf"{re.escape(target.name)}({re.escape(FORMER)}|\.[0-9a-f]{{8}}{files.PARTIAL})"
    )
    with suppress(FileNotFoundError):
        for path in target.parent.iterdir():
            if leftover.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)


def standing_folder(path: Path) -> Path:
    """Return `path`; or the former folder, where the new one is about to get its name."""
    if files.exists(path) or not path.name:  # `.` has none
        return path
    former = _former(path)
    if files.is_folder(former):
        return former
    return path


def newest_state(run: Path) -> Path | None:
    """Return the weights of a run folder, or its newest checkpoint if that is of a later step.

    A training that went on after its end, and was cut short, has later checkpoints.
    """
    states = [newest(standing_folder(run / "weights")), newest(run)]
    return max(filter(None, states), key=step_of, default=None)


def _place(target: Path) -> Path:
    """Return the folder to which a link leads: that is replaced, and the link stays."""
    if os.path.islink(target):
        return target.resolve()
    return target


def _former(target: Path) -> Path:
    target = _place(target)
    return target.with_name(f"{target.name}{FORMER}")
