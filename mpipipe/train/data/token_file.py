"""The file of tokens that `mpipipe tokenize` writes.

    byte 0    header, 128 bytes, little-endian:
              magic "MPITOKEN", version (u32), bytes of a token id (u32: 2 or 4), size of the vocabulary (u64), id of
              the end-of-text token (i64, -1 for none), number of tokens (u64), of documents (u64), of bytes of text
              (u64), hash of the tokenizer (32 hexadecimal digits), checksum of all this (BLAKE2b, 16 bytes), zeros
    byte 128  token ids, uint16 or uint32, filled up with zeros to a multiple of 8 bytes
    then      position of the first token of each document, u64
    then      bytes of text before each document, u64

So a file is exactly as long as its header says. Every number that is read is checked before it is used.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from mpipipe.errors import DataError
from mpipipe.train.data.file_tokens import REMEDY, FileTokens, Integers
from mpipipe.train.data.pieces import read_bytes, size_of

MAGIC = b"MPITOKEN"
VERSION = 1
HEADER_BYTES = 128
FIELDS = struct.Struct("<8sIIQqQQQ32s")
CHECKSUM_BYTES = 16


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

    def packed(self) -> bytes:
        """Return the first bytes of the file."""
        end = -1 if self.end is None else self.end
        numbers = VERSION, self.itemsize, self.vocab, end, self.tokens, self.documents, self.nbytes
        fields = FIELDS.pack(MAGIC, *numbers, self.tokenizer.encode())
        return (fields + _checksum(fields)).ljust(HEADER_BYTES, b"\0")


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
    """Read the header of a file that begins with `MAGIC`; raises DataError if it or the file is damaged."""
    size = size_of(path)
    if size < HEADER_BYTES:
        raise _damaged(path, f"{size} bytes", f"at least {HEADER_BYTES}")
    content = read_bytes(path, 0, HEADER_BYTES)
    fields = content[: FIELDS.size]
    _, version, itemsize, vocab, end, tokens, documents, nbytes, tokenizer = FIELDS.unpack(fields)
    if version != VERSION:
        raise DataError(
            "a file of tokens of another version",
            found=f"version {version} in {path}",
            expected=f"version {VERSION}",
            remedy="read it with the mpipipe that wrote it, or tokenize the text again",
        )
    if content[FIELDS.size :][:CHECKSUM_BYTES] != _checksum(fields):
        raise _damaged(path, "a header with another checksum", "the header that was written")
    if not (1 <= vocab <= 1 << 32 and itemsize == itemsize_for(vocab) and -1 <= end < vocab):
        facts = f"vocabulary {vocab}, ids of {itemsize} bytes, end-of-text {end}"
        raise _damaged(path, facts, "a vocabulary of 1 to 2^32, ids of 2 or 4 bytes, an id of the vocabulary or -1")
    header = Header(vocab, None if end < 0 else end, tokens, documents, nbytes, tokenizer.decode(errors="replace"))
    if size != header.file_bytes:
        raise _damaged(path, f"{size} bytes", f"{header.file_bytes} for {tokens} tokens of {documents} documents")
    return header


def open_tokens(path: Path, vocab: int | None = None) -> tuple[Header, FileTokens]:
    """Open a file of tokens for a vocabulary, by default its own. Raises DataError as `read_header` does."""
    header = read_header(path)
    ids = Integers(path, HEADER_BYTES, f"<u{header.itemsize}", header.tokens)
    starts = Integers(path, header.index, "<u8", header.documents)
    before = Integers(path, header.index + 8 * header.documents, "<u8", header.documents)
    documents = StoredDocuments(starts, before, header.nbytes)
    return header, FileTokens(ids, header.vocab if vocab is None else vocab, documents)


def _checksum(fields: bytes) -> bytes:
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
