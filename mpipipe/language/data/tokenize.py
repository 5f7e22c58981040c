"""Text to a file of tokens, by all ranks together; the file is the same for any number of them.

The texts are cut into units (units.py), and units are put into chunks of about `CHUNK` bytes. Chunk c belongs to rank c
modulo the number of ranks. The ranks agree behind every `ROUND` chunks of theirs, so that an error on one of them ends
them all, and all know how far they are.

    the library's threads     | encode 0 | encode 1 | encode 2 |
    Python              read 0 | read 1  | write 0, read 2 | write 1 ...
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from hashlib import blake2b
from itertools import chain, islice
from pathlib import Path
from time import perf_counter
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from mpipipe import files
from mpipipe.errors import ConfigError, DataError, StorageError
from mpipipe.job.cores import fair_share, own_cores, parse_cores
from mpipipe.job.group import Group, group_of
from mpipipe.job.types import Communicator
from mpipipe.language.data.file_bytes import forget_files
from mpipipe.language.data.text import find_files
from mpipipe.language.data.text_chunks import Text, Texts, Unit, units_of
from mpipipe.language.data.token_files import CHECKSUM_BYTES, HEADER_BYTES, Header, itemsize_for
from mpipipe.language.data.tokenizer import Tokenizer, explained, open_tokenizer
from mpipipe.train import output_folder

CHUNK = 1 << 21  # bytes of text
ROUND = 4  # chunks of each rank
THREADS = "RAYON_NUM_THREADS"  # of the library


class Done(NamedTuple):
    """What has been tokenized.

    Attributes
    ----------
    header : of the file
    path : of the file
    files : number of files of text
    seconds : from the first text that was read to the file under its name
    """

    header: Header
    path: Path
    files: int
    seconds: float


def tokenize(
    texts: Sequence[str],
    tokenizer: str,
    out: str,
    comm: Communicator,
    *,
    end: str | None = None,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> Done:
    """Write the tokens of texts into a file; collective. All ranks raise the same error, and leave no file then.

    Parameters
    ----------
    texts : files and folders of text; files of JSON lines are known by their names
    tokenizer : folder of a tokenizer
    out : a new file, in a folder that all ranks share
    comm : the ranks
    end : the token behind each document, in place of the one that the tokenizer's folder names
    progress : called with the bytes that are done, and all

    Raises
    ------
    DataError
        For a text that cannot be read, a line without a text, a tokenizer that cannot be read.
    ConfigError
        For an `out` that is there already, or that ranks do not share.
    StorageError
        For a file that cannot be written.
    BackendError
        Without the library.
    """
    group, path = group_of(comm), Path(output_folder.shared_path(comm, out))
    with group.raise_together("tokenize: the output"):
        if comm.rank == 0:
            _check_new(path)
    output_folder.make_folder(path.parent, comm, writes=True)
    share_threads(group)
    with group.raise_together("tokenize: the tokenizer"):
        encoder = Encoder(open_tokenizer(tokenizer, end))
    group.agree(
        "tokenize: the tokenizer",
        (("tokenizer", encoder.tokenizer.hash), ("end of text", encoder.tokenizer.end)),
        message="the ranks have different tokenizers",
        remedy="give all hosts the same folder",
    )
    found = found_texts(texts, group)
    chunks = chunks_of(units_of(found))
    start, total, done = perf_counter(), sum(size for _, size in found), 0
    with PartWriter(path, comm.rank) as part, ThreadPoolExecutor(1) as worker:
        encoded = encoder.stream(chunks[comm.rank :: comm.size], worker)
        for _ in range(-(-len(chunks) // (comm.size * ROUND))):
            error, size = None, 0
            try:
                for chunk, nbytes in islice(encoded, ROUND):
                    part.write(chunk)
                    size += nbytes
            except Exception as caught:
                error = caught
            done += int(group.agree("tokenize: some chunks", values=[size], error=error).sum())
            progress(done, total)
        with group.raise_together("tokenize: the parts"):
            part.flush()
        counts = group.gather("tokenize: the parts", part.counts)
        header = _assembled(path, counts, encoder.tokenizer, group)
    return Done(header, path, len(found), perf_counter() - start)


class Encoder:
    """Turns units into tokens.

    Parameters
    ----------
    tokenizer : to use
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.texts = tokenizer, Texts(tokenizer)
        ends = () if tokenizer.end is None else (tokenizer.end,)
        behind = tokenizer.behind if tokenizer.behind[-1:] == ends else (*tokenizer.behind, *ends)
        self._dtype = np.dtype(f"<u{itemsize_for(tokenizer.vocab)}")
        self._around = np.array(tokenizer.before, self._dtype), np.array(behind, self._dtype)

    def encode(self, units: Sequence[Unit]) -> Chunk:
        """Return the tokens of some units."""
        texts = self._texts(units)
        return self._chunk(texts, self._encode(texts))

    def stream(self, chunks: Sequence[Sequence[Unit]], worker: Executor) -> Iterator[tuple[Chunk, int]]:
        """Yield the tokens of some chunks, and how many bytes of text each has; the worker calls the library."""
        earlier: tuple[list[Text], Future[Sequence[Any]], int] | None = None
        for units in chunks:
            texts = self._texts(units)
            future = worker.submit(self._encode, texts)
            if earlier is not None:
                yield self._chunk(earlier[0], earlier[1].result()), earlier[2]
            earlier = texts, future, sum(unit.stop - unit.start for unit in units)
        if earlier is not None:
            yield self._chunk(earlier[0], earlier[1].result()), earlier[2]

    def _texts(self, units: Sequence[Unit]) -> list[Text]:
        return list(chain.from_iterable(map(self.texts.of, units)))

    def _encode(self, texts: Sequence[Text]) -> Sequence[Any]:
        with explained(self.tokenizer.path):
            found: Sequence[Any] = self.tokenizer.library.encode_batch_fast(
                [each.text for each in texts], add_special_tokens=False
            )
        return found

    def _chunk(self, texts: Sequence[Text], encoded: Sequence[Any]) -> Chunk:
        before, behind = self._around
        pieces, starts, count = [np.zeros(0, self._dtype)], list[int](), 0
        for each, found in zip(texts, encoded):
            own = [np.array(found.ids, self._dtype)]
            if each.opens:
                starts.append(count)
                own.insert(0, before)
            if each.closes:
                own.append(behind)
            pieces += own
            count += sum(map(len, own))
        return Chunk(np.concatenate(pieces), starts, [each.nbytes for each in texts if each.opens])


def chunks_of(units: Sequence[Unit]) -> list[list[Unit]]:
    """Put consecutive units together."""
    chunks: list[list[Unit]] = []
    room = 0
    for unit in units:
        size = unit.stop - unit.start
        if size > room:
            chunks.append([])
            room = CHUNK
        chunks[-1].append(unit)
        room -= size
    return chunks


def found_texts(texts: Sequence[str], group: Group) -> list[tuple[Path, int]]:
    """Return (file, bytes) of all texts, as rank 0 sees them."""
    found: list[tuple[Path, int]] = []
    with group.raise_together("tokenize: listing the texts"):
        if group.rank == 0:
            forget_files()
            found = [entry for text in texts for entry in find_files(Path(text).absolute())]
    listed: list[tuple[Path, int]] = group.broadcast("tokenize: the list of texts", found)
    return listed


def _check_new(path: Path) -> None:
    if files.exists(path):
        raise ConfigError(
            "there is a file or folder of this name already",
            found=str(path),
            expected="a new file",
            remedy="choose another one with --out, or move the old one away",
        )


def _assembled(path: Path, counts: Sequence[Sequence[Counts]], tokenizer: Tokenizer, group: Group) -> Header:
    header = None
    with group.raise_together("tokenize: the file of tokens"):
        if group.rank == 0:
            if not sum(count.tokens for part in counts for count in part):
                raise DataError("the texts have no tokens", found=str(path), remedy="give files that hold some text")
            header, _ = assemble(path, counts, tokenizer.vocab, tokenizer.end, tokenizer.hash)
    shared: Header = group.broadcast("tokenize: the header", header)
    return shared


def share_threads(group: Group) -> None:
    """Let the library use this rank's share of the cores, unless the user has set a number of threads; collective.

    Hardware threads count as cores, as the library counts them.
    """
    own = parse_cores(own_cores())
    share = fair_share(group, own)
    if own and THREADS not in os.environ:
        os.environ[THREADS] = str(share)


# -- The parts of a file of tokens: each rank writes its own, and one rank puts them together -------------------------
#
# tokens.rank-0.partial, tokens.rank-1.partial ...             token ids, one chunk behind the other
# tokens.rank-0.documents.partial ...                          (first token in its chunk, bytes of text), u64


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
