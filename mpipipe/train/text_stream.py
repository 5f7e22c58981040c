"""Text as tokens of a model, and tokens as text that appears while they are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpipipe.train.model_folder import Tokenizer

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a decoder gives for the first bytes of a character


@dataclass(frozen=True)
class Bytes:
    """The tokenizer of a model of bytes: a token is one byte of UTF-8."""

    vocab: int = 256
    end: int | None = None

    def encode(self, text: str) -> list[int]:
        """Return the bytes of a text; those of a command line that are no UTF-8 come through as they are."""
        return list(text.encode(errors="surrogateescape"))

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of bytes, with a replacement character for what is no UTF-8."""
        return bytes(tokens).decode(errors="replace")


class TextStream:
    """The text of tokens that come one after the other, given out in whole characters.

    A token may hold a part of a character, and its text may depend on the token before it. So the last tokens are
    decoded with and without the new one, and the difference is the new text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.tokens: list[int] = []
        self._before = self._done = 0  # tokens before the last piece of text that was given out, and up to its end

    def feed(self, tokens: Sequence[int]) -> str:
        """Take the next tokens; return the text that is certain by now."""
        self.tokens += tokens
        text = self._new()
        if text.endswith(UNFINISHED) or not text:
            return ""
        self._before, self._done = self._done, len(self.tokens)
        return text

    def end(self) -> str:
        """Return the rest."""
        text = self._new()
        self._before = self._done = len(self.tokens)
        return text

    def _new(self) -> str:
        known = self.tokenizer.decode(self.tokens[self._before : self._done])
        return self.tokenizer.decode(self.tokens[self._before :])[len(known) :]
