"""The parts of a file of tokens: each rank writes its own, and one rank puts them together.

tokens.rank-0.partial, tokens.rank-1.partial ...             token ids, one chunk behind the other
tokens.rank-0.documents.partial ...                          (first token in its chunk, bytes of text), u64
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from mpipipe import files
from mpipipe.errors import DataError, StorageError
from mpipipe.train.data.token_file import CHECKSUM_BYTES, HEADER_BYTES, Header, itemsize_for

BLOCK = 1 << 22  # bytes that are copied together


class Counts(NamedTuple):
    """What a chunk has."""

    tokens: int
    documents: int
    nbytes: int


class Chunk(NamedTuple):
    """The tokens of some units.

    Attributes
    ----------
    ids : in the dtype of the file
    starts, nbytes : first token and bytes of text of each document that begins here
    """

    ids: np.ndarray
    starts: list[int]
    nbytes: list[int]


class PartWriter:
    """Writes the part of one rank; a context manager that removes it at its end.

    Parameters
    ----------
    out : the file of tokens that is being made
    rank : of this process

    Attributes
    ----------
    counts : of each chunk written
    """

    def __init__(self, out: Path, rank: int) -> None:
        self.paths, self.counts = part_paths(out, rank), list[Counts]()
        self._stack = ExitStack()

    def __enter__(self) -> PartWriter:
        try:
            self._files = [self._stack.enter_context(open(path, "wb")) for path in self.paths]
        except OSError as error:
            self.__exit__()
            raise unwritable(self.paths[0], error) from error
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):  # of data that nobody wants any more
            self._stack.close()
        for path in self.paths:
            with suppress(OSError):
                path.unlink()

    def write(self, chunk: Chunk) -> None:
        """Append a chunk. Raises StorageError."""
        entries = np.array([chunk.starts, chunk.nbytes], "<u8").T
        try:
            self._files[0].write(chunk.ids.data)
            self._files[1].write(np.ascontiguousarray(entries).data)
        except OSError as error:
            raise unwritable(self.paths[0], error) from error
        self.counts.append(Counts(len(chunk.ids), len(chunk.starts), sum(chunk.nbytes)))

    def flush(self) -> None:
        """Let other ranks see what was written. Raises StorageError."""
        try:
            for file in self._files:
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise unwritable(self.paths[0], error) from error


def part_paths(out: Path, rank: int) -> tuple[Path, Path]:
    """Return the files of a rank."""
    name = f"{out.name}.rank-{rank}"
    return out.with_name(f"{name}{files.PARTIAL}"), out.with_name(f"{name}.documents{files.PARTIAL}")


def assemble(
    out: Path, counts: Sequence[Sequence[Counts]], vocab: int, end: int | None, tokenizer: str
) -> tuple[Header, int]:
    """Write the file of tokens from the parts of all ranks; return its header, and the number of chunks.

    Chunk c is the next one in the part of rank c modulo the number of ranks. Raises StorageError, and DataError if
    a part is not all there.
    """
    ranks = len(counts)
    order = [(c % ranks, counts[c % ranks][c // ranks]) for c in range(sum(map(len, counts)))]
    totals = [sum(getattr(count, name) for _, count in order) for name in Counts._fields]
    header = Header(vocab, end, totals[0], totals[1], totals[2], tokenizer)
    paths = [part_paths(out, rank) for rank in range(ranks)]
    try:
        with ExitStack() as opened, files.whole_file(out) as file:
            ids = [opened.enter_context(open(path, "rb")) for path, _ in paths]
            file.write(bytes(HEADER_BYTES))
            for rank, count in order:
                _copy(ids[rank], file, count.tokens * itemsize_for(vocab), paths[rank][0])
            file.write(bytes(header.index - file.tell()))
            index = blake2b(digest_size=CHECKSUM_BYTES)
            for column in _columns(order, [path for _, path in paths]):
                for values in column:
                    content = values.astype("<u8").data
                    index.update(content)
                    file.write(content)
            file.seek(0)
            file.write(header.packed(index.digest()))
    except OSError as error:
        raise unwritable(out, error) from error
    return header, len(order)


def _columns(order: Sequence[tuple[int, Counts]], paths: Sequence[Path]) -> Iterable[Iterable[np.ndarray]]:
    """Yield the positions of all documents, then the bytes before each, chunk by chunk."""
    for column in (0, 1):
        yield _column(order, paths, column)


def _column(order: Sequence[tuple[int, Counts]], paths: Sequence[Path], column: int) -> Iterable[np.ndarray]:
    before = 0
    with ExitStack() as opened:
        parts = [opened.enter_context(open(path, "rb")) for path in paths]
        for rank, count in order:
            content = parts[rank].read(16 * count.documents)
            if len(content) < 16 * count.documents:
                raise _short(paths[rank])
            values = np.frombuffer(content, "<u8").reshape(-1, 2)[:, column].astype(np.int64)
            if column == 0:
                yield before + values
                before += count.tokens
            else:
                yield before + np.cumsum(values) - values
                before += count.nbytes


def _copy(source: BinaryIO, target: BinaryIO, count: int, path: Path) -> None:
    while count:
        block = source.read(min(BLOCK, count))
        if not block:
            raise _short(path)
        target.write(block)
        count -= len(block)


def _short(path: Path) -> DataError:
    return DataError(
        "a part of the tokens is not all there",
        found=str(path),
        expected="what a rank has written",
        remedy="put --out on a file system that all hosts share",
    )


def unwritable(path: Path, error: OSError) -> StorageError:
    """Make the error for a file that cannot be written."""
    return StorageError(
        f"the tokens cannot be written: {error.strerror}", found=str(path), remedy="make room, or choose another --out"
    )
