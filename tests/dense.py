"""A small model of tanh layers as pipeline stages, and the same model in plain numpy on one process."""

from __future__ import annotations

import numpy as np

from mpipipe import schedules


class TanhStage:
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

    def backward(self, dy, saved):
        dx, pending = self.backward_input(dy, saved)
        self.backward_weight(pending)
        return dx


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


def model(schedule, rank):
    """This rank's stages."""
    extents = widths(schedule.stages)
    return [TanhStage(number, *extents[number : number + 2]) for number in schedule.stages_of(rank)]


def reference(stages, inputs, targets):
    """(loss, weight gradient of each stage, input gradient, output) of the whole batch at once."""
    extents = widths(stages)
    layers = [TanhStage(number, *extents[number : number + 2]) for number in range(stages)]
    x, kept = inputs, []
    for layer in layers:
        x, saved = layer.forward(x)
        kept.append(saved)
    loss, dy = mean_squared(x, targets)
    for layer, saved in zip(layers[::-1], kept[::-1]):
        dy = layer.backward(dy, saved)
    return loss, [layer.gradient for layer in layers], dy, x


def placed(schedule, rank, inputs, targets):
    """(inputs or None, targets or None): each on the rank that takes it."""
    return (
        inputs if schedule.placement[0] == rank else None,
        targets if schedule.placement[-1] == rank else None,
    )


def build(name, ranks, chunks, microbatches):
    """A schedule by name; `chunks` only for those that take more than one."""
    return schedules.by_name(name, ranks=ranks, chunks=chunks, microbatches=microbatches)


CASES = [  # name, chunks
    ("gpipe", 1),
    ("one_f_one_b", 1),
    ("interleaved_1f1b", 2),
    ("interleaved_1f1b", 3),
    ("looped_bfs", 2),
    ("zero_bubble_h1", 1),
]
