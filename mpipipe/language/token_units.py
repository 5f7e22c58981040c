"""The data and tokens of a training: found, counted in bits per byte, shown as text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mpipipe.errors import BackendError, ConfigError, MismatchError
from mpipipe.job import Communicator, RankGroup, group_of
from mpipipe.language.config import DataOptions
from mpipipe.language.data import DataListing, Source, check_tokenizer, find, glance
from mpipipe.language.data.tokenizer import Tokenizer, hash_of, open_tokenizer
from mpipipe.language.inference.generation import shown
from mpipipe.language.inference.prompts import Bytes
from mpipipe.options import Values

RATES = ("bits_per_byte", "validation_bits_per_byte")  # names for training and validation
DIFFERENT = "the ranks see different data: other sizes or contents of files"


def find_data(config: DataOptions, source: Source | None, group: RankGroup) -> DataListing | Source:
    """Return `config.data`, listed by rank 0, or a source of the user's own; collective.

    Rank 0 alone lists files and looks into all of them: a file system that thousands of ranks share
    is slow.
    """
    if source is None:
        return group.from_one("train: the list of data", lambda: find(config.data, config.vocab))
    with group.raise_together("train: the data"):
        if config.data:
            raise ConfigError(
                "the data are given twice",
                found=f"data = {', '.join(config.data)}, and a source of your own",
                remedy="leave one of them out",
            )
    group.agree(
        "train: the source of data",
        (
            ("vocab", source.vocab),
            ("fingerprint", source.fingerprint),
            ("unit", source.unit),
            ("tokenizer", source.tokenizer),
            ("tokens", (len(source.train), len(source.validation))),
        ),
        message=DIFFERENT,
        remedy="give all ranks the same",
    )
    return source


def open_data(
    config: DataOptions,
    comm: Communicator,
    listing: DataListing | Source,
    reads: bool,
    model: Path | None,
) -> tuple[Source | None, TokenUnits]:
    """Return (source, units), after a glance at the files that rank 0 has listed; collective.

    `source` is None on ranks that do not read data. `model` is the folder of the model that the
    training begins from.
    """
    source = None
    tokenizer = None
    facts = None
    group = group_of(comm)
    with group.raise_together("train: opening the data"):
        if reads or comm.rank == 0:
            source = listing.open(config.seq_len)
            ratios = {}
            for name, text in zip(RATES, (source.train, source.validation)):
                if text.nbytes:
                    ratios[name] = text.nbytes / len(text)
            facts = glance(listing.files), ratios
        if comm.rank == 0:
            tokenizer = find_tokenizer(listing, config.tokenizer, model)
    first_facts = group.broadcast("train: the data", facts)
    with group.raise_together("train: the data on all ranks"):
        if facts not in (None, first_facts):
            raise MismatchError(
                DIFFERENT,
                found=f"other data on rank {comm.rank}",
                expected="those of rank 0 on every rank that reads data",
                remedy="give the same files to all hosts, best on a shared file system; the "
                "default data differ where hosts have different Python versions",
            )
    if not reads:
        source = None
    return source, TokenUnits(listing.unit, first_facts[1], tokenizer)


@dataclass(frozen=True)
class TokenUnits:
    """What the tokens of a training are; `tokenizer` is None for bytes and without one.

    `bytes_per_token` are means, where they are known, by the names that the rates have in a Record.
    """

    unit: str
    bytes_per_token: dict[str, float]
    tokenizer: Tokenizer | None = None

    def bits(self, loss: float | None, validation: float | None) -> Values:
        """Return losses in nats per token as bits per byte of text."""
        rates = {}
        for name, value in zip(RATES, (loss, validation)):
            if value is not None and name in self.bytes_per_token:
                rates[name] = value / math.log(2) / self.bytes_per_token[name]
        return rates

    def text(self, ids: Sequence[int]) -> str:
        """Return ids as text that can be shown; as numbers where no tokenizer is there."""
        if self.unit == "bytes":
            return shown(Bytes().decode(ids))
        if self.tokenizer is None:
            return " ".join(map(str, ids))
        return shown(self.tokenizer.decode(ids))


def find_tokenizer(
    listing: DataListing | Source, named: str | None, model: Path | None
) -> Tokenizer | None:
    """Return the tokenizer of the data in the folder `named`, or else in `model`.

    Without the library BackendError is raised where the tokenizer was named; that of a model is
    used for its name alone.
    """
    folder = named or model
    if folder is None or (named is None and hash_of(folder) is None):
        return None
    check_tokenizer(listing, folder)
    try:
        return open_tokenizer(folder)
    except BackendError:
        if named is not None:
            raise
        return None
