"""Arrays in files of the safetensors format, written as a stream and read by position.

    8 bytes   length of the header, little-endian
    header    JSON, filled up with spaces to a multiple of 8 bytes:
              {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}
    arrays    each between its two offsets, which count from the end of the header, without a gap

The library's own writer takes each array as one piece of host memory, and `save_file` forces
nothing to the disk. Here an array is written in pieces, which are added to a checksum on their way.
Reading is by position and into the memory that is to have the values: a file that is cut short
raises an error, where a map of it would end the process by a signal. A header may come from
anywhere, so the library checks it. All follows the format's description
(github.com/huggingface/safetensors, "Format"); the library reads what is written here, and the
other way round.
"""

from __future__ import annotations

import json
import math
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol
from zlib import crc32

import numpy as np
from safetensors import SafetensorError, safe_open

from mpipipe import arrays, files
from mpipipe.arrays import Array, Shape
from mpipipe.errors import ArgumentError
from mpipipe.options import Values

PIECE_BYTES = 8 << 20  # a part of an array
# safetensors' names of dtypes
DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
NAMES = {stored: name for name, stored in DTYPES.items()}


@dataclass(frozen=True)
class TensorEntry:
    """One array in a file: `start` is the position of its bytes.

    `checksum` is their CRC-32, "" where it is not known.
    """

    dtype: str  # safetensors' name of it
    shape: Shape
    start: int
    checksum: str = ""

    @property
    def kind(self) -> np.dtype:
        """Its dtype, of numpy or of ml_dtypes."""
        return arrays.dtype(NAMES[self.dtype])

    @property
    def nbytes(self) -> int:
        """Number of its bytes."""
        return math.prod(self.shape) * self.kind.itemsize

    def __str__(self) -> str:
        return f"{NAMES[self.dtype]}{list(self.shape)}"


@dataclass(frozen=True)
class Content:
    """The arrays of a file by name, its size, and the size and CRC-32 of its header."""

    bytes: int
    header: int
    checksum: str
    arrays: dict[str, TensorEntry]


class Planned(NamedTuple):
    """An array that is made when it is written, so that not all are in memory at once."""

    dtype: np.dtype
    shape: Shape
    make: Callable[[], Array]


def check_storable(name: str, array: Array) -> None:
    """Raise ArgumentError for an array that cannot be written or set in place."""
    if array.dtype.name not in DTYPES or not array.flags.c_contiguous:
        order = "strided"
        if array.flags.c_contiguous:
            order = "C-contiguous"
        raise ArgumentError(
            f"{name} cannot be saved",
            found=f"{order} array of {array.dtype}",
            expected=f"a C-contiguous array of {', '.join(DTYPES)}",
        )


class Listener(Protocol):
    """Learns how far a write has come; it may end the write by raising."""

    def about_to_read(self, nbytes: int) -> None:
        """Expect this number of bytes of the arrays to be read and written now."""

    def has_read(self) -> None:
        """All arrays have been read; what is left is between the file and the disk."""


def header_of(
    content: Mapping[str, Array | Planned], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Return the header of a file with these arrays."""
    facts: Values = {}
    if metadata is not None:
        facts = {"__metadata__": metadata}
    start = 0
    for name, item in content.items():
        end = start + math.prod(item.shape) * item.dtype.itemsize
        dtype = DTYPES[item.dtype.name]
        facts[name] = {"dtype": dtype, "shape": item.shape, "data_offsets": (start, end)}
        start = end
    text = json.dumps(facts, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_tensors(
    path: Path,
    content: Mapping[str, Array | Planned],
    listener: Listener | None = None,
    before_naming: Callable[[], object] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Content:
    """Write C-contiguous arrays, of host or GPU, into a file as a whole. Raises OSError."""
    # the widest first, so each begins at a multiple of its size
    content = dict(sorted(content.items(), key=lambda entry: -entry[1].dtype.itemsize))
    header = header_of(content, metadata)
    # Planned arrays are made one at a time.
    made = (item.make() if isinstance(item, Planned) else item for item in content.values())
    sums = [0] * len(content)
    with files.whole_file(path, before_naming) as file:
        file.write(header)
        for number, piece in arrays.host_pieces(made, PIECE_BYTES):
            if listener is not None:
                listener.about_to_read(piece.nbytes)
            sums[number] = crc32(piece.data, sums[number])
            file.write(piece.data)
        if listener is not None:
            listener.has_read()
    entries = {}
    start = len(header)
    for (name, item), total in zip(content.items(), sums):
        entry = TensorEntry(DTYPES[item.dtype.name], tuple(item.shape), start, f"{total:08x}")
        entries[name] = entry
        start += entry.nbytes
    return Content(start, len(header), f"{crc32(header):08x}", entries)


class TensorFile:
    """A file open for reading, with `arrays`, {name: TensorEntry}; a context manager.

    With the `content` that a manifest says, size and header are compared with it; else the header
    is read and checked. Raises OSError if the file cannot be opened or is no regular file, and
    ValueError, which names the entry, where its header is wrong or the file is shorter or longer
    than it says.
    """

    def __init__(self, path: Path, content: Content | None = None) -> None:
        self.path = path
        self.bytes_read = 0
        self.descriptor = files.open_regular(path)
        try:
            size = os.fstat(self.descriptor).st_size
            if content is None:
                self.arrays = self._header()
            else:
                self.arrays = self._expected(content, size)
        except BaseException:
            self.close()
            raise

    def _expected(self, content: Content, size: int) -> dict[str, TensorEntry]:
        if size != content.bytes:
            raise ValueError(f"it has {size} bytes and not {content.bytes}")
        total = crc32(self._read(0, content.header))
        if f"{total:08x}" != content.checksum:
            raise ValueError(f"its header has the checksum {total:08x} and not {content.checksum}")
        return content.arrays

    def _header(self) -> dict[str, TensorEntry]:
        """Return what the header says, once the library has checked it."""
        try:
            with safe_open(self.path, "numpy"):
                pass
        except SafetensorError as error:
            raise ValueError(f"{error}"[:200]) from error
        length = int.from_bytes(self._read(0, 8), "little")
        facts = json.loads(self._read(8, length))
        facts.pop("__metadata__", None)
        entries = {}
        for name, entry in facts.items():
            if entry["dtype"] not in NAMES:
                raise ValueError(
                    f"{name!r:.100} has the dtype {entry['dtype']}, which is none of "
                    f"{', '.join(NAMES)}"
                )
            start = 8 + length + entry["data_offsets"][0]
            entries[name] = TensorEntry(entry["dtype"], tuple(entry["shape"]), start)
        return entries

    def _read(self, start: int, count: int) -> bytes:
        content = files.read_at(self.descriptor, start, count)
        self.bytes_read += len(content)
        return content

    def read_into(self, name: str, array: np.ndarray, first: int = 0) -> None:
        """Fill a contiguous host array with bytes of `name`, from its byte `first` on.

        Raises ValueError if the file ends before.
        """
        entry = self.arrays[name]
        memory = array.reshape(-1).view(np.uint8).data
        count = files.read_into(self.descriptor, entry.start + first, memory)
        self.bytes_read += count
        if count < len(memory):
            raise ValueError(f"it ends at byte {entry.start + first + count}, within {name}")

    def read_summed(self, name: str, array: Array) -> str:
        """Set an array of host or GPU to `name`; return the checksum of what was read."""
        device = arrays.is_device(array)
        flat = array.reshape(-1)
        step = max(1, PIECE_BYTES // flat.dtype.itemsize)
        total = 0
        for start in range(0, flat.size, step):
            part = flat[start : start + step]
            host = part
            if device:
                host = np.empty(part.shape, part.dtype)
            self.read_into(name, host, start * flat.dtype.itemsize)
            total = crc32(host.view(np.uint8).data, total)
            if device:
                arrays.upload(host, out=part)
        return f"{total:08x}"

    def close(self) -> None:
        """Close the file."""
        os.close(self.descriptor)

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@contextmanager
def open_tensors(
    path: Path, what: str, expected: str, remedy: str, content: Content | None = None
) -> Iterator[TensorFile]:
    """Open a file for reading; errors become ArgumentError with its name and `what` it is."""
    try:
        with TensorFile(path, content) as file:
            yield file
    except OSError as error:
        raise ArgumentError(
            f"{what} cannot be read: {error.strerror}",
            found=f"{path} on {socket.gethostname()}",
            expected=f"{files.REGULAR}, on a file system that all ranks share",
            remedy=remedy,
        ) from error
    except ValueError as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError(
            f"{what} is damaged: {error}", found=str(path), expected=expected, remedy=remedy
        ) from error
