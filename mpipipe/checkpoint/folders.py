"""Folders of checkpoints, and the manifest of each: what it holds, and where.

    step-00000100/part-0.safetensors     each rank writes a file; its name is a part of the manifest
                  manifest.json          written last, so a checkpoint is whole or absent
    step-00000200/...

A manifest may come from anywhere, so nothing in it is taken on trust: types, numbers, and the names
of files, which must stay inside the folder. It is JSON, and nothing in a checkpoint is code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

from mpipipe import files
from mpipipe.checkpoint import owner
from mpipipe.checkpoint.tensor_files import NAMES, Content, TensorEntry
from mpipipe.errors import ArgumentError, StorageError
from mpipipe.options import Values

NAME = re.compile(r"step-([0-9]{8,18})")
INSIDE = "checkpoints"  # the folder of a training that has them
MANIFEST = "manifest.json"
FORMAT = 1
MOST_BYTES = 64 << 20  # for a manifest, and for the header of a file
FILE = re.compile(r"part-[0-9]{1,10}\.safetensors")
COPY_AGAIN = "copy the checkpoint again from where it is whole, or take another one"


def find(root: Path) -> list[Path]:
    """List the checkpoints in `root` that have a manifest, by rising step."""
    return [path for path in _folders(root) if (path / MANIFEST).is_file()]


def newest(root: str | Path) -> Path | None:
    """Return the newest whole checkpoint in a folder of them, or in that of a training."""
    root = Path(root)
    return next(reversed(find(root) or find(root / INSIDE)), None)


def clear(folder: Path) -> bool:
    """Remove a checkpoint, its manifest first; other files stay. Raises OSError.

    Returns whether there was anything to remove.
    """
    ours = []
    for path in sorted(folder.iterdir()):
        name = path.name.removesuffix(files.PARTIAL)
        if name == MANIFEST or FILE.fullmatch(name):
            ours.append(path)
    for path in [folder / MANIFEST, *ours]:
        path.unlink(missing_ok=True)
    return bool(ours)


def prune(root: Path, keep: int, just_saved: Path) -> None:
    """Remove all but the newest checkpoints, and what saves that were cut short have left.

    Others may be under way after `just_saved`: later folders that are no checkpoints yet stay.
    Raises OSError.
    """
    whole = find(root)
    for path in _folders(root):
        if path in whole[-keep:] or (path not in whole and _place(path) > _place(just_saved)):
            continue
        clear(path)
        with suppress(OSError):  # files of others are in it
            path.rmdir()


def check_keep(keep: int | None) -> None:
    """Raise ArgumentError unless `keep` is None or at least 1."""
    if keep is not None and (type(keep) is not int or keep < 1):
        raise ArgumentError(
            "keep", found=repr(keep), expected="at least 1: the newest checkpoint always stays"
        )


def set_aside(path: Path) -> Path:
    """Rename a checkpoint, so that it is found no more; return its new name."""
    target = path.with_name(f"aside-{path.name}")
    number = 1
    while target.exists():
        number += 1
        target = path.with_name(f"aside-{path.name}-{number}")
    path.rename(target)
    return target


def _folders(root: Path) -> list[Path]:
    if not files.is_folder(root):
        return []
    with suppress(FileNotFoundError, NotADirectoryError):  # it has gone since
        return sorted((path for path in root.iterdir() if NAME.fullmatch(path.name)), key=_place)
    return []


def step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint that `find` has found."""
    return int(path.name[5:])


def _place(path: Path) -> tuple[int, str]:
    return step_of(path), path.name


# -- One folder: made, cleaned up, and what its errors say -----------------------------------------


def open_folder(root: Path, step: int) -> Path:
    """Make the folder of a step's checkpoint, without leftovers. Raises StorageError."""
    folder = root / f"step-{step:08d}"
    owner.check_owned(folder)
    with explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if clear(folder):  # the old manifest must be gone before anything else in there changes
            files.sync_folder(folder)
    return folder


def drop(folder: Path, name: str) -> None:
    """Remove a file, finished or not; no thread that still writes it can name it then."""
    # A thread may rename the file between the two.
    for file in (name + files.PARTIAL, name):
        with suppress(OSError):
            (folder / file).unlink()


@contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Turn an OSError into a StorageError with the remedy."""
    try:
        yield
    except OSError as error:
        owner.check_owned(folder)  # another job may have removed what this one was writing
        raise StorageError(
            f"the checkpoint cannot be written: {error}",
            found=str(folder),
            expected="a folder with room, on a file system that all ranks share",
            remedy="make room, or choose another folder",
        ) from error


# -- The manifest ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint is, without its arrays.

    Attributes
    ----------
    path : Path
        The folder.
    step : int
        Steps that the training had made.
    state : dict
        What was given to `save` as `state`.
    optimizer_steps : int or None
        Steps that the optimizer had made; None if none was saved.
    library : str
        The version of mpipipe that wrote it.
    files : dict
        What each file holds, by its name.
    """

    path: Path
    step: int
    state: Values
    optimizer_steps: int | None
    library: str
    files: dict[str, Content]


def write(checkpoint: Checkpoint, before_naming: Callable[[], object] | None = None) -> None:
    """Write the manifest of a checkpoint whose files are there. Raises OSError."""
    facts = {**asdict(checkpoint), "format": FORMAT}
    del facts["path"]
    write_facts(checkpoint.path / MANIFEST, facts, before_naming)


def write_facts(
    path: Path, facts: Mapping[str, object], before_naming: Callable[[], object] | None = None
) -> None:
    """Write plain facts as JSON, with their checksum. Raises OSError."""
    content = json.dumps({**facts, "checksum": checksum_of(facts)}, indent=1) + "\n"
    files.write_whole(path, content.encode(), before_naming)


def checksum_of(facts: Mapping[str, object]) -> str:
    """Return the CRC-32 of plain facts, as eight hexadecimal digits, against damage."""
    return f"{crc32(json.dumps(facts, sort_keys=True).encode()):08x}"


def read(folder: Path) -> Checkpoint:
    """Read a manifest; ArgumentError where it is missing, damaged, foreign or newer."""
    path = folder / MANIFEST
    try:
        facts = json.loads(files.read_text(path, MOST_BYTES))
    except OSError as error:
        raise ArgumentError(
            f"no checkpoint: {error.strerror}",
            found=str(path),
            expected="a folder step-... with a manifest, which is written when all else is",
            remedy="name a checkpoint, or a folder with some",
        ) from error
    except (ValueError, RecursionError) as error:
        raise _wrong(path, f"cannot be read: {error}") from error
    if not isinstance(facts, dict) or type(facts.get("format")) is not int:
        raise _wrong(path, "is not that of a checkpoint of mpipipe: it has no format")
    if facts["format"] > FORMAT:
        raise ArgumentError(
            "the checkpoint is of a newer format",
            found=f"format {facts['format']} of mpipipe {facts.get('library')!s:.40} in {path}",
            expected=f"at most format {FORMAT}, which this version knows",
            remedy="install the version of mpipipe that wrote it, or a later one",
        )
    written = facts.pop("checksum", None)
    checksum = checksum_of(facts)
    if written != checksum:
        raise _wrong(path, f"is damaged: its checksum is {checksum} and not {written!s:.40}")
    try:
        steps = facts["optimizer_steps"]
        contents = {name: _content(name, content) for name, content in facts["files"].items()}
        names = [array for content in contents.values() for array in content.arrays]
        if len(set(names)) < len(names):
            raise ValueError("an array is in two files")
        return Checkpoint(
            folder,
            _count(facts["step"]),
            dict(facts["state"]),
            None if steps is None else _count(steps),
            str(facts["library"]),
            contents,
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _wrong(path, f"is wrong: {type(error).__name__}: {error}"[:300]) from error


def _wrong(path: Path, text: str) -> ArgumentError:
    return ArgumentError(f"the manifest of a checkpoint {text}", found=str(path), remedy=COPY_AGAIN)


def _content(name: str, facts: Any) -> Content:
    if FILE.fullmatch(name) is None:
        raise ValueError(f"{name!r:.80} is no name of a file of a checkpoint")
    size = _count(facts["bytes"])
    header = _count(facts["header"])
    if not 8 <= header <= min(size, MOST_BYTES):
        raise ValueError(f"{name} with {size} bytes has a header of {header}")
    entries = {}
    for array, array_facts in facts["arrays"].items():
        dtype = array_facts["dtype"]
        shape = tuple(map(_count, array_facts["shape"]))
        if dtype not in NAMES:
            raise ValueError(f"{array} has the dtype {dtype!r:.40}")
        entry = entries[array] = TensorEntry(
            dtype, shape, _count(array_facts["start"]), array_facts["checksum"]
        )
        if entry.start < header or entry.start + entry.nbytes > size:
            raise ValueError(
                f"{array} would begin at byte {entry.start} and end after its file, which has "
                f"{size}"
            )
    return Content(size, header, facts["checksum"], entries)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**62:
        raise ValueError(f"{value!r:.80} is no number of steps, bytes or items")
    return value
