"""The loss of a model on tokens, in windows that predict each token once, over any mesh.

    tokens      t0 t1 t2 t3 t4 t5 t6 t7 t8 t9 ...
    window 0   [t0 t1 t2 t3]               predicts t1 ... t4
    window 1               [t4 t5 t6 t7]   predicts t5 ... t8        and so on

Tokens after the last whole window are left out.
The replicas take windows in turn; losses are summed in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mpipipe import arrays, nn
from mpipipe.arrays import Array
from mpipipe.attention import kernels
from mpipipe.comm import Mesh
from mpipipe.errors import ConfigError, DataError, NonFiniteError
from mpipipe.job import group_of
from mpipipe.language.data import DataListing, Tokens, check_tokenizer, find, glance
from mpipipe.language.data.windows import read_windows
from mpipipe.language.inference.generation import forward_plan
from mpipipe.language.models.model_folder import ModelFolder
from mpipipe.pipeline import Pipeline
from mpipipe.text import counted
from mpipipe.train import Shard

TOKENS = 4096  # tokens in a micro-batch by default


@dataclass(frozen=True)
class Evaluation:
    """The tokens predicted, and their mean loss in nats.

    `bits_per_byte` is None where the bytes of text are not known.
    """

    tokens: int
    loss: float
    bits_per_byte: float | None


def perplexity(loss: float) -> float:
    """Return exp(loss), infinite where that is too large."""
    if loss < 709:
        return math.exp(loss)
    return math.inf


class WindowLosses(nn.HeadCrossEntropy):
    """The sum of the losses of windows, with the product of the head in tiles.

    With `slices` of the head the output is the losses themselves.
    """

    def __init__(self, stage: nn.Stage, slices: bool) -> None:
        self.stage = stage
        self.mean_of = nn.mean_of_losses
        if not slices:
            self.mean_of = super().__call__
            super().__init__(stage)
        self.nats: list[float] = []  # sum for each micro-batch
        self._noted: list[tuple[int, float | Array]] = []  # (tokens, mean loss), in order

    def __call__(self, output: Array, target: Array, factor: float = 1.0) -> tuple[float, None]:
        """Note the loss of a micro-batch. The 0 that is returned is no loss."""
        self._noted.append((target.size, self.mean_of(output, target)[0]))
        return 0.0, None

    def settle(self) -> None:
        """Add what was noted, on the host; raise NonFiniteError for NaN and infinity."""
        for count, value in self._noted:
            mean = float(arrays.download(value))
            if not math.isfinite(mean):
                raise NonFiniteError(
                    "the loss of a window is not finite",
                    found=str(mean),
                    expected="finite numbers",
                    remedy="take weights of a training whose loss is finite, or a wider dtype",
                )
            self.nats.append(mean * count)
        self._noted.clear()


def count_windows(tokens: Tokens, length: int) -> int:
    """Return the number of windows in a text. Raises DataError if there are none."""
    count = (len(tokens) - 1) // length
    if count < 1:
        raise DataError(
            "the data are too short for one window",
            found=counted(len(tokens), "token"),
            expected=f"at least {length + 1} tokens",
            remedy="give more data, or a shorter --seq-len",
        )
    return count


@dataclass(frozen=True)
class Evaluator:
    """A pipeline that evaluates some windows in each micro-batch.

    `losses` is None but after the last stage; `share` is the windows of a replica in one call.
    """

    pipeline: Pipeline
    losses: WindowLosses | None
    mesh: Mesh
    shard: Shard
    first: bool
    share: int
    labels: bool

    def run(self, tokens: Tokens, length: int, windows: int) -> Evaluation:
        """Evaluate the first `windows` windows; collective, with the result on every rank."""
        group = group_of(self.mesh.comm)
        replicas = self.mesh.data
        at_once = self.share * replicas.size
        for start in range(0, windows, at_once):
            numbers = range(start + replicas.rank, min(start + at_once, windows), replicas.size)
            with group.raise_together("evaluate: reading the data"):
                # A replica without windows takes the first one, which does not count.
                starts = [number * length for number in numbers or (0,)]
                inputs, targets = map(self.shard.part, read_windows(tokens, starts, length))
            if self.labels:
                inputs = arrays.Branches(inputs, labels=targets)
            self.pipeline.evaluate(inputs if self.first else None, targets if self.losses else None)
            with group.raise_together("evaluate: the losses"):
                if self.losses is not None and numbers:
                    self.losses.settle()
        nats = 0.0
        if self.losses is not None:
            nats = math.fsum(self.losses.nats)
        loss = math.fsum(group.gather("evaluate: all losses", nats)) / (windows * length)
        bits = None
        if tokens.nbytes is not None:
            bits = loss / math.log(2) / (tokens.nbytes / len(tokens))
        return Evaluation(windows * length, loss, bits)


@contextmanager
def build_evaluator(
    folder: ModelFolder, mesh: Mesh, length: int, *, rows: int | None, dtype: str, device: str
) -> Iterator[Evaluator]:
    """Build the evaluator of a model for windows of `length` tokens; collective.

    A micro-batch has `rows` windows, by default as many as have about `TOKENS` tokens. Raises
    ConfigError, on every rank, for a window that is longer than the model allows or shorter than
    its ranks need.
    """
    group = group_of(mesh.comm)
    with group.raise_together("evaluate: the model"):
        model = folder.model
        if length > model.seq_len:
            raise ConfigError(
                "a window is longer than the model allows",
                found=f"--seq-len {length}",
                expected=f"at most {model.seq_len}, the length of its sequences",
            )
        plan = forward_plan(model, mesh.pipe.size, rows or max(1, TOKENS // length))
        shard = Shard(mesh.seq, "zigzag")
        attend = shard.attend(length, causal=True)
        positions = None
        if mesh.seq.size > 1:
            positions = shard.positions(length)
        kernels.check_choice(device)
        layers = model.build(attend, positions, labels=True)
        labels = model.head_slices > 1
        plan = plan.with_names(layers)
        stages = plan.stages(mesh.pipe.rank, layers, dtype, 0, device)
        losses = None
        if mesh.pipe.rank == plan.schedule.placement[-1]:
            losses = WindowLosses(stages[-1], labels)
    folder.load(stages, mesh)
    with Pipeline(
        stages, plan.schedule, mesh.pipe, loss=losses, replicas=mesh.replicas
    ) as pipeline:
        first = mesh.pipe.rank == plan.schedule.placement[0]
        share = plan.rows * plan.schedule.microbatches
        yield Evaluator(pipeline, losses, mesh, shard, first, share, labels)


def open_tokens(folder: ModelFolder, paths: Sequence[str], mesh: Mesh) -> tuple[Tokens, str]:
    """Return the tokens at the paths, and the name of a token; collective.

    They are read by position. Text is for models of bytes alone.
    """
    group = group_of(mesh.comm)

    def listed() -> DataListing:
        if not paths:
            raise ConfigError("there is nothing to evaluate on", expected="files with --data")
        return find([Path(path).absolute() for path in paths], folder.model.vocab)

    listing = group.from_one("evaluate: the list of data", listed)
    with group.raise_together("evaluate: opening the data"):
        if folder.tokenizer() is not None:
            check_tokenizer(listing, folder.path)
        elif listing.unit == "bytes" and folder.model.vocab != 256:
            raise ConfigError(
                "the model takes tokens, and no text",
                found=f"text in {listing.files[0][0]}, {folder.model.vocab} token ids in the model",
                expected="files of tokens",
            )
        tokens = listing.whole()
        seen = glance(listing.files)
    group.agree(
        "evaluate: the data",
        (("the first and last blocks of the files", seen),),
        message="the ranks see different data",
        remedy="give the same files to all hosts, best on a shared file system",
    )
    return tokens, listing.unit
