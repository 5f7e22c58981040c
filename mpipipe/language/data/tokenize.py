"""Text to a file of tokens, by one process; the library uses all its cores.

A text file is one document, and so is each line of a file of JSON lines. The file of tokens gets
its name last.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import numpy as np

from mpipipe import files
from mpipipe.checkpoint import write_facts
from mpipipe.errors import DataError, StorageError
from mpipipe.language.data.file_bytes import forget_files, read_bytes
from mpipipe.language.data.listing import find_files
from mpipipe.language.data.token_files import (
    DOCUMENTS,
    FACTS,
    TokenFacts,
    beside,
    dtype_for,
    npy_header,
)
from mpipipe.language.data.tokenizer import Tokenizer, library_errors, open_tokenizer

BATCH = 1 << 21  # bytes of text that the library gets at once
MOST = 1 << 27  # bytes of a text file
LINES = (".jsonl", ".ndjson")  # names of files of JSON lines


class Tokenized(NamedTuple):
    """What has been written, from how many files of text, and in how many seconds."""

    facts: TokenFacts
    path: Path
    files: int
    seconds: float


class Document(NamedTuple):
    """A text, its bytes, and where it ends in its file."""

    text: str
    nbytes: int
    end: int


def tokenize(
    texts: Sequence[str],
    tokenizer: str,
    out: str,
    *,
    end: str | None = None,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> Tokenized:
    """Write the tokens of texts into a new file. Where an error is raised no file is left.

    `end` is the token after each document, in place of the one that the tokenizer's folder names.
    `progress` is called with the bytes that are done, and all.
    """
    path = Path(out).absolute()
    others = beside(path, DOCUMENTS), beside(path, FACTS)
    for place in (path, *others):
        files.check_new("the file of tokens", place)
    encoder = Encoder(open_tokenizer(tokenizer, end))
    forget_files()
    entries = [entry for text in texts for entry in find_files(Path(text).absolute())]
    start = perf_counter()
    before = 0
    total = sum(size for _, size in entries)
    waiting: list[Document] = []
    unwritten = 0  # bytes of text of these
    try:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        with writing(path), files.whole_file(path) as file:
            file.write(npy_header(encoder.dtype, (0,)))
            for place, size in entries:
                for document in documents_of(place, size):
                    waiting.append(document)
                    unwritten += document.nbytes
                    if unwritten >= BATCH:
                        file.write(encoder.encode(waiting).data)
                        waiting.clear()
                        unwritten = 0
                        progress(before + document.end, total)
                before += size
            file.write(encoder.encode(waiting).data)
            progress(total, total)
            index, facts = encoder.index_and_facts()
            with files.whole_file(others[0]) as target:
                target.write(npy_header("<u8", index.shape))
                target.write(index.tobytes())
            write_facts(others[1], asdict(facts))
            file.seek(0)
            file.write(npy_header(encoder.dtype, (facts.tokens,)))
    except BaseException:
        for place in others:
            with suppress(OSError):
                place.unlink()
        raise
    return Tokenized(facts, path, len(entries), perf_counter() - start)


class Encoder:
    """Turns documents into tokens, with the tokens that the tokenizer puts around each.

    `lengths` and `nbytes` are the tokens and the bytes of text of all documents so far.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.lengths = array("q")
        self.nbytes = array("q")
        self._after = [*tokenizer.after]
        if tokenizer.end is not None and self._after[-1:] != [tokenizer.end]:
            self._after.append(tokenizer.end)
        self.dtype = dtype_for(tokenizer.vocab)

    def encode(self, documents: Sequence[Document]) -> np.ndarray:
        """Return the tokens of some documents, in the dtype of the file."""
        with library_errors(self.tokenizer.path):
            texts = [document.text for document in documents]
            encoded = self.tokenizer.library.encode_batch_fast(texts, add_special_tokens=False)
        pieces = [np.zeros(0, self.dtype)]
        for document, encoding in zip(documents, encoded):
            ids = [*self.tokenizer.before, *encoding.ids, *self._after]
            pieces.append(np.array(ids, self.dtype))
            self.lengths.append(len(pieces[-1]))
            self.nbytes.append(document.nbytes)
        return np.concatenate(pieces)

    def index_and_facts(self) -> tuple[np.ndarray, TokenFacts]:
        """Return the index of the documents, and the facts; raise DataError without tokens."""
        every = np.array([self.lengths, self.nbytes], np.int64)
        tokens, nbytes = every.sum(axis=1).tolist()
        if not tokens:
            raise DataError("the texts have no tokens", remedy="give files that hold some text")
        index = (np.cumsum(every, axis=1) - every).astype("<u8")
        checksum = blake2b(index.tobytes(), digest_size=16).hexdigest()
        made = self.tokenizer
        return index, TokenFacts(
            made.vocab, made.end, tokens, every.shape[1], nbytes, made.hash, checksum
        )


def documents_of(path: Path, size: int) -> Iterator[Document]:
    """Yield the documents of a file; raise DataError with the file and the line or byte."""
    if path.name.lower().endswith(LINES):
        yield from _lines(path)
        return
    if size > MOST:
        raise DataError(
            "a text file is too long for one document",
            found=f"{size} bytes in {path}",
            expected=f"at most {MOST} bytes",
            remedy="give the text as several files, or as JSON lines with a document in each",
        )
    content = read_bytes(path, 0, size)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"a text is not UTF-8: {error.reason}",
            found=f"byte {content[error.start]:#04x} at position {error.start} of {path}",
            expected="UTF-8",
            remedy="convert the file, or leave it out",
        ) from error
    if text:
        yield Document(text, size, size)


def _lines(path: Path) -> Iterator[Document]:
    place = 0
    with files.reading("data", path, DataError), open(files.open_regular(path), "rb") as file:
        for number, line in enumerate(file, 1):
            place += len(line)
            if line.strip():
                text = _text_of(line, f"line {number} of {path}")
                if text:
                    yield Document(text, len(text.encode()), place)


def _text_of(line: bytes, place: str) -> str:
    """Return the text of a line of JSON."""
    try:
        text: str = json.loads(line)["text"]
        text.encode()  # half a character is an error, too
        return text
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise DataError(
            "a line is no JSON object with a text",
            found=f"{type(error).__name__}: {error}"[:200] + f", {place}",
            expected='a line like {"text": "..."}',
            remedy="mend the line, or leave it out",
        ) from error


def writing(path: Path) -> AbstractContextManager[None]:
    """Turn an OSError within into the error for a file that cannot be written."""
    return files.writing(
        "the tokens", path, error=StorageError, remedy="make room, or choose another --out"
    )
