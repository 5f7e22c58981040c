"""Checkpoints beside each other in one folder: step-00000100/, step-00000200/, ... Which are whole, and which go."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from mpipipe import files
from mpipipe.checkpoint import manifest
from mpipipe.checkpoint.manifest import FILE, MANIFEST
from mpipipe.errors import ArgumentError

NAME = re.compile(r"step-([0-9]{8,18})")
INSIDE = "checkpoints"  # the folder of a training that has them


def folder_of(root: Path, step: int) -> Path:
    """Return the folder of the checkpoint after so many steps."""
    return root / f"step-{step:08d}"


def find(root: Path) -> list[Path]:
    """List the checkpoints in `root` that have a manifest, by rising step; none if there is no such folder."""
    return [path for path in _folders(root) if (path / MANIFEST).is_file()]


def newest(root: str | Path) -> Path | None:
    """Return the newest checkpoint in a folder.

    Parameters
    ----------
    root : str or Path
        What was given to `save`, or the output folder of a training.

    Returns
    -------
    Path or None
        A checkpoint that was saved to its end; None if there is none.
    """
    root = Path(root)
    return next(reversed(find(root) or find(root / INSIDE)), None)


def locate(path: str | Path) -> Path:
    """Return a checkpoint: `path` itself, or the newest one in it. Raises ArgumentError if there is none."""
    path = Path(path).absolute()
    found = path if files.exists(path / MANIFEST) else newest(path)
    if found is None:
        raise ArgumentError(
            "no checkpoint is here",
            found=str(path),
            expected=f"a folder step-... with {MANIFEST}, or a folder with some of these",
            remedy="name another folder; a save that was cut short leaves no manifest, and cannot be read",
        )
    return found


def other_whole(path: Path) -> Path | None:
    """Return the newest checkpoint beside `path` whose manifest can be read and whose files have their sizes."""
    for other in reversed(find(path.parent)):
        with suppress(OSError, ArgumentError):
            contents = manifest.read(other).files
            sizes = {name: files.check_regular(other / name).st_size for name in contents}
            if other != path and all(sizes[name] == content.bytes for name, content in contents.items()):
                return other
    return None


def clear(folder: Path) -> bool:
    """Remove a checkpoint, its manifest first: without it the rest is no checkpoint. Other files stay. Raises OSError.

    Returns whether there was anything to remove.
    """
    ours = sorted(path.name for path in folder.iterdir() if _is_ours(path.name))
    for name in [MANIFEST, *ours]:
        (folder / name).unlink(missing_ok=True)
    return bool(ours)


def prune(root: str | Path, keep: int, just_saved: Path | None = None) -> None:
    """Remove all but the newest checkpoints in a folder, and what saves that were cut short have left before them.

    One rank calls this.

    Parameters
    ----------
    root : str or Path
        What was given to `save`.
    keep : int
        How many stay, at least 1.
    just_saved : Path, optional
        A checkpoint behind which saves may be under way: folders behind it that are no checkpoints yet stay.

    Raises
    ------
    ArgumentError
        `keep` is not at least 1, or a file cannot be removed.
    """
    check_keep(keep)
    whole = find(Path(root))
    if not whole:
        return
    last = whole[-1] if just_saved is None else min(whole[-1], just_saved, key=_place)
    for path in _folders(Path(root)):
        if path in whole[-keep:] or (path not in whole and _place(path) > _place(last)):
            continue
        try:
            clear(path)
            with suppress(OSError):  # somebody else's files are in it
                path.rmdir()
        except OSError as error:
            raise ArgumentError(
                f"an old checkpoint cannot be removed: {error.strerror}", found=str(error.filename or path)
            ) from error


def check_keep(keep: int | None) -> None:
    """Raise ArgumentError unless `keep` is None or at least 1."""
    if keep is not None and (type(keep) is not int or keep < 1):
        raise ArgumentError("keep", found=repr(keep), expected="at least 1: the newest checkpoint always stays")


def set_aside(path: Path) -> Path:
    """Rename a checkpoint, so that it is not found as one of its folder any more; return what it is called now."""
    names = (path.with_name(f"aside-{path.name}{tail}") for tail in ("", *(f"-{n}" for n in range(2, 1000))))
    target = next(name for name in names if not name.exists())
    path.rename(target)
    return target


def _folders(root: Path) -> list[Path]:
    if not files.is_folder(root):
        return []
    try:
        found = [path for path in root.iterdir() if NAME.fullmatch(path.name)]
    except (FileNotFoundError, NotADirectoryError):  # it has gone since
        return []
    return sorted(found, key=_place)


def step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint that `find` has found."""
    return int(path.name[5:])


def _place(path: Path) -> tuple[int, str]:
    return step_of(path), path.name


def _is_ours(name: str) -> bool:
    stem = name.removesuffix(files.PARTIAL)
    return stem == MANIFEST or FILE.fullmatch(stem) is not None
