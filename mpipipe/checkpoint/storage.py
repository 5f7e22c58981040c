"""The folder of a checkpoint on the disk: made, cleaned up, and what its errors say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mpipipe.checkpoint import folders, owner
from mpipipe.checkpoint.manifest import COPY_AGAIN, MANIFEST
from mpipipe.errors import ArgumentError, StorageError
from mpipipe.files import PARTIAL, sync_folder


def part_of(rank: int) -> str:
    """Return the name of the file that a rank of the mesh writes."""
    return f"part-{rank}.safetensors"


def begin(folder: Path) -> None:
    """Make the folder, without what an earlier save has left in it. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    if folders.clear(folder):  # the old manifest must be gone before anything else in there changes
        sync_folder(folder)


def take_back(folder: Path, rank: int) -> None:
    """Remove what one rank has written for a checkpoint without a manifest; the last rank removes the folder.

    A thread may still be at work here: it cannot give its file a name that is gone.
    """
    for name in (part_of(rank) + PARTIAL, part_of(rank)):  # in this order: it may be renamed between the two
        with suppress(OSError):
            (folder / name).unlink()
    with suppress(OSError):  # others have files in it
        folder.rmdir()


def drop_manifest(folder: Path) -> None:
    """Remove a manifest, finished or not: without it the folder is no checkpoint."""
    for name in (MANIFEST + PARTIAL, MANIFEST):
        with suppress(OSError):
            (folder / name).unlink()


@contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Turn an OSError into a StorageError with the remedy."""
    try:
        yield
    except OSError as error:
        owner.check(folder)  # another job may have removed what this one was writing
        raise unwritable(folder, error) from error


def unwritable(folder: Path, error: OSError) -> StorageError:
    """Make the error for a folder that cannot be written to."""
    return StorageError(
        f"the checkpoint cannot be written: {error}",
        found=str(folder),
        expected="a folder with room, on a file system that all ranks share",
        remedy="make room, or choose another folder",
    )


@contextmanager
def offering(folder: Path) -> Iterator[None]:
    """Let an error name the newest whole checkpoint beside this one."""
    try:
        yield
    except ArgumentError as error:
        offer(error, folder)
        raise


def offer(error: ArgumentError, folder: Path) -> None:
    """Name the newest whole checkpoint beside `folder` in the remedy of an error that is about to be raised."""
    other = folders.other_whole(folder)
    if other is not None:
        error.remedy = f"{error.remedy or COPY_AGAIN}; the newest whole checkpoint beside it is {other}"
