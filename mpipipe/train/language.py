"""What the tokens of a training are: how losses count in bits per byte of text, and how ids become text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mpipipe.errors import BackendError, ConfigError
from mpipipe.train.data import Found, Source
from mpipipe.train.data.tokenizer import Tokenizer, hash_of, open_tokenizer
from mpipipe.train.report import Record
from mpipipe.train.sample import readable, shown


class BytesPerToken(NamedTuple):
    """Mean bytes of text of a token; None if they are not known."""

    train: float | None = None
    validation: float | None = None

    @classmethod
    def of(cls, source: Source) -> BytesPerToken:
        """Return those of a source."""
        pairs = [(text.nbytes, len(text)) for text in (source.train, source.validation)]
        return cls(*(None if not nbytes else nbytes / count for nbytes, count in pairs))


@dataclass(frozen=True)
class Language:
    """What the tokens of a training are.

    Attributes
    ----------
    vocab : number of token ids
    unit : "bytes" or "tokens"
    bytes_per_token : of training and of validation
    tokenizer : on the rank that shows text; None for bytes, and where there is none
    """

    vocab: int
    unit: str
    bytes_per_token: BytesPerToken
    tokenizer: Tokenizer | None = None

    def bits(self, loss: float | None, validation: float | None) -> dict[str, Any]:
        """Return losses in nats per token as bits per byte of text, by the names that they have in a Record."""
        parts = (("bits_per_byte", loss, self.bytes_per_token.train),
                 ("validation_bits_per_byte", validation, self.bytes_per_token.validation))  # fmt: skip
        return {
            name: value / math.log(2) / ratio for name, value, ratio in parts if value is not None and ratio is not None
        }

    def summary(self, record: Record) -> str:
        """Return what the last line of a training says besides: of tokens, the validation in bits per byte."""
        bits = record.validation_bits_per_byte
        return "" if bits is None or self.unit == "bytes" else f" bits/byte={bits:.4f}"

    def text(self, ids: Sequence[int]) -> str:
        """Return ids as text that can be shown; as numbers where nobody knows their text."""
        if self.unit == "bytes":
            return readable(bytes(token for token in ids if token < 256))  # a model may have more ids
        return " ".join(map(str, ids)) if self.tokenizer is None else shown(self.tokenizer.decode(ids))


def find_tokenizer(found: Found, named: str | None, model: Path | None) -> Tokenizer | None:
    """Return the tokenizer of the data, None if there is none; one rank calls this.

    Raises ConfigError if the data are not of this tokenizer, DataError if it cannot be read. Without the library
    BackendError is raised where the tokenizer was named; that of a model is then used for its name alone.

    Parameters
    ----------
    found : the data
    named : folder of a tokenizer, by the user
    model : folder of the model that the training begins from, which may have a tokenizer
    """
    folder = named if named is not None else model
    own = None if folder is None else hash_of(folder)
    if folder is None or (own is None and named is None):
        return None
    if found.unit == "bytes":
        raise ConfigError(
            "the data are bytes, and the model has a tokenizer",
            found=f"text, and a tokenizer in {folder}",
            expected="tokens of this tokenizer",
            remedy=f"python -m mpipipe tokenize --tokenizer {folder} TEXT --out FILE, and name FILE with --data",
        )
    if found.tokenizer is not None and own is not None and found.tokenizer != own:
        raise ConfigError(
            "the data are of another tokenizer",
            found=f"tokens of the tokenizer {found.tokenizer}",
            expected=f"{own}, as in {folder}",
            remedy=f"tokenize the text again with --tokenizer {folder}",
        )
    try:
        return open_tokenizer(folder)
    except BackendError:
        if named is not None:
            raise
        return None
