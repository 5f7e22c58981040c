"""The data that `--data` names: their files, what a token is, what is held out for validation.

    a text file   |=================train=================|-val-|    the last 5 % of its bytes
    tokens        |====train====|-val-|====train====|-val-|          about 5 % of each section

Cuts between sections are moved to the next start of a document. Where that would hold out too much
or too little of a file, as with few documents, the last 5 % of its tokens are held out.
"""

from __future__ import annotations

import os
import sysconfig
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import filterfalse, islice
from pathlib import Path

from mpipipe import files
from mpipipe.errors import ConfigError, DataError
from mpipipe.language.data.file_bytes import fingerprint, forget_files, size_of
from mpipipe.language.data.source import Source, Tokens
from mpipipe.language.data.token_files import (
    FileIntegers,
    FileTokens,
    TokenFacts,
    TokenFile,
    TokenPart,
    is_token_file,
    largest_id,
    open_tokens,
)
from mpipipe.language.data.tokenizer import hash_of
from mpipipe.text import counted

BYTES = 256  # token ids of text
SNIFFED = 1024  # bytes read of a file to tell text from binary
SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages"}
REMEDY = "name readable text files, or folders that hold some, with --data"
HELD_OUT = 20  # one token in this many is for validation
SECTIONS = 32
DOCUMENTS = 64  # least documents in a section
# share that may be held out by documents
FEWEST = 0.025
MOST = 0.1


@dataclass(frozen=True)
class DataListing:
    """Data as one rank lists them; the other ranks open them without another look.

    `files` are (path, bytes) of all files. `token_files` is empty for files of text.
    """

    files: tuple[tuple[Path, int], ...]
    fingerprint: str
    vocab: int = BYTES
    unit: str = "bytes"
    tokenizer: str | None = None
    token_files: tuple[TokenFile, ...] = ()

    def open(self, seq_len: int) -> Source:
        """Split the data into training and validation; raise DataError if one is too short."""
        token_files = self._token_files()
        train, validation = _held_out(token_files)
        if min(len(train), len(validation)) <= seq_len:
            total = sum(map(len, token_files))
            raise DataError(
                "the data are too short for one sequence in training and one in validation",
                found=f"{counted(total, self.unit[:-1])} in "
                f"{', '.join(str(path) for path, _ in self.files[:5])}",
                expected=f"about {HELD_OUT * (seq_len + 1)} {self.unit} or more for sequences of "
                f"{seq_len}",
                remedy="give more data, or a shorter seq_len",
            )
        return Source(self.vocab, train, validation, self.fingerprint, self.unit, self.tokenizer)

    def whole(self) -> Tokens:
        """Return all tokens, without a split."""
        return FileTokens(TokenPart(file, 0, len(file)) for file in self._token_files())

    def _token_files(self) -> Sequence[TokenFile]:
        if self.token_files:
            return self.token_files
        texts = []
        for path, size in self.files:
            ids = FileIntegers(path, "|u1", size)
            texts.append(TokenFile(ids, path, (0,), (0,), size, vocab=BYTES))
        return texts


def find(paths: Sequence[str | Path], vocab: int | None = None) -> DataListing:
    """List the data and their kind; no paths stand for the source of the standard library."""
    forget_files()
    places = [Path(path) for path in paths]
    tokens = [*filter(is_token_file, places)]
    if tokens and len(tokens) < len(places):
        others = map(str, filterfalse(is_token_file, places))
        raise DataError(
            "tokens and text cannot be mixed",
            found=f"tokens in {tokens[0]}, none in {', '.join(islice(others, 5))}",
            expected="tokens in all of them, or in none",
            remedy="tokenize the text, too: python -m mpipipe tokenize --tokenizer DIR TEXT --out "
            "FILE",
        )
    if tokens:
        return _list_tokens(tokens, vocab)
    listed = []
    for path in places:
        listed += find_files(path)
    if not places:
        # The source of the standard library.
        for path, size in _walk(Path(sysconfig.get_path("stdlib"))):
            if path.suffix == ".py" and size:
                listed.append((path, size))
    return DataListing(tuple(listed), fingerprint(listed))


def _list_tokens(paths: Sequence[Path], vocab: int | None) -> DataListing:
    """List files of tokens for a vocabulary, by default their own.

    Without one it is one more than their largest id.
    """
    opened = [open_tokens(path) for path in paths]
    known = []
    for path, file in zip(paths, opened):
        if file.facts is not None:
            known.append((path, file.facts))
    _check_tokenizers(known, vocab)
    tokenizer = None
    if len(known) == len(opened):
        tokenizer = known[0][1].tokenizer
    if vocab is None and known:
        vocab = known[0][1].vocab
    elif vocab is None:
        vocab = max(1, 1 + max(largest_id(file.ids) for file in opened))
    sizes = []
    token_files = []
    for file in opened:
        for path in (file.ids.path, file.index):
            sizes.append((path, size_of(path)))
        token_files.append(replace(file, vocab=vocab))
    content = fingerprint(sizes)
    return DataListing(tuple(sizes), content, vocab, "tokens", tokenizer, tuple(token_files))


def _check_tokenizers(known: Sequence[tuple[Path, TokenFacts]], vocab: int | None) -> None:
    """Raise DataError unless files were made by one tokenizer, whose ids fit into a vocabulary."""
    for path, facts in known:
        first, other = known[0]
        if (facts.tokenizer, facts.vocab) != (other.tokenizer, other.vocab):
            raise DataError(
                "files of tokens of different tokenizers",
                found=f"tokenizer {facts.tokenizer} with {facts.vocab} ids, {path}",
                expected=f"tokenizer {other.tokenizer} with {other.vocab} ids, as {first}",
                remedy="tokenize all texts with one tokenizer",
            )
        if vocab is not None and facts.vocab > vocab:
            raise DataError(
                "tokens of another vocabulary",
                found=f"{facts.vocab} token ids, {path}",
                expected=f"at most {vocab}, those of the model",
                remedy="tokenize the text with the tokenizer of the model, or leave out vocab",
            )


def check_tokenizer(listing: DataListing | Source, folder: str | Path) -> None:
    """Raise ConfigError where the data are not tokens of the tokenizer in a folder."""
    if listing.unit == "bytes":
        raise ConfigError(
            "the data are bytes, and the model has a tokenizer",
            found=f"text, and a tokenizer in {folder}",
            expected="tokens of this tokenizer",
            remedy=f"python -m mpipipe tokenize --tokenizer {folder} TEXT --out FILE, and name "
            "FILE with --data",
        )
    expected = hash_of(folder)
    if None not in (listing.tokenizer, expected) and listing.tokenizer != expected:
        raise ConfigError(
            "the data are of another tokenizer",
            found=f"tokens of the tokenizer {listing.tokenizer}",
            expected=f"{expected}, as in {folder}",
            remedy=f"tokenize the text again with --tokenizer {folder}",
        )


# -- What is held out for validation ---------------------------------------------------------------


def _held_out(token_files: Sequence[TokenFile]) -> tuple[FileTokens, FileTokens]:
    """Return the tokens for training and those for validation, which have none in common."""
    train = []
    validation = []
    for file in token_files:
        parts = _by_documents(file)
        if not parts:
            parts = [TokenPart(file, len(file) - len(file) // HELD_OUT, len(file))]
        validation += parts
        begin = 0
        for part in parts:  # the last one ends with the file
            train.append(TokenPart(file, begin, part.start))
            begin = part.stop
    return FileTokens(train), FileTokens(validation)


def _by_documents(file: TokenFile) -> list[TokenPart]:
    """Return what is held out of a file between starts of documents, if that is about 5 %."""
    starts = file.first
    total = len(file)

    def next_start(position: int) -> int:
        number = bisect_left(starts, position)
        if number < len(starts):
            return starts[number]
        return total

    parts = []
    count = max(1, min(SECTIONS, len(starts) // DOCUMENTS))
    for section in range(count):
        begin = total * section // count
        end = total * (section + 1) // count
        cut = next_start(end - (end - begin) // HELD_OUT)
        parts.append(TokenPart(file, cut, next_start(end)))
    share = sum(part.stop - part.start for part in parts) / max(1, total)
    if FEWEST <= share <= MOST:
        return parts
    return []


# -- Files of text ---------------------------------------------------------------------------------


def find_files(path: Path) -> list[tuple[Path, int]]:
    """List (file, bytes) of a file, or of the text files below a folder, sorted by path.

    Hidden and empty files are left out.
    """
    with files.reading(
        "data", path, DataError, expected=f"{files.REGULAR}, or a folder", remedy=REMEDY
    ):
        if files.is_folder(path):
            listed = []
            for file, size in _walk(path):
                if size and not _is_binary(file):
                    listed.append((file, size))
            binary = False
        else:
            listed = [(path, files.check_regular(path).st_size)]
            binary = _is_binary(path)
    if binary:
        raise DataError(
            "a binary file without a header that is known",
            found=f"a NUL byte in the first {SNIFFED} bytes of {path}",
            expected="text, tokens that `mpipipe tokenize` wrote, or Megatron's .bin beside its "
            ".idx",
            remedy="tokenize the text: python -m mpipipe tokenize --tokenizer DIR TEXT --out FILE; "
            "text in UTF-16 must become UTF-8 first",
        )
    if not any(size for _, size in listed):
        expected = "a text file, or a folder with one"
        raise DataError("no text in the data", found=str(path), expected=expected, remedy=REMEDY)
    return listed


def _walk(folder: Path) -> list[tuple[Path, int]]:
    """List regular files below `folder` with their sizes, sorted by path.

    Hidden and generated folders are left out.
    """

    def fail(error: OSError) -> None:
        raise error

    listed: list[tuple[Path, int]] = []
    for parent, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if name[0] != "." and name not in SKIPPED_FOLDERS]
        for name in names:
            path = Path(parent, name)
            # A file may vanish meanwhile.
            with suppress(FileNotFoundError):
                if name[0] != "." and path.is_file():
                    listed.append((path, path.stat().st_size))
    return sorted(listed, key=lambda entry: entry[0].relative_to(folder).parts)


def _is_binary(path: Path) -> bool:
    with open(files.open_regular(path), "rb") as file:
        return b"\0" in file.read(SNIFFED)
