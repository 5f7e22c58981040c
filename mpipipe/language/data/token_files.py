"""Tokens in files, read by position: integers in a row, and where documents begin.

    text               its bytes; the file is one document
    tokens             a .npy file of unsigned integers, with two files next to it
    tokens.json        vocabulary, tokenizer, numbers of tokens, documents and bytes, a checksum
    tokens.documents   a .npy file (2, documents), u64: the first token of each document, and the
                       bytes of text before it
    name.bin, .idx     Megatron's pair, see below

`mpipipe tokenize` writes the files of tokens.

Files are not mapped into memory; `file_bytes.py` says why.
"""

from __future__ import annotations

import json
import math
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpipipe import files
from mpipipe.checkpoint import checksum_of
from mpipipe.errors import DataError
from mpipipe.language.data.file_bytes import read_bytes, size_of
from mpipipe.language.data.source import Tokens, check_range

REMEDY = "copy the file again from where it is whole, or make it again"
BLOCK = 1 << 22  # integers that are looked at together


@dataclass(frozen=True)
class FileIntegers(Sequence[int]):
    """`length` integers of `dtype`, such as "<u8", in a file from byte `offset` on."""

    path: Path
    dtype: str
    length: int
    offset: int = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self.length:
            raise IndexError(f"entry {index} of {self.length}")
        return int(self.read(index, 1)[0])

    def read(self, start: int, count: int) -> np.ndarray:
        """Raises DataError if the file has become shorter."""
        size = np.dtype(self.dtype).itemsize
        return np.frombuffer(
            read_bytes(self.path, self.offset + start * size, count * size), self.dtype
        )

    def blocks(self) -> Iterator[np.ndarray]:
        """Yield the values of all entries."""
        for start in range(0, self.length, BLOCK):
            yield self.read(start, min(BLOCK, self.length - start))


@dataclass(frozen=True)
class TokenFacts:
    """The content of the .json next to a file of tokens.

    `tokenizer` and `index` are hashes, `end` is the end-of-text token.
    """

    vocab: int
    end: int | None
    tokens: int
    documents: int
    nbytes: int
    tokenizer: str
    index: str


@dataclass(frozen=True)
class TokenFile:
    """The tokens of one file: `ids` from 0 to below `vocab`, and its documents.

    The file `index` has the `first` token of each document, and the bytes of text `before` it, of
    `nbytes` in all; None where these are not known. `facts` is what `mpipipe tokenize` says.
    """

    ids: FileIntegers
    index: Path
    first: Sequence[int]
    before: Sequence[int] | None = None
    nbytes: int = 0
    facts: TokenFacts | None = None
    vocab: int = 0

    def __len__(self) -> int:
        return len(self.ids)

    def read(self, start: int, count: int) -> np.ndarray:
        """Raises DataError for a token that the vocabulary does not have."""
        ids = self.ids.read(start, count)
        check_range(ids, self.vocab, start, str(self.ids.path))
        return ids

    def starts(self, start: int, stop: int) -> np.ndarray:
        """As `Tokens.starts`."""
        numbers = range(bisect_left(self.first, start), bisect_left(self.first, stop))
        return np.array([self.first[number] for number in numbers], np.int64)

    def bytes_before(self, position: int) -> int | None:
        """Return the bytes of text before a token.

        Within a document all tokens count as equally long.
        """
        if self.before is None:
            return None
        # The last of several documents that begin here.
        number = bisect_right(self.first, position) - 1
        if number < 0:
            return 0
        stop = len(self)
        after = self.nbytes
        if number + 1 < len(self.first):
            stop = self.first[number + 1]
            after = self.before[number + 1]
        start = self.first[number]
        before = self.before[number]
        return before + (after - before) * (position - start) // max(1, stop - start)


class TokenPart(NamedTuple):
    """The tokens start ... stop - 1 of a file."""

    file: TokenFile
    start: int
    stop: int


class FileTokens(Tokens):
    """Parts of files, joined in this order. Each part begins a document."""

    def __init__(self, parts: Iterable[TokenPart]) -> None:
        self.parts = [part for part in parts if part.start < part.stop]
        self._ends = list(accumulate(part.stop - part.start for part in self.parts))

    def __len__(self) -> int:
        return max(self._ends, default=0)

    @property
    def nbytes(self) -> int | None:
        total = 0
        for file, start, stop in self.parts:
            before = file.bytes_before(start)
            after = file.bytes_before(stop)
            if before is None or after is None:
                return None
            total += after - before
        return total

    def read(self, start: int, count: int) -> np.ndarray:
        if not 0 <= start <= start + count <= len(self):
            raise IndexError(f"tokens {start} to {start + count} of {len(self)}")
        pieces = []
        for part, first, last, _ in self._within(start, start + count):
            pieces.append(part.file.read(first, last - first))
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate([np.zeros(0, np.int64), *pieces])

    def starts(self, start: int, stop: int) -> np.ndarray:
        rows = [np.zeros(0, np.int64)]
        for part, first, last, shift in self._within(start, stop):
            inside = part.file.starts(first, last)
            if first == part.start and part.start not in inside[:1]:
                inside = np.concatenate([[first], inside])
            rows.append(inside + shift)
        return np.concatenate(rows)

    def _within(self, start: int, stop: int) -> Iterator[tuple[TokenPart, int, int, int]]:
        """Yield (part, first and last position in the file, shift to positions here)."""
        index = bisect_right(self._ends, start)
        while start < stop:
            part = self.parts[index]
            end = min(stop, self._ends[index])
            shift = self._ends[index] - part.stop
            yield part, start - shift, end - shift, shift
            start = end
            index += 1


# -- Formats ---------------------------------------------------------------------------------------


NPY_MAGIC = b"\x93NUMPY"
# ends of the names of the files beside a file of tokens
FACTS = ".json"
DOCUMENTS = ".documents"
MOST_FACTS = 1 << 20  # bytes of the first


def beside(path: Path, end: str) -> Path:
    """The path of a file next to a file of tokens."""
    return path.with_name(path.name + end)


def dtype_for(vocab: int) -> str:
    """The dtype in which the ids of a vocabulary are written."""
    if vocab <= 1 << 16:
        return "<u2"
    return "<u4"


def is_token_file(path: Path) -> bool:
    """Return True if a path names tokens: by the first bytes of the file, or Megatron's pair."""
    if megatron_pair(path) is not None:
        return True
    try:
        return read_bytes(path, 0, min(8, files.check_regular(path).st_size)).startswith(NPY_MAGIC)
    except OSError:
        return False


def open_tokens(path: Path) -> TokenFile:
    """Open what `is_token_file` accepts, without `vocab`; DataError if damaged or foreign."""
    pair = megatron_pair(path)
    if pair is not None:
        return _open_megatron(*pair)
    place = beside(path, FACTS)
    rows = beside(path, DOCUMENTS)
    with files.reading(
        "what is said of a file of tokens",
        place,
        DataError,
        expected="the .json that `mpipipe tokenize` writes beside it",
        remedy=f"{REMEDY}; give ids of your own as Megatron's pair of files, or to train(..., "
        "data=)",
        also=(ValueError, TypeError, RecursionError),
    ):
        values = dict(json.loads(files.read_text(place, MOST_FACTS)))
        written = values.pop("checksum", None)
        checksum = checksum_of(values)
        facts = TokenFacts(**values)
    if written != checksum:
        raise _damaged(place, f"checksum {checksum}", f"{written!r:.80}")
    ids = _open_npy(path, dtype_for(facts.vocab), (facts.tokens,))
    index = _open_npy(rows, "<u8", (2, facts.documents))
    content = blake2b(digest_size=16)
    for block in index.blocks():
        content.update(block.data)
    if content.hexdigest() != facts.index:
        raise _damaged(rows, f"checksum {content.hexdigest()}", facts.index)
    first = replace(index, length=facts.documents)
    before = replace(first, offset=first.offset + 8 * facts.documents)
    return TokenFile(ids, rows, first, before, facts.nbytes, facts)


def largest_id(ids: FileIntegers) -> int:
    """The largest of all ids; -1 where there are none."""
    return max((int(values.max()) for values in ids.blocks()), default=-1)


def npy_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return the first 128 bytes of a .npy file, version 1.0."""
    facts = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}"
    return NPY_MAGIC + b"\x01\x00\x76\x00" + facts.ljust(117).encode() + b"\n"


def _open_npy(path: Path, dtype: str, shape: tuple[int, ...]) -> FileIntegers:
    """Return the integers of a .npy file of this shape. Raises DataError for others."""
    header = npy_header(dtype, shape)
    count = math.prod(shape)
    size = size_of(path)
    needed = len(header) + count * np.dtype(dtype).itemsize
    if size != needed or read_bytes(path, 0, len(header)) != header:
        raise _damaged(
            path, f"{size} bytes", f"{needed}, which are a .npy file of {dtype}{list(shape)}"
        )
    return FileIntegers(path, dtype, count, len(header))


def _damaged(
    path: Path, problem: str, expected: str, what: str = "a file of tokens is damaged"
) -> DataError:
    return DataError(what, found=f"{problem}, {path}", expected=expected, remedy=REMEDY)


def _bad_index(path: Path, problem: str, expected: str) -> DataError:
    return _damaged(path, problem, expected, "an index of tokens is damaged")


# -- Megatron's pair of .bin and .idx --------------------------------------------------------------
#
# The .idx, little-endian (the class MMapIndexedDataset, megatron/core/datasets/indexed_dataset.py):
#
#     "MMIDIDX" and two zero bytes, version 1 (u64), code of the dtype (u8), number of sequences
#     (u64), number of entries about documents (u64); tokens of each sequence (i32), its byte in the
#     .bin (i64); the entries: number of the first sequence of each document, and of all sequences
#     (i64)
#
# The sequences stand one after the other in the .bin, which is checked. How long the text was is
# not said.


MEGATRON_MAGIC = b"MMIDIDX\0\0"
MEGATRON_HEADER = struct.Struct("<9sQBQQ")
MEGATRON_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


@dataclass(frozen=True)
class MegatronStarts(Sequence[int]):
    """The tokens at which documents begin: with their first sequences, of `tokens` in all."""

    first_sequence: FileIntegers
    byte_of: FileIntegers
    itemsize: int
    tokens: int

    def __len__(self) -> int:
        return max(0, len(self.first_sequence) - 1)  # the last entry is the end

    def __getitem__(self, index: Any) -> Any:
        sequence = self.first_sequence[index]
        if sequence == len(self.byte_of):
            return self.tokens
        return self.byte_of[sequence] // self.itemsize


def megatron_pair(path: Path) -> tuple[Path, Path] | None:
    """Return (.bin, .idx) that `path` names, by either or without the ending; else None."""
    prefix = str(path)
    if prefix.endswith((".bin", ".idx")):
        prefix = prefix[:-4]
    pair = Path(prefix + ".bin"), Path(prefix + ".idx")
    if files.exists(pair[1]) and (path in pair or not files.exists(path)):
        return pair
    return None


def _open_megatron(tokens: Path, index: Path) -> TokenFile:
    size = size_of(index)
    header = read_bytes(index, 0, min(size, MEGATRON_HEADER.size)).ljust(MEGATRON_HEADER.size)
    magic, version, code, sequences, entries = MEGATRON_HEADER.unpack(header)
    needed = MEGATRON_HEADER.size + 12 * sequences + 8 * entries
    if (magic, version, size) != (MEGATRON_MAGIC, 1, needed) or code not in MEGATRON_DTYPES:
        raise _bad_index(
            index,
            f"{size} bytes, {magic!r}, version {version}, dtype {code}",
            f"{MEGATRON_MAGIC!r}, version 1, a dtype of integers, and {needed} bytes for "
            f"{sequences} sequences and {entries} entries of documents",
        )
    content = read_bytes(index, 0, size)
    dtype = MEGATRON_DTYPES[code]
    itemsize = np.dtype(dtype).itemsize
    offset = MEGATRON_HEADER.size
    lengths = np.frombuffer(content, "<i4", sequences, offset).astype(np.int64)
    places = np.frombuffer(content, "<i8", sequences, offset + 4 * sequences)
    documents = np.frombuffer(content, "<i8", entries, offset + 12 * sequences)
    following = (np.cumsum(lengths) - lengths) * itemsize
    wrong = np.flatnonzero((places != following) | (lengths < 0))
    if wrong.size:
        entry = wrong[0]
        raise _bad_index(
            index,
            f"sequence {entry} of {lengths[entry]} tokens at byte {places[entry]}",
            f"at byte {following[entry]}, after the one before it",
        )
    last = max(documents[-1:], default=0)
    if documents[:1].any() or (documents[1:] < documents[:-1]).any() or last != sequences:
        raise _bad_index(
            index,
            f"entries of documents that end with {last}",
            f"rising numbers from 0 to {sequences}, all sequences",
        )
    total = int(lengths.sum())
    if size_of(tokens) != total * itemsize:
        raise DataError(
            "the tokens do not fit their index",
            found=f"{size_of(tokens)} bytes in {tokens}",
            expected=f"{total * itemsize} for {total} tokens, as in {index}",
            remedy=REMEDY,
        )
    starts = MegatronStarts(
        FileIntegers(index, "<i8", entries, offset + 12 * sequences),
        FileIntegers(index, "<i8", sequences, offset + 4 * sequences),
        itemsize,
        total,
    )
    return TokenFile(FileIntegers(tokens, dtype, total), index, starts)
