"""The loss of a model on tokens: windows one after the other, each token predicted once, over any mesh.

    tokens      t0 t1 t2 t3 t4 t5 t6 t7 t8 t9 ...
    window 0   [t0 t1 t2 t3]               predicts t1 ... t4
    window 1               [t4 t5 t6 t7]   predicts t5 ... t8        and so on; what is left at the end is left out

By document, the last window of each may be shorter. The replicas take windows in turn; losses are summed in float64.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpipipe import arrays, nn
from mpipipe.arrays import Array
from mpipipe.attention import kernels
from mpipipe.comm import Mesh
from mpipipe.errors import ConfigError, DataError, NonFiniteError
from mpipipe.even_split import even_split
from mpipipe.job import RankGroup, group_of
from mpipipe.language import data
from mpipipe.language.data import Tokens, find, glance
from mpipipe.language.data.source import out_of_range
from mpipipe.language.data.text_chunks import chunks_of
from mpipipe.language.data.tokenize import Encoder
from mpipipe.language.data.tokenizer import Tokenizer
from mpipipe.language.inference.generation import forward_plan
from mpipipe.language.models.gpt import GPT
from mpipipe.language.models.model_folder import ModelFolder
from mpipipe.pipeline import Pipeline
from mpipipe.text import counted
from mpipipe.train import Shard

TOKENS = 4096  # of a micro-batch, by default


class LossSum(NamedTuple):
    """Number of tokens, and the sum of their losses in nats."""

    tokens: int
    nats: float


@dataclass(frozen=True)
class Evaluation:
    """The tokens predicted, and their mean loss in nats; `bits_per_byte` is None where the bytes are not known.

    `documents` has the losses of each document in which a token was predicted, by number; empty unless asked for.
    """

    tokens: int
    loss: float
    bits_per_byte: float | None
    documents: dict[int, LossSum]


def perplexity(loss: float) -> float:
    """Return exp(loss), infinite where that is too large."""
    return math.exp(loss) if loss < 709 else math.inf


class WindowLosses(nn.HeadCrossEntropy):
    """The loss of an evaluation: it notes the loss of each window, with the product of the head in tiles.

    With `slices` of the head the output is the losses themselves.
    """

    def __init__(self, stage: nn.Stage, slices: bool = False) -> None:
        self.stage, self.mean_of = stage, nn.mean_of_losses if slices else super().__call__
        if not slices:
            super().__init__(stage)
        self._noted: list[tuple[int, int, Any]] = []  # (document, tokens, mean loss), in order
        self._losses: dict[int, list[LossSum]] = defaultdict(list)

    def __call__(self, output: Array, target: Any, factor: float = 1.0) -> tuple[float, None]:
        """Note the losses of the windows of a micro-batch. The 0 that is returned is no loss."""
        ids, counts, documents = target["ids"], target["counts"].tolist(), target["documents"].tolist()
        if set(counts) == {ids.shape[1]} and len(set(documents)) == 1:  # the common case: all in one product
            self._note(documents[0], output, ids)
            return 0.0, None
        for row, (count, document) in enumerate(zip(counts, documents)):
            if count:
                self._note(document, output[row : row + 1, :count], ids[row : row + 1, :count])
        return 0.0, None

    def _note(self, document: int, output: Array, ids: Array) -> None:
        value, _ = self.mean_of(output, ids)
        self._noted.append((document, ids.size, value))

    def settle(self) -> None:
        """Add up what was noted; waits for a GPU. Raises NonFiniteError if a loss is NaN or infinite."""
        for document, count, value in self._noted:
            mean = float(arrays.download(value)) if arrays.is_device(value) else float(value)
            if not math.isfinite(mean):
                raise NonFiniteError(
                    "the loss of a window is not finite",
                    found=f"{mean} in document {document}",
                    expected="finite numbers",
                    remedy="take weights of a training whose loss is finite, or a wider dtype",
                )
            self._losses[document].append(LossSum(count, mean * count))
        self._noted.clear()

    def sums(self) -> dict[int, LossSum]:
        """Return the sum of each document."""
        return {document: _total(losses) for document, losses in self._losses.items()}


class Evaluator:
    """A pipeline that evaluates `rows` windows in each micro-batch; `losses` is None but after the last stage."""

    def __init__(
        self, pipeline: Pipeline, losses: WindowLosses | None, mesh: Mesh, shard: Shard, *, rows: int, model: GPT
    ) -> None:
        self.pipeline, self.losses, self.mesh, self.shard = pipeline, losses, mesh, shard
        self.vocab, self.labels = model.vocab, model.head_slices > 1
        placement = pipeline.schedule.placement
        self.first, self.last = mesh.pipe.rank == placement[0], mesh.pipe.rank == placement[-1]
        self.share = rows * pipeline.schedule.microbatches  # windows of a replica in one call

    def run(self, tokens: Tokens, windows: Windows) -> Iterator[int]:
        """Evaluate all windows, the same on every rank; yield how many have been done after each call; collective."""
        group, at_once = group_of(self.mesh.comm), self.share * self.mesh.data.size
        for start in range(0, len(windows), at_once):
            stop = min(start + at_once, len(windows))
            own = range(start + self.mesh.data.rank, stop, self.mesh.data.size)
            with group.raise_together("evaluate: reading the data"):
                inputs, targets = self._batch(tokens, [windows[number] for number in own], windows.length)
            given = arrays.Branches(inputs, labels=targets["ids"]) if self.labels else inputs
            self.pipeline.evaluate(given if self.first else None, targets if self.last else None)
            with group.raise_together("evaluate: the losses"):
                if self.losses is not None:
                    self.losses.settle()
            yield stop

    def _batch(self, tokens: Tokens, own: Sequence[Window], length: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return inputs and targets of this rank: its positions of each window, zeros after the end of short ones."""
        if self.shard.comm.size == 1:  # else the ring is made for windows of one length
            length = max((window.rows for window in own), default=1)
        read = np.zeros((max(1, len(own)), length + 1), np.int64)  # a replica without windows takes an empty one
        for row, window in zip(read, own):
            row[: window.rows + 1] = tokens.read(window.start, window.rows + 1)
            outside = np.flatnonzero((row < 0) | (row >= self.vocab))
            if outside.size:
                place = int(outside[0])
                raise out_of_range(int(row[place]), self.vocab, window.start + place, "the data")
        counts = np.zeros(len(read), np.int64)
        counts[: len(own)] = np.searchsorted(self.shard.positions(length), [window.rows for window in own])
        documents = np.zeros(len(read), np.int64)
        documents[: len(own)] = [window.document for window in own]
        cut = self.shard.part
        targets = {"ids": np.ascontiguousarray(cut(read[:, 1:])), "counts": counts, "documents": documents}
        return np.ascontiguousarray(cut(read[:, :-1])), targets

    def result(self, by_document: bool, bytes_per_token: float | None) -> Evaluation:
        """Return what all ranks have found, on every rank; collective."""
        group = group_of(self.mesh.comm)
        parts: dict[int, list[LossSum]] = defaultdict(list)
        for part in group.gather("evaluate: all losses", {} if self.losses is None else self.losses.sums()):
            for document, losses in part.items():
                parts[document].append(losses)
        documents = {document: _total(sums) for document, sums in sorted(parts.items())}
        count, nats = _total(documents.values())
        loss = nats / count
        bits = None if bytes_per_token is None else loss / math.log(2) / bytes_per_token
        return Evaluation(count, loss, bits, documents if by_document else {})


def _total(sums: Collection[LossSum]) -> LossSum:
    return LossSum(sum(losses.tokens for losses in sums), math.fsum(losses.nats for losses in sums))


@contextmanager
def build_evaluator(
    folder: ModelFolder, mesh: Mesh, length: int, *, layout: str, rows: int | None, dtype: str, device: str
) -> Iterator[Evaluator]:
    """Build the evaluator of a model for windows of `length` tokens; collective.

    A micro-batch has `rows` windows, by default as many as have about `TOKENS` tokens. Raises ConfigError, on every
    rank, for a window that is longer than the model allows or shorter than its ranks need.
    """
    group = group_of(mesh.comm)
    with group.raise_together("evaluate: the model"):
        model = folder.model
        if length > model.seq:
            raise ConfigError(
                "a window is longer than the model allows",
                found=f"--seq-len {length}",
                expected=f"at most {model.seq}, the length of its sequences",
            )
        plan = forward_plan(model, mesh.pipe.size, rows or max(1, TOKENS // length))
    with group.raise_together("evaluate: the shards of windows"):
        shard = Shard(mesh.seq, layout)
        attend, positions = shard.attend(length, causal=True), None if mesh.seq.size == 1 else shard.positions(length)
    with group.raise_together("evaluate: the stages"):
        kernels.check_choice(device)
        layers, slices = model.build(attend, positions, labels=True), model.head_slices > 1
        plan = plan.with_names(layers)
        stages = plan.stages(mesh.pipe.rank, layers, dtype, 0, device)
        losses = WindowLosses(stages[-1], slices) if mesh.pipe.rank == plan.schedule.placement[-1] else None
    folder.load(stages, mesh)
    with Pipeline(stages, plan.schedule, mesh.pipe, loss=losses, replicas=mesh.replicas) as pipeline:
        yield Evaluator(pipeline, losses, mesh, shard, rows=plan.rows, model=model)


# -- The data of an evaluation: tokens as they are, or text as the tokens of the model --------------------------------


def open_tokens(folder: ModelFolder, paths: Sequence[str], mesh: Mesh) -> tuple[Tokens, str]:
    """Return the tokens at the paths, which rank 0 looks for, and what a token is called; collective.

    Files of tokens are read by position. Text is tokenized by all ranks together; each then has all tokens in memory.
    """
    group = group_of(mesh.comm)
    with group.raise_together("evaluate: the data"):
        if not paths:
            raise ConfigError("there is nothing to evaluate on", expected="files with --data")
    listing = group.from_one(
        "evaluate: the list of data", lambda: find([Path(path).absolute() for path in paths], folder.model.vocab)
    )
    with group.raise_together("evaluate: the tokenizer"):
        tokenizer, first = folder.tokenizer(), listing.files[0][0]
        if listing.unit == "bytes" and tokenizer is None and folder.model.vocab != 256:
            raise ConfigError(
                "the model has no tokenizer, so it takes no text",
                found=f"text in {first}, {folder.model.vocab} token ids in the model",
                expected="files of tokens",
                remedy="python -m mpipipe tokenize --tokenizer DIR TEXT --out FILE",
            )
        if tokenizer is not None and listing.tokenizer not in (None, tokenizer.hash):
            raise DataError(
                "the tokens are those of another tokenizer",
                found=f"hash {listing.tokenizer} in {first}",
                expected=f"{tokenizer.hash}, as in {folder.path}",
                remedy="tokenize the text with the tokenizer of the model",
            )
    if listing.unit == "bytes" and tokenizer is not None:
        return tokenized(listing.files, tokenizer, group), "tokens"
    with group.raise_together("evaluate: opening the data"):
        tokens, seen = listing.whole(), glance(listing.files)
    group.agree(
        "evaluate: the data",
        (("the first and last blocks of the files", seen),),
        message="the ranks see different data",
        remedy="give the same files to all hosts, best on a shared file system",
    )
    return tokens, listing.unit


def tokenized(files: Sequence[tuple[Path, int]], tokenizer: Tokenizer, group: RankGroup) -> data.Array:
    """Return the tokens of files of text on every rank; each rank has tokenized its share. Collective."""
    texts = chunks_of(files)
    part = even_split(len(texts), group.size)[group.rank]
    batch = None
    with group.raise_together("evaluate: tokenizing"):
        batch = Encoder(tokenizer).encode(texts[part.start : part.stop])
    batches = group.gather("evaluate: the tokens", batch)
    ids = np.concatenate([each.ids for each in batches])
    shifts = np.cumsum([0, *(len(each.ids) for each in batches)])
    starts = [start + int(shift) for each, shift in zip(batches, shifts) for start in each.starts]
    return data.Array(ids, starts, sum(sum(each.nbytes) for each in batches))


# -- The windows of an evaluation: which tokens each of them reads, and which document it is of -----------------------


class Window(NamedTuple):
    """Inputs start ... start + rows - 1 of a document; each predicts the token after it."""

    start: int
    rows: int
    document: int


class Windows:
    """The windows of `length` inputs in a text, by number; with `short` the last one of a document may be shorter.

    `starts` are where each document begins, rising from 0, and the number of tokens at the end.
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
