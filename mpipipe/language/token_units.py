"""The data and tokens of a training: found, counted in bits per byte, shown as text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpipipe.errors import BackendError, ConfigError, MismatchError
from mpipipe.job import Communicator, RankGroup, group_of, raise_on_all, rank_list
from mpipipe.language.config import DataOptions
from mpipipe.language.data import DataListing, Source, check_tokenizer, find, glance
from mpipipe.language.data.tokenizer import Tokenizer, hash_of, open_tokenizer
from mpipipe.language.inference.generation import shown
from mpipipe.language.inference.prompts import Bytes

RATES = ("bits_per_byte", "validation_bits_per_byte")  # of training and validation
DIFFERENT = "the ranks see different data: other sizes or contents of files"


def find_data(config: DataOptions, own: Source | None, group: RankGroup) -> DataListing | Source:
    """Return `config.data`, listed by rank 0, or a source of the user's own; collective.

    Rank 0 alone lists files and looks into all of them: a file system that thousands of ranks share
    is slow.
    """
    if own is None:
        return group.from_one("train: the list of data", lambda: find(config.data, config.vocab))
    with group.raise_together("train: the data"):
        if config.data:
            raise ConfigError(
                "the data are given twice",
                found=f"data = {', '.join(config.data)}, and a source of your own",
                remedy="leave one of them out",
            )
    facts = tuple(
        (name, getattr(own, name)) for name in ("vocab", "fingerprint", "unit", "tokenizer")
    )
    lengths = ("tokens", (len(own.train), len(own.validation)))
    group.agree(
        "train: the source of data",
        (*facts, lengths),
        message=DIFFERENT,
        remedy="give all ranks the same",
    )
    return own


def open_data(
    config: DataOptions,
    comm: Communicator,
    found: DataListing | Source,
    reads: bool,
    model: Path | None,
) -> tuple[Source | None, TokenUnits]:
    """Return (source, units), after a glance at the files that rank 0 has listed; collective.

    `source` is None on ranks that do not read data. `model` is the folder of the model that the
    training begins from.
    """
    tokenizer = None
    source = seen = None
    group = group_of(comm)
    with group.raise_together("train: opening the data"):
        if reads:
            source = found.open(config.seq_len)
        if comm.rank == 0 or reads:
            seen = glance(found.files)
        if comm.rank == 0:
            tokenizer = find_tokenizer(found, config.tokenizer, model)
    parts = () if source is None else zip(RATES, (source.train, source.validation))
    ratios = {name: text.nbytes / len(text) for name, text in parts if text.nbytes}
    everyone = group.gather("train: the data", (seen, ratios))
    all_seen = [rank_seen for rank_seen, _ in everyone]
    others = [rank for rank, other in enumerate(all_seen) if other not in (None, all_seen[0])]
    if others:
        error = MismatchError(
            DIFFERENT,
            found=f"other data on {rank_list.named(others)}",
            expected="those of rank 0 on every rank that reads data",
            remedy="give the same files to all hosts, best on a shared file system; the default "
            "data differ where "
            "hosts have different Python versions",
        )
        raise_on_all(0, error, group)
    known = next((of_rank for _, of_rank in everyone if RATES[0] in of_rank), ratios)
    return source, TokenUnits(found.unit, known, tokenizer)


@dataclass(frozen=True)
class TokenUnits:
    """What the tokens of a training are; `tokenizer` is None for bytes and without one.

    `bytes_per_token` are means, where they are known, by the names that the rates have in a Record.
    """

    unit: str
    bytes_per_token: dict[str, float]
    tokenizer: Tokenizer | None = None

    def bits(self, loss: float | None, validation: float | None) -> dict[str, Any]:
        """Return losses in nats per token as bits per byte of text."""
        losses = dict(zip(RATES, (loss, validation)))
        return {
            name: value / math.log(2) / ratio
            for name, ratio in self.bytes_per_token.items()
            if (value := losses[name]) is not None
        }

    def summary(self, record: Mapping[str, float]) -> str:
        """Return the validation in bits per byte of tokens, for the last line of a training."""
        bits = record.get(RATES[1])
        return "" if bits is None or self.unit == "bytes" else f" bits/byte={bits:.4f}"

    def text(self, ids: Sequence[int]) -> str:
        """Return ids as text that can be shown; as numbers where no tokenizer is there."""
        tokenizer = Bytes() if self.unit == "bytes" else self.tokenizer
        return " ".join(map(str, ids)) if tokenizer is None else shown(tokenizer.decode(ids))


def find_tokenizer(
    found: DataListing | Source, named: str | None, model: Path | None
) -> Tokenizer | None:
    """Return the tokenizer of the data in the folder `named`, or else in `model`.

    Without the library BackendError is raised where the tokenizer was named; that of a model is
    used for its name alone.
    """
    folder = named if named is not None else model
    if folder is None or (named is None and hash_of(folder) is None):
        return None
    check_tokenizer(found, folder)
    try:
        return open_tokenizer(folder)
    except BackendError:
        if named is not None:
            raise
        return None
