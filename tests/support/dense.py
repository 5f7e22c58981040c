"""A small model of tanh layers as pipeline stages, and the same model in plain numpy on one process."""

from types import SimpleNamespace

import numpy as np

from mpipipe import Pipeline, arrays, nn, schedules
from support.tolerance import bound, within


class Halves:
    """A stage that says its backward in two halves; the whole one is both."""

    def backward(self, dy, saved):
        dx, pending = self.backward_input(dy, saved)
        self.backward_weight(pending)
        return dx


class TanhStage(Halves):
    """y = tanh(x W), with W (inputs, outputs) in float64 drawn from the stage's number."""

    def __init__(self, number, inputs, outputs):
        self.weight = np.random.default_rng(1000 + number).normal(size=(inputs, outputs)) / np.sqrt(inputs)
        self.gradient = np.zeros_like(self.weight)

    def forward(self, x):
        y = np.tanh(x @ self.weight)
        return y, (x, y)

    def backward_input(self, dy, saved):
        x, y = saved
        inner = dy * (1 - y * y)
        return inner @ self.weight.T, (x, inner)

    def backward_weight(self, pending):
        x, inner = pending
        self.gradient += x.reshape(-1, x.shape[-1]).T @ inner.reshape(-1, inner.shape[-1])


class ShownStage(TanhStage):
    """The same, which shows its gradients, to be zeroed and to take part in replicas."""

    def __init__(self, number, inputs, outputs):
        super().__init__(number, inputs, outputs)
        self.gradients = SimpleNamespace(flat=self.gradient.reshape(-1))


class Identity:
    """Hands its very input on: outputs share memory with received arrays."""

    def forward(self, x):
        return x, None

    def backward(self, dy, saved):
        return dy


def mean_squared(output, target):
    difference = output - target
    return float(np.mean(difference**2)), 2 * difference / difference.size


def widths(stages):
    """Extents between the stages: all different, so that a wrong shape cannot pass."""
    return [3 + stage % 4 for stage in range(stages + 1)]


def batch(rows, stages, seed=0):
    """(inputs, targets) for the model of so many stages."""
    rng = np.random.default_rng(seed)
    extents = widths(stages)
    return rng.normal(size=(rows, extents[0])), rng.normal(size=(rows, extents[-1]))


def model(schedule, rank, kind=TanhStage):
    """This rank's stages."""
    extents = widths(schedule.stages)
    return [kind(number, *extents[number : number + 2]) for number in schedule.stages_of(rank)]


def whole(stages):
    """All stages."""
    extents = widths(stages)
    return [TanhStage(number, *extents[number : number + 2]) for number in range(stages)]


def through(layers, x, loss):
    """(value, input gradient, output) of layers one after the other; loss(output) -> (value, gradient)."""
    kept = []
    for layer in layers:
        x, saved = layer.forward(x)
        kept.append(saved)
    value, dy = loss(x)
    for layer, saved in zip(layers[::-1], kept[::-1]):
        dy = layer.backward(dy, saved)
    return value, dy, x


def reference(stages, inputs, targets):
    """(loss, weight gradient of each stage, input gradient, output) of the whole batch at once."""
    layers = whole(stages)
    loss, dx, output = through(layers, inputs, lambda y: mean_squared(y, targets))
    return loss, [layer.gradient for layer in layers], dx, output


def near(found, expected, what=""):
    """Equal but for rounding: a few hundred rounded sums of numbers of the size of the largest one."""
    size = max(1e-3, float(np.abs(expected).max()))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12 * size, err_msg=str(what))


def bounds(stages, inputs, targets):
    """How far rounding may move (loss, weight gradients, input gradient, output): each result's error, carried along.

    A running error analysis (Higham, Accuracy and Stability, section 3.3): a product passes errors on through |W|, adds
    those of its own sums |x| |W|, and tanh shrinks both. `off` is the error of an array, in units of one rounded sum.
    """
    x = inputs.reshape(-1, inputs.shape[-1])
    target, off, kept = targets.reshape(len(x), -1), np.zeros(x.shape), []
    for layer in whole(stages):
        weight = np.abs(layer.weight)
        y, off_y = np.tanh(x @ layer.weight), off @ weight + np.abs(x) @ weight + 1
        kept.append((x, off, y, off_y, layer.weight))
        x, off = y, off_y
    loss, dy = mean_squared(x, target)
    off_dy = 2 * (off + np.abs(x - target)) / x.size
    gradients = []
    for x, off, y, off_y, weight in kept[::-1]:
        inner = np.abs(dy * (1 - y * y))
        off_inner = off_dy * (1 - y * y) + 2 * np.abs(dy * y) * off_y + 4 * inner
        gradients.insert(0, np.abs(x).T @ off_inner + off.T @ inner + np.abs(x).T @ inner)
        off_dy, dy = (off_inner + inner) @ np.abs(weight).T, (dy * (1 - y * y)) @ weight.T
    off_loss = np.mean(2 * np.abs(kept[-1][2] - target) * kept[-1][3]) + loss
    one = lambda terms, off: bound(np.float64, terms, off)  # noqa: E731
    rows, width = len(x), 8  # of the widest product, and the rounding of what it gives
    return (
        one(rows + width, off_loss), [one(rows + width, off) for off in gradients],
        one(width, off_dy).reshape(inputs.shape), one(width, kept[-1][3]).reshape(targets.shape),
    )  # fmt: skip


def placed(schedule, rank, inputs, targets):
    """(inputs or None, targets or None): each on the rank that takes it."""
    return (inputs if schedule.placement[0] == rank else None, targets if schedule.placement[-1] == rank else None)


def check(comm, schedule, rows, steps=1, **options):
    """Train the model for so many steps, evaluate it, compare all with the reference; return the closed pipeline."""
    inputs, targets = batch(rows, schedule.stages)
    loss, gradients, dx, output = reference(schedule.stages, inputs, targets)
    allowed = bounds(schedule.stages, inputs, targets)
    stages, mine = model(schedule, comm.rank), placed(schedule, comm.rank, inputs, targets)
    with Pipeline(stages, schedule, comm, loss=mean_squared, **options) as pipeline:
        for _ in range(steps):
            for stage in stages:
                stage.gradient.fill(0)
            result = pipeline.step(*mine)
            within(result.loss, loss, allowed[0], "loss")
            for stage, number in zip(stages, schedule.stages_of(comm.rank)):
                within(stage.gradient, gradients[number], allowed[1][number], f"gradient of stage {number}")
        assert len(result.losses) == schedule.microbatches
        assert (result.input_grads is None) == (mine[0] is None)
        if mine[0] is not None:
            within(np.concatenate(result.input_grads), dx, allowed[2], "input gradient")
        within(pipeline.evaluate(*mine), loss, allowed[0], "loss")
        produced = pipeline.forward(mine[0])
        assert (produced is None) == (mine[1] is None)
        if produced is not None:
            within(produced, output, allowed[3], "output")
    return pipeline


def build(name, ranks, chunks, microbatches, slices=1):
    """A schedule by name; `chunks` only for those that take more than one."""
    return schedules.by_name(name, ranks=ranks, chunks=chunks, microbatches=microbatches, slices=slices)


CASES = [  # name, chunks
    ("gpipe", 1),
    ("one_f_one_b", 1),
    ("interleaved_1f1b", 2),
    ("interleaved_1f1b", 3),
    ("looped_bfs", 2),
    ("zero_bubble_h1", 1),
]


def check_weight_gradients_from_received_inputs(comm, device):
    """Bare linear stages keep the received array itself for W, which zero_bubble_h1 puts off while more arrive."""
    schedule, width = schedules.zero_bubble_h1(comm.size, 12), 8
    x, target = np.random.default_rng(0).normal(size=(2, 24, width))
    layers = [nn.Stage([nn.Linear(width, width)], "float64", seed=rank, first=rank) for rank in range(comm.size)]
    through(layers, x, lambda y: nn.mean_squared_error(y, target))
    stage = nn.Stage([nn.Linear(width, width)], "float64", seed=comm.rank, first=comm.rank, device=device)
    with Pipeline([stage], schedule, comm, loss=nn.mean_squared_error) as pipeline:
        for _ in range(3):
            pipeline.step(*placed(schedule, comm.rank, x, target))
            right = layers[comm.rank].gradients.flat
            allowed = bound(np.float64, 2 * width * comm.size + len(x), np.abs(right).max())
            within(arrays.download(stage.gradients.flat), right, allowed)
