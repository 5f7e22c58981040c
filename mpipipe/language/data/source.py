"""What a training reads: tokens for training and validation, from `--data` or a user's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import ArrayLike

from mpipipe.errors import DataError


class Tokens(Protocol):
    """Tokens one after the other; any part is read by position."""

    @property
    def nbytes(self) -> int | None:
        """Bytes of the text that they stand for; None if that is not known."""

    def __len__(self) -> int: ...

    def read(self, start: int, count: int) -> np.ndarray:
        """Return `count` tokens from the position `start` on: (count,), integers of any dtype."""

    def starts(self, start: int, stop: int) -> np.ndarray | None:
        """Return where documents begin from start to stop - 1: int64, rising; None if not known."""


@dataclass(frozen=True)
class Source:
    """What a training reads.

    Attributes
    ----------
    vocab : int
        Number of token ids: all are at least 0 and below it.
    train, validation : Tokens
        The tokens of each; `Array` makes them from an array.
    fingerprint : str
        Equal where the tokens are equal. Ranks compare it, and so does a resume.
    unit : str
        What a token is, in the plural, for people: "bytes" or "tokens".
    tokenizer : str, optional
        Hash of the tokenizer that made them.

    Examples
    --------
    >>> import numpy as np
    >>> from mpipipe.language import data
    >>> tokens = np.random.default_rng(0).integers(0, 50, 10_000, np.uint16)
    >>> source = data.Source.of_arrays(tokens[:9_500], tokens[9_500:], vocab=50)
    >>> len(source.train), source.validation.read(3, 4).shape
    (9500, (4,))
    """

    vocab: int
    train: Tokens
    validation: Tokens
    fingerprint: str
    unit: str = "tokens"
    tokenizer: str | None = None
    files: ClassVar[Sequence[tuple[Path, int]]] = ()  # to look at

    def open(self, seq_len: int) -> Source:
        """Return the source itself; raise DataError for fewer than `seq_len` + 1 tokens."""
        for name, tokens in (("training", self.train), ("validation", self.validation)):
            if len(tokens) <= seq_len:
                raise DataError(
                    f"the source has too few tokens for {name}",
                    found=len(tokens),
                    expected=f"at least {seq_len + 1} for sequences of {seq_len}",
                    remedy="give more data, or a shorter seq_len",
                )
        return self

    @classmethod
    def of_arrays(cls, train: ArrayLike, validation: ArrayLike, vocab: int) -> Source:
        """Make a source of two arrays of token ids of one axis, with a hash as fingerprint.

        DataError is raised for other things than integers of at least 0 and below `vocab`, the
        number of token ids.
        """
        parts: list[Array] = []
        content = blake2b(digest_size=16)
        for name, ids in (("train", train), ("validation", validation)):
            tokens = Array(ids)
            check_range(tokens.array, vocab, 0, f"the array {name}")
            parts.append(tokens)
            content.update(f"{len(tokens)} ".encode() + tokens.array.astype("<i8").tobytes())
        return cls(vocab, parts[0], parts[1], content.hexdigest())


class Array(Tokens):
    """Tokens in memory.

    Parameters
    ----------
    array : array_like
        One axis of integers; DataError is raised for others.
    documents : sequence of int, optional
        Positions at which documents begin, rising.
    nbytes : int, optional
        Bytes of the text that the tokens stand for.
    """

    nbytes: int | None = None

    def __init__(
        self, array: ArrayLike, documents: Sequence[int] | None = None, nbytes: int | None = None
    ) -> None:
        self.array = np.asarray(array)
        if self.array.ndim != 1 or self.array.dtype.kind not in "iu":
            raise DataError(
                "an array of tokens",
                found=f"{self.array.dtype}{list(self.array.shape)}",
                expected="one axis of integers",
            )
        self.documents = None
        if documents is not None:
            self.documents = np.asarray(documents, np.int64)
        self.nbytes = nbytes

    def __len__(self) -> int:
        return len(self.array)

    def read(self, start: int, count: int) -> np.ndarray:
        if not 0 <= start <= start + count <= len(self):
            raise IndexError(f"tokens {start} to {start + count} of {len(self)}")
        return self.array[start : start + count]

    def starts(self, start: int, stop: int) -> np.ndarray | None:
        if self.documents is None:
            return None
        first, last = np.searchsorted(self.documents, [start, stop])
        return self.documents[first:last]


def check_range(ids: np.ndarray, vocab: int, start: int, place: str) -> None:
    """Raise DataError for an id that the vocabulary does not have; `ids` are those from `start`."""
    if not ids.size or (ids.min() >= 0 and ids.max() < vocab):
        return
    first = np.flatnonzero((ids < 0) | (ids >= vocab))[0]
    raise DataError(
        "a token id is out of range",
        found=f"id {ids[first]} at position {start + first} of {place}",
        expected=f"at least 0 and below {vocab}, the size of the vocabulary",
        remedy="take the data and the model of one tokenizer; tokenize the text again with "
        "--tokenizer",
    )
