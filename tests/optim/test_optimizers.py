"""Optimizers and curves against textbook float64 versions; groups, state by names, stages of a user's own."""

import math
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from support.gradients import fill, four_layers, gradient_norm
from support.tolerance import close

from mpipipe import Pipeline, nn, optim, schedules
from mpipipe.errors import ArgumentError
from mpipipe.job import inprocess


def textbook_adamw(p, gradients, lr, b1, b2, eps, decay):
    """(parameters, sizes of what was added up to them)"""
    m, v, size, terms = np.zeros_like(p), np.zeros_like(p), np.zeros_like(p), np.abs(p)
    for t, g in enumerate(gradients, 1):
        p = p - lr * decay * p
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g**2
        p = p - lr * (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)
        size = b1 * size + (1 - b1) * np.abs(g)
        terms = terms + lr * (size / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)
    return p, terms


def textbook_sgd(p, gradients, lr, momentum, decay):
    """(parameters, sizes of what was added up to them)"""
    u, size, terms = np.zeros_like(p), np.zeros_like(p), np.abs(p)
    for g in gradients:
        u = momentum * u + g + decay * p
        p = p - lr * u
        size = momentum * size + np.abs(g) + decay * terms
        terms = terms + lr * size
    return p, terms


def run(made, optimizer, steps=5):
    """The gradients of each parameter, step by step."""
    history = {}
    for step in range(steps):
        fill(made, step)
        for stage in made:
            for name, gradient in stage.gradients.items():
                history.setdefault(name, []).append(gradient.astype(np.float64))
        optimizer.step()
    assert optimizer.steps == steps
    return history


def check(made, before, history, textbook):
    for stage in made:
        for name, found in stage.parameters.items():
            expected, size = textbook(before[name], history[name], decays=found.ndim == 2)
            assert np.abs(expected - before[name]).max() > 1e-3
            close(found, expected, 12 * len(history[name]), size, what=name)
        gaps = np.ones(stage.parameters.flat.size, bool)
        for name, array in stage.parameters.items():
            gaps[stage.parameters.offsets[name] :][: array.size] = False
        assert not stage.parameters.flat[gaps].any()


def before(made):
    return {name: array.astype(np.float64) for stage in made for name, array in stage.parameters.items()}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(
    ("make", "textbook", "numbers", "decay"),
    [
        *((optim.AdamW, textbook_adamw, dict(betas=(0.8, 0.9), eps=1e-6), decay) for decay in (0.0, 0.1)),
        *((optim.SGD, textbook_sgd, dict(momentum=momentum), 0.1 - momentum / 9) for momentum in (0.0, 0.9)),
    ],
)
def test_steps_are_those_of_the_textbook(dtype, make, textbook, numbers, decay):
    made = four_layers(dtype)
    start = before(made)
    optimizer = make(made, lr=0.01, weight_decay=decay, **numbers)
    history = run(made, optimizer)
    given = [*numbers.get("betas", ()), *(numbers[name] for name in numbers if name != "betas")]
    check(made, start, history, lambda p, grads, decays: textbook(p, grads, 0.01, *given, decay if decays else 0.0))
    for stage, state in zip(made, optimizer.state):
        assert all(array.dtype == dtype and array.size == stage.parameters.flat.size for array in state.values())


# -- groups -----------------------------------------------------------------------------------------------------------

LR, DECAY = 0.01, 0.1
OPTIMIZERS = {
    "AdamW": lambda stages, lr=LR, decay=DECAY, **more: optim.AdamW(stages, lr, weight_decay=decay, **more),
    "SGD": lambda stages, lr=LR, decay=DECAY, **more: optim.SGD(stages, lr, 0.9, decay, **more),
}
GROUPS = [
    optim.Group("1.*", lr=0.5),
    optim.Group(lambda name, shape: shape == (7, 5), lr=3.0, weight_decay=0.3),
    optim.Group("*.bias", lr=2.0, weight_decay=0.05),
    optim.Group("2.weight", lr=100.0),  # an earlier one has it
]
# what each parameter is updated with: factor of the learning rate, weight decay
EXPECTED = {
    "0.weight": (1, DECAY), "0.bias": (2, 0.05), "1.gain": (0.5, 0), "2.weight": (3, 0.3), "2.bias": (2, 0.05),
}  # fmt: skip


def grouped(dtype="float64", device="cpu"):
    return nn.Stage([nn.Linear(3, 5), nn.RMSNorm(5), nn.Linear(5, 7)], dtype, device=device)


class Alone:
    """One parameter, all of which decays."""

    def __init__(self, name, array):
        self.parameters, self.gradients = (nn.FlatBuffer({name: array.shape}, array.dtype) for _ in range(2))
        self.parameters[name][...] = array
        self.decay_ranges = [(0, self.parameters.flat.size, True)]


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_each_parameter_is_updated_by_the_numbers_of_its_group(make):
    stage = grouped()
    alone = {name: Alone(name, array) for name, array in stage.parameters.items()}
    ours = make([stage], groups=GROUPS)
    theirs = {n: make([alone[n]], LR * factor, decay) for n, (factor, decay) in EXPECTED.items()}
    for step in range(3):
        fill([stage], step)
        rate = LR * (step + 1)
        ours.step(lr=rate, scale=0.5)
        for name, (factor, _) in EXPECTED.items():
            alone[name].gradients[name][...] = stage.gradients[name]
            theirs[name].step(lr=rate * factor, scale=0.5)
    for name, array in stage.parameters.items():
        np.testing.assert_array_equal(array, alone[name].parameters[name])
    assert {n: a.shape for n, a in next(iter(ours.named_state().values())).items()} == {
        name: array.shape for name, array in stage.parameters.items()
    }


def test_a_tied_parameter_goes_by_its_tie():
    """It has names of its own in each place, maybe on other ranks; the tie is the same."""
    stage = nn.Stage([nn.Embedding(4, 3, tie="tokens"), nn.Linear(3, 4, bias=False, tie="tokens")], "float64")
    before = stage.parameters["0.weight"].copy()
    stage.gradients["0.weight"][...] = stage.gradients["1.weight"][...] = 1
    optim.SGD([stage], LR, groups=[optim.Group("0.*", lr=5.0), optim.Group("tokens", lr=3.0)]).step()
    np.testing.assert_allclose(stage.parameters["0.weight"], before - 3 * LR, rtol=1e-14)
    np.testing.assert_allclose(stage.parameters["1.weight"], before - 3 * LR, rtol=1e-14)


def test_a_function_sees_complex_parameters_in_their_own_shape():
    shapes = {"w": (2, 3), "c": (3,)}

    class Own:
        parameters, gradients = nn.FlatBuffer(shapes, "complex64"), nn.FlatBuffer(shapes, "complex64")

    seen = {}
    optimizer = optim.SGD(
        [Own], 1.0, groups=[optim.Group(lambda name, shape: seen.setdefault(name, shape) == (3,), lr=2)]
    )
    Own.gradients["w"][...] = Own.gradients["c"][...] = 1 - 2j
    optimizer.step()
    assert seen == shapes
    np.testing.assert_array_equal(Own.parameters["w"], -1 + 2j)
    np.testing.assert_array_equal(Own.parameters["c"], -2 + 4j)


# -- the state by the names of parameters -----------------------------------------------------------------------------


def tied():
    """Two stages on one rank that share one of their matrices."""
    embedding, head = nn.Embedding(5, 4, tie="t"), nn.Linear(4, 5, bias=False, tie="t")
    return [nn.Stage([embedding]), nn.Stage([nn.RMSNorm(4), head], first=1)]


def share(stages):
    def make(comm):
        with Pipeline(stages, schedules.interleaved_1f1b(1, 2, 2), comm, loss=nn.softmax_cross_entropy):
            pass

    inprocess.run(1, make)


@pytest.mark.parametrize("make", [optim.AdamW, lambda stages, lr: optim.SGD(stages, lr, momentum=0.9)])
@pytest.mark.parametrize("before", [False, True])  # whether the optimizer is made before parameters are shared
def test_state_has_the_names_and_shapes_of_parameters_and_setting_it_is_felt(make, before):
    stages = tied()
    optimizer = make(stages, 0.1) if before else None
    share(stages)
    optimizer = optimizer or make(stages, 0.1)
    shapes = {name: array.shape for stage in stages for name, array in stage.parameters.items()}
    state = optimizer.named_state()
    assert set(state) == set(optimizer.state[0])
    for kind, named in state.items():
        assert {name: array.shape for name, array in named.items()} == shapes
        assert np.shares_memory(named["0.weight"], named["2.weight"])  # the tied ones
        named["1.gain"][...] = 3
        offset = stages[1].parameters.offsets["1.gain"]
        np.testing.assert_array_equal(optimizer.state[1][kind][offset : offset + 4], 3)
        named["2.weight"][...] = 2
        np.testing.assert_array_equal(named["0.weight"], 2)
    gain = stages[1].parameters["1.gain"].copy()
    optimizer.step()
    assert (stages[1].parameters["1.gain"] != gain).all()  # gradients are zero: what moves it is the state


def test_names_that_are_not_those_of_one_parameter_here_are_refused():
    assert optim.SGD(tied(), 0.1).named_state() == {}  # without momentum there is none
    stages = [nn.Stage([nn.RMSNorm(3)]), nn.Stage([nn.RMSNorm(3)])]
    with pytest.raises(ArgumentError, match=r"two stages of this rank have a parameter 0\.gain") as caught:
        optim.AdamW(stages, 0.1).named_state()
    assert "first" in caught.value.remedy
    stages = tied()
    share(stages)
    with pytest.raises(ArgumentError, match=r"tied parameter 2\.weight belongs to a stage"):
        optim.AdamW(stages[1:], 0.1).named_state()


# -- stages of a user's own -------------------------------------------------------------------------------------------

SHAPES = {"w": (5, 3), "gain": (7,), "v": (2, 2)}


def own(dtype="float64", seed=0):
    """A stage with buffers alone."""
    rng = np.random.default_rng(seed)
    stage = SimpleNamespace(parameters=nn.FlatBuffer(SHAPES, dtype), gradients=nn.FlatBuffer(SHAPES, dtype))
    for name, shape in SHAPES.items():
        stage.parameters[name][...], stage.gradients[name][...] = rng.normal(size=(2, *shape))
    return stage


def without_names(stage):
    return SimpleNamespace(
        parameters=SimpleNamespace(flat=stage.parameters.flat), gradients=SimpleNamespace(flat=stage.gradients.flat)
    )


def test_sgd_without_names_decays_everything():
    stage = own()
    p, g = stage.parameters.flat.copy(), stage.gradients.flat.copy()
    optimizer = optim.SGD([without_names(stage)], lr=0.5, momentum=0.5, weight_decay=0.25)
    stage.gradients.flat[...] = 8 * g
    optim.scaled_step(optimizer, optim.LossScaler(initial=8.0))
    np.testing.assert_allclose(stage.parameters.flat, p - 0.5 * (g + 0.25 * p), rtol=1e-15)
    assert set(optimizer.named_state()["momentum"]) == {"flat"}


def test_the_norm_counts_users_stages_and_those_of_layers_together(pair):
    layers = nn.Stage([nn.Linear(3, 3)], dtype="float64", first=pair.rank)
    layers.gradients.flat[...] = 1 + pair.rank
    mine = own(seed=pair.rank)
    numbers = [own(seed=rank).gradients.flat for rank in range(2)]
    square = sum(float((x**2).sum()) for x in numbers) + 12 * (1 + 4)
    expected = math.sqrt(square)
    assert gradient_norm([layers, mine], pair) == pytest.approx(expected, rel=1e-14)
    assert optim.clip_by_global_norm([layers, mine], 1.0, pair) == pytest.approx(expected, rel=1e-14)
    assert gradient_norm([layers, mine], pair) == pytest.approx(1.0, rel=1e-14)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_parameters_in_half_precision_are_measured_and_not_updated(dtype):
    stage = own(dtype)
    wide = stage.gradients.flat.astype(np.float64)
    assert gradient_norm([stage]) == pytest.approx(float(np.sqrt((wide**2).sum())), rel=1e-14)
    for make in (optim.AdamW, optim.SGD):
        with pytest.raises(ArgumentError, match=f"in {dtype}") as caught:
            make([stage], lr=0.1)
        assert "float32" in caught.value.remedy


# -- learning-rate curves ---------------------------------------------------------------------------------------------


def test_warmup_cosine_rises_peaks_and_falls_to_the_floor():
    rates = [optim.warmup_cosine(step, 100, 2.0, 10, floor=0.1) for step in range(120)]
    close(rates[:10], np.arange(1, 11) * 0.2, 4)
    assert max(rates) == rates[9] == 2.0
    assert all(a > b for a, b in pairwise(rates[9:100]))
    close(rates[54], 2.0 * (0.1 + 0.9 / 2), 8, 2.0)
    close(rates[99:], np.full(21, 0.2), 8, 2.0)


def test_a_stage_without_parameters_has_the_kinds_of_state():
    """Else a checkpoint of a pipeline with a frozen stage cannot be loaded on its rank."""
    for stage in (nn.Stage([nn.Gelu()]), nn.Stage([nn.Linear(2, 2)], frozen=["*"])):
        assert optim.AdamW([stage], lr=0.1).named_state() == {"first": {}, "second": {}}


# -- what is refused --------------------------------------------------------------------------------------------------


def step_of(**keys):
    return lambda: optim.scaled_step(optim.SGD([own()], 0.1), optim.LossScaler(), **keys)


def stage_with(parameters, gradients):
    return SimpleNamespace(parameters=parameters, gradients=gradients)


FLAT = SimpleNamespace(flat=np.zeros(3))
SCALES = [dict(initial=0.5), dict(initial=math.inf), dict(initial=math.nan), dict(growth=0.5), dict(backoff=1.0),
          dict(backoff=0), dict(interval=0)]  # fmt: skip
REFUSED = [
    *((partial(optim.clip_by_global_norm, [own()], limit), "max_norm") for limit in (0, -1.0, math.nan)),
    *((step_of(max_norm=limit), "max_norm") for limit in (0, -1.0, math.nan)),
    *((partial(optim.LossScaler, **keys), "wrong scaling of the loss") for keys in SCALES),
    *((partial(optim.warmup_cosine, *given), "wrong learning-rate curve")
      for given in ((-1, 5, 1.0, 0), (0, 0, 1.0, 0), (0, 5, 1.0, 6), (0, 5, 1.0, -1))),
    (lambda: optim.Group("*", lr=-1), "lr of a group"),
    (lambda: optim.Group("*", weight_decay=math.nan), "weight_decay of a group"),
    (lambda: optim.AdamW([own()], lr=0.1, groups=[("*", 0.5)]), r"a list of optim\.Group"),
    (lambda: optim.SGD([SimpleNamespace()], lr=0.1), "without flat parameters"),
    (lambda: optim.SGD([stage_with(FLAT, None)], lr=0.1), "without a one-dimensional"),
    (lambda: optim.SGD([stage_with(None, FLAT)], lr=0.1), "without a one-dimensional"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_cannot_be_meant_is_refused(number):
    call, match = REFUSED[number]
    with pytest.raises(ArgumentError, match=match):
        call()
