"""Tokens that stand one after the other in a file, read by position: `source.Tokens` for every format.

Files are not mapped into memory; `pieces.py` says why.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, overload

import numpy as np

from mpipipe.errors import DataError
from mpipipe.train.data.pieces import read_bytes
from mpipipe.train.data.source import out_of_range

REMEDY = "copy the file again from where it is whole, or make it again"


@dataclass(frozen=True)
class Integers(Sequence[int]):
    """An array of integers in a file, as a sequence.

    Attributes
    ----------
    path : of the file
    offset : byte at which it begins
    dtype : such as "<u8"
    length : number of integers
    """

    path: Path
    offset: int
    dtype: str
    length: int

    def __len__(self) -> int:
        return self.length

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        if isinstance(index, slice):
            start, stop, _ = index.indices(self.length)
            return self.read(start, stop - start).tolist()
        if not 0 <= index < self.length:
            raise IndexError(f"entry {index} of {self.length}")
        return int(self.read(index, 1)[0])

    def read(self, start: int, count: int) -> np.ndarray:
        """Read the entries start ... start + count - 1. Raises DataError if the file has become shorter."""
        size = np.dtype(self.dtype).itemsize
        content = read_bytes(self.path, self.offset + start * size, count * size)
        return np.frombuffer(content, self.dtype)


class Documents(Protocol):
    """Where the documents of a file begin, and how many bytes of text stand before them.

    path : of the file that says so
    starts : position of the first token of each document
    """

    @property
    def path(self) -> Path: ...
    @property
    def starts(self) -> Sequence[int]: ...

    def bytes_before(self, document: int) -> int | None:
        """Return the bytes of text of all documents before this one, or of all for the number of documents."""


@dataclass(frozen=True)
class FileTokens:
    """The tokens of one file.

    Attributes
    ----------
    ids : the token ids
    vocab : all ids must be at least 0 and below it
    documents : None if nothing is known of them
    """

    ids: Integers
    vocab: int
    documents: Documents | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def path(self) -> Path:
        """Of the file with the ids."""
        return self.ids.path

    @property
    def nbytes(self) -> int | None:
        """Bytes of the text that the tokens stand for; None if that is not known."""
        return self.bytes_of(0, len(self))

    def read(self, start: int, count: int) -> np.ndarray:
        """Read the tokens start ... start + count - 1. Raises DataError for one that the vocabulary does not have."""
        if not 0 <= start <= start + count <= len(self):
            raise IndexError(f"tokens {start} to {start + count} of {len(self)} in {self.path}")
        found = self.ids.read(start, count)
        if count and (found.max() >= self.vocab or found.min() < 0):
            place = int(np.flatnonzero((found >= self.vocab) | (found < 0))[0])
            raise out_of_range(int(found[place]), self.vocab, start + place, str(self.path))
        return found

    def starts(self, start: int, stop: int) -> np.ndarray | None:
        """Return where documents begin in start ... stop - 1, int64, rising; None if nothing is known of them."""
        if self.documents is None:
            return None
        starts = self.documents.starts
        found = np.array(starts[bisect_left(starts, start) : bisect_left(starts, stop)], np.int64)
        if found.size and (found[0] < start or found[-1] >= stop or (np.diff(found) < 0).any()):
            raise DataError(
                "the index of documents is damaged",
                found=f"starts {found.tolist()[:5]} in {self.documents.path}",
                expected=f"rising numbers from {start} to {stop - 1}",
                remedy=REMEDY,
            )
        return found

    def bytes_of(self, start: int, stop: int) -> int | None:
        """Return the bytes of text of the tokens start ... stop - 1.

        Within a document they are counted as if all its tokens were as long as each other.
        """
        if self.documents is None or self.documents.bytes_before(0) is None:
            return None
        return self._bytes_before(self.documents, stop) - self._bytes_before(self.documents, start)

    def _bytes_before(self, documents: Documents, position: int) -> int:
        starts = documents.starts
        number = bisect_right(starts, position) - 1  # the document that holds it, the last of several that begin here
        if number < 0:
            return 0
        first, before = starts[number], documents.bytes_before(number) or 0
        stop = starts[number + 1] if number + 1 < len(starts) else len(self)
        after = documents.bytes_before(number + 1) or 0
        return before + (after - before) * (position - first) // max(1, stop - first)
