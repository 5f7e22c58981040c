"""The manifest of a checkpoint: what it holds, and where. It is written last, so a checkpoint is whole or absent.

A manifest may come from anywhere, so nothing in it is taken on trust: types, numbers, and the names of files, which
must stay inside the folder. It is JSON, and nothing in a checkpoint is code.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

from mpipipe import files
from mpipipe.checkpoint.tensors import DTYPES, Content, Entry
from mpipipe.errors import ArgumentError

MANIFEST = "manifest.json"
FORMAT = 1
MOST_BYTES = 64 << 20  # of a manifest, and of the header of a file
FILE = re.compile(r"part-[0-9]{1,10}\.safetensors")
CHECKSUM = re.compile(r"[0-9a-f]{8}")
COPY_AGAIN = "copy the checkpoint again from where it is whole, or take another one"


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint is, without its arrays.

    Attributes
    ----------
    path : Path
        The folder.
    step : int
        Number of steps that the training had made.
    state : dict
        What was given to `save` as `state`.
    optimizer_steps : int or None
        Number of steps that the optimizer had made; None if no optimizer was saved.
    library : str
        The version of mpipipe that wrote it.
    files : dict
        What each file holds, by its name.
    """

    path: Path
    step: int
    state: dict[str, Any]
    optimizer_steps: int | None
    library: str
    files: dict[str, Content]


def write(checkpoint: Checkpoint, before_naming: Callable[[], object] | None = None) -> None:
    """Write the manifest of a checkpoint whose files are there. Raises OSError."""
    facts = {**asdict(checkpoint), "format": FORMAT}
    del facts["path"]
    content = json.dumps({**facts, "checksum": checksum_of(facts)}, indent=1) + "\n"
    files.write_whole(checkpoint.path / MANIFEST, content.encode(), before_naming)


def checksum_of(facts: Mapping[str, Any]) -> str:
    """Return the CRC-32 of plain facts, as eight hexadecimal digits. It finds damage, no forgery."""
    return f"{crc32(json.dumps(facts, sort_keys=True).encode()):08x}"


def read(folder: Path) -> Checkpoint:
    """Read a manifest. Raises ArgumentError, with the file's name, where it is missing, damaged, foreign or newer."""
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
    if written != (found := checksum_of(facts)):
        raise _wrong(path, f"is damaged: its checksum is {found} and not {written!s:.40}")
    try:
        return _parsed(folder, facts)
    except (KeyError, TypeError, ValueError) as error:
        raise _wrong(path, f"is wrong: {type(error).__name__}: {error}"[:300]) from error


def _wrong(path: Path, text: str) -> ArgumentError:
    return ArgumentError(f"the manifest of a checkpoint {text}", found=str(path), remedy=COPY_AGAIN)


def _parsed(folder: Path, facts: dict[str, Any]) -> Checkpoint:
    steps = facts["optimizer_steps"]
    contents = {_name(name): _content(name, content) for name, content in _of(dict, facts["files"]).items()}
    names = [array for content in contents.values() for array in content.arrays]
    if len(set(names)) < len(names):
        raise ValueError("an array is in two files")
    return Checkpoint(
        folder,
        _count(facts["step"]),
        _of(dict, facts["state"]),
        None if steps is None else _count(steps),
        _of(str, facts["library"]),
        contents,
    )


def _name(name: str) -> str:
    if FILE.fullmatch(name) is None:
        raise ValueError(f"{name!r:.80} is no name of a file of a checkpoint")
    return name


def _content(name: str, facts: Any) -> Content:
    size, header = _count(facts["bytes"]), _count(facts["header"])
    if not 8 <= header <= min(size, MOST_BYTES):
        raise ValueError(f"{name} with {size} bytes has a header of {header}")
    entries = {array: _entry(array, entry, header, size) for array, entry in _of(dict, facts["arrays"]).items()}
    return Content(size, header, _checksum(facts["checksum"]), entries)


def _entry(name: str, facts: Any, header: int, size: int) -> Entry:
    dtype, shape = facts["dtype"], tuple(map(_count, _of(list, facts["shape"])))
    widths = [width for width, stored in DTYPES.items() if stored == dtype]
    if not widths:
        raise ValueError(f"{name} has the dtype {dtype!r:.40}")
    start = _count(facts["start"])
    if start < header or start + math.prod(shape) * _width(widths[0]) > size:
        raise ValueError(f"{name} would begin at byte {start} and end behind its file, which has {size}")
    return Entry(dtype, shape, start, _checksum(facts["checksum"]))


def _width(dtype: str) -> int:
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) // 8 if digits else 1


def _of(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r:.80} is no {kind.__name__}")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**62:
        raise ValueError(f"{value!r:.80} is no number of steps, bytes or items")
    return value


def _checksum(value: Any) -> str:
    if CHECKSUM.fullmatch(_of(str, value)) is None:
        raise ValueError(f"{value!r:.40} is no checksum")
    return value
