"""Files of tokens, cut into training and validation, by documents where there are some.

    a file     |====train====|-val-|====train====|-val-|     cut into sections; about the last 5 % of each is held out

A section has at least `DOCUMENTS` documents, and there are at most `SECTIONS` of them, so that validation comes from
all parts of a file. Cuts are moved to the next start of a document. Where that would hold out too much or too little of
a file, as it does where there are few documents, the last 5 % of its tokens are held out, wherever documents begin.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from mpipipe.errors import DataError
from mpipipe.train.data.file_tokens import FileTokens
from mpipipe.wording import counted

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
