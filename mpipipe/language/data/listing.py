"""What kind of data the paths of `--data` hold."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from mpipipe.errors import DataError
from mpipipe.language.data.source import Source, Tokens
from mpipipe.language.data.text import Listing
from mpipipe.language.data.token_listing import is_token_file, list_tokens


class DataListing(Protocol):
    """Data as one rank finds them, and tells the others, which open them without looking for them again.

    Attributes
    ----------
    vocab, fingerprint, unit, tokenizer : as of `Source`
    """

    @property
    def vocab(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def unit(self) -> str: ...
    @property
    def tokenizer(self) -> str | None: ...

    def found(self, paths: Sequence[str | Path]) -> list[tuple[Path, int]]:
        """Return (file, bytes) of each file, where this rank has the paths."""

    def open(self, paths: Sequence[str | Path], seq_len: int) -> Source:
        """Split the data into training and validation. Raises DataError if one is shorter than `seq_len` + 1."""

    def whole(self, paths: Sequence[str | Path]) -> Tokens:
        """Return all tokens, without a split."""


class UserSource:
    """A source of the user's own, as data that were found; there are no files to look at.

    Parameters
    ----------
    source : on this rank
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.vocab, self.fingerprint, self.unit = source.vocab, source.fingerprint, source.unit
        self.tokenizer = source.tokenizer

    def found(self, paths: Sequence[str | Path]) -> list[tuple[Path, int]]:
        """Return no files."""
        return []

    def open(self, paths: Sequence[str | Path], seq_len: int) -> Source:
        """Return the source. Raises DataError as `DataListing.open` does."""
        for name, tokens in (("training", self.source.train), ("validation", self.source.validation)):
            if len(tokens) <= seq_len:
                raise DataError(
                    f"the source has too few tokens for {name}",
                    found=len(tokens),
                    expected=f"at least {seq_len + 1} for sequences of {seq_len}",
                    remedy="give more data, or a shorter seq_len",
                )
        return self.source

    def whole(self, paths: Sequence[str | Path]) -> Tokens:
        """Return the tokens for validation, which are those to evaluate on."""
        return self.source.validation


def find(paths: Sequence[str | Path], vocab: int | None = None) -> DataListing:
    """Look at the data: what kind they are, and how much.

    Raises DataError if they cannot be used, and where their token ids do not fit into a vocabulary of this size.
    """
    tokens = [path for path in map(Path, paths) if is_token_file(path)]
    if tokens and len(tokens) < len(paths):
        others = [str(path) for path in map(Path, paths) if path not in tokens]
        raise DataError(
            "tokens and text cannot be mixed",
            found=f"tokens in {tokens[0]}, none in {', '.join(others[:5])}",
            expected="tokens in all of them, or in none",
            remedy="tokenize the text, too: python -m mpipipe tokenize --tokenizer DIR TEXT --out FILE",
        )
    return list_tokens(tokens, vocab) if tokens else Listing.of(paths)
