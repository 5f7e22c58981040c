"""Arrays in files of the safetensors format, written as a stream and read by position.

    8 bytes   length of the header, little-endian
    header    JSON: for each array its dtype, shape and place; filled up with spaces to a multiple of 8 bytes
    arrays    one after the other, without gaps

The library's own writer takes each array as one piece of host memory, and `save_file` forces nothing to the disk. Here
an array is written in pieces, so that one on a GPU passes through little memory of the host, and each piece is added to
a checksum on its way. What is written follows the format's description (github.com/huggingface/safetensors, "Format");
the library reads it. Reading is by position and into the memory that is to have the values: a map of a file that is cut
short would end the process by a signal.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Protocol
from zlib import crc32

import numpy as np

from mpipipe import arrays, files
from mpipipe.arrays import Array
from mpipipe.errors import ArgumentError

PIECE_BYTES = 8 << 20  # of an array, at once
CACHED_BYTES = 256 << 10  # that are read at once: they are still in the cache of the core when they are summed up
AHEAD_BYTES = 64 << 20  # that the system is asked to read while what is there is summed up
# safetensors' names of dtypes
DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One array in a file.

    Attributes
    ----------
    dtype : safetensors' name of it
    shape : of the array
    start : where its bytes begin in the file
    checksum : CRC-32 of its bytes, as eight hexadecimal digits
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    checksum: str


@dataclass(frozen=True)
class Content:
    """What a file holds.

    Attributes
    ----------
    bytes : size of the file
    header : size of the part in front of the arrays
    checksum : CRC-32 of that part
    arrays : arrays by name
    """

    bytes: int
    header: int
    checksum: str
    arrays: dict[str, Entry]


def check_storable(name: str, array: Array) -> None:
    """Raise ArgumentError for an array that cannot be written or set in place."""
    if array.dtype.name not in DTYPES or not array.flags.c_contiguous:
        order = "C-contiguous" if array.flags.c_contiguous else "strided"
        raise ArgumentError(
            f"{name} cannot be saved",
            found=f"{order} array of {array.dtype}",
            expected=f"a C-contiguous array of {', '.join(DTYPES)}",
        )


class Listener(Protocol):
    """Is told how far a write has come; it may end the write by raising."""

    def about_to_read(self, nbytes: int) -> None:
        """So many bytes of the arrays are about to be read and written."""

    def has_read(self) -> None:
        """All arrays have been read, and are not looked at again: what is left is between the file and the disk."""


def write(
    path: Path,
    content: Mapping[str, Array],
    listener: Listener | None = None,
    before_naming: Callable[[], object] | None = None,
) -> Content:
    """Write arrays, of the host or of a GPU, into a file that appears as a whole. Raises OSError."""
    names = sorted(content, key=lambda name: -content[name].dtype.itemsize)  # so each begins at a multiple of its size
    ends = list(accumulate((content[name].nbytes for name in names), initial=0))
    facts = {
        name: {"dtype": DTYPES[content[name].dtype.name], "shape": list(content[name].shape), "data_offsets": span}
        for name, span in zip(names, pairwise(ends))
    }
    text = json.dumps(facts, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    sums = [0] * len(names)
    with files.whole_file(path, before_naming) as file:
        position = file.write(header)
        for number, piece in arrays.host_pieces([content[name] for name in names], PIECE_BYTES):
            if listener is not None:
                listener.about_to_read(piece.nbytes)
            sums[number] = crc32(piece.data, sums[number])
            file.write(piece.data)
            files.begin_writing(file, position, piece.nbytes)
            position += piece.nbytes
        if listener is not None:
            listener.has_read()
    entries = {
        name: Entry(DTYPES[content[name].dtype.name], content[name].shape, len(header) + start, f"{total:08x}")
        for name, start, total in zip(names, ends, sums)
    }
    return Content(len(header) + ends[-1], len(header), f"{crc32(header):08x}", entries)


def _cut(flat: Array, nbytes: int) -> Iterator[Array]:
    step = max(1, nbytes // flat.dtype.itemsize)
    return (flat[start : start + step] for start in range(0, flat.size, step))


def checksum(array: np.ndarray) -> str:
    """Return the CRC-32 of the bytes of a contiguous host array, as eight hexadecimal digits."""
    return f"{crc32(array.reshape(-1).view(np.uint8).data):08x}"


class File:
    """A file with this content, open for reading; a context manager.

    Raises OSError if it cannot be opened or is no regular file, and ValueError if its size or header is not that
    of the content.
    """

    def __init__(self, path: Path, content: Content) -> None:
        self.path, self.content = path, content
        self.descriptor = files.open_regular(path)
        try:
            self._check()
        except BaseException:
            self.close()
            raise

    def _check(self) -> None:
        size, content = os.fstat(self.descriptor).st_size, self.content
        if size != content.bytes:
            raise ValueError(f"it has {size} bytes and not {content.bytes}")
        found = crc32(files.read_at(self.descriptor, 0, content.header))
        if f"{found:08x}" != content.checksum:
            raise ValueError(f"its header has the checksum {found:08x} and not {content.checksum}")

    def read_into(self, name: str, array: Array) -> str:
        """Set an array of the size of the one called `name`, and return the checksum of what was read."""
        begin, total, advised = self.content.arrays[name].start, 0, 0
        device = arrays.is_device(array)
        done = 0
        for part in _cut(array.reshape(-1), PIECE_BYTES if device else min(PIECE_BYTES, CACHED_BYTES)):
            if advised < min(array.nbytes, done + AHEAD_BYTES // 2):
                files.will_read(self.descriptor, begin + advised, done + AHEAD_BYTES - advised)
                advised = done + AHEAD_BYTES
            host = np.empty(part.shape, part.dtype) if device else part
            piece = host.view(np.uint8).data
            if files.read_into(self.descriptor, begin + done, piece) < len(piece):
                raise ValueError(f"it ends before byte {begin + done + len(piece)}")
            total = crc32(piece, total)
            if device:
                arrays.upload(host, out=part)
            done += len(piece)
        return f"{total:08x}"

    def close(self) -> None:
        """Close the file."""
        os.close(self.descriptor)

    def __enter__(self) -> File:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


# -- A file of the safetensors format that somebody else has written: nothing in its header is believed unchecked -----
#
#     8 bytes   length of the header, little-endian
#     header    JSON: {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, "__metadata__": {...}}
#     arrays    each between its two offsets, which count from the end of the header; together they leave no gap
#
# The checks follow the format's description (github.com/huggingface/safetensors, "Format"). Reading is by position,
# so a rank reads the bytes that it wants and no more, and a file that is cut short while it is read raises an error,
# where a map of it would end the process by a signal.


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
