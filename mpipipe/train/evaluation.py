"""The loss of a model on tokens: windows one after the other, each token predicted once, over any mesh.

    tokens      t0 t1 t2 t3 t4 t5 t6 t7 t8 t9 ...
    window 0   [t0 t1 t2 t3]               predicts t1 ... t4
    window 1               [t4 t5 t6 t7]   predicts t5 ... t8        and so on; what is left at the end is left out

By document, windows begin with each document and end with it, so that the last one of each may be shorter. The replicas
take windows in turn. What they find is summed in float64, so the mesh changes the result by rounding alone.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from mpipipe import arrays, nn, schedules
from mpipipe.arrays import Array
from mpipipe.attention import kernels
from mpipipe.comm.group import group_of
from mpipipe.comm.mesh import Mesh
from mpipipe.errors import ConfigError, DataError, NonFiniteError
from mpipipe.pipeline import Pipeline
from mpipipe.train import limits
from mpipipe.train.data import Tokens
from mpipipe.train.evaluation_windows import Window, Windows
from mpipipe.train.model_folder import ModelFolder
from mpipipe.train.shard import Shard
from mpipipe.train.training_plan import TrainingPlan

TOKENS = 4096  # of a micro-batch, by default
IN_FLIGHT = 4  # micro-batches for each rank of a pipeline: one alone leaves all ranks but one waiting


class Sum(NamedTuple):
    """Losses of some tokens: their number, and the sum in nats."""

    tokens: int
    nats: float


@dataclass(frozen=True)
class Evaluation:
    """What a model says of a text.

    Attributes
    ----------
    tokens : number of tokens predicted
    loss : their mean cross-entropy in nats
    bits_per_byte : of the text, None if its bytes are not known
    documents : of each document in which a token was predicted, by its number; empty unless asked for
    """

    tokens: int
    loss: float
    bits_per_byte: float | None
    documents: dict[int, Sum]

    @property
    def perplexity(self) -> float:
        """The exponential of the loss, infinite where it is too large."""
        return perplexity(self.loss)


def perplexity(loss: float) -> float:
    """Return exp(loss), infinite where that is too large."""
    return math.exp(loss) if loss < 709 else math.inf


class WindowLosses(nn.HeadCrossEntropy):
    """The loss of an evaluation: it notes the loss of each window, with the product of the head in tiles."""

    def __init__(self, stage: nn.Stage) -> None:
        super().__init__(stage)
        self._noted: list[tuple[int, int, Any]] = []  # (document, tokens, mean loss), in order
        self._nats: dict[int, list[float]] = defaultdict(list)
        self._tokens: dict[int, int] = defaultdict(int)

    def __call__(self, output: Array, target: Any, factor: float = 1.0) -> tuple[float, None]:
        """Note the losses of the windows of a micro-batch. What is returned, 0, is nobody's loss."""
        ids, counts, documents = target["ids"], target["counts"].tolist(), target["documents"].tolist()
        if set(counts) == {ids.shape[1]} and len(set(documents)) == 1:  # the common case: all in one product
            self._note(documents[0], output, ids)
            return 0.0, None
        for row, (count, document) in enumerate(zip(counts, documents)):
            if count:
                self._note(document, output[row : row + 1, :count], ids[row : row + 1, :count])
        return 0.0, None

    def _note(self, document: int, output: Array, ids: Array) -> None:
        value, _ = super().__call__(output, ids)
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
            self._nats[document].append(mean * count)
            self._tokens[document] += count
        self._noted.clear()

    def sums(self) -> dict[int, Sum]:
        """Return the sum of each document."""
        return {document: Sum(self._tokens[document], math.fsum(nats)) for document, nats in self._nats.items()}


class Evaluator:
    """A pipeline that evaluates.

    Parameters
    ----------
    pipeline : on `mesh.pipe`, whose loss is `losses`
    losses : on the ranks of the last stage, None elsewhere
    mesh, shard : where this rank stands, and its part of each window
    rows : windows of a micro-batch
    vocab : number of ids that the model knows
    """

    def __init__(
        self, pipeline: Pipeline, losses: WindowLosses | None, mesh: Mesh, shard: Shard, *, rows: int, vocab: int
    ) -> None:
        self.pipeline, self.losses, self.mesh, self.shard = pipeline, losses, mesh, shard
        self.vocab = vocab
        placement = pipeline.schedule.placement
        self.first, self.last = mesh.pipe.rank == placement[0], mesh.pipe.rank == placement[-1]
        self.share = rows * pipeline.schedule.microbatches  # windows of a replica in one call
        self.positions = shard.layout.positions(shard.rank)

    def run(self, tokens: Tokens | None, windows: Windows) -> Iterator[int]:
        """Evaluate all windows; yield how many have been done after each call; collective.

        tokens : on the ranks of the first and the last stage
        windows : the same on every rank
        """
        group, at_once = group_of(self.mesh.comm), self.share * self.mesh.data.size
        for start in range(0, len(windows), at_once):
            stop = min(start + at_once, len(windows))
            own = range(start + self.mesh.data.rank, stop, self.mesh.data.size)
            inputs, targets = None, None
            with group.together("evaluate: reading the data"):
                if tokens is not None:
                    inputs, targets = self._batch(tokens, [windows[number] for number in own], windows.length)
            self.pipeline.evaluate(inputs if self.first else None, targets if self.last else None)
            with group.together("evaluate: the losses"):
                if self.losses is not None:
                    self.losses.settle()
            yield stop

    def _batch(self, tokens: Tokens, own: Sequence[Window], length: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return inputs and targets of this rank: its positions of each window, zeros behind the end of short ones."""
        if self.shard.ring is None:  # else the ring is made for windows of one length
            length = max((window.rows for window in own), default=1)
        read = np.zeros((max(1, len(own)), length + 1), np.int64)  # a replica without windows takes an empty one
        for row, window in zip(read, own):
            row[: window.rows + 1] = tokens.read(window.start, window.rows + 1)
            self._check(row, window)
        counts = np.zeros(len(read), np.int64)
        counts[: len(own)] = np.searchsorted(self.positions, [window.rows for window in own])
        documents = np.zeros(len(read), np.int64)
        documents[: len(own)] = [window.document for window in own]
        cut = self.shard.cut
        targets = {"ids": np.ascontiguousarray(cut(read[:, 1:])), "counts": counts, "documents": documents}
        return np.ascontiguousarray(cut(read[:, :-1])), targets

    def _check(self, row: np.ndarray, window: Window) -> None:
        outside = np.flatnonzero((row < 0) | (row >= self.vocab))
        if outside.size:
            raise DataError(
                "a token id is out of range",
                found=f"id {row[outside[0]]} at position {window.start + outside[0]} of the data",
                expected=f"at least 0 and below {self.vocab}, which the model knows",
                remedy="take the data and the model of one tokenizer",
            )

    def result(self, by_document: bool, bytes_per_token: float | None) -> Evaluation:
        """Return what all ranks have found, on every rank; collective."""
        group = group_of(self.mesh.comm)
        parts: dict[int, list[Sum]] = defaultdict(list)
        for part in group.gather("evaluate: all losses", {} if self.losses is None else self.losses.sums()):
            for document, each in part.items():
                parts[document].append(each)
        documents = {
            document: Sum(sum(each.tokens for each in found), math.fsum(each.nats for each in found))
            for document, found in sorted(parts.items())
        }
        count = sum(each.tokens for each in documents.values())
        loss = math.fsum(each.nats for each in documents.values()) / count
        bits = None if bytes_per_token is None else loss / math.log(2) / bytes_per_token
        return Evaluation(count, loss, bits, documents if by_document else {})


def build_evaluator(
    folder: ModelFolder, mesh: Mesh, length: int, *, layout: str, rows: int | None, dtype: str, device: str
) -> AbstractContextManager[Evaluator]:
    """Build the evaluator of a model in a folder, a context manager; collective.

    Parameters
    ----------
    folder : with the model
    mesh : all ranks
    length : tokens of a window
    layout : which positions of it each rank of `mesh.seq` holds
    rows : windows of a micro-batch; None: so many that they have about `TOKENS` tokens
    dtype : of activations
    device : "cpu" or "cuda"

    Raises ConfigError, on every rank, for a window that is longer than the model allows or shorter than its ranks need.
    """
    group = group_of(mesh.comm)
    with group.together("evaluate: the model"):
        model, ranks = folder.model, mesh.pipe.size
        if length > model.seq:
            raise ConfigError(
                "a window is longer than the model allows",
                found=f"--seq-len {length}",
                expected=f"at most {model.seq}, the length of its sequences",
            )
        microbatches = 1 if ranks == 1 else IN_FLIGHT * ranks
        limits.check_counts(model.layers, "forward_only", ranks, 1, microbatches)
        schedule = schedules.forward_only(ranks, 1, microbatches)
        at_once = rows or max(1, TOKENS // length)
        plan = TrainingPlan(model, schedule, schedules.partition(model.costs(), schedule.stages), rows=at_once)
    with group.together("evaluate: the shards of windows"):
        shard = Shard(mesh.seq, layout, length)
    with group.together("evaluate: the stages"):
        kernels.check_choice(device)
        stages = plan.stages(mesh.pipe.rank, shard, dtype, 0, device)
        losses = WindowLosses(stages[-1]) if mesh.pipe.rank == schedule.placement[-1] else None
    folder.load(stages, mesh)
    pipeline = Pipeline(stages, schedule, mesh.pipe, loss=losses, replicas=mesh.replicas)
    return _closing(pipeline, Evaluator(pipeline, losses, mesh, shard, rows=at_once, vocab=model.vocab))


@contextmanager
def _closing(pipeline: Pipeline, evaluator: Evaluator) -> Iterator[Evaluator]:
    with pipeline:
        yield evaluator
