"""A file of the safetensors format that somebody else has written: nothing in its header is believed unchecked.

    8 bytes   length of the header, little-endian
    header    JSON: {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, "__metadata__": {...}}
    arrays    each between its two offsets, which count from the end of the header; together they leave no gap

The checks follow the format's description (github.com/huggingface/safetensors, "Format"). Reading is by position, so a
rank reads the bytes that it wants and no more, and a file that is cut short while it is read raises an error, where a
map of it would end the process by a signal.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpipipe import arrays, files
from mpipipe.checkpoint.tensors import DTYPES

MOST_BYTES = 100_000_000  # of a header, the format's own limit
MOST_AXES = 32
NAMES = {stored: name for name, stored in DTYPES.items()}


@dataclass(frozen=True)
class Stored:
    """One array in a file.

    Attributes
    ----------
    dtype : of numpy, or of ml_dtypes
    shape : of the array
    start : where its bytes begin in the file
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        """Number of its bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class ForeignFile:
    """A file of the safetensors format, open for reading; a context manager.

    Raises OSError if it cannot be opened or is no regular file, and ValueError, which names the entry, where its
    header is wrong or the file is shorter or longer than its header says.

    Attributes
    ----------
    path : of the file
    arrays : {name: Stored}
    bytes_read : of the file so far, header included
    """

    def __init__(self, path: Path) -> None:
        self.path, self.bytes_read = path, 0
        self.descriptor = files.open_regular(path)
        try:
            self.arrays = self._header()
        except BaseException:
            self.close()
            raise

    def _header(self) -> dict[str, Stored]:
        size = os.fstat(self.descriptor).st_size
        length = int.from_bytes(self._read(0, 8), "little")
        if size < 8 or not 2 <= length <= min(MOST_BYTES, size - 8):
            raise ValueError(f"its header would have {length} bytes, in a file of {size} bytes")
        try:
            facts = json.loads(self._read(8, length), object_pairs_hook=_without_doubles)
        except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"its header is no JSON: {error}"[:200]) from error
        if not isinstance(facts, dict):
            raise ValueError("its header is no JSON object")
        facts.pop("__metadata__", None)
        found = {name: _stored(name, entry, 8 + length) for name, entry in facts.items()}
        _check_without_gaps(found, 8 + length, size)
        return found

    def _read(self, start: int, count: int) -> bytes:
        content = files.read_at(self.descriptor, start, count)
        self.bytes_read += len(content)
        return content

    def read_into(self, name: str, first: int, array: np.ndarray) -> None:
        """Set a contiguous array to the bytes of the one called `name`, from its byte `first` on.

        Raises ValueError if the file ends before.
        """
        begin, memory = self.arrays[name].start + first, array.reshape(-1).view(np.uint8).data
        count = files.read_into(self.descriptor, begin, memory)
        self.bytes_read += count
        if count < len(memory):
            raise ValueError(f"it ends at byte {begin + count}, within {name}")

    def will_read(self, name: str, first: int, count: int) -> None:
        """Let the system read ahead these bytes of an array; an advice."""
        entry = self.arrays[name]
        files.will_read(self.descriptor, entry.start + first, min(count, max(0, entry.nbytes - first)))

    def close(self) -> None:
        """Close the file."""
        os.close(self.descriptor)

    def __enter__(self) -> ForeignFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        double = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"its header has two entries {double!r:.100}")
    return found


def _stored(name: str, entry: Any, after: int) -> Stored:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name!r:.100} has no dtype, shape and data_offsets in its header")
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(kind, str) or kind not in NAMES:
        raise ValueError(f"{name!r:.100} has the dtype {kind!r:.40}, which is none of {', '.join(NAMES)}")
    if not _counts(shape) or len(shape) > MOST_AXES:
        raise ValueError(f"{name!r:.100} has the shape {shape!r:.80}")
    if not _counts(offsets) or len(offsets) != 2:
        raise ValueError(f"{name!r:.100} has the offsets {offsets!r:.80}")
    found = Stored(arrays.dtype(NAMES[kind]), tuple(shape), after + offsets[0])
    if offsets[1] - offsets[0] != found.nbytes:
        raise ValueError(
            f"{name!r:.100} lies between the offsets {offsets[0]} and {offsets[1]}, but {kind}{shape} has "
            f"{found.nbytes} bytes"
        )
    return found


def _counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**62 for value in values)


def _check_without_gaps(found: dict[str, Stored], after: int, size: int) -> None:
    """Raise ValueError unless the arrays follow one another, from the header to the end of the file."""
    end = after
    for name, entry in sorted(found.items(), key=lambda pair: (pair[1].start, pair[1].nbytes)):
        if entry.start != end:
            kind = "a gap before" if entry.start > end else "an overlap with"
            raise ValueError(f"there is {kind} {name!r:.100}, at byte {entry.start}")
        end += entry.nbytes
        if end > size:
            raise ValueError(f"it has {size} bytes, but {name!r:.100} ends at byte {end}: it is cut short")
    if end != size:
        raise ValueError(f"it has {size} bytes, but its last array ends at byte {end}")
