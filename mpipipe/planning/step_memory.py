"""What each rank of a training would hold in memory: measured on one micro-batch of each stage, and added up.

    layers of the stage      E A F A F A F A F H        a run of 4 times (A F)
    measured                 E A F H    E A F A F H     its bytes, and those of each further time

What is kept grows by the same amount with each repetition, so two measurements say what any number of them takes. It
is counted array by array; what an action takes on top is how far the resident memory of the process grows meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mpipipe import arrays, nn
from mpipipe.adapters import ForeignLayer, counting
from mpipipe.arrays import Structure, Tree
from mpipipe.nn import Position, is_frozen
from mpipipe.pipeline import Loss, receive_windows
from mpipipe.planning.layer_plan import LayerPlan
from mpipipe.planning.memory import (
    array_bytes,
    attentions,
    check_rehearsal,
    new_bytes,
    parameters_of,
    peak,
    process_bytes,
    resident,
)
from mpipipe.planning.problem import PlanningProblem
from mpipipe.schedules import Schedule, before_backwards


@dataclass(frozen=True)
class StageBytes:
    """Bytes of one stage, without the input of a micro-batch.

    tables : what the first micro-batch leaves for all others
    drawing : most that is there besides parameters and gradients while initial values are drawn
    output : what a forward returns
    saved : what is kept from a forward for its backward; after the last stage the gradient of the loss, too
    pending : what is kept from the input gradient for the weight gradient
    forward, backward, input_grad, weight_grad : most that the action allocates at once, its results included
    """

    tables: float
    drawing: float
    output: float
    saved: float
    pending: float
    forward: float
    backward: float
    input_grad: float
    weight_grad: float

    def longer(self, more: StageBytes, times: int) -> StageBytes:
        """Return the bytes of a stage with `times` further repetitions, where `more` has one more than this one."""
        saved, pending = more.saved - self.saved, more.pending - self.pending
        return replace(
            more,
            tables=self.tables + times * (more.tables - self.tables),
            saved=self.saved + times * saved,
            pending=self.pending + times * pending,
            forward=more.forward + (times - 1) * saved,
            input_grad=more.input_grad + (times - 1) * max(0, pending - saved),
        )


class LayerRun(NamedTuple):
    """Layers that repeat: `times` times the `period` layers from `start` on."""

    start: int
    period: int
    times: int


def longest_run(kinds: Sequence[Any]) -> LayerRun:
    """Return the repetition that leaves the fewest layers where it is cut to two; of equals the shortest period.

    >>> longest_run("EAFAFAFAFH")
    LayerRun(start=1, period=2, times=4)
    """
    best = LayerRun(0, len(kinds), 1)
    for period in range(1, len(kinds) // 3 + 1):
        same = [kinds[i] == kinds[i + period] for i in range(len(kinds) - period)] + [False]
        start = 0
        for place, holds in enumerate(same):
            if holds:
                continue
            count = (place - start) // period + 1
            if count > 2 and (count - 2) * period > max(0, best.times - 2) * best.period:
                best = LayerRun(start, period, count)
            start = place + 1
    return best


def kind_of(layer: nn.Layer) -> tuple:
    """Return what tells layers apart that compute in different ways or sizes."""
    return tuple(
        (name, type(part).__qualname__, part.takes, part.gives,
         tuple((key, p.shape, p.frozen) for key, p in part.declared.items()),
         getattr(getattr(part, "attend", None), "window", None))
        for name, part in layer.walk("")
    )  # fmt: skip


class StageMeter:
    """Measures stages of the layers that `build` makes; each kind of stage once.

    `frozen` are patterns, as for nn.Stage, `loss_for` makes the loss after the last stage, and `inputs` tell layers
    apart by the shapes of what comes to them.
    """

    def __init__(
        self,
        build: Callable[[], list[nn.Layer]],
        dtype: str,
        frozen: Sequence[str],
        loss_for: Callable[[nn.Stage], Callable[..., Any]],
        inputs: Sequence[str] = (),
    ) -> None:
        self.make, self.dtype, self.frozen, self.loss_for = build, dtype, frozen, loss_for
        self.kinds = [(kind_of(layer), *inputs[place : place + 1]) for place, layer in enumerate(self.build())]
        self._known: dict[tuple, tuple[StageBytes, Shapes]] = {}

    def stage(
        self, start: int, stop: int, x: Tree, targets: Tree, ends: bool, gives: tuple[str, ...] = ()
    ) -> tuple[StageBytes, Shapes]:
        """Return the bytes of the layers from `start` to before `stop`, and the shapes of the output.

        `x` is the input of a micro-batch, `ends` says whether no stage wants its gradient, and `gives` are the names
        that later stages take.
        """
        kinds = self.kinds[start:stop]
        key = tuple(kinds), shapes_of(x), ends, gives, stop == len(self.kinds)
        if key in self._known:
            return self._known[key]
        run = longest_run(kinds)
        times = (1, 2) if run.times > 2 else (run.times,)
        behind = start + run.start + run.period * run.times
        cuts = [[*range(start, start + run.start + run.period * count), *range(behind, stop)] for count in times]
        if not self._known:  # what the first use of anything leaves behind is no part of a stage
            self._measure(cuts[0], x, targets, ends, gives)
        (short, shape), *more = [self._measure(cut, x, targets, ends, gives) for cut in cuts]
        self._known[key] = (short.longer(more[0][0], run.times - 1) if more else short), shape
        return self._known[key]

    def build(self) -> list[nn.Layer]:
        """Return all layers, whose parameters say themselves whether they are frozen: a shorter stage renames them."""
        layers = self.make()
        for place, top in enumerate(layers):
            for name, layer in top.walk(str(place)):
                layer.declared = {
                    key: replace(entry, frozen=entry.frozen or is_frozen(f"{name}.{key}", self.frozen))
                    for key, entry in layer.declared.items()
                }
        return layers

    def _measure(
        self, places: Sequence[int], x: Tree, targets: Tree, ends: bool, gives: tuple[str, ...]
    ) -> tuple[StageBytes, Shapes]:
        layers = self.build()
        chosen = [layers[place] for place in places]
        del layers
        check_rehearsal(chosen, self.dtype, bytes_of(x))
        resident()
        stage = nn.Stage(chosen, self.dtype)
        most = peak()
        drawing = most - resident()
        stage.optimizer_writes_compute()
        stage.end_backward(ends)
        stage.hand_on(gives)
        loss = Loss(self.loss_for(stage)) if places[-1] == len(self.kinds) - 1 else None
        one = _MicroBatch(stage, loss, x, targets)
        with ExitStack() as stack:
            stack.enter_context(np.errstate(all="ignore"))
            stack.enter_context(counting())
            if loss is not None:
                stack.enter_context(loss.taking_head())
            one.measure()  # what is made once is there then
            return StageBytes(tables_of(stage), max(0, drawing), *one.measure()), one.shapes


def tables_of(stage: nn.Stage) -> int:
    """Return the bytes that a stage and its layers keep besides parameters, gradients and copies of them."""
    parts = [vars(part) for top in stage.layers for _, part in top.walk("") if not isinstance(part, ForeignLayer)]
    return new_bytes([[stage.tables, *parts]], {*array_bytes(stage.buffers)})[0]


class _MicroBatch:
    """One micro-batch through one stage, as the executor runs it."""

    def __init__(self, stage: nn.Stage, loss: Loss | None, x: Tree, targets: Tree) -> None:
        self.stage, self.loss, self.x, self.targets = stage, loss, x, targets
        self.dy: Tree | None = None
        self.shapes: Shapes = (None, ())
        stage.position = Position(0, 0, 0, True)

    def forward(self) -> tuple[Any, Any, int]:
        """Return (saved, gradient of the output, bytes of the output)."""
        y, saved = self.stage.forward(self.x)
        self.shapes = shapes_of(y)
        if self.loss is None:
            if self.dy is None:
                self.dy = zeros_of(self.shapes, gradient=True)
            return saved, self.dy, bytes_of(y)
        _, gradient, _ = self.loss.checked(self.loss.call(y, self.targets, 1.0))
        return saved, self.loss.scaled(gradient, 1.0, y), bytes_of(y)

    def measure(self) -> tuple[float, ...]:
        """Return output, saved, pending, and the most of forward, backward, input and weight gradient."""
        shared = {*array_bytes((self.stage.buffers, self.x, self.targets))}
        start = resident()
        saved, dy, output = self.forward()
        (kept,) = new_bytes([saved if self.loss is None else (saved, dy)], shared)
        forward = max(kept, peak() - start)
        start = resident()
        self.stage.backward(dy, saved)
        backward = peak() - start
        del saved, dy
        saved, dy, output = self.forward()
        start = resident()
        waiting = self.stage.backward_input(dy, saved)[1]
        input_grad = peak() - start
        del saved, dy
        (pending,) = new_bytes([waiting], shared)
        start = resident()
        self.stage.backward_weight(waiting)
        return output, kept, pending, forward, backward, input_grad, peak() - start


Shapes: TypeAlias = "tuple[Structure, tuple[tuple[arrays.Shape, Any], ...]]"  # of a tree: shape and dtype of each array


def shapes_of(tree: Tree) -> Shapes:
    """Return what a tree of zeros is made of."""
    leaves, structure = arrays.flatten(tree)
    return structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def zeros_of(shapes: Shapes, gradient: bool = False) -> Tree:
    """Return a tree of zeros; of a gradient, integers have none."""
    structure, leaves = shapes
    kept = [not gradient or arrays.is_floating(kind) for _, kind in leaves]
    return arrays.unflatten([np.zeros(*each) if there else None for each, there in zip(leaves, kept)], structure)


def bytes_of(tree: Tree) -> int:
    """Return the bytes of all arrays of a tree."""
    return sum(leaf.nbytes for leaf in arrays.flatten(tree)[0])


# -- What each rank of a training would hold --------------------------------------------------------------------------


@dataclass(frozen=True)
class RankBytes:
    """Memory of one rank of a pipeline, in bytes.

    rank : of the pipeline
    stages : its stages, each with (start, stop) of its layers
    count : elements of its parameters
    parameters : with the copy that a narrower dtype computes with
    gradients, moments : of what is trained
    tables : what is made once, such as rotary tables
    activations, messages, scratch : at the peak of a step
    batch : inputs and targets, also those of the next step
    start : what drawing the initial values takes, besides parameters and gradients
    sample : what a step has taken, with parameters and gradients of the decoder that writes the sample at the end
    sums : what MPI takes for sums over replicas; 0 without replicas
    process : Python with its libraries and MPI, and what they keep for themselves once a training runs
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
        """What a step takes besides parameters, gradients and moments."""
        return self.activations + self.messages + self.scratch + self.batch


def rank_bytes(
    problem: PlanningProblem,
    plan: LayerPlan,
    meter: StageMeter,
    example: tuple[Any, Any],
    *,
    recompute: bool,
    copied: bool,
) -> list[RankBytes]:
    """Return what each rank of a pipeline holds, from one micro-batch that `meter` runs on the processor.

    `example` are inputs and targets of a micro-batch, `copied` says whether the model is copied at the end for a
    sample.
    """
    schedule = before_backwards(plan.schedule) if recompute else plan.schedule
    stages: list[StageBytes] = []
    inputs: list[int] = []
    x, targets = zeros_of(shapes_of(example[0])), example[1]  # a loss may divide by what is in its targets
    first = arrays.flatten(example[0])[0][0]
    values: dict[str, Tree] = {}
    for number, (start, stop) in enumerate(plan.layer_ranges):
        names = {skip.name for skip in schedule.skips if skip.target == number}
        x = nn.handed(x, values, names) if number else x
        inputs.append(bytes_of(x))
        gives = tuple(dict.fromkeys(skip.name for skip in schedule.skips if skip.source == number))
        measured, shapes = meter.stage(start, stop, x, targets, number == schedule.trained_from, gives)
        if problem.seq > 1:
            positions = first.shape[0] * first.shape[1]
            measured = with_ring(measured, problem.layers[start:stop], positions, problem.dtype)
        stages.append(measured)
        x = zeros_of(shapes)
    windows, process = receive_windows(schedule), process_bytes()
    row = 2 * (sum(map(bytes_of, example)) // len(first)) * plan.rows  # the next batch is read meanwhile
    narrow = arrays.dtype(problem.dtype)
    wide = arrays.accumulator(narrow).itemsize
    ranks = []
    for rank in range(problem.ranks):
        held = peak_of_step(schedule, rank, stages, inputs, windows)
        batch = ((rank == schedule.placement[0]) + (rank == schedule.placement[-1])) * row
        own = [stages[number] for number in schedule.stages_of(rank)]
        ranges = plan.ranges_of(rank)
        sizes = [parameters_of(problem.layers[start:stop]) for start, stop in ranges]
        count, trained = sum(sizes), sum(problem.trained_counts[layer] for layer in plan.layers_of(rank))
        step = round(held.total) + batch
        ranks.append(
            RankBytes(
                rank=rank,
                stages=dict(zip(plan.schedule.stages_of(rank), ranges)),
                count=count,
                parameters=count * (wide + (narrow.itemsize if narrow.itemsize != wide else 0)),
                gradients=trained * wide,
                moments=trained * wide * problem.moments,
                tables=max(0, round(sum(stage.tables for stage in own))),
                activations=round(held.activations),
                messages=round(held.messages),
                scratch=round(held.scratch),
                batch=batch,
                start=max(0, round(max(stage.drawing for stage in own))),
                sample=_with_buffers(step, [size * wide for size in (*sizes, *sizes)]) if copied else 0,
                # MPI sums with a buffer as large, where a step has been
                sums=trained * wide if problem.replicas * problem.seq > 1 else 0,
                process=process,
            )
        )
    return ranks


def _with_buffers(step: int, buffers: list[int]) -> int:
    """Return what a step has taken and what these buffers take after it.

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


class StepBytes(NamedTuple):
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
) -> StepBytes:
    """Walk through the order of a rank, and return what it holds at the peak.

    `inputs` are bytes of the input of a micro-batch, for all stages, and `windows` is `receive_windows(schedule)`.
    """
    placement, last = schedule.placement, schedule.stages - 1
    window = (windows or receive_windows(schedule))(rank) if schedule.ranks > 1 else 0
    waiting = sum(_receives(schedule, rank, *action[:2]) for action in schedule.orders[rank])
    largest = max((inputs[stage + 1] for stage in schedule.stages_of(rank) if stage < last), default=0)
    largest = max([largest, *(inputs[stage] for stage in schedule.stages_of(rank) if stage)])
    best = StepBytes(0, 0, 0)
    activations, local, leased, buffers, leaving = 0.0, 0.0, 0, 0, 0.0
    for stage, op, microbatch in schedule.orders[rank]:
        own, trained = stages[stage], schedule.has_backward(stage)
        from_here = stage > 0 and placement[stage - 1] == rank
        from_away, to_away = stage > 0 and not from_here, stage < last and placement[stage + 1] != rank
        if _receives(schedule, rank, stage, op):
            buffers = max(buffers, leased + min(window, waiting))
            waiting -= 1
            leased += 1
        elif op == "F" and from_here:
            local += inputs[stage]
        stays = trained and (stage, microbatch) not in schedule.recomputed
        scratch, more = {
            "F": (own.forward, own.saved if stays else 0.0),
            "R": (own.forward, own.saved),
            "B": (own.backward, -own.saved),
            "I": (own.input_grad, own.pending - own.saved),
            "W": (own.weight_grad, -own.pending),
        }[op]
        held = StepBytes(activations + local, buffers * largest, scratch + leaving)
        best = max(best, held, key=lambda bytes_: bytes_.total)
        activations += more
        leaving = own.output if op == "F" and to_away else inputs[stage] if op in "BI" and from_away else 0.0
        if op in "BW" or (op == "F" and not trained):  # the input of the forward, and the gradient of the output
            local -= inputs[stage] if from_here else 0
            leased -= from_away + (op != "F" and to_away)
    return best


def _receives(schedule: Schedule, rank: int, stage: int, op: str) -> bool:
    """Whether an action of this rank takes an array from another one."""
    if op == "F":
        return stage > 0 and schedule.placement[stage - 1] != rank
    return op in "BI" and stage < schedule.stages - 1 and schedule.placement[stage + 1] != rank


# -- What attention over a ring of ranks takes beyond attention on one rank: the messages with keys and values --------


def with_ring(measured: StageBytes, layers: Sequence[nn.Layer], positions: int, dtype: str) -> StageBytes:
    """Return the bytes of a stage that was rehearsed on one rank, for a ring.

    A forward keeps the last block that has come by, and has another one on its way. In a backward two messages are
    under way, each with a block and its gradients, which are sums in the wider dtype.

    `measured` is on one rank, `layers` are unbound, and a micro-batch has `positions` on this rank.
    """
    kind = arrays.dtype(dtype)
    wide = arrays.accumulator(kind).itemsize
    widths = [2 * layer.kv_heads * layer.head_dim * positions for layer in attentions(layers)]
    kept, largest = sum(widths) * kind.itemsize, max(widths, default=0)
    under_way = 2 * largest * (kind.itemsize + wide)
    return replace(
        measured,
        saved=measured.saved + kept,
        forward=measured.forward + kept + largest * kind.itemsize,
        backward=measured.backward + under_way,
        input_grad=measured.input_grad + under_way,
    )
