"""Memory of each rank of a training: each kind of layer is run once, and added up.

What is kept is counted array by array; what an action takes on top is the most that is allocated at
once meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

import numpy as np

from mpipipe import arrays, nn
from mpipipe.adapters import ForeignLayer, counting
from mpipipe.arrays import Branches, Structure, Tree
from mpipipe.pipeline import Loss, receive_window
from mpipipe.planning.layer_plan import LayerPlan
from mpipipe.planning.memory import (
    array_bytes,
    check_memory,
    new_bytes,
    process_bytes,
    taking,
    tracing,
)
from mpipipe.planning.problem import PlanningProblem, attentions, parameters_of
from mpipipe.schedules import Schedule, before_backwards, simulate


@dataclass(frozen=True)
class StageBytes:
    """Bytes of layers for one micro-batch, whose input is not counted.

    tables, shared : left by the first micro-batch for all others: of a layer, and of its stage
    drawing : needed besides parameters and gradients while initial values are drawn
    input, output : arrays that come in, and that a forward returns
    saved, keeps_output, keeps_input : kept from a forward for its backward, in all, of the output,
        and of the input
    pending, added, pends_input : kept from the input gradient for the weight gradient, in all, of
        what was not saved, and of the input
    loss : gradient of the loss
    forward, backward, input_grad, weight_grad : most that the action allocates at once, with its
        results
    keys, sums : keys and values of a sequence in slices, and sums of their gradients
    """

    tables: float = 0
    shared: float = 0
    drawing: float = 0
    input: float = 0
    output: float = 0
    saved: float = 0
    keeps_output: float = 0
    keeps_input: float = 0
    pending: float = 0
    added: float = 0
    pends_input: float = 0
    loss: float = 0
    forward: float = 0
    backward: float = 0
    input_grad: float = 0
    weight_grad: float = 0
    keys: float = 0
    sums: float = 0


def joined(layers: Sequence[StageBytes]) -> StageBytes:
    """Return the bytes of layers in a row: an array between two of them is there once."""
    saved = pending = forward = backward = input_grad = added = 0.0
    before = StageBytes()
    for each in layers:
        forward = max(forward, saved + before.output - before.keeps_output + each.forward)
        saved += each.saved + max(0, min(each.keeps_input, before.output) - before.keeps_output)
        pending += each.pending + min(each.pends_input, before.output)
        before = each
    gradient = 0.0  # none for the output of the last layer
    for each in reversed(layers):
        backward = max(backward, gradient + each.backward)
        input_grad = max(input_grad, added + gradient + each.input_grad)
        added = added + each.added
        gradient = each.input
    return StageBytes(
        tables=sum(each.tables for each in layers) + max(each.shared for each in layers),
        drawing=max(each.drawing for each in layers),
        input=layers[0].input,
        output=before.output,
        saved=saved + before.loss,
        pending=pending,
        forward=forward,
        backward=backward,
        input_grad=input_grad,
        weight_grad=max(each.weight_grad for each in layers),
        keys=sum(each.keys for each in layers),
        sums=sum(each.sums for each in layers),
    )


def layer_bytes(
    problem: PlanningProblem,
    layers: list[nn.Layer],
    loss_for: Callable[[nn.Stage], Callable[..., Any]],
    example: tuple[Any, Any],
    frozen: Sequence[str] = (),
) -> tuple[list[StageBytes], dict[str, int]]:
    """Return the bytes of each layer of a model, and of what layers give and take by its names.

    `layers` are unbound, and taken out of the list, `loss_for` makes the loss after the last one,
    and `example` are inputs and targets of a micro-batch.
    """
    # a loss may divide by what is in its targets
    x = zeros_of(shapes_of(example[0]))
    targets = example[1]

    def measured(lone: LoneLayer, drawing: int) -> tuple[StageBytes, Shapes]:
        with np.errstate(all="ignore"), counting(), lone.taking_head():
            found, shapes = _micro_batch(lone.stage, lone.loss, lone.x, targets, lone.trained)
        return replace(found, drawing=drawing), shapes

    with tracing():
        found, values = each_layer(problem, layers, loss_for, x, frozen, measured)
    return found, {name: bytes_of(value) for name, value in values.items()}


@dataclass(eq=False)
class LoneLayer:
    """A layer in a stage by itself, with an input, and the loss after it if it is last."""

    stage: nn.Stage
    x: Tree
    trained: bool
    loss: Loss | None

    def taking_head(self) -> AbstractContextManager[None]:
        """Let the loss compute the product of the head in a block, if it does in a pipeline."""
        return nullcontext() if self.loss is None else self.loss.taking_head()


Measured = TypeVar("Measured")


def each_layer(
    problem: PlanningProblem,
    layers: list[nn.Layer],
    loss_for: Callable[[nn.Stage], Callable[..., Any]],
    x: Tree,
    frozen: Sequence[str],
    measure: Callable[[LoneLayer, int], tuple[Measured, Shapes]],
) -> tuple[list[Measured], dict[str, Tree]]:
    """Measure each layer; return the results, and what layers give and take by names.

    Layers of one kind whose inputs have the same shapes are measured once. `x` is the input of the
    first one, and `measure` takes the bytes for drawing parameters, too, and returns its result and
    the shapes of the output.
    """
    values: dict[str, Tree] = {}
    known: dict[tuple, tuple[Measured, Shapes, bool]] = {}
    results: list[Measured] = []
    # below all that is trained
    below = True
    wide = arrays.accumulator(arrays.dtype(problem.dtype)).itemsize
    while layers:
        layer = layers.pop(0)
        takes, gives, _ = nn.names_of([layer])
        x = nn.handed(x, values, takes)
        key = problem.kinds[len(results)], shapes_of(x), gives, below, bool(layers)
        if key not in known:
            needs = {
                f"{parameters_of([layer]):,} parameters and their gradients": 2
                * wide
                * parameters_of([layer])
            }
            check_memory("measuring a layer", needs, "run it on a machine with more memory")
            taken = taking()
            stage = nn.Stage([layer], problem.dtype, first=len(results), frozen=frozen)
            drawing = max(0, taken() - stage.buffers.nbytes)
            stage.optimizer_writes_compute()
            still = below and layer.frozen
            stage.end_backward(below and not still)
            stage.hand_on(stage.gives)
            loss = None if layers else Loss(loss_for(stage))
            known[key] = (*measure(LoneLayer(stage, x, not still, loss), drawing), still)
        result, shapes, below = known[key]
        results.append(result)
        x = zeros_of(shapes)
    return results, values


def _micro_batch(
    stage: nn.Stage, loss: Loss | None, x: Tree, targets: Tree, trained: bool
) -> tuple[StageBytes, Shapes]:
    """Run one micro-batch as the executor does, after another one that makes tables."""
    dy: Tree = None
    shared = {*array_bytes((stage.buffers, x, targets))}

    def forward() -> tuple[Tree, Any, Tree]:
        nonlocal dy
        y, saved = stage.forward(x)
        if loss is not None:
            return y, saved, loss.scaled(loss.checked(loss.call(y, targets, 1.0))[1], 1.0, y)
        dy = zeros_of(shapes_of(y), gradient=True) if dy is None else dy
        return y, saved, dy

    for _ in range(2):
        taken = taking()
        y, saved, gradient = forward()
        before, after = (each.main if isinstance(each, Branches) else each for each in (x, y))
        held = saved if trained else ()
        kept, more = new_bytes([held, gradient if loss else ()], shared)
        found = StageBytes(
            input=bytes_of(before),
            output=bytes_of(after),
            saved=kept,
            keeps_output=_within(after, held),
            keeps_input=_within(before, held),
            loss=more,
        )
        least = kept + more + found.output - found.keeps_output
        found = replace(found, forward=max(least, taken()))
        shapes = shapes_of(y)
        del y, after, held
        if not trained:
            continue
        taken = taking()
        stage.backward(gradient, saved)
        backward = taken()
        del saved, gradient
        _, saved, gradient = forward()
        taken = taking()
        pending = stage.backward_input(gradient, saved)[1]
        input_grad = taken()
        (waiting,), (_, added) = new_bytes([pending], shared), new_bytes([saved, pending], shared)
        pends = _within(before, pending)
        del saved, gradient
        taken = taking()
        stage.backward_weight(pending)
        found = replace(
            found, pending=waiting, added=added, pends_input=pends,
            backward=backward, input_grad=max(added, input_grad), weight_grad=taken(),
        )  # fmt: skip
        del pending
    parts = [
        vars(part) for _, part in stage.layers[0].walk("") if not isinstance(part, ForeignLayer)
    ]
    common, own = new_bytes([stage.tables, parts], {*array_bytes(stage.buffers)})
    return replace(found, tables=own, shared=common), shapes


def _within(tree: Tree, kept: Any) -> int:
    """Return the bytes of a tree that are among those of what is kept."""
    places = array_bytes(kept)
    return sum(size for place, size in array_bytes(tree).items() if place in places)


# Of a tree: shape and dtype of each array.
Shapes: TypeAlias = "tuple[Structure, tuple[tuple[arrays.Shape, Any], ...]]"


def shapes_of(tree: Tree) -> Shapes:
    """Return what a tree of zeros is made of."""
    leaves, structure = arrays.flatten(tree)
    return structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def zeros_of(shapes: Shapes, gradient: bool = False) -> Tree:
    """Return a tree of zeros; of a gradient, integers have none."""
    structure, leaves = shapes
    kept = [not gradient or arrays.is_floating(kind) for _, kind in leaves]
    return arrays.unflatten(
        [np.zeros(*each) if there else None for each, there in zip(leaves, kept)], structure
    )


def bytes_of(tree: Tree) -> int:
    """Return the bytes of all arrays of a tree."""
    return sum(leaf.nbytes for leaf in arrays.flatten(tree)[0])


# -- What each rank of a training would hold -------------------------------------------------------


@dataclass(frozen=True)
class RankBytes:
    """Memory of one rank of a pipeline, in bytes.

    rank : rank in the pipeline
    stages : its stages, each with (start, stop) of its layers
    count : elements of its parameters
    parameters : with the copy in a narrower dtype, whose originals replicas may keep shares of
    gradients, moments : those of what is trained
    tables : made once, such as rotary tables
    activations, messages, scratch : at the peak of a step
    batch : inputs and targets, also those of the next step
    start : needed to draw the initial values, besides parameters and gradients
    sample : needed at the end: parameters that replicas have shares of, made whole, and the decoder
        that writes the sample
    sums : memory of MPI for sums over replicas; 0 without replicas
    process : Python with its libraries and MPI, and what they keep once a training runs
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
        """Most that the rank holds at once: at the start, in a step, or after it."""
        training = self.moments + self.tables + max(self.step, self.sample, self.sums)
        return self.process + self.parameters + self.gradients + max(self.start, training)

    @property
    def step(self) -> int:
        """What a step takes besides parameters, gradients and moments."""
        return self.activations + self.messages + self.scratch + self.batch


def rank_bytes(
    problem: PlanningProblem,
    plan: LayerPlan,
    measured: tuple[Sequence[StageBytes], Mapping[str, int]],
    example: tuple[Any, Any],
    *,
    recompute: bool,
    copied: bool,
    shares: Sequence[float] = (1.0,),
) -> list[RankBytes]:
    """Return what each rank of a pipeline holds, from what `layer_bytes` has measured for one rank.

    `example` are inputs and targets of a micro-batch, `copied` says whether the model is copied at
    the end for a sample, and `shares` are those of the slices in a sequence.
    """
    schedule = before_backwards(plan.schedule) if recompute else plan.schedule
    layers, named = measured
    first = arrays.flatten(example[0])[0][0]
    if problem.seq > 1:
        positions = first.shape[0] * first.shape[1]
        layers = [
            with_ring(each, layer, positions, problem.dtype)
            for each, layer in zip(layers, problem.layers)
        ]
    if schedule.slices > 1:
        positions = first.shape[0] * first.shape[1]
        layers = [
            with_slices(each, layer, positions, problem.dtype)
            for each, layer in zip(layers, problem.layers)
        ]
    stages: list[StageBytes] = []
    inputs: list[float] = []
    for number, (start, stop) in enumerate(plan.layer_ranges):
        whole = joined(layers[start:stop])
        inputs.append(
            whole.input + sum(named[skip.name] for skip in schedule.skips if skip.target == number)
        )
        gives = {skip.name for skip in schedule.skips if skip.source == number}
        stages.append(replace(whole, output=whole.output + sum(named[name] for name in gives)))
    timeline = simulate(schedule)
    process = process_bytes()
    # A pipeline keeps its batch until the next step.
    row = 2 * sum(map(bytes_of, example)) * plan.rows // plan.microbatch_rows
    wide = arrays.accumulator(arrays.dtype(problem.dtype)).itemsize
    ranks = []
    for rank in range(problem.ranks):
        window = receive_window(timeline, rank) if schedule.ranks > 1 else 0
        held = [
            round(part) for part in peak_of_step(schedule, rank, stages, inputs, window, shares)
        ]
        batch = ((rank == schedule.placement[0]) + (rank == schedule.placement[-1])) * row
        ranges = plan.ranges_of(rank)
        sizes = [parameters_of(problem.layers[start:stop]) for start, stop in ranges]
        own = [stages[number] for number in schedule.stages_of(rank)]
        count = sum(sizes)
        trained = sum(problem.trained_counts[layer] for layer in plan.layers_of(rank))
        step = sum(held) + batch
        parameters = problem.parameter_bytes(count, trained)
        elsewhere = replace(problem, shards=1).parameter_bytes(count, trained) - parameters
        buffers = [
            *([size * wide for size in (*sizes, *sizes)] if copied else []),
            *([trained * wide] if elsewhere else []),
        ]
        ranks.append(
            RankBytes(
                rank=rank,
                stages=dict(zip(plan.schedule.stages_of(rank), ranges)),
                count=count,
                parameters=parameters,
                gradients=trained * wide,
                moments=problem.moment_bytes(trained),
                tables=round(sum(stage.tables for stage in own)),
                activations=held[0],
                messages=held[1],
                scratch=held[2],
                batch=batch,
                start=round(max(stage.drawing for stage in own)) + elsewhere,
                sample=_with_buffers(step, buffers) if buffers else 0,
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
    room = step
    more = 0
    for size in sorted(buffers, reverse=True):
        if size <= room:
            room -= size
        else:
            more += size
    return step + more


# -- The memory of one rank in a training step, action by action -----------------------------------
#
# F  leaves `saved` until B, or until I, which leaves `pending` until W
# R  leaves it where F has kept its input alone, which stays as long, in a buffer of messages


def peak_of_step(
    schedule: Schedule,
    rank: int,
    stages: Sequence[StageBytes],
    inputs: Sequence[float],
    window: int,
    shares: Sequence[float] = (1.0,),
) -> tuple[float, float, float]:
    """Walk through the order of a rank; return bytes at the peak.

    They are those of activations, messages and scratch.

    `inputs` are bytes of the input of a micro-batch, for all stages, `window` is that of
    `receive_window`, and `shares` are those of the slices in a sequence.
    """
    parts = [
        ([share_of(stage, share) for stage in stages], [share * size for size in inputs])
        for share in shares
    ]
    placement = schedule.placement
    last = schedule.stages - 1
    order = schedule.orders[rank]
    away = {
        stage: (
            stage > 0 and placement[stage - 1] != rank,
            stage < last and placement[stage + 1] != rank,
        )
        for stage in schedule.stages_of(rank)
    }  # whether the input comes from another rank, and the gradient of the output
    receives = [op in "FBI" and away[stage][op != "F"] for stage, op, _ in order]
    waiting = sum(receives)
    largest = max(
        (inputs[at] for stage in away for at in (stage, stage + 1) if 0 < at <= last), default=0
    ) * max(shares)
    best = (0.0, 0.0, 0.0)
    activations = 0.0
    local = 0.0
    leaving = 0.0
    leased = 0
    buffers = 0
    for (stage, op, microbatch), receiving in zip(order, receives):
        number = microbatch % schedule.slices
        final = schedule.slices - 1
        of_stages, inputs = parts[number]
        own, trained, (from_away, to_away) = (
            of_stages[stage],
            schedule.has_backward(stage),
            away[stage],
        )
        here = inputs[stage] if stage and not from_away else 0.0
        if receiving:
            buffers = max(buffers, leased + min(window, waiting))
            waiting -= 1
            leased += 1
        elif op == "F":
            local += here
        stays = op == "R" or (
            op == "F" and trained and (stage, microbatch) not in schedule.recomputed
        )
        saved = own.saved if stays else 0.0
        scratch, more = {
            "F": (own.forward - saved, saved),
            "R": (own.forward - saved, saved),
            "B": (own.backward, -own.saved),
            "I": (own.input_grad, own.pending - own.saved),
            "W": (own.weight_grad, -own.pending),
        }[op]
        activations += own.keys * (op == "F" and number == 0) + own.sums * (
            op in "BI" and number == final
        )
        best = max(
            best, (activations + saved + local, buffers * largest, scratch + leaving), key=sum
        )
        activations += more
        if number == (0 if trained else final) and op in ("BI" if trained else "F"):
            activations -= own.keys + own.sums * trained
        leaving = (
            own.output
            if op == "F" and to_away
            else inputs[stage]
            if op in "BI" and from_away
            else 0.0
        )
        if op in "BW" or (
            op == "F" and not trained
        ):  # the input of the forward, and the gradient of the output
            local -= here
            leased -= from_away + (op != "F" and to_away)
    return best


def share_of(whole: StageBytes, share: float) -> StageBytes:
    """Return the bytes of a slice that has this share of a sequence."""
    kept = {
        name: share * size for name, size in vars(whole).items() if name not in ("keys", "sums")
    }
    return replace(whole, **kept)


# -- Attention over a ring takes messages with keys and values, too --------------------------------


def with_ring(measured: StageBytes, layer: nn.Layer, positions: int, dtype: str) -> StageBytes:
    """Return the bytes of a layer that was measured on one rank, for a ring.

    A forward keeps the last block that has come by, and has another one on its way. In a backward
    two messages are under way, each with a block and its gradients, which are sums in the wider
    dtype. A micro-batch has `positions` on this rank.
    """
    kind = arrays.dtype(dtype)
    widths = [2 * each.kv_heads * each.head_dim * positions for each in attentions([layer])]
    kept = sum(widths) * kind.itemsize
    largest = max(widths, default=0)
    under_way = 2 * largest * (kind.itemsize + arrays.accumulator(kind).itemsize)
    return replace(
        measured,
        saved=measured.saved + kept,
        forward=measured.forward + kept + largest * kind.itemsize,
        backward=measured.backward + under_way,
        input_grad=measured.input_grad + under_way,
    )


# -- Attention to slices: keys and values are those of the whole sequence --------------------------


def with_slices(measured: StageBytes, layer: nn.Layer, positions: int, dtype: str) -> StageBytes:
    """Return the bytes of a layer measured on whole sequences, with keys and values apart.

    A micro-batch has `positions` on this rank.
    """
    kind = arrays.dtype(dtype)
    width = sum(2 * each.kv_heads * each.head_dim * positions for each in attentions([layer]))
    keys = width * kind.itemsize
    return replace(
        measured,
        saved=measured.saved - keys,
        keys=keys,
        sums=width * arrays.accumulator(kind).itemsize,
    )


# -- Models and batches that do not fit into this machine are refused ------------------------------
#
# The limits are generous. What they let through may still be too much; what they refuse could not
# have run. Bytes are compared with all the memory of the machine, as if this rank had the machine
# for itself and kept nothing but what is counted here. Where the operating system does not say how
# much memory there is, nothing is refused.


def check_training(
    problem: PlanningProblem, plan: LayerPlan, rank: int, device: str, *, sample: int, message: int
) -> None:
    """Raise ConfigError if a rank surely needs more memory than this machine has.

    On the host that is its parameters, gradients and state of the optimizer, the batch, and one
    micro-batch's input of each of its layers; for a GPU, parameters as they are drawn and the
    batch. `sample` are the bytes of inputs and targets of one sample, `message` those that a layer
    hands to the next for a micro-batch.
    """
    own = plan.layers_of(rank)
    count = parameters_of([problem.layers[layer] for layer in own])
    wide = arrays.accumulator(arrays.dtype(problem.dtype)).itemsize
    needs = {"batch": sample * plan.rows, f"{count:,} parameters": count * wide}
    if device == "cpu":
        trained = sum(problem.trained_counts[layer] for layer in own)
        needs |= {
            f"gradients and state of {problem.optimizer}": trained * wide
            + problem.moment_bytes(trained),
            "activations of one micro-batch": len(own) * message,
        }
    check_memory("training on pipeline rank "
                 f"{rank}", needs, "lower dim, hidden, layers, batch or seq_len, or use "
                 "more ranks for a pipeline")  # fmt: skip
