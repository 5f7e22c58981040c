"""Names that layers give and take: gradients of the whole network, however the list of layers is cut and run."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import dense
from support.dense import near
from support.random_schedules import runnable_schedules
from support.skip_nets import drawn, reference

from mpipipe import Branches, Mesh, Pipeline, cut, nn, schedules
from mpipipe.errors import ArgumentError, PeerError
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


class Mixed(nn.Layer):
    """y = tanh(x W + sum of s U over all names that it takes), which it gives under all its names."""

    def __init__(self, place, takes, gives):
        self.place, self.takes, self.gives = place, takes, gives
        self.declared = {
            name: nn.Parameter((WIDTH, WIDTH), lambda generator, shape, name=name: drawn(place, name, WIDTH))
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


def batch(rows, names=("time", "extra")):
    draw = np.random.default_rng(rows).normal
    inputs = Branches(draw(size=(rows, WIDTH)), **{name: draw(size=(rows, WIDTH)) for name in names})
    return inputs, draw(size=(rows, WIDTH))


def rows_of(inputs, rows):
    return Branches(inputs.main[rows], **{name: each[rows] for name, each in inputs.skips.items()})


def run(comm, schedule, net, inputs, targets, *, recomputes=(), frozen=(), costs=None, steps=2, **options):
    """Stages, last result, evaluated loss and pipeline of this rank."""
    layers = [Mixed(place, *each) for place, each in enumerate(net)]
    layers = [nn.Recompute(layer) if place in recomputes else layer for place, layer in enumerate(layers)]
    stages = cut(layers, schedule, comm.rank, costs, dtype="float64", frozen=frozen)
    own = dense.placed(schedule, comm.rank, inputs, targets)
    with Pipeline(stages, stages.schedule, comm, loss=dense.mean_squared, **options) as pipeline:
        for _ in range(steps):
            result = pipeline.step(*own)
        value, _ = pipeline.evaluate(*own), pipeline.forward(own[0])
    return stages, result, value


def check_all(found, expected, frozen=()):
    stages, result, value = found
    loss, gradients, of_inputs, _ = expected
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


def made(name, chunks=1):
    return schedules.by_name(name, ranks=2, microbatches=4, chunks=chunks)


ONE_F_ONE_B = made("one_f_one_b")


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


TABLE = schedules.with_frozen(made("interleaved_zero_bubble", 2), {0})


@pytest.mark.ranks(2)
@pytest.mark.parametrize("schedule, frozen", [(TABLE, "01"), (ONE_F_ONE_B, "47"), (made("gpipe"), "0")])
def test_frozen_layers_hand_gradients_on_where_something_before_them_is_trained(comm, schedule, frozen):
    if comm.size != 2:
        return
    inputs, targets = batch(12)
    found = run(comm, schedule, NET, inputs, targets, frozen=[f"{place}.*" for place in frozen])
    expected = reference(NET, inputs, targets)
    check_all(found, expected if schedule.has_backward(0) else (*expected[:2], {}, None), frozen)


@pytest.mark.ranks(4)
def test_replicas_sum_and_check_mode_looks_at_named_values(comm):
    if comm.size != 4:
        return
    inputs, targets = batch(16)
    with Mesh(comm, pipe=2) as mesh:
        rows = slice(8 * mesh.data.rank, 8 * mesh.data.rank + 8)
        own = rows_of(inputs, rows)
        found = run(
            mesh.pipe, made("zero_bubble_v", 2), NET, own, targets[rows], replicas=mesh.replicas, check=True, steps=1
        )
    loss, gradients, *_ = reference(NET, inputs, targets)
    check_all(found, (loss, gradients, {}, None))


def test_a_function_of_the_microbatch_may_give_branches():
    inputs, targets = batch(12)
    pieces = [rows_of(inputs, slice(at, at + 3)) for at in range(0, 12, 3)]
    whole = reference(NET, inputs, targets)
    for given_as in (pieces, pieces.__getitem__):
        for found in inprocess.run(2, lambda comm: run(comm, ONE_F_ONE_B, NET, given_as, targets)):  # noqa: B023
            check_all(found, whole)


def test_integers_under_names_reach_layers_and_have_no_gradient():
    class Pick(nn.Layer):
        takes = ("kind",)

        def forward(self, x):
            return x * self.stage.taken("kind")[:, None], self.stage.taken("kind")

        def backward_input(self, dy, saved):
            return dy * saved[:, None], None

    kind, (inputs, targets) = np.arange(8) % 3, batch(8)

    def job(comm):
        stages = cut([nn.Linear(4, 4), Pick()], ONE_F_ONE_B, comm.rank, dtype="float64")
        own = dense.placed(stages.schedule, comm.rank, Branches(inputs.main, kind=kind), targets)
        with Pipeline(stages, stages.schedule, comm, loss=dense.mean_squared) as pipeline:
            result = pipeline.step(*own)
        return result.input_grads, {name: array.copy() for name, array in stages[0].parameters.items()}, result.loss

    (grads, parameters, loss), _ = inprocess.run(2, job)
    output = (inputs.main @ parameters["0.weight"].T + parameters["0.bias"]) * kind[:, None]
    near(loss, dense.mean_squared(output, targets)[0])
    assert all(each["kind"] is None for each in grads) and all(each.main.shape == (2, 4) for each in grads)


# -- Mistakes: one error on all ranks, which says where -------------------------------------------------------------


LISTS = {
    "no layer after it takes it": lambda: [nn.Linear(4, 4), nn.Keep("a"), nn.Linear(4, 4)],
    "a second time": lambda: [nn.Keep("a"), nn.Keep("a"), nn.Join("a")],
    r"layers\[2\] gives the name 'a' after layers\[0\] has taken it": lambda: [nn.Join("a"), nn.Gelu(), nn.Keep("a")],
    "which each rank must know": lambda: [lambda: nn.Keep("a"), lambda: nn.Keep("a"), nn.Join("a")],
}


@pytest.mark.parametrize("match", LISTS)
def test_lists_that_cannot_be_are_refused(match):
    with pytest.raises(ArgumentError, match=match):
        cut(LISTS[match](), schedules.one_f_one_b(2, 2), 0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "wrong, match",
    [
        (lambda x, stages: (x.main, stages.schedule), "take other names than it is handed"),
        (lambda x, stages: (Branches(x.main, lead=x["time"]), stages.schedule), "found: lead"),
        (lambda x, stages: (Branches(x.main, more=x.main, **x.skips), stages.schedule), "found: more, time"),
        (lambda x, stages: (x, ONE_F_ONE_B), "the skips of the schedule are not those of the names"),
        (
            lambda x, stages: (x, schedules.with_skips(stages.schedule, {"a": (0, 1), "b": (0, 1), "time": (0, 1)})),
            "skip b",
        ),
    ],
)
def test_names_that_do_not_fit_are_one_error_on_all_ranks(comm, wrong, match):
    if comm.size != 2:
        return
    layers = [Mixed(0, (), ("a",)), nn.Linear(4, 4), nn.Join("a"), nn.Linear(8, 4), nn.AdaptiveNorm(4, 4, "time")]
    stages = cut(layers, ONE_F_ONE_B, comm.rank, dtype="float64")
    inputs, targets = batch(8, ("time",))
    inputs, schedule = wrong(inputs, stages)
    with (
        pytest.raises((ArgumentError, PeerError), match=match),
        Pipeline(stages, schedule, comm, loss=dense.mean_squared) as pipeline,
    ):
        pipeline.step(*dense.placed(schedule, comm.rank, inputs, targets))


def test_a_stage_without_names_refuses_branches_and_layers_what_does_not_fit():
    x = np.ones((2, 3, 4))
    for layer, named, match in [
        (nn.Linear(4, 4), {"a": x}, "names that no layer takes"),
        (nn.Join("a"), {}, "take other names"),
        (nn.Join("a"), {"a": x[:1]}, "does not fit"),
        (nn.Join("a", None), {"a": x[..., :2]}, "does not fit"),
        (nn.Join("a", 1), {"a": x[..., :2]}, "does not fit"),
        (nn.AdaptiveNorm(4, 2, "a"), {"a": np.ones((2, 3))}, "has the wrong shape"),
        (nn.AdaptiveNorm(4, 2, "a"), {"a": np.ones((2, 2), np.int64)}, "has the wrong shape"),
    ]:
        with pytest.raises(ArgumentError, match=match):
            nn.Stage([layer], "float64").forward(Branches(x, **named))
    with pytest.raises(ArgumentError, match="does not fit its input"):
        nn.Stage([nn.Join("a")], "float64").forward(Branches(x, a=x.astype(np.float32)))
    for wrong in (lambda: nn.Join("a", 0), lambda: nn.Keep("a b"), lambda: nn.Keep("from")):
        with pytest.raises(ArgumentError):
            wrong()


def test_an_adaptive_norm_is_its_formula_and_begins_as_a_norm_alone():
    draw = np.random.default_rng(5).normal
    x, condition = draw(size=(3, 2, 5, 4)), draw(size=(3, 2))
    stage = nn.Stage([nn.AdaptiveNorm(4, 2, eps=1e-3)], "float64")
    normal = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-3)
    near(stage.forward(Branches(x, condition=condition))[0], normal)
    weight, bias = draw(size=(8, 2)), draw(size=8)
    stage.parameters["0.modulation.weight"][...] = weight
    stage.parameters["0.modulation.bias"][...] = bias
    scale, shift = np.split((condition @ weight.T + bias)[:, None, None], 2, axis=-1)
    near(stage.forward(Branches(x, condition=condition))[0], scale * normal + shift)


class Careless(nn.Layer):
    """y = x s, with a mistake in how it uses the name."""

    takes = ("s",)

    def __init__(self, mistake):
        self.mistake = mistake

    def forward(self, x):
        s = self.stage.taken("s")
        return x * s, (x, s)

    def backward_input(self, dy, saved):
        x, s = saved
        if self.mistake == "taken late":
            s = self.stage.taken("s")
        if self.mistake == "asked":
            self.stage.gradient_of("s")
        if self.mistake != "added late":
            self.stage.add_gradient("z" if self.mistake == "mistyped" else "s", dy * x)
        return dy * s, dy * x

    def backward_weight(self, pending):
        if self.mistake == "added late":
            self.stage.add_gradient("s", pending)


@pytest.mark.parametrize(
    ("mistake", "text"),
    [
        ("taken late", "nothing under the name 's'"),
        ("mistyped", "not in `takes`"),
        ("asked", "not in `gives`"),
        ("added late", "no backward_input under way"),
    ],
)
def test_a_layer_that_uses_a_name_wrongly_is_an_error_in_a_split_backward(mistake, text):
    stage = nn.Stage([Careless(mistake)], "float64")
    x, s = np.ones((2, 3, 4))
    y, saved = stage.forward(Branches(x, s=s))
    with pytest.raises(ArgumentError, match=text):
        _, pending = stage.backward_input(y, saved)
        stage.backward_weight(pending)
