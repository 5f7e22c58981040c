"""Where and for which training a plan is made."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from mpipipe import arrays, nn
from mpipipe.attention import Local
from mpipipe.comm.group import group_of
from mpipipe.comm.mesh import Mesh
from mpipipe.errors import ConfigError
from mpipipe.planning import Choice, Space, parse_bytes
from mpipipe.train.architecture import Architecture, Model
from mpipipe.train.config import TrainConfig
from mpipipe.train.config_checks import parse_partition
from mpipipe.train.fine_tuning import FineTuning
from mpipipe.train.memory import STATES
from mpipipe.train.packing import Packing
from mpipipe.train.shard import Shard
from mpipipe.train.training_plan import TrainingPlan

ONE = ("one_f_one_b", 1)  # a schedule and micro-batches with which any model and batch makes a plan on one rank


@dataclass(frozen=True)
class Scene:
    """A training that is to be planned, and this rank's place in it.

    Parameters
    ----------
    config : of the training; what it fixes stays
    architecture : makes the model
    mesh : the ranks
    vocab : token ids in the data
    tuning : what is trained
    shard : the share of sequences that this rank has
    """

    config: TrainConfig
    architecture: Architecture
    mesh: Mesh
    vocab: int
    tuning: FineTuning
    shard: Shard

    @classmethod
    def of(
        cls, config: TrainConfig, architecture: Architecture, mesh: Mesh, vocab: int, tuning: FineTuning | None = None
    ) -> Scene:
        """Make a scene with its shard; collective over all ranks. Raises the same error on every rank."""
        with group_of(mesh.comm).together("plan: the shards of sequences"):
            packing = Packing(1) if config.packing == "segments" else None
            shard = Shard(mesh.seq, config.layout, config.seq_len, packing)
        return cls(config, architecture, mesh, vocab, tuning or FineTuning(), shard)

    @cached_property
    def model(self) -> Model:
        """The model; raises where it, or the batch, cannot be."""
        name, microbatches = ONE
        plain = replace(
            self.config, schedule=name, chunks=1, microbatches=microbatches, recompute=False, recompute_limit=None,
            partition=None,
        )  # fmt: skip
        return TrainingPlan.of(plain, self.architecture, 1, self.mesh.data.size, self.vocab, self.tuning).model

    @property
    def rows(self) -> int:
        """Sequences of a step in each replica."""
        return self.config.batch // self.mesh.data.size

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
        return Space(self.mesh.pipe.size, len(self.model.costs()), self.rows, kept, trained)

    def planned(self, choice: Choice) -> TrainConfig:
        """Return the configuration with this choice."""
        return replace(
            self.config,
            schedule=choice.schedule,
            chunks=choice.chunks,
            microbatches=choice.microbatches,
            partition=",".join(map(str, choice.partition)),
            recompute=choice.recompute,
            recompute_limit=choice.recompute_limit,
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

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """The kind of each layer: those of one kind have the same parts, shapes and operations."""
        trained = self.tuning.trained(self.model)
        found: dict[Any, int] = {}
        kinds = []
        layers = self.tuning.layers(self.model.build(Local()))
        for place, (layer, cost) in enumerate(zip(layers, self.tuning.costs(self.model))):
            parts = [
                (name, type(part).__name__, key, entry.shape, f"{place}{name}.{key}" in trained)
                for name, part in layer.walk("")
                for key, entry in part.declared.items()
            ]
            kinds.append(found.setdefault((tuple(parts), cost), len(found)))
        return tuple(kinds)

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

    def check_place(self, place: str) -> None:
        """Refuse a GPU, on which the host's clock says nothing of a layer."""
        if place != "cpu":
            raise ConfigError(
                "a plan is made on the CPU only",
                found=f"device {place}",
                remedy="choose schedule, chunks and microbatches by hand, with --device cpu make a plan of the CPU's",
            )

    def crowd(self) -> str:
        """Say where ranks share cores, "" where none do; collective."""
        mine = socket.gethostname(), sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
        hosts: dict[str, list[list[int] | None]] = {}
        for name, cores in group_of(self.mesh.comm).gather("plan: the cores", mine):
            hosts.setdefault(name, []).append(cores)
        crowded = []
        for name, all_cores in hosts.items():
            count = len({core for cores in all_cores for core in cores or ()})
            if 0 < count < len(all_cores):
                crowded.append(f"{len(all_cores)} ranks share {count} core{'s' * (count > 1)} of {name}")
        if not crowded:
            return ""
        return f"{'; '.join(crowded)}: times depend on who waits meanwhile, and predictions are rough"


def _per_layer(parameters: Any, layers: int) -> tuple[int, ...]:
    counts = [0] * layers
    for name, entry in parameters.items():
        counts[int(name.partition(".")[0])] += entry.size
    return tuple(counts)
