"""The file of tokens that `mpipipe tokenize` writes.

    byte 0    header, 128 bytes, little-endian:
              magic "MPITOKEN", version (u32), bytes of a token id (u32: 2 or 4), size of the vocabulary (u64), id of
              the end-of-text token (i64, -1 for none), number of tokens (u64), of documents (u64), of bytes of text
              (u64), hash of the tokenizer (32 hexadecimal digits), checksum of the index (BLAKE2b, 16 bytes),
              checksum of all this (BLAKE2b, 16 bytes), zeros
    byte 128  token ids, uint16 or uint32, filled up with zeros to a multiple of 8 bytes
    then      the index: position of the first token of each document, u64, then bytes of text before each, u64

So a file is exactly as long as its header says. Every number that is read is checked before it is used. In version 1
the index has no checksum: there the order and the range of its numbers are all that can be checked.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Protocol, overload

import numpy as np

from mpipipe.errors import DataError
from mpipipe.language.data.file_bytes import read_bytes, size_of
from mpipipe.language.data.source import out_of_range

MAGIC = b"MPITOKEN"
VERSION = 2
HEADER_BYTES = 128
FIELDS = struct.Struct("<8sIIQqQQQ32s")
CHECKSUM_BYTES = 16
BLOCK = 1 << 18  # numbers of the index that are looked at together


@dataclass(frozen=True)
class Header:
    """What a file of tokens says of itself.

    Attributes
    ----------
    vocab : number of token ids
    end : id of the end-of-text token, None if there is none
    tokens, documents, nbytes : numbers of tokens, documents, and bytes of text
    tokenizer : hash of the tokenizer, 32 hexadecimal digits
    """

    vocab: int
    end: int | None
    tokens: int
    documents: int
    nbytes: int
    tokenizer: str

    @property
    def itemsize(self) -> int:
        """Bytes of a token id."""
        return itemsize_for(self.vocab)

    @property
    def index(self) -> int:
        """Byte at which the positions of documents begin."""
        return HEADER_BYTES + -(-self.tokens * self.itemsize // 8) * 8

    @property
    def file_bytes(self) -> int:
        """Bytes of the whole file."""
        return self.index + 16 * self.documents

    def packed(self, index: bytes) -> bytes:
        """Return the first bytes of the file; `index` is the checksum of the index."""
        end = -1 if self.end is None else self.end
        numbers = VERSION, self.itemsize, self.vocab, end, self.tokens, self.documents, self.nbytes
        fields = FIELDS.pack(MAGIC, *numbers, self.tokenizer.encode()) + index
        return (fields + checksum(fields)).ljust(HEADER_BYTES, b"\0")


def itemsize_for(vocab: int) -> int:
    """Return the bytes of a token id of a vocabulary."""
    return 2 if vocab <= 1 << 16 else 4


@dataclass(frozen=True)
class StoredDocuments:
    """The index of documents in a file of tokens; see `file_tokens.Documents`."""

    starts: Integers
    before: Integers
    nbytes: int

    @property
    def path(self) -> Path:
        """Of the file."""
        return self.starts.path

    def bytes_before(self, document: int) -> int:
        """As `Documents.bytes_before`."""
        return self.before[document] if document < len(self.before) else self.nbytes


def read_header(path: Path) -> Header:
    """Read the header of a file that begins with `MAGIC`; raises DataError if it, the index or the file is damaged."""
    size = size_of(path)
    if size < HEADER_BYTES:
        raise _damaged(path, f"{size} bytes", f"at least {HEADER_BYTES}")
    content = read_bytes(path, 0, HEADER_BYTES)
    _, version, itemsize, vocab, end, tokens, documents, nbytes, tokenizer = FIELDS.unpack_from(content)
    if not 1 <= version <= VERSION:
        raise DataError(
            "a file of tokens of another version",
            found=f"version {version} in {path}",
            expected=f"at most version {VERSION}",
            remedy="read it with the mpipipe that wrote it, or tokenize the text again",
        )
    covered = FIELDS.size + (CHECKSUM_BYTES if version > 1 else 0)
    if content[covered:] != checksum(content[:covered]).ljust(HEADER_BYTES - covered, b"\0"):
        raise _damaged(path, "a header with another checksum", "the header that was written")
    if not (1 <= vocab <= 1 << 32 and itemsize == itemsize_for(vocab) and -1 <= end < vocab):
        facts = f"vocabulary {vocab}, ids of {itemsize} bytes, end-of-text {end}"
        raise _damaged(path, facts, "a vocabulary of 1 to 2^32, ids of 2 or 4 bytes, an id of the vocabulary or -1")
    header = Header(vocab, None if end < 0 else end, tokens, documents, nbytes, tokenizer.decode(errors="replace"))
    if size != header.file_bytes:
        raise _damaged(path, f"{size} bytes", f"{header.file_bytes} for {tokens} tokens of {documents} documents")
    _check_index(path, header, content[FIELDS.size : covered])
    return header


def _check_index(path: Path, header: Header, written: bytes) -> None:
    """Raise DataError for an index with another checksum, of which version 1 has none, or in the wrong order."""
    rows = starts, before = _rows(path, header)
    content = blake2b(digest_size=CHECKSUM_BYTES)
    for row in rows:
        for place in range(0, header.documents, BLOCK):
            content.update(row.read(place, min(BLOCK, header.documents - place)).data)
    if written and content.digest() != written:
        raise _damaged(path, "an index of documents with another checksum", "the index that was written")
    for place in range(0, header.documents, BLOCK):
        tokens, text = _from(starts, place, header.tokens), _from(before, place, header.nbytes)
        wrong = (tokens[1:] < tokens[:-1]) | (text[1:] < text[:-1])
        if not written:  # positions that are all 0 do not fall; a text without a token is rarer than damage
            wrong |= (tokens[1:] == tokens[:-1]) & (text[1:] != text[:-1])
        if place == 0:
            wrong[0] |= bool(tokens[0] or text[0])
        if wrong.any():
            entry = int(np.flatnonzero(wrong)[0])
            raise _damaged(
                path,
                f"document {place + entry} from token {tokens[entry]} to {tokens[entry + 1]}, and from byte "
                f"{text[entry]} to {text[entry + 1]} of the text",
                f"documents one after the other, from 0 to token {header.tokens} and byte {header.nbytes}",
            )


def _rows(path: Path, header: Header) -> tuple[Integers, Integers]:
    """Return the two rows of the index."""
    starts = Integers(path, header.index, "<u8", header.documents)
    return starts, Integers(path, header.index + 8 * header.documents, "<u8", header.documents)


def _from(row: Integers, place: int, end: int) -> np.ndarray:
    """Return a block of a row and the number after it, which is `end` at the end of the row."""
    values = row.read(place, min(BLOCK + 1, len(row) - place))
    return values if len(values) > BLOCK else np.append(values, np.uint64(end))


def open_tokens(path: Path, vocab: int | None = None) -> tuple[Header, FileTokens]:
    """Open a file of tokens for a vocabulary, by default its own. Raises DataError as `read_header` does."""
    header = read_header(path)
    ids = Integers(path, HEADER_BYTES, f"<u{header.itemsize}", header.tokens)
    documents = StoredDocuments(*_rows(path, header), header.nbytes)
    return header, FileTokens(ids, header.vocab if vocab is None else vocab, documents)


def checksum(fields: bytes) -> bytes:
    """Return the BLAKE2b of some bytes."""
    return blake2b(fields, digest_size=CHECKSUM_BYTES).digest()


def _damaged(path: Path, found: str, expected: str) -> DataError:
    return DataError("a file of tokens is damaged", found=f"{found}, {path}", expected=expected, remedy=REMEDY)


def same_tokenizer(headers: Sequence[tuple[Path, Header]]) -> None:
    """Raise DataError if files were made by different tokenizers."""
    for path, header in headers[1:]:
        first, other = headers[0]
        if (header.tokenizer, header.vocab) != (other.tokenizer, other.vocab):
            raise DataError(
                "files of tokens of different tokenizers",
                found=f"tokenizer {header.tokenizer} with {header.vocab} ids, {path}",
                expected=f"tokenizer {other.tokenizer} with {other.vocab} ids, as {first}",
                remedy="tokenize all texts with one tokenizer",
            )


# -- Tokens that stand one after the other in a file, read by position: `source.Tokens` for every format --------------
#
# Files are not mapped into memory; `pieces.py` says why.


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
