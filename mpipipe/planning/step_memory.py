"""Memory of each rank of a training: each kind of layer is run once, and added up.

What is kept is counted array by array; what an action takes on top is the most that is allocated at
once meanwhile.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TypeAlias, TypeVar

import numpy as np

from mpipipe import arrays, nn
from mpipipe.adapters import ForeignLayer, counting
from mpipipe.arrays import Structure, Tree
from mpipipe.pipeline import Loss, receive_window
from mpipipe.planning.layer_plan import LayerPlan
from mpipipe.planning.memory import array_bytes, new_bytes, process_bytes, taking, tracing
from mpipipe.planning.predict import crossings, step_peaks
from mpipipe.planning.problem import MeasuredRanks, PlanningProblem, attentions, parameters_of
from mpipipe.planning.profile import Sizes, joined
from mpipipe.schedules import before_backwards, peak_memory, simulate


def layer_bytes(
    measured: MeasuredRanks, example: tuple[Tree, Tree], rows: int
) -> tuple[list[Sizes], dict[str, int]]:
    """Return the bytes of each layer of a model, and of what layers give and take by its names.

    `example` are inputs and targets of a micro-batch with this number of rows.
    """
    # A loss may divide by what is in its targets.
    x, targets = example
    example = zeros_like(x), targets
    values: dict[str, Tree] = {}
    results = []
    with tracing():
        for lone in lone_layers(measured, example, rows, values, taking):
            if lone.sizes is None:
                with np.errstate(all="ignore"), counting(), lone.head():
                    lone.sizes = _micro_batch(lone)
                # Layers may be large, and one at a time is in memory.
                del lone.stage, lone.x, lone.loss, lone.gradient
            results.append(lone.sizes)
    return results, {name: bytes_of(value) for name, value in values.items()}


@dataclass(eq=False)
class LoneLayer:
    """A layer in a stage by itself, with an input, and the loss after it if it is last.

    meter : begins to measure an action; returns a function that ends that
    head : lets the loss compute the product of the head in a block, if it does in a pipeline
    gradient, output : gradient of the output, and zeros like the output, once it has run
    sizes : its bytes, once they are counted
    actions : what was measured of actions and the loss, by their names
    kept, pending : what forwards left for backwards, and input gradients for weight gradients
    """

    stage: nn.Stage
    x: Tree
    targets: Tree
    trained: bool
    meter: Callable[[], Callable[[], float]]
    loss: Loss | None = None
    head: Callable[[], AbstractContextManager[None]] = nullcontext
    gradient: Tree = None
    output: Tree = None
    drawing: float = 0  # bytes taken besides its arrays while initial values were drawn
    sizes: Sizes | None = None
    actions: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    kept: deque[tuple[Tree, nn.Saved]] = field(default_factory=deque)
    pending: deque[nn.Pending] = field(default_factory=deque)

    def run(self, name: str, call: Callable[..., Result], *arguments: object) -> Result:
        """Run an action, or the loss, and measure it."""
        end = self.meter()
        result = call(*arguments)
        self.actions[name].append(end())
        return result

    def forward(self, name: str = "F") -> Tree:
        """Run one forward, and the loss after it; return the output."""
        y, saved = self.run(name, self.stage.forward, self.x)
        if self.output is None:
            self.output = zeros_like(y)
        if self.loss is not None:
            result = self.run("loss", self.loss.call, y, self.targets, 1.0)
            self.gradient = self.loss.scaled(self.loss.checked(result)[1], 1.0, y)
        elif self.gradient is None:
            self.gradient = zeros_like(y, gradient=True)
        if self.trained:
            self.kept.append((self.gradient, saved))
        return y

    def act(self, name: str) -> None:
        """Run an action by its name, those of backwards for the oldest forward."""
        if name in ("F", "R"):
            self.forward(name)
        elif name == "I":
            gradients = self.run(name, self.stage.backward_input, *self.kept.popleft())
            self.pending.append(gradients[1])
        elif name == "W":
            self.run(name, self.stage.backward_weight, self.pending.popleft())
        else:
            self.run(name, self.stage.backward, *self.kept.popleft())


Result = TypeVar("Result")


def lone_layers(
    measured: MeasuredRanks,
    example: tuple[Tree, Tree],
    rows: int,
    values: dict[str, Tree],
    meter: Callable[[], Callable[[], float]],
) -> Iterator[LoneLayer]:
    """Yield each layer, to be run; again the same for one of its kind with inputs of its shapes.

    `example` are inputs and targets of a micro-batch with this number of rows. What layers give and
    take by names is put into `values`.
    """
    problem = measured.problem
    layers = measured.layers()
    known: dict[tuple, LoneLayer] = {}
    place = 0
    x, targets = example
    # below all that is trained
    below = True
    while layers:
        layer = layers.pop(0)
        takes, gives, _ = nn.names_of([layer])
        x = nn.handed(x, values, takes)
        key = problem.kinds[place], shapes_of(x), gives, below, bool(layers)
        if key not in known:
            drawn = meter()
            stage = nn.Stage([layer], problem.dtype, first=place, frozen=measured.frozen)
            drawing = max(0, drawn() - sum(array_bytes(stage.buffers.all).values()))
            stage.optimizer_writes_compute()
            trained = not (below and layer.frozen)
            stage.end_backward(below and trained)
            stage.names.hand_on(stage.gives)
            known[key] = lone = LoneLayer(stage, x, targets, trained, meter, drawing=drawing)
            if not layers:
                lone.loss = Loss(measured.loss_for(stage, rows))
                lone.head = lone.loss.taking_head
        lone = known[key]
        yield lone
        below = below and not lone.trained
        x = lone.output
        place += 1


def _micro_batch(lone: LoneLayer) -> Sizes:
    """Run one micro-batch as the executor does, after another one that makes tables."""
    stage = lone.stage
    shared = {*array_bytes((stage.buffers.all, lone.x, lone.targets))}
    before = getattr(lone.x, "main", lone.x)
    for name in "FBFIW" if lone.trained else "F":
        lone.act(name)
    y = lone.forward()
    after = getattr(y, "main", y)
    saved = None
    if lone.trained:
        saved = lone.kept[0][1]
    _, own, loss = new_bytes([y, saved, lone.gradient], shared)
    if lone.loss is None:
        loss = 0
    sizes = Sizes(
        input=bytes_of(before),
        output=bytes_of(after),
        saved=own,
        keeps_output=_within(after, saved),
        keeps_input=_within(before, saved),
        loss=loss,
        drawing=lone.drawing,
    )
    del y, after
    if lone.trained:
        lone.act("B")
        lone.forward()
        saved = lone.kept[0][1]
        lone.act("I")
        _, added = new_bytes([saved, lone.pending], shared)
        del saved
        sizes.added = added
        sizes.pending = sum(new_bytes([lone.pending], shared))
        sizes.pends_input = _within(before, lone.pending)
        lone.act("W")
    parts = []
    for _, part in stage.layers[0].walk(""):
        if not isinstance(part, ForeignLayer):
            parts.append(vars(part))
    sizes.shared, sizes.tables = new_bytes([stage.tables, parts], {*array_bytes(stage.buffers.all)})
    most: dict[str, float] = defaultdict(float)
    for name, action in lone.actions.items():
        most[name] = action[-1]
    sizes.forward = max(most["F"], sizes.saved + sizes.output + max(loss, most["loss"]))
    sizes.backward = most["B"]
    sizes.input_grad = max(sizes.added, most["I"])
    sizes.weight_grad = most["W"]
    return sizes


def _within(tree: Tree, kept: object) -> int:
    """Return the bytes of a tree that are among those of what is kept."""
    addresses = array_bytes(kept)
    total = 0
    for address, size in array_bytes(tree).items():
        if address in addresses:
            total += size
    return total


# Of a tree: shape and dtype of each array.
Shapes: TypeAlias = "tuple[Structure, tuple[tuple[arrays.Shape, np.dtype], ...]]"


def shapes_of(tree: Tree) -> Shapes:
    """Return structure, shapes and dtypes of a tree."""
    leaves, structure = arrays.flatten(tree)
    return structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def zeros_like(tree: Tree, gradient: bool = False) -> Tree:
    """Return a tree of zeros; of a gradient, integers have none."""

    def zeros(leaf: np.ndarray) -> np.ndarray | None:
        if gradient and not arrays.is_floating(leaf.dtype):
            return None
        # In memory that the system has given.
        return np.full(leaf.shape, 0, leaf.dtype)

    return arrays.mapped(zeros, tree)


def bytes_of(tree: Tree) -> int:
    """Return the bytes of all arrays of a tree."""
    return sum(leaf.nbytes for leaf in arrays.flatten(tree)[0])


# -- What each rank of a training would hold -------------------------------------------------------


@dataclass(frozen=True)
class RankBytes:
    """Memory of one rank of a pipeline, in bytes.

    rank : rank in the pipeline
    layers : (start, stop) of those of each of its stages
    inputs : of a micro-batch, for each stage of the pipeline
    count : elements of its parameters
    parameters : with the copy in a narrower dtype, whose originals replicas may keep shares of
    gradients, moments : those of what is trained
    activations, messages, scratch : at the peak of a step, with tables that are made once
    batch : inputs and targets, also those of the next step
    start : taken while initial values are drawn, also by parameters that replicas have shares of,
        made whole
    after : needed after a step: of MPI for sums over replicas, or at the end by parameters that
        replicas have shares of, made whole, and by the decoder that writes the sample
    process : Python with its libraries and MPI, and what they keep once a training runs
    """

    rank: int
    layers: list[tuple[int, int]]
    inputs: list[float]
    count: int
    parameters: int
    gradients: int
    moments: int
    activations: int
    messages: int
    scratch: int
    batch: int
    start: int
    after: int
    process: int

    @property
    def total(self) -> int:
        """Most that the rank holds at once: at the start, in a step, or after it."""
        training = max(self.start, self.moments + self.step + self.later)
        return self.process + self.parameters + self.gradients + training

    @property
    def step(self) -> int:
        """What a step takes besides parameters, gradients and moments."""
        return self.activations + self.messages + self.scratch + self.batch

    @property
    def later(self) -> int:
        """What is needed after a step beyond the memory that it has taken and that stays."""
        return max(0, self.after - self.step)


def rank_bytes(
    measured: MeasuredRanks,
    plan: LayerPlan,
    *,
    recompute: bool,
    copied: bool,
    shares: Sequence[float] = (1.0,),
) -> list[RankBytes]:
    """Return what each rank of a pipeline holds: each kind of layer runs here, for one micro-batch.

    `copied` says whether the model is copied at
    the end for a sample, and `shares` are those of the slices in a sequence.
    """
    problem = measured.problem
    example = measured.example(plan.microbatch_rows, 1)
    layers, named = layer_bytes(measured, example, plan.microbatch_rows)
    schedule = plan.schedule
    if recompute:
        schedule = before_backwards(schedule)
    if problem.seq > 1:
        rows, length, *_ = arrays.flatten(example[0])[0][0].shape
        for place, layer in enumerate(problem.layers):
            counts = [0]
            for part in attentions([layer]):
                counts.append(2 * part.kv_heads * part.head_dim * rows * length)
            layers[place] = _in_ring(layers[place], counts, problem)
    stages = [joined(layers[start:stop]) for start, stop in plan.layer_ranges]
    inputs = [stage.input for stage in stages]
    for skip in schedule.skips:
        stages[skip.target].input += named[skip.name]
    # A value that several stages take leaves its stage once.
    for name, source in {skip.name: skip.source for skip in schedule.skips}.items():
        stages[source].output += named[name]
    timeline = simulate(schedule)
    process = process_bytes()
    # A pipeline keeps its batch until the next step.
    row = 2 * sum(map(bytes_of, example)) * plan.rows // plan.microbatch_rows
    wide = problem.wide
    peaks = step_peaks(schedule, stages, shares)
    away = crossings(schedule)
    # Inputs stay in buffers of messages until their backwards.
    leased = peak_memory(schedule, away[:-1], away[:-1])
    ranks = []
    for rank, (activations, scratch) in enumerate(peaks):
        ranges = plan.ranges_of(rank)
        places = plan.layers_of(rank)
        count = parameters_of([problem.layers[place] for place in places])
        own = schedule.stages_of(rank)
        receives = schedule.units * sum(away[stage] + away[stage + 1] for stage in own)
        buffers = min(leased[rank] + receive_window(timeline, rank), receives)
        messages = [end.input for stage in own for end in stages[max(stage, 1) : stage + 2]]
        gradients = sum(problem.gradient_bytes(ranges))
        trained = gradients // wide
        elsewhere = problem.elsewhere_bytes(trained)
        after = 0
        if copied:
            after = 2 * count * wide
        if elsewhere:
            after += gradients
        if problem.replicas * problem.seq > 1:
            # MPI sums with a buffer as large, where a step has been.
            after = max(after, gradients)
        ranks.append(
            RankBytes(
                rank=rank,
                layers=ranges,
                inputs=inputs,
                count=count,
                parameters=problem.parameter_bytes(count, trained),
                gradients=gradients,
                moments=problem.moment_bytes(trained),
                activations=round(activations),
                messages=round(buffers * max(messages, default=0) * max(shares)),
                scratch=round(scratch),
                batch=[schedule.placement[0], schedule.placement[-1]].count(rank) * row,
                start=elsewhere + round(max(layers[place].drawing for place in places)),
                after=after,
                process=process,
            )
        )
    return ranks


def _in_ring(measured: Sizes, counts: Sequence[int], problem: PlanningProblem) -> Sizes:
    """Return the bytes of a layer that was measured on one rank, in a ring of ranks.

    `counts` are the keys and values of each attention of the layer on a rank, for a micro-batch. A
    forward keeps the last block that has come by, and has another one on its way. In a backward two
    messages are under way, each with a block and its gradients, which are sums in the wider dtype.
    """
    itemsize = arrays.dtype(problem.dtype).itemsize
    keys = sum(counts) * itemsize
    largest = max(counts)
    under_way = 2 * largest * (itemsize + problem.wide)
    return replace(
        measured,
        saved=measured.saved + keys,
        forward=measured.forward + keys + largest * itemsize,
        backward=measured.backward + under_way,
        input_grad=measured.input_grad + under_way,
    )
