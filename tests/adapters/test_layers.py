"""Modules of PyTorch and functions of JAX as layers of one list, next to layers of mpipipe: trained on any ranks."""

import numpy as np
import pytest

torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")

from mpipipe import Branches, Pipeline, adapters, cut, nn, schedules  # noqa: E402
from mpipipe.adapters import as_layer  # noqa: E402
from mpipipe.errors import ArgumentError  # noqa: E402
from mpipipe.job import inprocess  # noqa: E402
from mpipipe.planning.memory import array_bytes, new_bytes  # noqa: E402

pytestmark = pytest.mark.judges
WIDTH = 6
jax.config.update("jax_enable_x64", True)


def scaled(parameters, x):
    return jax.numpy.tanh(x @ parameters["weight"]) * parameters["gain"]


def entries():
    values = np.random.default_rng(3).normal(size=(WIDTH, WIDTH))
    return [
        nn.Linear(WIDTH, WIDTH),
        lambda: torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()),
        (scaled, {"weight": values, "gain": np.ones(WIDTH)}),
        lambda: nn.Linear(WIDTH, WIDTH),
    ]


def layers():
    return [as_layer(entry, place, 5) for place, entry in enumerate(entries())]


def test_gradients_are_those_of_finite_differences_or_of_the_formula():
    x = np.random.default_rng(0).normal(size=(4, WIDTH))
    for layer in (layers()[0], layers()[2]):
        assert max(nn.check_gradients(layer, x).values()) < 1e-7
    stage = nn.Stage([layers()[1]], "float64", first=1)
    y, saved = stage.forward(x)
    dx, dz = stage.backward(np.ones_like(y), saved), 1 - y**2  # of y = tanh(z), z = x W^T + b
    np.testing.assert_allclose(dx, dz @ stage.parameters["1.0.weight"], rtol=1e-12)
    np.testing.assert_allclose(stage.gradients["1.0.weight"], dz.T @ x, rtol=1e-12)
    np.testing.assert_allclose(stage.gradients["1.0.bias"], dz.sum(0), rtol=1e-12)
    names = list(nn.Stage(layers(), "float64").parameters)
    assert names == ["0.weight", "0.bias", "1.0.weight", "1.0.bias", "2.gain", "2.weight", "3.weight", "3.bias"]


def test_frozen_ones_stay_and_have_no_gradient():
    stage = nn.Stage(layers(), "float64", frozen=("1.0.bias", "2.gain"))
    x = np.random.default_rng(0).normal(size=(4, WIDTH))
    y, saved = stage.forward(x)
    stage.backward(np.ones_like(y), saved)
    assert not {"1.0.bias", "2.gain"} & {*stage.gradients}
    assert all(np.abs(stage.gradients[name]).max() > 0 for name in stage.gradients)


@pytest.mark.parametrize("place", [1, 2])
def test_what_they_keep_is_seen_by_a_dry_run(place):
    stage = nn.Stage([layers()[place]], "float64", first=place)
    x = np.zeros((4096, WIDTH))
    with adapters.counting():
        y, saved = stage.forward(x, nn.Position())
        (kept,) = new_bytes([saved], {*array_bytes((stage.buffers.all, x))})
        dx, pending = stage.backward_input(np.ones_like(y), saved)
        stage.backward_weight(pending)
    assert dx.shape == x.shape and 0.95 * x.nbytes <= kept <= 6 * x.nbytes  # the tanh at least


@pytest.mark.parametrize("entry", ["a layer", 3, (1, {}), lambda: None])
def test_what_is_no_layer_is_refused(entry):
    with pytest.raises(ArgumentError, match=r"layers\[7\] is not a layer"):
        as_layer(entry, 7)


class Down(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x, lead_time):
        y = torch.tanh(self.inner(x) * lead_time[:, None])
        return y, (y, 2 * y)  # a name stands for a tree


class Up(torch.nn.Module):
    def forward(self, x, arm):
        return x * arm[0] + arm[1]


def stretched(parameters, x, lead_time):
    return x * (1 + parameters["gain"] * lead_time[:, None]), x


def named_entries():
    return [
        adapters.with_skips(Down, gives=("arm",), takes=("lead_time",)),
        lambda: torch.nn.Linear(WIDTH, WIDTH),
        adapters.with_skips((stretched, {"gain": np.ones(WIDTH)}), takes=("lead_time",), gives=("before",)),
        adapters.with_skips(Up, takes=("arm",)),
        adapters.with_skips(
            lambda: nn.Sequential([nn.Linear(WIDTH, WIDTH), nn.Join("before", axis=None)]), takes=("before",)
        ),
    ]


def test_entries_with_skips_have_right_gradients_and_the_same_on_any_ranks():
    x, lead, targets = (np.random.default_rng(n).normal(size=(8, WIDTH)[: 2 - n % 2]) for n in (0, 1, 2))
    whole = nn.Stage([as_layer(entry, place) for place, entry in enumerate(named_entries())], "float64")
    assert max(nn.check_gradients(whole, Branches(x, lead_time=lead)).values()) < 1e-7

    def job(comm, schedule):
        stages = cut(named_entries(), schedule, comm.rank, dtype="float64")
        inputs = Branches(x, lead_time=lead) if stages.is_first else None
        target = targets if stages.is_last else None
        with Pipeline(stages, stages.schedule, comm, loss=nn.mean_squared_error, recompute=True) as pipeline:
            result = pipeline.step(inputs, target)
        found = {name: array.copy() for stage in stages for name, array in stage.gradients.items()}
        return found | {"loss": result.loss} | {"lead": [each["lead_time"] for each in result.input_grads or ()]}

    (one,) = inprocess.run(1, lambda comm: job(comm, schedules.gpipe(1, 4)))
    for schedule in (schedules.zero_bubble_h1(2, 4), schedules.interleaved_1f1b(5, 1, 4)):
        for found in inprocess.run(schedule.ranks, lambda comm: job(comm, schedule)):  # noqa: B023
            for name, value in found.items():
                if name != "lead" or value:
                    np.testing.assert_allclose(value, one[name], rtol=1e-12, atol=1e-14)


def test_what_is_made_with_other_names_is_refused():
    with pytest.raises(ArgumentError, match="which each rank must know"):
        as_layer(adapters.with_skips(lambda: nn.Keep("arm"), gives=("leg",)), 0)
    with pytest.raises(ArgumentError, match="gives of with_skips"):
        adapters.with_skips(Up, gives="arm")


class Asking(torch.autograd.Function):
    """y = x w, which notes whether PyTorch asks for the gradient of x."""

    asked: list = []  # noqa: RUF012

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        Asking.asked.append(ctx.needs_input_grad[0])
        return dy * w if ctx.needs_input_grad[0] else None, (dy * x).sum(0)


class Gain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = torch.nn.Parameter(torch.linspace(1, 2, WIDTH, dtype=torch.float64))

    def forward(self, x):
        return Asking.apply(x, self.gain)


def gained(parameters, x):
    return x * parameters["gain"]


FIRST = {
    "torch": lambda: adapters.torch_stage(Gain()),
    "jax": lambda: adapters.jax_stage(gained, {"gain": np.linspace(1, 2, WIDTH)}),
    "torch layer": lambda: nn.Stage([as_layer(Gain(), 0)], "float64"),
    "jax layer": lambda: nn.Stage([as_layer((gained, {"gain": np.linspace(1, 2, WIDTH)}), 0)], "float64"),
    "names": lambda: nn.Stage([as_layer(entry, place) for place, entry in enumerate(named_entries())], "float64"),
}


@pytest.mark.parametrize("kind", FIRST)
@pytest.mark.parametrize(
    "schedule", [schedules.one_f_one_b(2, 4), schedules.zero_bubble_h1(2, 4)], ids=lambda s: s.name
)
def test_a_gradient_of_the_input_that_nobody_asks_for_is_not_computed(kind, schedule):
    x, lead, targets = (np.random.default_rng(n).normal(size=(8, WIDTH)[: 2 - n % 2]) for n in (0, 1, 2))

    def job(comm, asked):
        stage = FIRST[kind]() if comm.rank == 0 else nn.Stage([nn.Linear(WIDTH, WIDTH)], "float64", first=9)
        inputs = None if comm.rank else Branches(x, lead_time=lead) if kind == "names" else x
        target = targets if comm.rank else None
        with Pipeline([stage], schedule, comm, nn.mean_squared_error, input_grads=asked) as pipeline:
            Asking.asked.clear()
            for _ in range(2):
                pipeline.step(inputs, target)
        return stage.gradients.flat.copy(), len(Asking.asked), sum(Asking.asked)

    expected, found = (inprocess.run(2, lambda comm: job(comm, asked))[0] for asked in (True, False))  # noqa: B023
    assert found[0].any()
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-13)
    if kind.startswith("torch"):
        first = 2 if schedule.name == "zero_bubble_h1" else 1  # both halves go through a function of one's own
        assert (expected[1], expected[2]) == (found[1], found[1]) and found[2] <= first
