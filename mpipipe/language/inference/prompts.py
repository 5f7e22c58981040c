"""The prompts of a call of `generate`: from the command line or a file, as text or as token ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from mpipipe import files
from mpipipe.errors import ConfigError, DataError
from mpipipe.language.data.tokenizer import Tokenizer

MOST_BYTES = 1 << 30  # bytes in a file of prompts
REMEDY = (
    'write one prompt on a line; in a file .jsonl a line is {"prompt": "a text"} or '
    '{"tokens": [5, 17, 9]}'
)


@dataclass(frozen=True)
class Bytes:
    """The tokenizer of a model of bytes: a token is one byte of UTF-8."""

    vocab: int = 256
    end: int | None = None

    def encode(self, text: str) -> list[int]:
        """Return the bytes of a text, also those of a command line that are no UTF-8."""
        return list(text.encode(errors="surrogateescape"))

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of bytes, with replacement characters; skip ids above 255."""
        return bytes(token for token in tokens if token < self.vocab).decode(errors="replace")


FolderTokenizer: TypeAlias = Tokenizer | Bytes


@dataclass(frozen=True)
class Prompts:
    """What is to be continued: the ids of each prompt, and its text, None if ids were given."""

    tokens: list[list[int]]
    texts: list[str | None]


def read_prompts(
    prompt: str | None, path: str | None, tokenizer: FolderTokenizer | None
) -> Prompts:
    """Return the prompts that a command line names, in one of two ways; one rank calls this."""
    if prompt is not None and path is not None:
        raise ConfigError(
            "the prompt is given twice", found="both --prompt and --prompts", expected="one of them"
        )
    lines: Sequence[str | list[int]] = ["\n" if prompt is None else prompt]
    if path is not None:
        lines = _lines(Path(path))
    tokens: list[list[int]] = []
    texts: list[str | None] = []
    for number, line in enumerate(lines):
        texts.append(line if isinstance(line, str) else None)
        if isinstance(line, list):
            ids = line
        elif tokenizer is None:
            raise ConfigError(
                "the model has no tokenizer, so it takes no text",
                found=f"text in prompt {number}",
                expected="prompts of token ids",
                remedy='give --prompts a file .jsonl with lines such as {"tokens": [5, 17, 9]}',
            )
        else:
            ids = tokenizer.encode(line)
        if not ids and path is not None:
            raise DataError(
                f"prompt {number} is empty", found=f"line {number + 1} of {path}", remedy=REMEDY
            )
        tokens.append(ids)
    return Prompts(tokens, texts)


def _lines(path: Path) -> list[str | list[int]]:
    """Return the prompts of a file: its lines, or what the lines of a file .jsonl say."""
    with files.reading(
        "the prompts", path, DataError, expected="text in UTF-8", also=(UnicodeDecodeError,)
    ):
        text = files.read_text(path, MOST_BYTES)
    lines = []
    if text:
        lines = text.removesuffix("\n").split("\n")
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
        raise DataError(
            f"a line of the prompts is no JSON: {error}", found=place, remedy=REMEDY
        ) from error
    prompt = None
    if isinstance(value, dict):
        prompt = value.get("prompt", value.get("tokens"))
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and all(type(token) is int for token in prompt):
        return prompt
    raise DataError(
        "a line of the prompts has no prompt", found=f"{line[:80]} in {place}", remedy=REMEDY
    )
