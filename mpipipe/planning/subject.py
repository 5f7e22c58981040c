"""The training that is to be planned: its model, its layers, and the plans to search among. It needs no ranks."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from mpipipe import arrays, nn
from mpipipe.attention import Local
from mpipipe.comm.mesh import Mesh
from mpipipe.errors import ConfigError
from mpipipe.job.cores import oversubscribed, own_cores
from mpipipe.job.group import group_of
from mpipipe.language.models.fine_tuning import Architecture, FineTuning, Model
from mpipipe.language.packing import Packing
from mpipipe.planning import Choice, Space, parse_bytes
from mpipipe.planning.memory import STATES
from mpipipe.train.config import TrainConfig
from mpipipe.train.config_checks import parse_partition
from mpipipe.train.training_plan import Shard, TrainingPlan

ONE = ("one_f_one_b", 1)  # a schedule and micro-batches with which any model and batch makes a plan on one rank


@dataclass(frozen=True)
class Subject:
    """A training that is to be planned.

    Parameters
    ----------
    config : of the training; what it fixes stays
    architecture : makes the model
    vocab : token ids in the data
    tuning : what is trained
    ranks : of a pipeline
    replicas : of the pipeline
    """

    config: TrainConfig
    architecture: Architecture
    vocab: int
    tuning: FineTuning
    ranks: int
    replicas: int

    @cached_property
    def model(self) -> Model:
        """The model; raises where it, or the batch, cannot be."""
        name, microbatches = ONE
        plain = replace(
            self.config, schedule=name, chunks=1, microbatches=microbatches, recompute=False, recompute_limit=None,
            partition=None, plan="no", memory_limit=None, fixed=(),
        )  # fmt: skip
        return TrainingPlan.of(plain, self.architecture, 1, self.replicas, self.vocab, self.tuning).model

    @property
    def rows(self) -> int:
        """Sequences of a step in each replica."""
        return self.config.batch // self.replicas

    @property
    def memory_limit(self) -> int | None:
        """Bytes that a rank may need."""
        return None if self.config.memory_limit is None else parse_bytes(self.config.memory_limit)

    @cached_property
    def space(self) -> Space:
        """The plans to search among; raises where there are none."""
        config = self.config
        fixed: dict[str, Any] = {name: getattr(config, name) for name in config.fixed}
        if fixed.get("partition") is not None:
            fixed["partition"] = parse_partition(fixed["partition"])
        kept = {name: value for name, value in fixed.items() if value is not None or name == "recompute_limit"}
        trained = frozenset(int(name.partition(".")[0]) for name in self.tuning.trained(self.model))
        return Space(self.ranks, len(self.model.costs()), self.rows, kept, trained)

    def planned(self, choice: Choice) -> TrainConfig:
        """Return the configuration with this choice, which leaves nothing to plan."""
        return replace(
            self.config,
            plan="no",
            memory_limit=None,
            fixed=(),
            schedule=choice.schedule,
            chunks=choice.chunks,
            microbatches=choice.microbatches,
            partition=",".join(map(str, choice.partition)),
            recompute=choice.recompute,
            recompute_limit=choice.recompute_limit,
        )

    @cached_property
    def signatures(self) -> tuple[str, ...]:
        """What each layer is: its parts, their shapes, what of it is trained, and how many operations it takes."""
        trained = self.tuning.trained(self.model)
        layers = self.tuning.layers(self.model.build(Local()))
        found = []
        for place, (layer, cost) in enumerate(zip(layers, self.tuning.costs(self.model))):
            parts = [
                f"{type(part).__name__} {name}.{key} {entry.shape}{' trained' * (f'{place}{name}.{key}' in trained)}"
                for name, part in layer.walk("")
                for key, entry in part.declared.items()
            ]
            found.append("; ".join([*parts, f"{cost} operations"]))
        return tuple(found)

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """The kind of each layer: those of one kind have the same parts, shapes and operations."""
        found: dict[str, int] = {}
        return tuple(found.setdefault(each, len(found)) for each in self.signatures)

    @property
    def facts(self) -> Mapping[str, Any]:
        """What measured times hold for, besides the layers."""
        names = ("dtype", "seq_len", "seq", "layout", "packing", "heads", "tied", "dropout", "optimizer")
        heads = {"kv_heads": self.config.kv_heads or self.config.heads}
        return {"vocab": self.vocab, **heads, **{name: getattr(self.config, name) for name in names}}

    @cached_property
    def trained_counts(self) -> tuple[int, ...]:
        """Number of trained parameters of each layer."""
        return _per_layer(self.tuning.trained(self.model), len(self.kinds))

    @cached_property
    def states(self) -> tuple[int, ...]:
        """Bytes of parameters, gradients and the optimizer's state of each layer."""
        kind = arrays.dtype(self.config.dtype)
        wide = arrays.accumulator(kind).itemsize
        half = kind.itemsize if kind.itemsize < wide else 0
        everything = _per_layer(self.tuning.declared(self.model), len(self.kinds))
        more = wide * (1 + STATES[self.config.optimizer])
        return tuple(count * (wide + half) + trained * more for count, trained in zip(everything, self.trained_counts))


def _per_layer(parameters: Any, layers: int) -> tuple[int, ...]:
    counts = [0] * layers
    for name, entry in parameters.items():
        counts[int(name.partition(".")[0])] += entry.size
    return tuple(counts)


# -- The ranks on which a training is measured, and their share of it -------------------------------------------------


@dataclass(frozen=True)
class Scene(Subject):
    """A training that is to be planned, and this rank's place in it.

    Parameters
    ----------
    mesh : the ranks
    shard : the share of sequences that this rank has
    """

    mesh: Mesh
    shard: Shard

    @classmethod
    def of(
        cls, config: TrainConfig, architecture: Architecture, mesh: Mesh, vocab: int, tuning: FineTuning | None = None
    ) -> Scene:
        """Make a scene with its shard; collective over all ranks. Raises the same error on every rank."""
        with group_of(mesh.comm).raise_together("plan: the shards of sequences"):
            packing = Packing(1) if config.packing == "segments" else None
            shard = Shard(mesh.seq, config.layout, config.seq_len, packing)
        return cls(
            config, architecture, vocab, tuning or FineTuning(), mesh.pipe.size, mesh.data.size, mesh=mesh, shard=shard
        )

    def tokens(self, rows: int, microbatches: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw inputs and targets, this rank's share of them. Documents, where they count, are as long as sequences."""
        shape = (2, rows, self.config.seq_len)
        inputs, targets = np.random.default_rng(0).integers(0, self.vocab, size=shape)
        if self.shard.packing is not None:
            self.shard.packing.microbatches = microbatches
            self.shard.packing.begin(np.zeros(shape[1:], np.int64))
        return self.shard.cut(inputs), self.shard.cut(targets)

    def message_shape(self, rows: int) -> tuple[int, int, int]:
        """Return the shape of what a stage hands to the next for a micro-batch."""
        length = self.shard.layout.length(self.shard.rank)
        return rows, length, getattr(self.model, "dim", self.config.dim)

    def layers(self) -> list[nn.Layer]:
        """Make the layers of the model."""
        return self.tuning.layers(self.model.build(self.shard.attend, self.shard.positions))

    def check_place(self, place: str) -> None:
        """Refuse a GPU, on which the host's clock says nothing of a layer."""
        if place != "cpu":
            raise ConfigError(
                "a plan is made on the CPU only",
                found=f"device {place}",
                remedy="choose schedule, chunks and microbatches by hand, with --device cpu make a plan of the CPU's",
            )

    def oversubscribed(self) -> str:
        """Say which ranks share cores, "" where none do; collective."""
        comm = self.mesh.comm
        mine = {"rank": comm.rank, "host": socket.gethostname(), "cores": own_cores()}
        found = oversubscribed(group_of(comm).gather("plan: the cores", mine))
        return f"{found}: times depend on who waits meanwhile, and predictions are rough" if found else ""
