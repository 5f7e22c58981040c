"""What follows from a configuration and a number of ranks: the model, the schedule, and who gets which layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mpipipe import nn, schedules
from mpipipe.errors import ConfigError
from mpipipe.train import limits
from mpipipe.train.config import TrainConfig
from mpipipe.train.shard import Shard


@dataclass(frozen=True)
class TrainingPlan:
    """A training decided upon, before any data or memory is touched.

    Attributes
    ----------
    model : what `build(attend, positions)` makes layers of, one cost for each in `costs()`, and `parameters` in all
    schedule : Schedule
    parts : (start, stop) of the layers of each logical stage
    rows : sequences of a step in each replica
    """

    model: Any
    schedule: schedules.Schedule
    parts: list[tuple[int, int]]
    rows: int

    @classmethod
    def of(cls, config: TrainConfig, architecture, pipe: int, replicas: int) -> TrainingPlan:
        """Raises ConfigError or ArgumentError where the configuration does not fit `replicas` pipelines of `pipe`.

        Nothing is built for numbers of layers, chunks or micro-batches that nobody can mean (see `limits`).
        """
        rows, rest = divmod(config.batch, replicas)
        if rest:
            raise ConfigError(
                "the batch does not divide among the replicas",
                found=f"batch {config.batch}, {replicas} replicas",
                expected=f"a multiple of {replicas}",
                remedy=f"for example batch = {(rows + 1) * replicas}",
            )
        microbatches = config.microbatches
        if microbatches is None:
            microbatches = min(rows, schedules.advise(pipe, config.chunks).microbatches)
        if rows < microbatches:
            raise ConfigError(
                "fewer sequences than micro-batches",
                found=f"{rows} sequences in each of {replicas} replicas",
                expected=f"at least {microbatches}, the number of micro-batches",
                remedy="raise batch, or lower microbatches",
            )
        limits.check_counts(config.layers, pipe, config.chunks, microbatches)
        schedule = schedules.by_name(config.schedule, ranks=pipe, microbatches=microbatches, chunks=config.chunks)
        if all(action.op == "F" for action in schedule.orders[0]):
            raise ConfigError("a schedule without backward passes cannot train", found=config.schedule)
        names = ("dim", "layers", "heads", "kv_heads", "hidden", "tied", "dropout", "rope_base")
        model = architecture(seq=config.seq_len, **{name: getattr(config, name) for name in names})
        return cls(model, schedule, schedules.partition(model.costs(), schedule.stages), rows)

    def stages(self, rank: int, shard: Shard, dtype: str, seed: int, device: str = "cpu") -> list[nn.Stage]:
        """The stages of one rank of a pipeline that holds this shard of the sequences, with fresh parameters."""
        layers = self.model.build(shard.attend, shard.positions)
        parts = [self.layer_ranges[number] for number in self.schedule.stages_of(rank)]
        return [nn.Stage(layers[start:stop], dtype, seed, device, first=start) for start, stop in parts]
