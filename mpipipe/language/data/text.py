"""The bytes of text to train on: which files, and the split for validation.

    file a  |=================train=================|-val-|
    file b  |=============train=============|val|
    train      = a[:95 %] b[:95 %]          validation = a[95 %:] b[95 %:]

Each split joins its pieces, and a window may cross from one piece into the next.
"""

from __future__ import annotations

import errno
import os
import stat
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, ClassVar

from mpipipe import files
from mpipipe.errors import DataError
from mpipipe.language.data.file_bytes import Piece, Text, forget_files
from mpipipe.language.data.source import Source, fingerprint
from mpipipe.text import counted

HELD_OUT = 20  # one byte in this many is for validation
SNIFFED = 1024  # bytes read of a file to tell text from binary
SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages"}
REMEDY = "name readable text files, or folders that hold some, with --data"


@dataclass(frozen=True)
class Listing:
    """The files of a corpus, as one rank finds them and tells the others.

    Attributes
    ----------
    entries : (number of the path that a file is at or below, its name from there, bytes) of each file
    fingerprint : see `fingerprint.fingerprint`
    """

    vocab: ClassVar[int] = 256
    unit: ClassVar[str] = "bytes"
    tokenizer: ClassVar[str | None] = None
    entries: tuple[tuple[int, str, int], ...]
    fingerprint: str

    @classmethod
    def of(cls, paths: Sequence[str | Path]) -> Listing:
        """List the files of `paths` as `Corpus.open` takes them, and look into them. Raises DataError as that does."""
        forget_files()
        found = [find_files(Path(path)) for path in paths] if paths else [standard_library()]
        entries = tuple(
            (number, os.path.relpath(path, root), size)
            for number, (root, below) in enumerate(zip(_roots(paths), found))
            for path, size in below
        )
        return cls(entries, fingerprint([entry for below in found for entry in below]))

    def found(self, paths: Sequence[str | Path]) -> list[tuple[Path, int]]:
        """Return (file, bytes) of each file, where this rank has its folders. Nothing is read for it."""
        roots = _roots(paths)
        return [(roots[number] / name, size) for number, name, size in self.entries]

    def open(self, paths: Sequence[str | Path], seq_len: int) -> Corpus:
        """As `Corpus.of`."""
        return Corpus.of(self, paths, seq_len)

    def whole(self, paths: Sequence[str | Path]) -> Text:
        """Return all bytes, without a split; each file is a document."""
        return Text([Piece(path, 0, size) for path, size in self.found(paths)])


def _roots(paths: Sequence[str | Path]) -> list[Path]:
    return [Path(path) for path in paths] if paths else [Path(sysconfig.get_path("stdlib"))]


@dataclass(frozen=True)
class Corpus(Source):
    """The two texts that a training reads, which have no byte in common; their documents are the files.

    Attributes
    ----------
    vocab : 256
    train, validation : Text
    fingerprint : equal on two ranks that found the same file names, sizes and, as far as they are sampled, contents
        (see `fingerprint.fingerprint` for what it can miss)
    """

    @classmethod
    def open(cls, paths: Sequence[str | Path], seq_len: int) -> Corpus:
        """Open the corpus of `paths`, files and folders; an empty list means the standard library's source.

        Raises DataError if a path is missing or unreadable, holds no text, or where a split is shorter than
        `seq_len` + 1 bytes.
        """
        return cls.of(Listing.of(paths), paths, seq_len)

    @classmethod
    def of(cls, listing: Listing, paths: Sequence[str | Path], seq_len: int) -> Corpus:
        """Make the corpus of files that this rank or another one has listed; none of them is opened before it is read.

        Raises DataError if a split is shorter than `seq_len` + 1 bytes.
        """
        train, validation = [], []
        found = listing.found(paths)
        for path, size in found:
            held_out = size // HELD_OUT
            train.append(Piece(path, 0, size - held_out))
            validation.append(Piece(path, size - held_out, held_out))
        corpus = cls(listing.vocab, Text(train), Text(validation), listing.fingerprint, listing.unit)
        if len(corpus.validation) <= seq_len:
            raise DataError(
                "the data are too short for one sequence in training and one in validation",
                found=f"{counted(sum(size for _, size in found), 'byte')} in {counted(len(found), 'file')}",
                expected=f"about {HELD_OUT * (seq_len + 1)} bytes or more for sequences of {seq_len}",
                remedy="give more data, or a shorter seq_len",
            )
        return corpus


def find_files(path: Path) -> list[tuple[Path, int]]:
    """List (file, bytes) of a file, or of all text files below a folder, sorted by path.

    Below a folder, hidden, empty and binary files (a NUL byte early on) are skipped. A binary file that is named itself
    is refused.
    """
    binary = False
    try:
        if files.is_folder(path):
            found = [entry for entry in _walk(path) if entry[1] and _is_text(entry[0])]
        else:
            with open(files.open_regular(path), "rb") as file:
                found = [(path, os.fstat(file.fileno()).st_size)]
                binary = _is_binary(file)
    except OSError as error:
        raise DataError(
            f"data cannot be read: {error.strerror}",
            found=str(error.filename),
            expected=f"{files.REGULAR}, or a folder",
            remedy=REMEDY,
        ) from error
    if binary:
        raise DataError(
            "a binary file without a header that is known",
            found=f"a NUL byte in the first {SNIFFED} bytes of {path}",
            expected="text, tokens that `mpipipe tokenize` wrote, a .npy file, or Megatron's .bin beside its .idx",
            remedy="tokenize the text: python -m mpipipe tokenize --tokenizer DIR TEXT --out FILE; save bare token ids "
            "with numpy.save; text in UTF-16 must become UTF-8 first",
        )
    if not any(size for _, size in found):
        raise DataError(
            "no text in the data", found=str(path), expected="a text file, or a folder with one", remedy=REMEDY
        )
    return found


def standard_library() -> list[tuple[Path, int]]:
    """List (file, bytes) of the Python source of this interpreter's standard library."""
    folder = Path(sysconfig.get_path("stdlib"))
    found = [(path, size) for path, size in _walk(folder) if path.suffix == ".py" and size]
    if not found:
        raise DataError("the standard library's source is not installed here", found=str(folder), remedy=REMEDY)
    return found


def _walk(folder: Path) -> list[tuple[Path, int]]:
    """List regular files below `folder` with their sizes, sorted by path, without hidden and generated folders."""

    def fail(error: OSError) -> None:
        raise error

    found: list[tuple[Path, int]] = []
    for parent, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in SKIPPED_FOLDERS]
        paths = [Path(parent, name) for name in names if not name.startswith(".")]
        statuses = [(path, _status(path)) for path in paths]
        found += [(path, status.st_size) for path, status in statuses if status and stat.S_ISREG(status.st_mode)]
    return sorted(found, key=lambda entry: entry[0].relative_to(folder).parts)


def _status(path: Path) -> os.stat_result | None:
    """Return the status of a file, None if a link leads nowhere."""
    try:
        return path.stat()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return None
        raise


def _is_text(path: Path) -> bool:
    with open(files.open_regular(path), "rb") as file:
        return not _is_binary(file)


def _is_binary(file: BinaryIO) -> bool:
    return b"\0" in file.read(SNIFFED)
