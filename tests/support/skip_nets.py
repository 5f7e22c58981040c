"""Stages of tanh layers with skips between them, and the same network in plain numpy on one process."""

import numpy as np

from mpipipe import Branches
from support import dense
from support.dense import near


def drawn(name, *shape):
    return np.random.default_rng([*name.encode()]).normal(size=shape) / np.sqrt(shape[0])


def weights_of(skips, stages, width):
    """(matrix of each stage, matrix of each skip)."""
    return (
        [drawn(f"stage {stage}", width, width) for stage in range(stages)],
        {skip.name: drawn(skip.name, width, width) for skip in skips},
    )


class SkipStage(dense.Halves):
    """h = tanh(x W + sum of s U over all skips that come in); h goes on, and over each skip out of it.

    W belongs to the stage, U to the one that takes; the gradients of both are kept.
    """

    def __init__(self, schedule, number, width):
        self.number = number
        self.takes = [skip.name for skip in schedule.skips if skip.target == number]
        self.gives = [skip.name for skip in schedule.skips if skip.source == number]
        matrices, others = weights_of(schedule.skips, schedule.stages, width)
        self.weight, self.others = matrices[number], {name: others[name] for name in self.takes}
        self.gradient = np.zeros_like(self.weight)
        self.other_gradients = {name: np.zeros_like(each) for name, each in self.others.items()}

    def forward(self, x):
        main, skips = (x.main, x.skips) if self.takes else (x, {})
        assert sorted(skips) == sorted(self.takes)
        h = np.tanh(main @ self.weight + sum(skips[name] @ self.others[name] for name in self.takes))
        y = Branches(h, **{name: h for name in self.gives}) if self.gives else h
        return y, (main, skips, h)

    def backward_input(self, dy, saved):
        main, skips, h = saved
        dh = dy.main + sum(dy[name] for name in self.gives) if self.gives else dy
        dz = dh * (1 - h * h)
        dx = dz @ self.weight.T
        if self.takes:
            dx = Branches(dx, **{name: dz @ self.others[name].T for name in self.takes})
        return dx, (main, skips, dz)

    def backward_weight(self, pending):
        main, skips, dz = pending
        self.gradient += main.T @ dz
        for name, skip in skips.items():
            self.other_gradients[name] += skip.T @ dz


def model(schedule, rank, width):
    return [SkipStage(schedule, number, width) for number in schedule.stages_of(rank)]


def reference(schedule, inputs, targets):
    """(loss, gradients of the matrices of stages, of those of skips, of the inputs, output), for all rows at once."""
    skips = schedule.skips
    matrices, others = weights_of(skips, schedule.stages, inputs.shape[1])
    outputs = []
    for stage, weight in enumerate(matrices):
        z = (outputs[-1] if outputs else inputs) @ weight
        for skip in skips:
            if skip.target == stage:
                z = z + outputs[skip.source] @ others[skip.name]
        outputs.append(np.tanh(z))
    loss = float(np.mean((outputs[-1] - targets) ** 2))
    to_come = [np.zeros_like(inputs) for _ in matrices]
    to_come[-1] = 2 * (outputs[-1] - targets) / targets.size
    gradients, of_skips, of_inputs = [None] * len(matrices), {}, None
    for stage in reversed(range(len(matrices))):
        dz = to_come[stage] * (1 - outputs[stage] ** 2)
        gradients[stage] = (outputs[stage - 1] if stage else inputs).T @ dz
        for skip in skips:
            if skip.target == stage:
                of_skips[skip.name] = outputs[skip.source].T @ dz
                to_come[skip.source] += dz @ others[skip.name].T
        of_inputs = dz @ matrices[stage].T
        if stage:
            to_come[stage - 1] += of_inputs
    return loss, gradients, of_skips, of_inputs, outputs[-1]


def assert_equal_to(expected, stages):
    """Compare the gradients that stages have with those of the reference."""
    _, gradients, of_skips, _, _ = expected
    for stage in stages:
        near(stage.gradient, gradients[stage.number])
        for name, found in stage.other_gradients.items():
            near(found, of_skips[name])
