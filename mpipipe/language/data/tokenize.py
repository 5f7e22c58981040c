"""Text to a file of tokens, by all ranks together; the file is the same for any number of them.

The texts are cut into chunks (text_chunks.py). Each rank has consecutive ones, of about as many bytes as any other,
and writes their tokens into a part of its own. Rank 0 joins the parts. The ranks agree after each batch of about
`BATCH` bytes, so that an error on one of them ends them all, and all know how far they are.
"""

from __future__ import annotations

import os
import shutil
from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import numpy as np

from mpipipe import files
from mpipipe.checkpoint import write_facts
from mpipipe.errors import DataError, StorageError
from mpipipe.even_split import consecutive_bins
from mpipipe.job import Communicator, RankGroup, fair_share, group_of, own_cores, parse_cores
from mpipipe.language.data.file_bytes import forget_files
from mpipipe.language.data.listing import find_files
from mpipipe.language.data.text_chunks import TextChunk, chunks_of
from mpipipe.language.data.token_files import DOCUMENTS, FACTS, TokenFacts, beside, dtype_for, npy_header
from mpipipe.language.data.tokenizer import Tokenizer, library_errors, open_tokenizer
from mpipipe.train import output_folder

BATCH = 1 << 21  # bytes of text
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

    def list_texts() -> list[tuple[Path, int]]:
        forget_files()
        return [entry for text in texts for entry in find_files(Path(text).absolute())]

    entries = group.from_one("tokenize: the list of texts", list_texts)
    with group.raise_together("tokenize: the chunks"):
        batches = divide(chunks_of(entries), comm.size)
    start, total, done = perf_counter(), sum(size for _, size in entries), 0
    part = part_path(path, comm.rank)
    try:
        with group.raise_together("tokenize: the parts"), writing(part):
            part.write_bytes(b"")
        for number in range(max(map(len, batches))):
            error, size = None, 0
            try:
                for chunk in batches[comm.rank][number : number + 1]:
                    ids = encoder.encode(chunk)
                    with writing(part), part.open("ab") as file:
                        file.write(ids.data)
                    size = sum(text.stop - text.start for text in chunk)
            except Exception as caught:
                error = caught
            done += int(group.agree("tokenize: some chunks", values=[size], error=error).sum())
            progress(done, total)
        lengths = np.array([encoder.lengths, encoder.nbytes], np.int64)
        documents = group.gather("tokenize: the documents", lengths)
        facts = group.from_one("tokenize: the file of tokens", lambda: join_parts(path, documents, encoder.tokenizer))
    finally:
        with suppress(OSError):
            part.unlink()
    return Tokenized(facts, path, len(entries), perf_counter() - start)


class Encoder:
    """Turns chunks of text into tokens, with the tokens that the tokenizer puts around each document.

    `lengths` and `nbytes` are the tokens and the bytes of text of all documents so far.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.lengths = array("q")
        self.nbytes = array("q")
        ends = () if tokenizer.end is None else (tokenizer.end,)
        self._after = tokenizer.after if tokenizer.after[-1:] == ends else (*tokenizer.after, *ends)
        self._dtype = np.dtype(dtype_for(tokenizer.vocab))

    def encode(self, chunks: Sequence[TextChunk]) -> np.ndarray:
        """Return the tokens of some chunks, in the dtype of the file."""
        texts = []
        for chunk in chunks:
            for text, nbytes in chunk.documents():
                texts.append(text)
                self.nbytes.append(nbytes)
        with library_errors(self.tokenizer.path):
            encoded = self.tokenizer.library.encode_batch_fast(texts, add_special_tokens=False)
        pieces = [np.zeros(0, self._dtype)]
        for encoding in encoded:
            pieces.append(np.array([*self.tokenizer.before, *encoding.ids, *self._after], self._dtype))
            self.lengths.append(len(pieces[-1]))
        return np.concatenate(pieces)


def divide(chunks: Sequence[TextChunk], ranks: int) -> list[list[list[TextChunk]]]:
    """Return the chunks of each rank, in batches: consecutive ones, of about as many bytes on each rank."""
    sizes = [chunk.stop - chunk.start for chunk in chunks]
    total = max(1, sum(sizes))
    shares: list[list[tuple[TextChunk, int]]] = [[] for _ in range(ranks)]
    for chunk, size, end in zip(chunks, sizes, accumulate(sizes)):
        shares[(end - size) * ranks // total].append((chunk, size))
    return [consecutive_bins(share, BATCH) for share in shares]


def share_threads(group: RankGroup) -> None:
    """Let the library use this rank's share of the cores, hardware threads included, unless the user has set it."""
    own = parse_cores(own_cores())
    share = fair_share(group, own)
    if own and THREADS not in os.environ:
        os.environ[THREADS] = str(share)


# -- The files of tokens: each rank writes its own part, and one rank puts them together ------------------------------


def part_path(out: Path, rank: int) -> Path:
    """Return the file with the token ids of a rank."""
    return out.with_name(f"{out.name}.rank-{rank}{files.PARTIAL}")


def join_parts(out: Path, documents: Sequence[np.ndarray], tokenizer: Tokenizer) -> TokenFacts:
    """Write the files of tokens, or none; `documents` are the tokens and bytes of each document, (2, n) by rank."""
    counts = [int(lengths.sum()) for lengths, _ in documents]
    every = np.concatenate(documents, axis=1)
    tokens, nbytes = every.sum(axis=1).tolist()
    if not tokens:
        raise DataError("the texts have no tokens", found=str(out), remedy="give files that hold some text")
    index = (np.cumsum(every, axis=1) - every).astype("<u8").tobytes()
    checksum = blake2b(index, digest_size=16).hexdigest()
    facts = TokenFacts(tokenizer.vocab, tokenizer.end, tokens, every.shape[1], nbytes, tokenizer.hash, checksum)
    others = beside(out, DOCUMENTS), beside(out, FACTS)
    dtype = dtype_for(tokenizer.vocab)
    try:
        with writing(out), files.whole_file(out) as file:  # it gets its name last
            file.write(npy_header(dtype, (tokens,)))
            for rank, count in enumerate(counts):
                part = part_path(out, rank)
                size = part.stat().st_size
                if size != count * np.dtype(dtype).itemsize:
                    raise DataError(
                        "a part of the tokens is not all there",
                        found=f"{size} bytes in {part}",
                        expected="what a rank has written",
                        remedy="put --out on a file system that all hosts share",
                    )
                with part.open("rb") as source:
                    shutil.copyfileobj(source, file)
            with files.whole_file(others[0]) as target:
                target.write(npy_header("<u8", every.shape))
                target.write(index)
            write_facts(others[1], asdict(facts))
    except BaseException:
        for path in others:
            with suppress(OSError):
                path.unlink()
        raise
    return facts


def writing(path: Path) -> AbstractContextManager[None]:
    """Turn an OSError within into the error for a file that cannot be written."""
    return files.writing("the tokens", path, StorageError, remedy="make room, or choose another --out")
