"""Files of tokens, of any format, as data that were found."""

from __future__ import annotations

import io
import struct
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from tokenize import TokenError
from typing import NamedTuple

import numpy as np

from mpipipe import files
from mpipipe.errors import DataError
from mpipipe.language.data import token_files
from mpipipe.language.data.file_bytes import forget_files, read_bytes, size_of
from mpipipe.language.data.source import Source, fingerprint
from mpipipe.language.data.token_files import REMEDY, FileTokens, Integers
from mpipipe.text import counted


@dataclass(frozen=True)
class TokenListing:
    """Files of tokens, as one rank finds them and tells the others; see `listing.DataListing`.

    Attributes
    ----------
    opened : the tokens of each file
    sizes : (file, bytes) of each file that is read
    vocab : number of token ids
    fingerprint : see `fingerprint.fingerprint`
    tokenizer : hash of the tokenizer that made them, None if that is not known
    """

    opened: tuple[FileTokens, ...]
    sizes: tuple[tuple[Path, int], ...]
    vocab: int
    fingerprint: str
    tokenizer: str | None
    unit: str = "tokens"

    def found(self, paths: Sequence[str | Path]) -> list[tuple[Path, int]]:
        """Return (file, bytes) of each file."""
        return list(self.sizes)

    def open(self, paths: Sequence[str | Path], seq_len: int) -> Source:
        """As `DataListing.open`."""
        train, validation = split(self.opened, seq_len)
        return Source(self.vocab, train, validation, self.fingerprint, self.unit, self.tokenizer)

    def whole(self, paths: Sequence[str | Path]) -> Parts:
        """As `DataListing.whole`."""
        return whole(self.opened)


def is_token_file(path: Path) -> bool:
    """Whether a path names tokens in a format that is known; by the first bytes of the file, and Megatron's pairs."""
    magics = (token_files.MAGIC, NPY_MAGIC)
    return megatron_pair(path) is not None or _begins(path).startswith(magics)


def list_tokens(paths: Sequence[Path], vocab: int | None) -> TokenListing:
    """Open files of tokens for a vocabulary, by default what they say, or one more than their largest id.

    Raises DataError if a file is damaged or of another tokenizer than the others.
    """
    forget_files()
    opened: list[FileTokens] = []
    headers: list[tuple[Path, token_files.Header]] = []
    read: list[Path] = []
    for path in paths:
        pair = megatron_pair(path)
        if pair is not None:
            opened.append(open_megatron(pair, vocab))
            read += pair
            continue
        read.append(path)
        if _begins(path).startswith(token_files.MAGIC):
            header, tokens = token_files.open_tokens(path, vocab)
            headers.append((path, header))
            opened.append(tokens)
        else:
            opened.append(open_npy(path, vocab))
    token_files.same_tokenizer(headers)
    own = max(tokens.vocab for tokens in opened)
    if vocab is None:
        vocab = headers[0][1].vocab if headers else own
    for path, header in headers:
        if header.vocab > vocab:
            raise DataError(
                "tokens of another vocabulary",
                found=f"{header.vocab} token ids, {path}",
                expected=f"at most {vocab}, those of the model",
                remedy="tokenize the text with the tokenizer of the model, or leave out vocab",
            )
    sizes = tuple((path, size_of(path)) for path in read)
    opened = [FileTokens(tokens.ids, vocab, tokens.documents) for tokens in opened]
    known = headers[0][1].tokenizer if len(headers) == len(opened) else None
    return TokenListing(tuple(opened), sizes, vocab, fingerprint(list(sizes)), known)


def _begins(path: Path) -> bytes:
    """Return the first 8 bytes of a file, fewer where there are fewer; none for what is no readable file."""
    try:
        return read_bytes(path, 0, min(8, files.check_regular(path).st_size))
    except OSError:
        return b""


# -- Files of tokens that other programs write: one-dimensional .npy files, and Megatron's pairs of .bin and .idx -----
#
# A .npy file is NumPy's (numpy.lib.format); one that holds pickled objects is refused, as all that are no integers.
#
# Megatron's .idx, little-endian (the class MMapIndexedDataset, megatron/core/datasets/indexed_dataset.py):
#
#     "MMIDIDX" and two zero bytes, version 1 (u64), code of the dtype (u8), number of sequences (u64), number of
# entries
#     about documents (u64); tokens of each sequence (i32), its byte in the .bin (i64); the entries: number of the first
#     sequence of each document, and of all sequences (i64)
#
# The sequences stand one behind the other in the .bin, which is checked.


NPY_MAGIC = b"\x93NUMPY"
NPY_HEADER_BYTES = 1 << 16  # read for a header; NumPy takes 10 000 by default
MEGATRON_MAGIC = b"MMIDIDX\0\0"
MEGATRON_HEADER = struct.Struct("<9sQBQQ")
MEGATRON_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
BLOCK = 1 << 22  # entries that are looked at together


def open_npy(path: Path, vocab: int | None) -> FileTokens:
    """Open a .npy file; without a vocabulary, its ids are looked through for the largest.

    Raises DataError for a file that is no one-dimensional array of integers, or is cut short.
    """
    size = size_of(path)
    head = io.BytesIO(read_bytes(path, 0, min(size, NPY_HEADER_BYTES)))  # a header may say that it has gigabytes
    try:
        version = np.lib.format.read_magic(head)
        if version not in ((1, 0), (2, 0), (3, 0)):
            raise ValueError(f"version {version}")
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(head)
        offset = head.tell()
    except (ValueError, EOFError, TokenError, RecursionError, MemoryError) as error:  # the parser raises the last ones
        text = f"{type(error).__name__}: {error}"[:200]
        raise DataError(f"the .npy file cannot be read: {text}", found=str(path), remedy=REMEDY) from error
    if len(shape) != 1 or dtype.kind not in "iu" or shape[0] < 0:
        raise DataError(
            "the .npy file holds no tokens",
            found=f"{dtype}{list(shape)} in {path}",
            expected="one axis of integers",
            remedy="save the token ids one after the other: numpy.save(path, ids.reshape(-1))",
        )
    needed = offset + shape[0] * dtype.itemsize
    if size < needed:
        raise DataError(
            "the .npy file is cut short",
            found=f"{size} bytes in {path}",
            expected=f"{needed} for {shape[0]} integers",
            remedy=REMEDY,
        )
    return _with_vocabulary(Integers(path, offset, dtype.str, shape[0]), vocab, None)


@dataclass(frozen=True)
class MegatronStarts(Sequence[int]):
    """The positions at which documents begin: those of their first sequences."""

    first_sequence: Integers
    byte_of: Integers
    itemsize: int
    tokens: int  # in all

    def __len__(self) -> int:
        return max(0, len(self.first_sequence) - 1)  # the last entry is the end

    def __getitem__(self, index):  # type: ignore[no-untyped-def]  # an int, or a list for a slice
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        sequence = self.first_sequence[index]
        return self.tokens if sequence == len(self.byte_of) else self.byte_of[sequence] // self.itemsize


@dataclass(frozen=True)
class MegatronDocuments:
    """The documents of a .idx file, which does not say how long their text was; see `file_tokens.Documents`."""

    starts: MegatronStarts

    @property
    def path(self) -> Path:
        """Of the index."""
        return self.starts.byte_of.path

    def bytes_before(self, document: int) -> None:
        """Return None: that is not known."""
        return None


def megatron_pair(path: Path) -> tuple[Path, Path] | None:
    """Return (.bin, .idx) that `path` names, by either of them or by what stands before the dot; None for others."""
    text = str(path)
    prefix = text[:-4] if text.endswith((".bin", ".idx")) else text
    pair = Path(prefix + ".bin"), Path(prefix + ".idx")
    return pair if files.exists(pair[1]) and (path in pair or not files.exists(path)) else None


def open_megatron(pair: tuple[Path, Path], vocab: int | None) -> FileTokens:
    """Open a pair of files; without a vocabulary, the ids are looked through for the largest.

    Raises DataError for an index that is damaged, and for a .bin that does not have what the index says.
    """
    tokens, index = pair
    size = size_of(index)
    head = read_bytes(index, 0, min(size, MEGATRON_HEADER.size))
    if len(head) < MEGATRON_HEADER.size or not head.startswith(MEGATRON_MAGIC):
        raise _damaged(index, f"{size} bytes that begin with {head[:9]!r}", f"an index that begins {MEGATRON_MAGIC!r}")
    _, version, code, sequences, entries = MEGATRON_HEADER.unpack(head)
    if version != 1 or code not in MEGATRON_DTYPES:
        raise _damaged(index, f"version {version}, dtype {code}", "version 1, and a dtype of integers")
    needed = MEGATRON_HEADER.size + 12 * sequences + 8 * entries
    if size != needed:
        raise _damaged(index, f"{size} bytes", f"{needed} for {sequences} sequences and {entries} entries of documents")
    dtype, offset = MEGATRON_DTYPES[code], MEGATRON_HEADER.size
    lengths = Integers(index, offset, "<i4", sequences)
    byte_of = Integers(index, offset + 4 * sequences, "<i8", sequences)
    first_sequence = Integers(index, offset + 12 * sequences, "<i8", entries)
    itemsize = np.dtype(dtype).itemsize
    total = _checked_total(lengths, byte_of, itemsize)
    _check_documents(first_sequence, sequences)
    if size_of(tokens) != total * itemsize:
        raise DataError(
            "the tokens do not fit their index",
            found=f"{size_of(tokens)} bytes in {tokens}",
            expected=f"{total * itemsize} for {total} tokens, as in {index}",
            remedy=REMEDY,
        )
    starts = MegatronStarts(first_sequence, byte_of, itemsize, total)
    return _with_vocabulary(Integers(tokens, 0, dtype, total), vocab, MegatronDocuments(starts))


def _checked_total(lengths: Integers, byte_of: Integers, itemsize: int) -> int:
    """Return the number of tokens; raises DataError unless each sequence begins where the one before it ends."""
    total = 0
    for start in range(0, len(lengths), BLOCK):
        count = min(BLOCK, len(lengths) - start)
        sizes, places = lengths.read(start, count).astype(np.int64), byte_of.read(start, count)
        expected = total + np.concatenate([[0], np.cumsum(sizes)[:-1]])
        wrong = np.flatnonzero((places != expected * itemsize) | (sizes < 0))
        if wrong.size:
            entry = int(wrong[0])
            raise _damaged(
                lengths.path,
                f"sequence {start + entry} of {sizes[entry]} tokens at byte {places[entry]}",
                f"at byte {expected[entry] * itemsize}, behind the one before it",
            )
        total += int(sizes.sum())
    return total


def _check_documents(first_sequence: Integers, sequences: int) -> None:
    """Raise DataError unless the entries of documents rise from 0 to the number of sequences."""
    last = 0
    for start in range(0, len(first_sequence), BLOCK):
        numbers = first_sequence.read(start, min(BLOCK, len(first_sequence) - start))
        steps = np.diff(numbers, prepend=last)
        if (steps < 0).any() or numbers.max() > sequences or (start == 0 and numbers[0] != 0):
            raise _damaged(first_sequence.path, "entries of documents out of order", f"numbers from 0 to {sequences}")
        last = int(numbers[-1])
    if last != sequences:
        raise _damaged(first_sequence.path, f"a last entry of documents of {last}", f"{sequences}, all sequences")


def _with_vocabulary(ids: Integers, vocab: int | None, documents: MegatronDocuments | None) -> FileTokens:
    if vocab is None:
        largest = -1
        for start in range(0, len(ids), BLOCK):
            largest = max(largest, int(ids.read(start, min(BLOCK, len(ids) - start)).max()))
        vocab = largest + 1
    return FileTokens(ids, max(1, vocab), documents)


def _damaged(path: Path, found: str, expected: str) -> DataError:
    return DataError("an index of tokens is damaged", found=f"{found}, {path}", expected=expected, remedy=REMEDY)


# -- Files of tokens, cut into training and validation, by documents where there are some -----------------------------
#
#     a file     |====train====|-val-|====train====|-val-|     cut into sections; about the last 5 % of each is held out
#
# A section has at least `DOCUMENTS` documents, and there are at most `SECTIONS` of them, so that validation comes from
# all parts of a file. Cuts are moved to the next start of a document. Where that would hold out too much or too
# little of a file, as it does where there are few documents, the last 5 % of its tokens are held out, wherever
# documents begin.


HELD_OUT = 20  # one token in this many is for validation
SECTIONS = 32
DOCUMENTS = 64  # of a section
FEWEST, MOST = 0.025, 0.1  # share that may be held out by documents


class Part(NamedTuple):
    """Consecutive tokens of one file."""

    tokens: FileTokens
    start: int
    stop: int


class Parts:
    """Parts of files as one sequence of tokens: `source.Tokens`.

    Parameters
    ----------
    parts : in the order in which they are joined. Each begins a document, where documents are known
    """

    def __init__(self, parts: Iterable[Part]) -> None:
        self.parts = [part for part in parts if part.start < part.stop]
        self._ends = list(accumulate(part.stop - part.start for part in self.parts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @property
    def nbytes(self) -> int | None:
        """Bytes of the text that they stand for; None if that is not known."""
        counts = [tokens.bytes_of(start, stop) for tokens, start, stop in self.parts]
        known = [count for count in counts if count is not None]
        return sum(known) if len(known) == len(counts) else None

    def read(self, start: int, count: int) -> np.ndarray:
        """Read the tokens start ... start + count - 1."""
        if not 0 <= start <= start + count <= len(self):
            raise IndexError(f"tokens {start} to {start + count} of {len(self)}")
        pieces = [part.tokens.read(first, last - first) for part, first, last, _ in self._within(start, start + count)]
        return pieces[0] if len(pieces) == 1 else np.concatenate([np.zeros(0, np.int64), *pieces]).astype(np.int64)

    def starts(self, start: int, stop: int) -> np.ndarray | None:
        """Return where documents begin in start ... stop - 1, int64, rising; None if a file does not say so."""
        found = []
        for part, first, last, shift in self._within(start, stop):
            inside = part.tokens.starts(first, last)
            if inside is None:
                return None
            here = [part.start] if first == part.start and part.start not in inside[:1] else []
            found.append(np.concatenate([np.array(here, np.int64), inside]) + shift)
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def _within(self, start: int, stop: int) -> Iterable[tuple[Part, int, int, int]]:
        """Yield (part, first and last position in its file, what makes them positions here) of what is in a range."""
        index = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            part = self.parts[index]
            shift = self._ends[index] - part.stop
            end = min(stop, self._ends[index])
            yield part, start - shift, end - shift, shift
            start, index = end, index + 1


def whole(files: Sequence[FileTokens]) -> Parts:
    """Return all tokens of files, one file behind the other."""
    return Parts(Part(tokens, 0, len(tokens)) for tokens in files)


def split(files: Sequence[FileTokens], seq_len: int) -> tuple[Parts, Parts]:
    """Return the tokens for training and those for validation, which have none in common.

    Raises DataError if one of them is shorter than `seq_len` + 1 tokens.
    """
    train, validation = [], []
    for tokens in files:
        held = _by_documents(tokens) or [Part(tokens, len(tokens) - len(tokens) // HELD_OUT, len(tokens))]
        begin = 0
        for part in held:
            train.append(Part(tokens, begin, part.start))
            begin = part.stop
        train.append(Part(tokens, begin, len(tokens)))
        validation += held
    parts = Parts(train), Parts(validation)
    if min(map(len, parts)) <= seq_len:
        raise DataError(
            "the data are too short for one sequence in training and one in validation",
            found=f"{counted(sum(map(len, files)), 'token')} in {', '.join(str(tokens.path) for tokens in files[:5])}",
            expected=f"about {HELD_OUT * (seq_len + 1)} tokens or more for sequences of {seq_len}",
            remedy="give more data, or a shorter seq_len",
        )
    return parts


def _by_documents(tokens: FileTokens) -> list[Part]:
    """Return what is held out of a file, between starts of documents; nothing if that cannot be about 5 %."""
    if tokens.documents is None:
        return []
    count = max(1, min(SECTIONS, len(tokens.documents.starts) // DOCUMENTS))
    held = []
    for section in range(count):
        begin, end = len(tokens) * section // count, len(tokens) * (section + 1) // count
        start, stop = _next_start(tokens, end - (end - begin) // HELD_OUT), _next_start(tokens, end)
        held.append(Part(tokens, start, stop))
    share = sum(part.stop - part.start for part in held) / max(1, len(tokens))
    return held if FEWEST <= share <= MOST else []


def _next_start(tokens: FileTokens, position: int) -> int:
    """Return the first position from this one on at which a document begins, or the end of the file."""
    assert tokens.documents is not None
    starts = tokens.documents.starts
    number = bisect_left(starts, position)
    return starts[number] if number < len(starts) else len(tokens)
