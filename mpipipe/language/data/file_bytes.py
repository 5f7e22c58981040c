"""Bytes of data files, read by position, and short hashes that ranks compare.

Files are not mapped into memory: where one is cut short during a training, reading a map would end
the process.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

from mpipipe import files
from mpipipe.errors import DataError

OPEN_FILES = 256  # descriptors kept
REMEDY = "leave the data alone while a training reads them; train on a copy"


def read_bytes(path: Path, start: int, count: int) -> bytes:
    """Read the bytes start .. start + count of a file; raise DataError if it has fewer."""
    with files.reading("data", path, DataError, remedy=REMEDY):
        # This reference keeps it open, also where another thread forgets all files.
        opened = _opened(path)
        content = files.read_at(opened.descriptor, start, count)
        size = os.fstat(opened.descriptor).st_size
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
    with files.reading("data", path, DataError, remedy=REMEDY):
        opened = _opened(path)
        return os.fstat(opened.descriptor).st_size


def forget_files() -> None:
    """Close the files that were read. The next read opens what has their names then."""
    _opened.cache_clear()


class _Opened:
    """A descriptor that is closed with the last reference to this object."""

    def __init__(self, path: Path) -> None:
        self.descriptor = files.open_regular(path)
        weakref.finalize(self, os.close, self.descriptor)


_opened = lru_cache(maxsize=OPEN_FILES)(_Opened)


# -- Hashes of files. Little of the data is read for them ------------------------------------------
#
# small file   |####|
# big file     |#.....#.....#.....#|      # hashed blocks, evenly spread, with first and last


BLOCK = 4096  # bytes
# Blocks in all; but a file has two of them.
BLOCKS = 4096
# Files whose contents are sampled at most.
FILES = 8192
GLANCED = 16  # files


def fingerprint(entries: Sequence[tuple[Path, int]], blocks: int = BLOCKS) -> str:
    """Return 32 hexadecimal digits: a hash of names, sizes and sampled contents of files.

    Of each file the first and last 4 KiB are read, and some between: about 16 MiB in all, and 8192
    files at most. So a change in a big file between the samples can be missed.
    """
    content = blake2b(digest_size=16)
    for path, size in entries:
        content.update(f"{path.name} {size}\n".encode(errors="surrogateescape"))
    chosen = spread(len(entries), FILES)
    for index in chosen:
        path, size = entries[index]
        for block in spread(-(-size // BLOCK), max(2, blocks // len(chosen))):
            start = block * BLOCK
            content.update(read_bytes(path, start, min(BLOCK, size - start)))
    return content.hexdigest()


def glance(entries: Sequence[tuple[Path, int]]) -> str:
    """Return the fingerprint of 16 of the files that another rank listed, as they are here."""
    chosen = [entries[index][0] for index in spread(len(entries), GLANCED)]
    return fingerprint([(path, size_of(path)) for path in chosen], blocks=0)


def spread(total: int, count: int) -> list[int]:
    """Choose at most `count` of the numbers 0 ... total - 1, with the first and the last.

    They are evenly spread; `count` is at least 2.
    """
    if total <= count:
        return list(range(total))
    return [number * (total - 1) // (count - 1) for number in range(count)]
