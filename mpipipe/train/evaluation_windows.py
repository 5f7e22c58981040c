"""The windows of an evaluation: which tokens each of them reads, and which document it is of."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mpipipe.errors import DataError
from mpipipe.train.data import Tokens
from mpipipe.wording import counted


class Window(NamedTuple):
    """Inputs start ... start + rows - 1, each of which predicts the token behind it.

    `document` is its number, 0 where all is one.
    """

    start: int
    rows: int
    document: int


class Windows:
    """The windows of `length` tokens in a text, by number.

    Parameters
    ----------
    starts : where each document begins, rising from 0, and the number of tokens at the end
    length : inputs of a window
    short : whether a document's last window may be shorter
    """

    def __init__(self, starts: np.ndarray, length: int, short: bool) -> None:
        self.length, self.short = length, short
        self._starts = np.asarray(starts, np.int64)
        predicted = np.maximum(np.diff(self._starts) - 1, 0)
        self._ends = np.cumsum(-(-predicted // length) if short else predicted // length)
        if not len(self):
            raise DataError(
                "the data are too short for one window",
                found=f"{counted(self._starts[-1], 'token')} in {counted(len(predicted), 'document')}",
                expected="a document of two tokens" if short else f"at least {length + 1} tokens",
                remedy="give more data, or a shorter --seq-len",
            )

    @classmethod
    def of(cls, tokens: Tokens, length: int, by_document: bool) -> Windows:
        """Return the windows of all tokens as one text, or of each document; raises DataError if there are none."""
        if not by_document:
            return cls(np.array([0, len(tokens)]), length, short=False)
        starts = tokens.starts(0, len(tokens))
        if starts is None:
            raise DataError(
                "the data do not say where documents begin",
                expected="a file of tokens with documents, or files of text",
                remedy="leave out --by-document, or tokenize the text again",
            )
        inner = starts[(starts > 0) & (starts < len(tokens))]
        return cls(np.array([0, *inner.tolist(), len(tokens)]), length, short=True)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, number: int) -> Window:
        document = int(np.searchsorted(self._ends, number, side="right"))
        before = int(self._ends[document - 1]) if document else 0
        start = int(self._starts[document]) + (number - before) * self.length
        rows = min(self.length, int(self._starts[document + 1]) - 1 - start)
        return Window(start, rows, document)
