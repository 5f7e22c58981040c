"""Text to a file of tokens, by all ranks together; the file is the same for any number of them.

The texts are cut into chunks (text_chunks.py), and consecutive chunks are put into batches of about `BATCH` bytes.
Batch b belongs to rank b modulo the number of ranks. The ranks agree after every `ROUND` batches of theirs, so that an
error on one of them ends them all, and all know how far they are.

    the library's threads     | encode 0 | encode 1 | encode 2 |
    Python              read 0 | read 1  | write 0, read 2 | write 1 ...
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from mpipipe import files
from mpipipe.errors import ConfigError, DataError
from mpipipe.job import Communicator, RankGroup, fair_share, group_of, own_cores, parse_cores
from mpipipe.language.data.file_bytes import forget_files
from mpipipe.language.data.listing import find_files
from mpipipe.language.data.shard_writer import BatchCounts, ShardWriter, TokenBatch, join_shards
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
    """Write the tokens of texts into a file; collective. All ranks raise the same error, and leave no file then.

    Parameters
    ----------
    texts : files and folders of text; files of JSON lines are known by their names
    tokenizer : folder of a tokenizer
    out : a new file, in a folder that all ranks share
    comm : the ranks
    end : the token after each document, in place of the one that the tokenizer's folder names
    progress : called with the bytes that are done, and all

    Raises DataError for a text or a tokenizer that cannot be read, ConfigError for an `out` that is there already or
    that ranks do not share, StorageError for a file that cannot be written, BackendError without the library.
    """
    group, path = group_of(comm), Path(output_folder.shared_path(comm, out))
    with group.raise_together("tokenize: the output"):
        if comm.rank == 0:
            for place in (path, beside(path, DOCUMENTS), beside(path, FACTS)):
                _check_new(place)
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
        facts = _joined(path, counts, encoder.tokenizer, group)
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
            encoded: Sequence[Any] = self.tokenizer.library.encode_batch_fast(texts, add_special_tokens=False)
        return encoded

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
    batches: list[list[TextChunk]] = []
    room = 0
    for chunk in chunks:
        size = chunk.stop - chunk.start
        if size > room:
            batches.append([])
            room = BATCH
        batches[-1].append(chunk)
        room -= size
    return batches


def list_texts(texts: Sequence[str], group: RankGroup) -> list[tuple[Path, int]]:
    """Return (file, bytes) of all texts, as rank 0 sees them; collective."""
    entries: list[tuple[Path, int]] = []
    with group.raise_together("tokenize: listing the texts"):
        if group.rank == 0:
            forget_files()
            entries = [entry for text in texts for entry in find_files(Path(text).absolute())]
    listed: list[tuple[Path, int]] = group.broadcast("tokenize: the list of texts", entries)
    return listed


def _check_new(path: Path) -> None:
    if files.exists(path):
        raise ConfigError(
            "there is a file or folder of this name already",
            found=str(path),
            expected="a new file",
            remedy="choose another one with --out, or move the old one away",
        )


def _joined(path: Path, counts: Sequence[Sequence[BatchCounts]], tokenizer: Tokenizer, group: RankGroup) -> TokenFacts:
    facts = None
    with group.raise_together("tokenize: the file of tokens"):
        if group.rank == 0:
            if not sum(count.tokens for part in counts for count in part):
                raise DataError("the texts have no tokens", found=str(path), remedy="give files that hold some text")
            facts = join_shards(path, counts, tokenizer.vocab, tokenizer.end, tokenizer.hash)
    shared: TokenFacts = group.broadcast("tokenize: the header", facts)
    return shared


def share_threads(group: RankGroup) -> None:
    """Let the library use this rank's share of the cores, unless the user has set a number of threads; collective.

    Hardware threads count as cores, as the library counts them.
    """
    own = parse_cores(own_cores())
    share = fair_share(group, own)
    if own and THREADS not in os.environ:
        os.environ[THREADS] = str(share)
