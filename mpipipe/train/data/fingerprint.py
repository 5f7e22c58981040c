"""A short text by which ranks find out whether they have the same data. Little of the data is read for it.

small file   |####|
big file     |#.....#.....#.....#|      # hashed blocks, evenly spread: the first, the last, and some between
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

from mpipipe.train.data.pieces import read_bytes, size_of

BLOCK = 4096  # bytes
BLOCKS = 4096  # in all, where there are fewer files than half of this
FILES = 8192  # whose contents are looked at, where there are more
GLANCED = 16  # files


def fingerprint(found: list[tuple[Path, int]]) -> str:
    """Return 32 hexadecimal digits for (file, bytes) entries: a hash of all names and sizes, and of sampled contents.

    The order of the entries counts. Of each file the first and the last block of 4 KiB are read, and all of a small
    file. Up to 2048 files about 16 MiB are read in all; of more files two blocks each, and of 8192 files at most.

    This can miss a change in a big file outside of the sampled blocks, a change in a file that was not sampled, and
    another folder: only the names of the files themselves count.

    Raises DataError if a file is shorter than its entry says, or cannot be read.
    """
    content = blake2b(digest_size=16)
    for path, size in found:
        content.update(f"{path.name} {size}\n".encode(errors="surrogateescape"))
    chosen = spread(len(found), FILES)
    for index in chosen:
        path, size = found[index]
        for block in spread(-(-size // BLOCK), max(2, BLOCKS // len(chosen))):
            start = block * BLOCK
            content.update(read_bytes(path, start, min(BLOCK, size - start)))
    return content.hexdigest()


def glance(found: list[tuple[Path, int]]) -> str:
    """Return 32 hexadecimal digits for what a rank sees of files that another rank has listed.

    At most `GLANCED` files are looked at, however many there are: at their sizes, and at their first and last block.

    Raises DataError if one of them cannot be read.
    """
    content = blake2b(digest_size=16)
    for index in spread(len(found), GLANCED):
        path, size = found[index]
        size_here = size_of(path)
        content.update(f"{size_here}\n".encode())
        if size_here == size:
            for start in {0, max(0, size - BLOCK)}:
                content.update(read_bytes(path, start, min(BLOCK, size)))
    return content.hexdigest()


def spread(total: int, count: int) -> list[int]:
    """Choose at most `count` >= 2 of the numbers 0 ... total - 1, evenly spread, with the first and the last."""
    if total <= count:
        return list(range(total))
    return [number * (total - 1) // (count - 1) for number in range(count)]
