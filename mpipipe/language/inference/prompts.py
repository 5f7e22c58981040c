"""The prompts of a call of `generate`: from the command line or a file, as text or as token ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from mpipipe import files
from mpipipe.errors import ConfigError, DataError
from mpipipe.language.data.tokenizer import Tokenizer
from mpipipe.text import counted

MOST_BYTES = 1 << 30  # of a file of prompts
REMEDY = (
    'write one prompt on a line; in a file .jsonl a line is "a text", {"prompt": "a text"} or {"tokens": [5, 17, 9]}'
)


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
        """Return the text of bytes, with a replacement character for what is no UTF-8; a model may have more ids."""
        return bytes(token for token in tokens if token < self.vocab).decode(errors="replace")


FolderTokenizer: TypeAlias = Tokenizer | Bytes


@dataclass(frozen=True)
class Prompts:
    """What is to be continued: the ids of each prompt, and its text, None if ids were given."""

    tokens: list[list[int]]
    texts: list[str | None]


def read_prompts(prompt: str | None, path: str | None, ids: str | None, tokenizer: FolderTokenizer | None) -> Prompts:
    """Return the prompts that a command line names, in one of three ways; one rank calls this."""
    if sum(each is not None for each in (prompt, path, ids)) > 1:
        raise ConfigError(
            "the prompt is given twice",
            found="more than one of --prompt, --prompts and --tokens",
            expected="one of them",
        )
    if ids is not None:
        return Prompts([parse_ids(ids, "--tokens")], [None])
    given: list[Any] = ["\n" if prompt is None else prompt] if path is None else _lines(Path(path))
    texts = [each if isinstance(each, str) else None for each in given]
    if tokenizer is None and any(text is not None for text in texts):
        raise ConfigError(
            "the model has no tokenizer, so it takes no text",
            found=f"{counted(sum(text is not None for text in texts), 'prompt')} of text",
            expected="prompts of token ids",
            remedy='give ids with --tokens 5,17,9, or with lines {"tokens": [5, 17, 9]} in a file .jsonl',
        )
    assert tokenizer is not None or not any(texts)
    tokens = [tokenizer.encode(each) if isinstance(each, str) else each for each in given]  # type: ignore[union-attr]
    for number, each in enumerate(tokens):
        if not each and path is not None:
            raise DataError(f"prompt {number} is empty", found=f"line {number + 1} of {path}", remedy=REMEDY)
    return Prompts(tokens, texts)


def parse_ids(text: str, name: str) -> list[int]:
    """Return the ids in a text such as "5,17,9". Raises ConfigError if it is none."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts) or max(map(len, parts)) > 18:
        raise ConfigError(f"{name} are no token ids", found=repr(text[:80]), expected="numbers such as 5,17,9")
    return [int(part) for part in parts]


def _lines(path: Path) -> list[str | list[int]]:
    """Return the prompts of a file: its lines, or what the lines of a file .jsonl say."""
    with files.reading("the prompts", path, DataError, expected="text in UTF-8", also=(UnicodeDecodeError,)):
        text = files.read_text(path, MOST_BYTES)
    lines = text.removesuffix("\n").split("\n") if text else []
    if not lines:
        raise DataError("there are no prompts", found=f"an empty file {path}", remedy=REMEDY)
    if path.suffix != ".jsonl":
        return [line.removesuffix("\r") for line in lines]
    return [_parsed(line, f"line {number} of {path}") for number, line in enumerate(lines, 1)]


def _parsed(line: str, place: str) -> str | list[int]:
    """Return the prompt in a line of JSON."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"a line of the prompts is no JSON: {error}", found=place, remedy=REMEDY) from error
    prompt = value.get("prompt", value.get("tokens")) if isinstance(value, dict) else value
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and all(type(token) is int for token in prompt):
        return prompt
    raise DataError("a line of the prompts has no prompt", found=f"{line[:80]} in {place}", remedy=REMEDY)


class TextStream:
    """The text of tokens that come one after the other, given out in whole characters.

    The text of a token may depend on the one before. So the last tokens are decoded with and without the new one.
    """

    def __init__(self, tokenizer: FolderTokenizer) -> None:
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
