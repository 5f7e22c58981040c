"""Files of tokens that other programs write: one-dimensional .npy files, and Megatron's pairs of .bin and .idx.

A .npy file is NumPy's (numpy.lib.format); one that holds pickled objects is refused, as all that are no integers.

Megatron's .idx, little-endian (the class MMapIndexedDataset, megatron/core/datasets/indexed_dataset.py):

    "MMIDIDX" and two zero bytes, version 1 (u64), code of the dtype (u8), number of sequences (u64), number of entries
    about documents (u64); tokens of each sequence (i32), its byte in the .bin (i64); the entries: number of the first
    sequence of each document, and of all sequences (i64)

The sequences stand one behind the other in the .bin, which is checked.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError

import numpy as np

from mpipipe import files
from mpipipe.errors import DataError
from mpipipe.train.data.file_tokens import REMEDY, FileTokens, Integers
from mpipipe.train.data.pieces import read_bytes, size_of

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
