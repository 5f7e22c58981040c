"""The plan of a training: the model, the schedule, and the layers of each rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from mpipipe import nn, schedules
from mpipipe.arrays import Array
from mpipipe.attention import Layout, Local, Ring
from mpipipe.errors import ConfigError
from mpipipe.job.types import Communicator
from mpipipe.language.models.fine_tuning import Architecture, FineTuning, Model
from mpipipe.language.packing import PackedAttend, Packing
from mpipipe.nn.loss import worth_tiles
from mpipipe.text import counted
from mpipipe.train import limits
from mpipipe.train.config import TrainConfig
from mpipipe.train.config_checks import parse_partition
from mpipipe.train.order import fitting, is_table

BYTES = 256  # token ids of a model of bytes, which an architecture makes without being told


@dataclass(frozen=True)
class TrainingPlan:
    """What follows from a configuration and a number of ranks, before any data or memory is touched.

    Attributes
    ----------
    model : the sizes of the model, which makes its layers
    schedule : of the pipelines
    layer_ranges : (start, stop) of the layers of each logical stage
    rows : sequences of a step in each replica
    tuning : what of the model is trained
    """

    model: Model
    schedule: schedules.Schedule
    layer_ranges: list[tuple[int, int]]
    rows: int
    tuning: FineTuning = field(default_factory=FineTuning)

    @classmethod
    def of(
        cls,
        config: TrainConfig,
        architecture: Architecture,
        pipe: int,
        replicas: int,
        vocab: int = BYTES,
        tuning: FineTuning | None = None,
    ) -> TrainingPlan:
        """Plan a training on `replicas` pipelines of `pipe` ranks, with data of `vocab` token ids.

        Stages of which nothing is trained have no weight gradients in the schedule, and no backward if nothing before
        them is trained either.

        Raises ConfigError or ArgumentError if the configuration does not fit these numbers. For numbers of layers,
        chunks or micro-batches that nobody can mean (see `limits`) that happens before anything is built.
        """
        rows, rest = divmod(config.batch, replicas)
        if rest:
            raise ConfigError(
                "the batch does not divide among the replicas",
                found=f"batch {config.batch}, {counted(replicas, 'replica')}",
                expected=f"a multiple of {replicas}",
                remedy=f"for example batch = {(rows + 1) * replicas}",
            )
        order = None
        if is_table(config.schedule):
            order = fitting(config.schedule, pipe, config.chunks, config.microbatches)
        microbatches = config.microbatches if order is None else order.microbatches
        if microbatches is None:
            microbatches = min(rows, schedules.advise(pipe, config.chunks).microbatches)
        if rows < microbatches:
            raise ConfigError(
                "fewer sequences than micro-batches",
                found=f"{counted(rows, 'sequence')} in each of {counted(replicas, 'replica')}",
                expected=f"at least {microbatches}, the number of micro-batches",
                remedy="raise batch, or lower microbatches",
            )
        limits.check_counts(config.layers, config.schedule, pipe, config.chunks, microbatches)
        schedule = order or schedules.by_name(
            config.schedule, ranks=pipe, microbatches=microbatches, chunks=config.chunks
        )
        if all(action.op == "F" for action in schedule.orders[0]):
            raise ConfigError("a schedule without backward passes cannot train", found=schedule.name)
        names = ("dim", "layers", "heads", "kv_heads", "hidden", "tied", "dropout", "rope_base")
        sizes = {name: getattr(config, name) for name in names}
        wanted = vocab if config.vocab is None else config.vocab
        if wanted != BYTES:
            sizes["vocab"] = wanted
        model = architecture(seq=config.seq_len, **sizes)
        has = asdict(model).get("vocab", vocab)
        if has < vocab:
            raise ConfigError(
                "the data have more token ids than the model",
                found=f"{vocab} token ids in the data, {has} in the model",
                expected=f"a model of at least {vocab}",
                remedy="tokenize the text with the tokenizer of the model, or leave out vocab",
            )
        tuning = tuning or FineTuning()
        costs = tuning.costs(model)
        _check_pieces(model, len(costs), schedule.stages)
        ranges = given_ranges(config, len(costs), schedule.stages) or schedules.partition(costs, schedule.stages)
        schedule = schedules.with_frozen(schedule, tuning.frozen_stages(model, ranges))
        if config.recompute_limit is not None:
            schedule = schedules.with_recompute(schedule, memory_limit=config.recompute_limit)
        return cls(model, schedule, ranges, rows, tuning)

    @property
    def microbatch_rows(self) -> int:
        """Number of sequences of the largest micro-batch."""
        return -(-self.rows // self.schedule.microbatches)

    def ranges_of(self, rank: int) -> list[tuple[int, int]]:
        """Return (start, stop) of the layers of each stage of one rank of a pipeline."""
        return [self.layer_ranges[stage] for stage in self.schedule.stages_of(rank)]

    def stages(self, rank: int, shard: Shard, dtype: str, seed: int, device: str = "cpu") -> list[nn.Stage]:
        """Make the stages of one rank of a pipeline that holds this shard of the sequences, with new parameters."""
        layers = self.tuning.layers(self.model.build(shard.attend, shard.positions))
        return [
            nn.Stage(layers[start:stop], dtype, seed, device, first=start, frozen=self.tuning.freeze)
            for start, stop in self.ranges_of(rank)
        ]

    def trained_parameters(self, rank: int) -> int:
        """Count the elements of all parameters that a rank of a pipeline trains."""
        own = {layer for cut in self.ranges_of(rank) for layer in range(*cut)}
        trained = self.tuning.trained(self.model)
        return sum(entry.size for name, entry in trained.items() if int(name.partition(".")[0]) in own)


def given_ranges(config: TrainConfig, layers: int, stages: int) -> list[tuple[int, int]]:
    """Return (start, stop) of the layers of each stage as the configuration says it; nothing if it does not."""
    if config.partition is None:
        return []
    counts = parse_partition(config.partition)
    if len(counts) != stages or sum(counts) != layers:
        raise ConfigError(
            "the partition does not fit",
            found=f"{counted(len(counts), 'stage')} with {counted(sum(counts), 'layer')} in {config.partition}",
            expected=f"{counted(stages, 'stage')} with {counted(layers, 'layer')}",
            remedy="count embedding, attention, feed-forward and head as a layer each, or leave partition out",
        )
    return list(pairwise(accumulate(counts, initial=0)))


def _check_pieces(model: Model, pieces: int, stages: int) -> None:
    """Raise ConfigError if the model cannot be cut into so many stages."""
    if pieces >= stages:
        return
    layers, found, remedy = asdict(model).get("layers"), f"{pieces} pieces", "use fewer ranks or chunks"
    if layers is not None and pieces == 2 * layers + 2:  # attention and feed-forward of each; embedding, and head
        found = f"{counted(layers, 'layer')} {'is' if layers == 1 else 'are'} {pieces} pieces (2 x {layers} + 2)"
        remedy += f", or at least {counted(-(-(stages - 2) // 2), 'layer')}"
    raise ConfigError(
        "the model has too few pieces for so many stages",
        found=f"{found} and cannot fill {counted(stages, 'stage')}",
        expected="at least one piece for each stage",
        remedy=remedy,
    )


# -- The part of every sequence that this rank has: its attention and its positions -----------------------------------


class Shard:
    """The share of one rank of `comm` in sequences of `seq_len` positions; making one is collective.

    Parameters
    ----------
    comm : the ranks that share a sequence; a single one has it all
    layout : "zigzag", "contiguous" or "striped"
    packing : has the documents of each batch; None if attention goes across them

    Attributes
    ----------
    attend : for nn.SelfAttention
    positions : for nn.SelfAttention; None for 0 ... seq_len - 1

    Raises ConfigError if a rank would have no position.
    """

    def __init__(self, comm: Communicator, layout: str, seq_len: int, packing: Packing | None = None) -> None:
        self.layout, self.rank = Layout(layout, comm.size, seq_len), comm.rank
        if min(self.layout.length(rank) for rank in range(comm.size)) == 0:
            raise ConfigError(
                "a rank would hold no part of the sequence",
                found=f"seq_len {seq_len} on {counted(comm.size, 'rank')}, {layout}",
                expected="at least one position a rank, two for zigzag",
                remedy="raise seq_len, or lower seq",
            )
        self.ring = Ring(comm, causal=True, layout=self.layout) if comm.size > 1 else None
        whole = Local(causal=True) if self.ring is None else self.ring
        self.packing = packing
        self.attend: Local | Ring | PackedAttend = whole if packing is None else PackedAttend(whole, packing)
        self.positions = None if self.ring is None else self.layout.positions(self.rank)

    def cut(self, array: np.ndarray) -> np.ndarray:
        """Return this rank's columns of an array (rows, seq_len)."""
        return array if self.ring is None else self.layout.shard(array, self.rank)

    def loss_for(self, stage: nn.Stage, sequences: int) -> Callable[..., tuple[Any, Array | None]]:
        """Return the loss behind a stage: with its head, in tiles, where logits of so many sequences are large."""
        if worth_tiles(stage, sequences * self.layout.length(self.rank)):
            return nn.HeadCrossEntropy(stage)
        return nn.softmax_cross_entropy
