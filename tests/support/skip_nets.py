"""Networks of tanh layers with named values past others: the network in plain numpy on one process, and as stages."""

import numpy as np

from mpipipe import Branches
from support import dense


def drawn(place, name, width):
    return np.random.default_rng([place, *name.encode()]).normal(size=(width, width)) / np.sqrt(width)


def reference(net, inputs, targets):
    """(loss, gradients of matrices by place and name, those of the inputs by name, output), for all rows at once.

    `net` has (names that it takes, names that it gives) of each layer, as which it gives its output.
    """
    values, outputs, x, width = dict(inputs.skips), [], inputs.main, targets.shape[1]
    for place, (takes, gives) in enumerate(net):
        before = {"main": x} | {name: values[name] for name in takes}
        x = np.tanh(sum(each @ drawn(place, name, width) for name, each in before.items()))
        outputs.append((before, x))
        values |= dict.fromkeys(gives, x)
    loss, dx = dense.mean_squared(x, targets)
    wanted = {name: np.zeros_like(each) for name, each in values.items()}
    gradients = {}
    for place, (takes, gives) in reversed([*enumerate(net)]):
        before, y = outputs[place]
        dz = (dx + sum(wanted[name] for name in gives)) * (1 - y * y)
        for name, each in before.items():
            gradients[f"{place}.{name}"] = each.T @ dz
        for name in takes:
            wanted[name] += dz @ drawn(place, name, width).T
        dx = dz @ drawn(place, "main", width).T
    return loss, gradients, {"": dx} | {name: wanted[name] for name in inputs.skips}, x


class SkipStage(dense.Halves):
    """h = tanh(x W + sum of s U over all skips that come in); h goes on, and over each skip out of it.

    It may leave out the gradients of some of these skips, and that of its input where `ends` is set.
    """

    leaves_out = ()
    ends = False

    def __init__(self, number, takes, gives, width):
        self.number, self.takes, self.gives = number, takes, gives
        self.weights = {name: drawn(number, name, width) for name in ("main", *takes)}
        self.gradient_of = {name: np.zeros((width, width)) for name in self.weights}

    def forward(self, x):
        inputs = {"main": x.main, **x.skips} if self.takes else {"main": x}
        assert sorted(inputs) == sorted(self.weights)
        h = np.tanh(sum(inputs[name] @ weight for name, weight in self.weights.items()))
        return Branches(h, **dict.fromkeys(self.gives, h)) if self.gives else h, (inputs, h)

    def backward_input(self, dy, saved):
        inputs, h = saved
        dh = dy.main + sum(dy[name] for name in self.gives) if self.gives else dy
        dz = dh * (1 - h * h)
        slopes = {name: dz @ weight.T for name, weight in self.weights.items() if name not in self.leaves_out}
        dx = slopes.pop("main")
        dx = Branches(dx, **slopes) if slopes else dx
        return None if self.ends else dx, (inputs, dz)

    def backward_weight(self, pending):
        inputs, dz = pending
        for name, each in inputs.items():
            self.gradient_of[name] += each.T @ dz


def net_of(schedule):
    """The network whose layers are stages that hand values over the skips of a schedule."""
    takes = [[skip.name for skip in schedule.skips if skip.target == stage] for stage in range(schedule.stages)]
    gives = [[skip.name for skip in schedule.skips if skip.source == stage] for stage in range(schedule.stages)]
    return list(zip(takes, gives))


def model(schedule, rank, width):
    net = net_of(schedule)
    return [SkipStage(number, *net[number], width) for number in schedule.stages_of(rank)]


def assert_equal_to(gradients, stages):
    """Compare the gradients that stages have with those of the reference."""
    for stage in stages:
        for name, found in stage.gradient_of.items():
            dense.near(found, gradients[f"{stage.number}.{name}"])
