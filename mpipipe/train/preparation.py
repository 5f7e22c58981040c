"""What the ranks of a training agree on before it begins: the configuration, the plan, and the data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mpipipe import arrays
from mpipipe.checkpoint import Checkpoint
from mpipipe.comm.mesh import Mesh
from mpipipe.errors import BackendError, ConfigError, MismatchError
from mpipipe.job import rank_list
from mpipipe.job.consensus import raise_on_all
from mpipipe.job.group import Group, group_of
from mpipipe.language.data import DataListing, Source, UserSource, find, glance
from mpipipe.language.data.tokenizer import Tokenizer, hash_of, open_tokenizer
from mpipipe.language.inference.generation import readable, shown
from mpipipe.language.models.fine_tuning import Architecture, FineTuning
from mpipipe.language.models.pretrained import PretrainedModel, check_export
from mpipipe.planning import memory
from mpipipe.train import output_folder, resume, sinks
from mpipipe.train.config import TrainConfig
from mpipipe.train.report import Record, Reporter
from mpipipe.train.training_plan import TrainingPlan

DIFFERENT = "the ranks see different data: other sizes or contents of files"
PROMPT_BYTES = 32  # of validation text, which the sample at the end of a training continues


def check_same_config(group: Group, config: TrainConfig) -> None:
    """Raise MismatchError on all ranks where they have different configurations."""
    group.agree(
        "train: the configuration",
        tuple((f"{key} =", repr(value)) for key, value in vars(config).items()),
        message="the ranks have different configurations",
        remedy="give the same file and flags to all ranks",
    )


def make_plan(
    config: TrainConfig,
    architecture: Architecture,
    base: PretrainedModel | None,
    mesh: Mesh,
    device: str,
    vocab: int,
    tuning: FineTuning,
) -> TrainingPlan:
    """Plan the training, and check that it fits into memory and that its end can be written.

    All ranks raise the same error.
    """
    with group_of(mesh.comm).raise_together("train: the plan"):
        plan = TrainingPlan.of(config, architecture, mesh.pipe.size, mesh.data.size, vocab, tuning)
        memory.check_training(config, plan, mesh.pipe.rank, device)
        check_export(config, plan, base)
        if config.packing == "segments" and asdict(plan.model).get("positions") == "learned":
            raise ConfigError(
                "documents cannot be packed for a model with learned positions, which begin with the sequence",
                found="packing = segments",
                expected="a model with rotary positions, to which only distances count",
                remedy="leave packing out",
            )
        if config.sample_bytes:
            dtype = arrays.accumulator(arrays.dtype(config.dtype)).name
            memory.check_decoding(plan, mesh.pipe.rank, dtype, (1, PROMPT_BYTES + config.sample_bytes), mesh.seq.size)
    return plan


def find_data(config: TrainConfig, given: Source | None, group: Group) -> DataListing | UserSource:
    """Return what the data are, on every rank: those of `config.data`, or a source of the user's own.

    All ranks raise the same error. Rank 0 alone lists files and looks into all of them: a file system that thousands
    of ranks share is slow.
    """
    found = None
    with group.raise_together("train: the data"):
        if given is not None and config.data:
            raise ConfigError(
                "the data are given twice",
                found=f"data = {', '.join(config.data)}, and a source of your own",
                remedy="leave one of them out",
            )
        if given is None and group.rank == 0:
            found = find(config.data, config.vocab)
    if given is None:
        return group.broadcast("train: the list of data", found)
    facts = tuple((name, getattr(given, name)) for name in ("vocab", "fingerprint", "unit", "tokenizer"))
    lengths = ("tokens", (len(given.train), len(given.validation)))
    group.agree("train: the source of data", (*facts, lengths), message=DIFFERENT, remedy="give all ranks the same")
    return UserSource(given)


def open_data(
    config: TrainConfig, plan: TrainingPlan, mesh: Mesh, found: DataListing | UserSource, base: PretrainedModel | None
) -> tuple[Source | None, TokenUnits]:
    """Open the data. Return them on the ranks that read them, None on the others, and on all ranks what they are.

    The ranks of the first and of the last stage read data; all ranks do if attention stays within documents. A rank
    that reads checks that a few of its files are the files that rank 0 has listed. All ranks raise the same error.
    """
    placement = plan.schedule.placement
    reads = mesh.pipe.rank in (placement[0], placement[-1]) or config.packing == "segments"
    tokenizer = None
    source = seen = None
    group = group_of(mesh.comm)
    with group.raise_together("train: opening the data"):
        if reads:
            source = found.open(config.seq_len)
        if mesh.rank == 0 or reads:
            seen = glance(found.files)
        if mesh.rank == 0:
            tokenizer = find_tokenizer(found, config.tokenizer, None if base is None else base.folder.path)
    ratios = BytesPerToken() if source is None else BytesPerToken.of(source)
    everyone = group.gather("train: the data", (seen, ratios))
    all_seen = [each for each, _ in everyone]
    others = [rank for rank, other in enumerate(all_seen) if other not in (None, all_seen[0])]
    if others:
        error = MismatchError(
            DIFFERENT,
            found=f"other data on {rank_list.named(others)}",
            expected="those of rank 0 on every rank that reads data",
            remedy="give the same files to all hosts, best on a shared file system; the default data differ where "
            "hosts have different Python versions",
        )
        raise_on_all(0, error, group)
    known = next((each for _, each in everyone if each.train is not None), ratios)
    return source, TokenUnits(found.vocab, found.unit, known, tokenizer)


def make_reporter(
    config: TrainConfig, out: Path, start: Checkpoint | None, unit: str, oversubscribed: str | None
) -> Reporter:
    """Make the reporter of rank 0, with metrics that go on behind the checkpoint `start`, if there is one.

    For `unit` and `oversubscribed` see Reporter.
    """
    step = 0 if start is None else start.step
    try:
        aside = resume.leave_behind(start, out)
        sinks.cut(out, step)
        goes_on = None if config.resume == "no" else step
        reporter = Reporter(config.steps, out, unit=unit, oversubscribed=oversubscribed, done=goes_on)
    except OSError as error:
        raise output_folder.unusable(out, error) from error
    for path in aside:
        reporter.say(f"mpipipe: a checkpoint behind the one that is resumed is now called {path}")
    return reporter


# -- What the tokens of a training are: how losses count in bits per byte of text, and how ids become text ------------


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
class TokenUnits:
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


def find_tokenizer(found: DataListing | UserSource, named: str | None, model: Path | None) -> Tokenizer | None:
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
