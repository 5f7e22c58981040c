"""A tokenizer, as the library `tokenizers` reads it from a folder: text to token ids and back.

The tokenizer.json is the tokenizer; its hash names it in files of tokens. Which token ends a text
(eos_token) is said by tokenizer_config.json, else special_tokens_map.json or config.json. Only
`open_tokenizer` imports the library.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from mpipipe import files
from mpipipe.errors import DataError
from mpipipe.options import Values
from mpipipe.text import optional_library

NAME = "tokenizer.json"
MOST_BYTES = 1 << 26  # bytes of a tokenizer.json
MOST_SMALL = 1 << 24  # bytes of a file beside it
REMEDY = "name the folder of a model that has a tokenizer.json, or that file"


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer, with `vocab` ids: `end` ends a text, `before` and `after` are put around each.

    `hash` is that of the tokenizer.json at `path`. `library` is called within `library_errors`.
    """

    vocab: int
    end: int | None
    hash: str
    before: tuple[int, ...]
    after: tuple[int, ...]
    path: Path
    library: Any = field(repr=False)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text that goes on, after what the tokenizer puts before a text."""
        with library_errors(self.path):
            return [*self.before, *self.library.encode(text, add_special_tokens=False).ids]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of ids, without special tokens."""
        with library_errors(self.path):
            return str(self.library.decode(list(tokens), skip_special_tokens=True))


def open_tokenizer(folder: str | Path, end: str | None = None) -> Tokenizer:
    """Open the tokenizer in a folder, or a tokenizer.json.

    `end` is the token that ends a text, by default that of the folder.
    """
    path = path_of(folder)
    tokenizers = optional_library("tokenizers", "read a tokenizer.json", "tokens")
    with files.reading("the tokenizer", path, DataError, remedy=REMEDY, also=(UnicodeDecodeError,)):
        text = files.read_text(path, MOST_BYTES)
    with library_errors(path, "the tokenizer cannot be read"):
        library = tokenizers.Tokenizer.from_str(text)
        library.no_truncation()
        library.no_padding()
        vocab = 1 + max(library.get_vocab(with_added_tokens=True).values(), default=-1)
        before, after = _around(library)
    if vocab < 1:
        raise DataError("the tokenizer has no tokens", found=str(path), remedy=REMEDY)
    return Tokenizer(
        vocab, _end_of_text(library, path, end, vocab), _hash(text), before, after, path, library
    )


@contextmanager
def library_errors(path: Path, text: str = "the tokenizer fails") -> Iterator[None]:
    """Turn what the library raises, panics of its Rust too, into DataError."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise DataError(f"{text}: {error}"[:500], found=str(path), remedy=REMEDY) from error


def path_of(folder: str | Path) -> Path:
    """Return the tokenizer.json of a folder, or the path itself where it is no folder."""
    path = Path(folder)
    if files.is_folder(path):
        return path / NAME
    return path


def hash_of(folder: str | Path) -> str | None:
    """Return the hash of the tokenizer in a folder; None if there is no tokenizer.json."""
    try:
        return _hash(files.read_text(path_of(folder), MOST_BYTES))
    except (OSError, UnicodeDecodeError):
        return None


def _hash(text: str) -> str:
    return blake2b(text.encode(), digest_size=16).hexdigest()


def _around(library: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids that the tokenizer puts before and after a text."""
    encoding = library.encode("a", add_special_tokens=True)
    # One more 0 at the end stands for a tokenizer that knows no "a".
    start = [*encoding.special_tokens_mask, 0].index(0)
    stop = start + encoding.special_tokens_mask.count(0)
    return tuple(encoding.ids[:start]), tuple(encoding.ids[stop:])


def _end_of_text(library: Any, path: Path, named: str | None, vocab: int) -> int | None:
    """Return the id of the token that ends a text: `named`, or that of a file next to `path`."""
    token: Any = named
    source: str | Path = "the command line"
    for name in ("tokenizer_config.json", "special_tokens_map.json", "config.json"):
        if token is None:
            source = path.with_name(name)
            facts = _facts(source)
            token = facts.get("eos_token", facts.get("eos_token_id"))
    if isinstance(token, dict):
        token = token.get("content")
    elif isinstance(token, list) and token:
        token = token[0]
    if token is None:
        return None
    number = token
    if type(token) is not int:
        number = library.token_to_id(str(token))
    if number is None or not 0 <= number < vocab:
        raise DataError(
            "the tokenizer does not have the token that ends a text",
            found=f"{token!r} of {source}",
            expected=f"a token of {path}",
            remedy="name one that it has with --end-of-text",
        )
    return int(number)


def _facts(path: Path) -> Values:
    """Return the content of a JSON file; nothing if there is none."""
    if not files.exists(path):
        return {}
    with files.reading(
        "a file beside the tokenizer", path, DataError, also=(ValueError, RecursionError)
    ):
        facts = json.loads(files.read_text(path, MOST_SMALL))
    if isinstance(facts, dict):
        return facts
    return {}
