"""What a training would be on so many ranks, without one: its plan, and the memory of each rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mpipipe import arrays, nn, schedules
from mpipipe.attention import Local
from mpipipe.errors import ConfigError
from mpipipe.job import inprocess
from mpipipe.job.types import Communicator
from mpipipe.language.data import find
from mpipipe.language.models.fine_tuning import Architecture, find_tuning
from mpipipe.language.models.pretrained import architecture_of, find_pretrained
from mpipipe.pipeline import receive_windows
from mpipipe.planning.memory import STATES, own_layers, parameters_of, resident
from mpipipe.planning.rehearsal import Rehearsal, StageBytes
from mpipipe.schedules import Schedule
from mpipipe.schedules.recompute import before_backwards
from mpipipe.text import counted
from mpipipe.train.config import TrainConfig
from mpipipe.train.order_file import with_order
from mpipipe.train.training_plan import Shard, TrainingPlan

# What a process takes once it trains, whatever the model: modules that are imported late, buffers of MPI and of BLAS,
# and gaps between arrays. Measured with `bench dry-run` under MPICH 5.0 and Open MPI 5.0: 8 to 18 MB.
SETTLED = 13_000_000


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
    sample : what a step has taken, with parameters and gradients of the decoder that writes the sample at the end
    sums : what MPI takes for sums over replicas; 0 without replicas
    process : Python with its libraries, and what they keep for themselves once a training runs
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
    sample: int
    sums: int
    process: int

    @property
    def total(self) -> int:
        """The most that the rank holds at once: in a step, while initial values are drawn, or for the sample."""
        state = self.moments + self.tables + max(self.step, self.sample, self.sums)
        return self.process + self.parameters + self.gradients + max(self.start, state)

    @property
    def step(self) -> int:
        """What a step takes beside parameters, gradients and moments."""
        return self.activations + self.messages + self.scratch + self.batch


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
    process = resident() + SETTLED  # before the rehearsal
    return inprocess.run(1, lambda comm: _foresee(config, architecture, ranks, process, comm))[0]


class _Rehearsed(NamedTuple):
    """What runs, with the bytes of each stage and of its input, and the window of receives of each rank."""

    schedule: schedules.Schedule
    stages: list[StageBytes]
    inputs: list[int]
    windows: Callable[[int], int]


def _foresee(config: TrainConfig, architecture: Architecture, ranks: int, process: int, comm: Communicator) -> Forecast:
    if config.plan == "auto":
        raise ConfigError(
            "a dry run cannot foresee what a plan chooses",
            found="plan auto",
            expected="no: a plan is made of measurements on the ranks of the training",
            remedy="make a plan with `mpipipe plan --out FILE`, and give that file to the dry run by --config",
        )
    config, base = find_pretrained(config, comm)
    tuning = find_tuning(config, comm)
    config = with_order(config, comm, Path(config.out or "."))
    pipe, data = mesh_of(config, ranks)
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
        if config.seq > 1:
            found = with_ring(found, plan.model.build(shard.attend)[start:stop], rows * length, config.dtype)
        stages.append(found)
        x = np.zeros(shape, arrays.dtype(config.dtype))
    rehearsed = _Rehearsed(schedule, stages, inputs, receive_windows(schedule))
    of_ranks = [_rank(config, plan, rehearsed, rank, process, data * config.seq) for rank in range(pipe)]
    return Forecast(config, plan, pipe, data, config.seq, of_ranks)


def mesh_of(config: TrainConfig, ranks: int) -> tuple[int, int]:
    """Return the ranks of a pipeline, and the number of replicas."""
    pipe = max(1, ranks // config.seq) if config.pipe is None else config.pipe
    data, rest = divmod(ranks, pipe * config.seq)
    if rest or not data:
        raise ConfigError(
            "the mesh does not fit the ranks",
            found=f"{counted(ranks, 'rank')}, pipe {pipe}, seq {config.seq}",
            expected=f"a multiple of {pipe * config.seq}",
        )
    return pipe, data


def _rank(
    config: TrainConfig, plan: TrainingPlan, rehearsed: _Rehearsed, rank: int, process: int, replicas: int
) -> RankBytes:
    schedule, stages, inputs, windows = rehearsed
    own = [stages[number] for number in schedule.stages_of(rank)]
    kind = arrays.dtype(config.dtype)
    wide = arrays.accumulator(kind).itemsize
    layers = plan.model.build(Local())
    sizes = [parameters_of(layers[start:stop]) for start, stop in plan.ranges_of(rank)]
    count, trained = parameters_of(own_layers(plan, rank)), plan.trained_parameters(rank)
    held = peak_of_step(schedule, rank, stages, inputs, windows)
    length = -(-config.seq_len // config.seq)
    ends = (rank == schedule.placement[0]) + (rank == schedule.placement[-1])
    step = round(held.total) + ends * 16 * plan.rows * length
    states = STATES[config.optimizer] if config.optimizer == "adamw" or config.momentum else 0
    return RankBytes(
        rank=rank,
        stages=dict(zip(schedule.stages_of(rank), plan.ranges_of(rank))),
        count=count,
        parameters=count * (wide + (kind.itemsize if kind.itemsize != wide else 0)),
        gradients=trained * wide,
        moments=trained * wide * states,
        tables=max(0, round(sum(each.tables for each in own))),
        activations=round(held.activations),
        messages=round(held.messages),
        scratch=round(held.scratch),
        batch=ends * 16 * plan.rows * length,
        start=max(0, round(max(each.drawing for each in own))),
        sample=_with_buffers(step, [size * wide for size in (*sizes, *sizes)]) if config.sample_bytes else 0,
        sums=trained * wide if replicas > 1 else 0,  # MPI sums with a buffer as large, where a step has been
        process=process,
    )


def _with_buffers(step: int, buffers: list[int]) -> int:
    """Return what a step has taken and what these buffers take behind it.

    Memory that a step has taken stays with the process. A buffer that fits into it takes no more.
    """
    room, more = step, 0
    for size in sorted(buffers, reverse=True):
        if size <= room:
            room -= size
        else:
            more += size
    return step + more


# -- The memory of one rank in a training step, action by action: what it holds, and what the action takes on top -----
#
# F  leaves `saved` until B, or until I, which leaves `pending` until W
# R  leaves it where F has kept its input alone, which stays as long, in a buffer of messages


class Held(NamedTuple):
    """Bytes of one rank at the peak of its step, by what they are for."""

    activations: float
    messages: float
    scratch: float

    @property
    def total(self) -> float:
        """All of them."""
        return sum(self)


def peak_of_step(
    schedule: Schedule,
    rank: int,
    stages: Sequence[StageBytes],
    inputs: Sequence[int],
    windows: Callable[[int], int] | None = None,
) -> Held:
    """Walk through the order of a rank, and return what it holds at the peak.

    Parameters
    ----------
    schedule : what runs, with its R's
    rank : of the pipeline
    stages : bytes of all stages
    inputs : bytes of the input of a micro-batch, for all stages
    windows : `receive_windows` of the schedule, for those who ask for more than one rank
    """
    placement, last = schedule.placement, schedule.stages - 1
    window = (windows or receive_windows(schedule))(rank) if schedule.ranks > 1 else 0
    waiting = sum(_receives(schedule, rank, *action[:2]) for action in schedule.orders[rank])
    largest = max((inputs[stage + 1] for stage in schedule.stages_of(rank) if stage < last), default=0)
    largest = max([largest, *(inputs[stage] for stage in schedule.stages_of(rank) if stage)])
    best = Held(0, 0, 0)
    activations, local, leased, buffers, leaving = 0.0, 0.0, 0, 0, 0.0
    for stage, op, microbatch in schedule.orders[rank]:
        own = stages[stage]
        again = (stage, microbatch) in schedule.recomputed
        trained = schedule.has_backward(stage)
        receives = _receives(schedule, rank, stage, op)
        if receives:
            buffers = max(buffers, leased + min(window, waiting))
            waiting -= 1
            leased += 1
        elif op == "F" and stage and placement[stage - 1] == rank:
            local += inputs[stage]
        scratch = {"F": own.forward, "R": own.forward, "B": own.backward, "I": own.input_grad, "W": own.weight_grad}[op]
        held = Held(activations + local, buffers * largest, scratch + leaving)
        best = max(best, held, key=lambda each: each.total)
        leaving = 0.0
        if op == "F":
            activations += own.saved if trained and not again else 0.0
            leaving = own.output if stage < last and placement[stage + 1] != rank else 0.0
        elif op == "R":
            activations += own.saved
        elif op == "I":
            activations += own.pending - own.saved
        elif op == "W":
            activations -= own.pending
        elif op == "B":
            activations -= own.saved
        if op in "BI":
            leaving = inputs[stage] if stage and placement[stage - 1] != rank else 0.0
        if (op in "BW") or (op == "F" and not trained):  # the input of the forward, and the gradient of the output
            if stage and placement[stage - 1] == rank:
                local -= inputs[stage]
            leased -= (stage > 0 and placement[stage - 1] != rank) + (
                op != "F" and stage < last and placement[stage + 1] != rank
            )
    return best


def _receives(schedule: Schedule, rank: int, stage: int, op: str) -> bool:
    """Whether an action of this rank takes an array from another one."""
    if op == "F":
        return stage > 0 and schedule.placement[stage - 1] != rank
    return op in "BI" and stage < schedule.stages - 1 and schedule.placement[stage + 1] != rank


# -- What attention over a ring of ranks takes beyond attention on one rank: the messages with keys and values --------


def with_ring(found: StageBytes, layers: Sequence[nn.Layer], tokens: int, dtype: str) -> StageBytes:
    """Return the bytes of a stage that was rehearsed on one rank, for a ring.

    A forward keeps the last block that has come by, and has another one on its way. In a backward two messages are
    under way, each with a block and its gradients, which are sums in the wider dtype.

    Parameters
    ----------
    found : of the rehearsal
    layers : of the stage, unbound
    tokens : of a micro-batch on this rank
    dtype : of activations
    """
    kind = arrays.dtype(dtype)
    wide = arrays.accumulator(kind).itemsize
    attentions = [each for top in layers for _, each in top.walk("") if isinstance(each, nn.SelfAttention)]
    widths = [2 * each.kv_heads * each.head_dim * tokens for each in attentions]
    kept, largest = sum(widths) * kind.itemsize, max(widths, default=0)
    under_way = 2 * largest * (kind.itemsize + wide)
    return replace(
        found,
        saved=found.saved + kept,
        forward=found.forward + kept + largest * kind.itemsize,
        backward=found.backward + under_way,
        input_grad=found.input_grad + under_way,
    )
