"""Pieces of files as one array of bytes, read where they are needed.

Files are read by position and not mapped into memory. A file may be cut short while a training runs: reading it then
gives an error, where reading a map would end the process by a signal.
"""

from __future__ import annotations

import os
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mpipipe import files
from mpipipe.errors import DataError

OPEN_FILES = 256  # descriptors kept
REMEDY = "leave the data alone while a training reads them; train on a copy"


class Piece(NamedTuple):
    """Consecutive bytes of one file."""

    path: Path
    start: int
    length: int


class Text:
    """Pieces of files as one array of bytes: `source.Tokens`, whose documents are the pieces.

    Parameters
    ----------
    pieces : in the order in which they are joined
    """

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self.pieces = [piece for piece in pieces if piece.length]
        self._ends = list(accumulate(piece.length for piece in self.pieces))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @property
    def nbytes(self) -> int:
        """Its length: a token is a byte."""
        return len(self)

    def starts(self, start: int, stop: int) -> np.ndarray:
        """Return the positions in start ... stop - 1 at which pieces begin, int64, rising."""
        ends = [0, *self._ends[:-1]]
        return np.array(ends[bisect_left(ends, start) : bisect_left(ends, stop)], np.int64)

    def read(self, start: int, count: int) -> np.ndarray:
        """Read the bytes start .. start + count into a new uint8 array.

        Raises IndexError outside of the text, and DataError if a file has become shorter or cannot be read.
        """
        if not 0 <= start <= start + count <= len(self):
            raise IndexError(f"bytes {start} to {start + count} of a text of {len(self)}")
        window = np.empty(count, np.uint8)
        filled, index = 0, bisect_right(self._ends, start)
        while filled < count:
            piece = self.pieces[index]
            skip = start + filled - (self._ends[index] - piece.length)
            size = min(piece.length - skip, count - filled)
            part = read_bytes(piece.path, piece.start + skip, size)
            window[filled : filled + size] = np.frombuffer(part, np.uint8)
            filled, index = filled + size, index + 1
        return window


def read_bytes(path: Path, start: int, count: int) -> bytes:
    """Read the bytes start .. start + count of a file. Raises DataError if it has fewer, or cannot be read."""
    try:
        opened = _opened(path)  # this reference keeps it open, also where another thread forgets all files
        content = files.read_at(opened.descriptor, start, count)
        size = start + count if len(content) == count else os.fstat(opened.descriptor).st_size
    except OSError as error:
        raise _unreadable(path, error) from error
    if len(content) < count:
        raise DataError(
            "a data file has become shorter since it was looked at",
            found=f"{size} bytes in {path}",
            expected=f"at least {start + count}",
            remedy=REMEDY,
        )
    return content


def size_of(path: Path) -> int:
    """Return the bytes of a file. Raises DataError if it cannot be read."""
    try:
        opened = _opened(path)  # as in read_bytes
        return os.fstat(opened.descriptor).st_size
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"data cannot be read: {error.strerror}", found=str(path), expected=files.REGULAR, remedy=REMEDY)


def forget_files() -> None:
    """Close the files that were read. The next read opens what has their names then."""
    _opened.cache_clear()


class _Opened:
    """A descriptor that is closed with the last reference to this object."""

    def __init__(self, path: Path) -> None:
        self.descriptor = files.open_regular(path)
        weakref.finalize(self, os.close, self.descriptor)


@lru_cache(maxsize=OPEN_FILES)
def _opened(path: Path) -> _Opened:
    return _Opened(path)
