"""Names that layers give and take: gradients of the whole network, however the list of layers is cut and run."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import dense
from support.random_schedules import runnable_schedules
from support.skip_nets import near

from mpipipe import Branches, Pipeline, cut, nn, schedules
from mpipipe.job import inprocess

WIDTH = 4
# per layer what it takes and gives; "time" and "extra" are of the inputs; names go over stages, to the next one, stay
NET = [
    ((), ("a",)),
    (("time",), ("b",)),
    ((), ()),
    (("a",), ()),
    (("time", "b"), ("c",)),
    (("c",), ()),
    (("a", "b"), ()),
    (("time", "c", "extra"), ()),
]


def drawn(place, name):
    return np.random.default_rng([place, *name.encode()]).normal(size=(WIDTH, WIDTH)) / np.sqrt(WIDTH)


class Mixed(nn.Layer):
    """y = tanh(x W + sum of s U over all names that it takes), which it gives under all its names."""

    def __init__(self, place, takes, gives):
        self.place, self.takes, self.gives = place, takes, gives
        self.declared = {
            name: nn.Parameter((WIDTH, WIDTH), lambda generator, shape, name=name: drawn(place, name))
            for name in ("main", *takes)
        }

    def forward(self, x):
        inputs = {"main": x} | {name: self.stage.taken(name) for name in self.takes}
        y = np.tanh(sum(each @ getattr(self, name) for name, each in inputs.items()))
        for name in self.gives:
            self.stage.give(name, y)
        return y, (inputs, y)

    def backward_input(self, dy, saved):
        inputs, y = saved
        for name in self.gives:
            more = self.stage.gradient_of(name)
            dy = dy if more is None else dy + more
        dz = dy * (1 - y * y)
        for name in self.takes:
            self.stage.add_gradient(name, dz @ getattr(self, name).T)
        return dz @ self.main.T, (inputs, dz)

    def backward_weight(self, pending):
        inputs, dz = pending
        for name, each in inputs.items():
            self._add(name, lambda part, grad: np.add(grad, part, out=grad), each.T @ dz)


def reference(net, inputs, targets):
    """(loss, gradients of parameters by name, those of the inputs by name), for all rows at once."""
    values, outputs, x = dict(inputs.skips), [], inputs.main
    for place, (takes, gives) in enumerate(net):
        before = {"main": x} | {name: values[name] for name in takes}
        x = np.tanh(sum(each @ drawn(place, name) for name, each in before.items()))
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
            wanted[name] += dz @ drawn(place, name).T
        dx = dz @ drawn(place, "main").T
    return loss, gradients, {"": dx} | {name: wanted[name] for name in inputs.skips}


def batch(rows, names=("time", "extra")):
    draw = np.random.default_rng(rows).normal
    inputs = Branches(draw(size=(rows, WIDTH)), **{name: draw(size=(rows, WIDTH)) for name in names})
    return inputs, draw(size=(rows, WIDTH))


def layers_of(net, recomputes=()):
    layers = [Mixed(place, *each) for place, each in enumerate(net)]
    return [nn.Recompute(layer) if place in recomputes else layer for place, layer in enumerate(layers)]


def run(comm, schedule, net, inputs, targets, *, recomputes=(), frozen=(), costs=None, steps=2, **options):
    """Stages, last result, evaluated loss and pipeline of this rank."""
    stages = cut(layers_of(net, recomputes), schedule, comm.rank, costs, dtype="float64", frozen=frozen)
    own = dense.placed(schedule, comm.rank, inputs, targets)
    with Pipeline(stages, stages.schedule, comm, loss=dense.mean_squared, **options) as pipeline:
        for _ in range(steps):
            result = pipeline.step(*own)
        value, _ = pipeline.evaluate(*own), pipeline.forward(own[0])
    return stages, result, value


def check_all(found, expected, frozen=()):
    stages, result, value = found
    loss, gradients, of_inputs = expected
    near(result.loss, loss)
    near(value, loss)
    for stage in stages:
        assert set(stage.gradients) == {name for name in stage.parameters if name[0] not in frozen}
        for name, gradient in stage.gradients.items():
            near(gradient, gradients[name])
    if result.input_grads:
        trees = [each if isinstance(each, Branches) else Branches(each) for each in result.input_grads]
        for name, wanted in of_inputs.items():
            near(np.concatenate([({"": each.main} | each.skips)[name] for each in trees]), wanted)


CASES = {
    name: schedules.by_name(name, ranks=2, microbatches=4, chunks=chunks)
    for name, chunks in [
        ("gpipe", 1),
        ("one_f_one_b", 1),
        ("interleaved_1f1b", 2),
        ("zero_bubble_h1", 1),
        ("interleaved_zero_bubble", 2),
        ("zero_bubble_v", 2),
    ]
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("how", ["plain", "recompute", "layers again"])
def test_gradients_are_those_of_the_whole_network(comm, name, how):
    if comm.size != 2:
        return
    inputs, targets = batch(12)
    options = {"recompute": True} if how == "recompute" else {}
    recomputes = range(1, 8, 2) if how == "layers again" else ()
    found = run(comm, CASES[name], NET, inputs, targets, recomputes=recomputes, **options)
    check_all(found, reference(NET, inputs, targets))


@st.composite
def nets(draw, least):
    count = draw(st.integers(least, least + 3))
    net = [(set(), set()) for _ in range(count)]
    for name in "abcd"[: draw(st.integers(1, 4))]:
        giver = draw(st.integers(-1, count - 2))
        if giver >= 0:
            net[giver][1].add(name)
        for taker in draw(st.sets(st.integers(giver + 1, count - 1), min_size=1, max_size=4)):
            net[taker][0].add(name)
    return [(tuple(sorted(takes)), tuple(sorted(gives))) for takes, gives in net]


@settings(max_examples=25)
@given(schedule=runnable_schedules(), data=st.data(), synchronous=st.booleans())
def test_every_list_of_layers_runs_by_every_schedule_and_cut(schedule, data, synchronous):
    net = data.draw(nets(schedule.stages))
    given = {name for _, gives in net for name in gives}
    inputs, targets = batch(2 * schedule.microbatches, sorted({n for takes, _ in net for n in takes} - given))
    costs = data.draw(st.lists(st.integers(1, 9), min_size=len(net), max_size=len(net)))
    recomputes = data.draw(st.sets(st.integers(0, len(net) - 1)))
    if not inputs.skips:
        inputs = inputs.main
    expected = reference(net, inputs if isinstance(inputs, Branches) else Branches(inputs), targets)

    def job(comm):
        return run(comm, schedule, net, inputs, targets, recomputes=recomputes, costs=costs)

    for found in inprocess.run(schedule.ranks, job, synchronous=synchronous):
        check_all(found, expected)
