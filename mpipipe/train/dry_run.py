"""What a training would be on so many ranks, without one: its plan, and the memory of each rank."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from mpipipe import arrays, schedules
from mpipipe.comm import inprocess
from mpipipe.comm.types import Communicator
from mpipipe.errors import ConfigError
from mpipipe.schedules.recompute import before_backwards
from mpipipe.train.architecture import Architecture
from mpipipe.train.base import architecture_of, find_base
from mpipipe.train.config import TrainConfig
from mpipipe.train.data import find
from mpipipe.train.fine_tuning import find_tuning
from mpipipe.train.footprint import Held, peak_of_step
from mpipipe.train.memory import STATES, own_layers, parameters_of
from mpipipe.train.rehearsal import Rehearsal, StageBytes
from mpipipe.train.shard import Shard
from mpipipe.train.training_plan import TrainingPlan


@dataclass(frozen=True)
class RankBytes:
    """Memory of one rank of a pipeline, in bytes.

    Attributes
    ----------
    rank : of the pipeline
    stages : its stages, each with (start, stop) of its layers
    count : elements of its parameters
    parameters : with the copy that a narrower dtype computes with
    gradients, moments : of what is trained
    tables : what is made once, such as rotary tables
    activations, messages, scratch : at the peak of a step
    batch : inputs and targets
    start : what drawing the initial values takes, beside parameters and gradients
    """

    rank: int
    stages: dict[int, tuple[int, int]]
    count: int
    parameters: int
    gradients: int
    moments: int
    tables: int
    activations: int
    messages: int
    scratch: int
    batch: int
    start: int

    @property
    def total(self) -> int:
        """The most that the rank holds at once: in a step, or while its initial values are drawn."""
        fixed = self.parameters + self.gradients
        step = self.moments + self.tables + self.activations + self.messages + self.scratch + self.batch
        return fixed + max(step, self.start)


@dataclass(frozen=True)
class Forecast:
    """What a training would be.

    Attributes
    ----------
    config : with what a folder to begin from says
    plan : model, schedule, and the layers of each stage
    pipe, data, seq : shape of the mesh
    ranks : memory of each rank of a pipeline; all replicas are alike
    """

    config: TrainConfig
    plan: TrainingPlan
    pipe: int
    data: int
    seq: int
    ranks: list[RankBytes]


def foresee(config: TrainConfig, architecture: Architecture, ranks: int) -> Forecast:
    """Return what a training would be on so many ranks; for one process, without MPI.

    It rehearses one micro-batch on the processor, on stages with at most two repetitions of the layers that repeat.

    Raises ConfigError, DataError or ArgumentError, as the training would.
    """
    return inprocess.run(1, lambda comm: _foresee(config, architecture, ranks, comm))[0]


def _foresee(config: TrainConfig, architecture: Architecture, ranks: int, comm: Communicator) -> Forecast:
    config, base = find_base(config, comm)
    tuning = find_tuning(config, comm)
    pipe, data = _mesh(config, ranks)
    plan = TrainingPlan.of(
        config, architecture_of(base, architecture), pipe, data, find(config.data, config.vocab).vocab, tuning
    )
    length = -(-config.seq_len // config.seq)
    shard = Shard(comm, "contiguous", length)
    rows = plan.microbatch_rows
    schedule = before_backwards(plan.schedule) if config.recompute else plan.schedule
    rehearsal = Rehearsal(
        lambda: tuning.layers(plan.model.build(shard.attend)),
        config.dtype,
        tuning.freeze,
        lambda stage: shard.loss_for(stage, rows),
    )
    stages: list[StageBytes] = []
    inputs: list[int] = []
    x = targets = np.zeros((rows, length), np.int64)
    for number, (start, stop) in enumerate(plan.layer_ranges):
        inputs.append(x.nbytes)
        ends = 0 < number == schedule.trained_from
        found, shape = rehearsal.stage(start, stop, x, targets, ends)
        stages.append(found)
        x = np.zeros(shape, arrays.dtype(config.dtype))
    of_ranks = [_rank(config, plan, schedule, rank, stages, inputs) for rank in range(pipe)]
    return Forecast(config, plan, pipe, data, config.seq, of_ranks)


def _mesh(config: TrainConfig, ranks: int) -> tuple[int, int]:
    """Return the ranks of a pipeline, and the number of replicas."""
    pipe = max(1, ranks // config.seq) if config.pipe is None else config.pipe
    data, rest = divmod(ranks, pipe * config.seq)
    if rest or not data:
        raise ConfigError(
            "the mesh does not fit the ranks",
            found=f"{ranks} ranks, pipe {pipe}, seq {config.seq}",
            expected=f"a multiple of {pipe * config.seq}",
        )
    return pipe, data


def _rank(
    config: TrainConfig,
    plan: TrainingPlan,
    schedule: schedules.Schedule,
    rank: int,
    stages: list[StageBytes],
    inputs: list[int],
) -> RankBytes:
    own = [stages[number] for number in schedule.stages_of(rank)]
    kind = arrays.dtype(config.dtype)
    wide = arrays.accumulator(kind).itemsize
    count, trained = parameters_of(own_layers(plan, rank)), plan.trained_parameters(rank)
    held: Held = peak_of_step(schedule, rank, stages, inputs)
    states = STATES[config.optimizer] if config.optimizer == "adamw" or config.momentum else 0
    ends = (rank == schedule.placement[0]) + (rank == schedule.placement[-1])
    return RankBytes(
        rank=rank,
        stages=dict(zip(schedule.stages_of(rank), plan.ranges_of(rank))),
        count=count,
        parameters=count * (wide + (kind.itemsize if kind.itemsize != wide else 0)),
        gradients=trained * wide,
        moments=trained * wide * states,
        tables=round(sum(each.tables for each in own)),
        activations=round(held.activations),
        messages=round(held.messages),
        scratch=round(held.scratch),
        batch=ends * 16 * plan.rows * -(-config.seq_len // config.seq),
        start=round(max(each.drawing for each in own)),
    )
