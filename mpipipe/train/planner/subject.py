"""The training that is to be planned: its model, its layers, and the plans to search among. It needs no ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from mpipipe import arrays
from mpipipe.attention import Local
from mpipipe.planning import Choice, Space, parse_bytes
from mpipipe.train.architecture import Architecture, Model
from mpipipe.train.config import TrainConfig
from mpipipe.train.config_checks import parse_partition
from mpipipe.train.fine_tuning import FineTuning
from mpipipe.train.memory import STATES
from mpipipe.train.training_plan import TrainingPlan

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
