"""The files of tokens that ranks write together: each rank writes its own shard, and one rank puts them together.

tokens.rank-0.partial, tokens.rank-1.partial ...             token ids, one batch after the other
tokens.rank-0.documents.partial ...                          (first token in its batch, bytes of text), u64
tokens.documents, tokens.json, tokens                        from all shards, in this order; see token_files.py
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from mpipipe import files
from mpipipe.errors import DataError, StorageError
from mpipipe.language.data.token_files import DOCUMENTS, FACTS, TokenFacts, beside, dtype_for

BLOCK = 1 << 22  # bytes that are copied together


class BatchCounts(NamedTuple):
    """Numbers of tokens and documents of a batch, and bytes of text of these documents."""

    tokens: int
    documents: int
    nbytes: int


class TokenBatch(NamedTuple):
    """Tokens in the dtype of the file, and the first token and the bytes of text of each document that begins here."""

    ids: np.ndarray
    starts: list[int]
    nbytes: list[int]


class ShardWriter:
    """Writes the shard of one rank of the file `out`; a context manager that removes it at its end.

    `counts` are those of each batch written.
    """

    def __init__(self, out: Path, rank: int) -> None:
        self.paths, self.counts = shard_paths(out, rank), list[BatchCounts]()
        self._stack = ExitStack()

    def __enter__(self) -> ShardWriter:
        try:
            with writing(self.paths[0]):
                self._files = [self._stack.enter_context(open(path, "wb")) for path in self.paths]
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):  # of data that no longer count
            self._stack.close()
        for path in self.paths:
            with suppress(OSError):
                path.unlink()

    def write(self, batch: TokenBatch) -> None:
        """Append a batch. Raises StorageError."""
        with writing(self.paths[0]):
            self._files[0].write(batch.ids.data)
            self._files[1].write(np.array([batch.starts, batch.nbytes], "<u8").T.tobytes())
        self.counts.append(BatchCounts(len(batch.ids), len(batch.starts), sum(batch.nbytes)))

    def flush(self) -> None:
        """Let other ranks see what was written. Raises StorageError."""
        with writing(self.paths[0]):
            for file in self._files:
                file.flush()
                os.fsync(file.fileno())


def shard_paths(out: Path, rank: int) -> tuple[Path, Path]:
    """Return the files of a rank."""
    name = f"{out.name}.rank-{rank}"
    return out.with_name(f"{name}{files.PARTIAL}"), out.with_name(f"{name}{DOCUMENTS}{files.PARTIAL}")


def join_shards(
    out: Path, counts: Sequence[Sequence[BatchCounts]], vocab: int, end: int | None, tokenizer: str
) -> TokenFacts:
    """Write the files of tokens from the shards of all ranks; none is left where that fails.

    Batch b is the next one in the shard of rank b modulo the number of ranks. Raises StorageError, and DataError if a
    shard is not all there.
    """
    ranks, dtype = len(counts), np.dtype(dtype_for(vocab))
    order = [(b % ranks, counts[b % ranks][b // ranks]) for b in range(sum(map(len, counts)))]
    tokens, documents, nbytes = (sum(getattr(count, name) for _, count in order) for name in BatchCounts._fields)
    paths = [shard_paths(out, rank) for rank in range(ranks)]
    others = beside(out, DOCUMENTS), beside(out, FACTS)
    try:
        with writing(out), ExitStack() as opened, files.whole_file(out) as file:  # it gets its name last
            file.write(npy_header(dtype, (tokens,)))
            shards = [opened.enter_context(open(path, "rb")) for path, _ in paths]
            for rank, count in order:
                _copy(shards[rank], file, count.tokens * dtype.itemsize, paths[rank][0])
            index = blake2b(digest_size=16)
            with files.whole_file(others[0]) as file:
                file.write(npy_header(np.dtype("<u8"), (2, documents)))
                for column in (0, 1):
                    for values in _column(order, [path for _, path in paths], column):
                        index.update(values.data)
                        file.write(values.data)
            facts = TokenFacts(vocab, end, tokens, documents, nbytes, tokenizer, index.hexdigest())
            files.write_whole(others[1], facts.as_json())
    except BaseException:
        for path in others:
            with suppress(OSError):
                path.unlink()
        raise
    return facts


def npy_header(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    """Return the first bytes of a .npy file."""
    head = io.BytesIO()
    facts = {"descr": dtype.str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(head, facts)
    return head.getvalue()


def _column(order: Sequence[tuple[int, BatchCounts]], paths: Sequence[Path], column: int) -> Iterator[np.ndarray]:
    """Yield, batch by batch, the first tokens of all documents (column 0), or the bytes of text before each (1)."""
    before = 0
    with ExitStack() as opened:
        shards = [opened.enter_context(open(path, "rb")) for path in paths]
        for rank, count in order:
            content = shards[rank].read(16 * count.documents)
            if len(content) < 16 * count.documents:
                raise _short(paths[rank])
            values = np.frombuffer(content, "<u8").reshape(-1, 2)[:, column].astype(np.int64)
            yield (before + (np.cumsum(values) - values if column else values)).astype("<u8")
            before += count.nbytes if column else count.tokens


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


def writing(path: Path) -> AbstractContextManager[None]:
    """Turn an OSError within into the error for a file that cannot be written."""
    return files.writing("the tokens", path, StorageError, remedy="make room, or choose another --out")
