"""Text to a file of tokens, by all ranks together; the file is the same for any number of them.

The texts are cut into chunks (text_chunks.py), and consecutive chunks are put into batches of about `BATCH` bytes.
Batch b belongs to rank b modulo the number of ranks. The ranks agree after every `ROUND` batches of theirs, so that an
error on one of them ends them all, and all know how far they are.

    the library's threads     | encode 0 | encode 1 | encode 2 |
    Python              read 0 | read 1  | write 0, read 2 | write 1 ...
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import asdict
from hashlib import blake2b
from itertools import chain, islice
from pathlib import Path
from time import perf_counter
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from mpipipe import files
from mpipipe.checkpoint import write_facts
from mpipipe.errors import DataError, StorageError
from mpipipe.even_split import consecutive_bins
from mpipipe.job import Communicator, RankGroup, fair_share, group_of, own_cores, parse_cores
from mpipipe.language.data.file_bytes import forget_files
from mpipipe.language.data.listing import find_files
from mpipipe.language.data.text_chunks import Passage, TextChunk, TextReader, chunks_of
from mpipipe.language.data.token_files import DOCUMENTS, FACTS, TokenFacts, beside, dtype_for
from mpipipe.language.data.tokenizer import Tokenizer, library_errors, open_tokenizer
from mpipipe.train import output_folder

BATCH = 1 << 21  # bytes of text
ROUND = 4  # batches of each rank
THREADS = "RAYON_NUM_THREADS"  # of the library


class Tokenized(NamedTuple):
    """What has been written, from how many files of text, and the seconds from the first text to the last name."""

    facts: TokenFacts
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
) -> Tokenized:
    """Write the tokens of texts into a new file; collective. All ranks raise the same error, and leave no file then.

    `end` is the token after each document, in place of the one that the tokenizer's folder names. `progress` is called
    with the bytes that are done, and all.
    """
    group, path = group_of(comm), Path(output_folder.shared_path(comm, out))
    output_folder.make_folder(path.parent, comm, writes=True)
    with group.raise_together("tokenize: the output"):
        for place in (path, beside(path, DOCUMENTS), beside(path, FACTS)) if comm.rank == 0 else ():
            files.check_new("the file of tokens", place)
    share_threads(group)
    with group.raise_together("tokenize: the tokenizer"):
        encoder = Encoder(open_tokenizer(tokenizer, end))
    group.agree(
        "tokenize: the tokenizer",
        (("tokenizer", encoder.tokenizer.hash), ("end of text", encoder.tokenizer.end)),
        message="the ranks have different tokenizers",
        remedy="give all hosts the same folder",
    )
    entries = list_texts(texts, group)
    batches = batches_of(chunks_of(entries))
    start, total, done = perf_counter(), sum(size for _, size in entries), 0
    with ShardWriter(path, comm.rank) as shard:
        encoded = encoder.stream(batches[comm.rank :: comm.size])
        for _ in range(-(-len(batches) // (comm.size * ROUND))):
            error, size = None, 0
            try:
                for batch, nbytes in islice(encoded, ROUND):
                    shard.write(batch)
                    size += nbytes
            except Exception as caught:
                error = caught
            done += int(group.agree("tokenize: some chunks", values=[size], error=error).sum())
            progress(done, total)
        with group.raise_together("tokenize: the parts"):
            shard.flush()
        counts = group.gather("tokenize: the parts", shard.counts)
        facts = group.from_one("tokenize: the file of tokens", lambda: join_shards(path, counts, encoder.tokenizer))
    return Tokenized(facts, path, len(entries), perf_counter() - start)


class Encoder:
    """Turns chunks of text into tokens, with the tokens that the tokenizer puts around each document."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.reader = tokenizer, TextReader(tokenizer)
        ends = () if tokenizer.end is None else (tokenizer.end,)
        after = tokenizer.after if tokenizer.after[-1:] == ends else (*tokenizer.after, *ends)
        self._dtype = np.dtype(dtype_for(tokenizer.vocab))
        self._around = np.array(tokenizer.before, self._dtype), np.array(after, self._dtype)

    def encode(self, chunks: Sequence[TextChunk]) -> TokenBatch:
        """Return the tokens of some chunks."""
        passages = self._passages(chunks)
        return self._batch(passages, self._encode(passages))

    def stream(self, batches: Sequence[Sequence[TextChunk]]) -> Iterator[tuple[TokenBatch, int]]:
        """Yield the tokens of some batches, and how many bytes of text each has; a thread calls the library."""
        with ThreadPoolExecutor(1) as worker:
            earlier = None
            for chunks in (*batches, None):
                upcoming = None
                if chunks is not None:
                    passages = self._passages(chunks)
                    future = worker.submit(self._encode, passages)
                    upcoming = passages, future, sum(chunk.stop - chunk.start for chunk in chunks)
                if earlier is not None:
                    yield self._batch(earlier[0], earlier[1].result()), earlier[2]
                earlier = upcoming

    def _passages(self, chunks: Sequence[TextChunk]) -> list[Passage]:
        return list(chain.from_iterable(map(self.reader.passages, chunks)))

    def _encode(self, passages: Sequence[Passage]) -> Sequence[Any]:
        texts = [passage.text for passage in passages]
        with library_errors(self.tokenizer.path):
            return self.tokenizer.library.encode_batch_fast(texts, add_special_tokens=False)

    def _batch(self, passages: Sequence[Passage], encoded: Sequence[Any]) -> TokenBatch:
        before, after = self._around
        pieces, starts, count = [np.zeros(0, self._dtype)], list[int](), 0
        for passage, encoding in zip(passages, encoded):
            own = [np.array(encoding.ids, self._dtype)]
            if passage.opens:
                starts.append(count)
                own.insert(0, before)
            if passage.closes:
                own.append(after)
            pieces += own
            count += sum(map(len, own))
        return TokenBatch(np.concatenate(pieces), starts, [passage.nbytes for passage in passages if passage.opens])


def batches_of(chunks: Sequence[TextChunk]) -> list[list[TextChunk]]:
    """Put consecutive chunks together."""
    return consecutive_bins(((chunk, chunk.stop - chunk.start) for chunk in chunks), BATCH)


def list_texts(texts: Sequence[str], group: RankGroup) -> list[tuple[Path, int]]:
    """Return (file, bytes) of all texts, as rank 0 sees them; collective."""

    def find() -> list[tuple[Path, int]]:
        forget_files()
        return [entry for text in texts for entry in find_files(Path(text).absolute())]

    return group.from_one("tokenize: the list of texts", find)


def share_threads(group: RankGroup) -> None:
    """Let the library use this rank's share of the cores, hardware threads included, unless the user has set it."""
    own = parse_cores(own_cores())
    share = fair_share(group, own)
    if own and THREADS not in os.environ:
        os.environ[THREADS] = str(share)


# -- The files of tokens: each rank writes its own shard, and one rank puts them together -----------------------------
#
#     tokens.rank-0.partial, ...                 token ids, one batch after the other
#     tokens.rank-0.documents.partial, ...       (first token in its batch, bytes of text), u64
#     tokens.documents, tokens.json, tokens      from all shards, in this order; see token_files.py


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
    """Writes the shard of one rank of `out`, and removes it at its end; `counts` are those of each batch."""

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


def join_shards(out: Path, counts: Sequence[Sequence[BatchCounts]], tokenizer: Tokenizer) -> TokenFacts:
    """Write the files of tokens from all shards, or none; batch b is the next one of rank b modulo the ranks."""
    ranks, dtype = len(counts), np.dtype(dtype_for(tokenizer.vocab))
    order = [(b % ranks, counts[b % ranks][b // ranks]) for b in range(sum(map(len, counts)))]
    tokens, documents, nbytes = (sum(getattr(count, name) for _, count in order) for name in BatchCounts._fields)
    if not tokens:
        raise DataError("the texts have no tokens", found=str(out), remedy="give files that hold some text")
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
            facts = TokenFacts(
                tokenizer.vocab, tokenizer.end, tokens, documents, nbytes, tokenizer.hash, index.hexdigest()
            )
            write_facts(others[1], asdict(facts))
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
