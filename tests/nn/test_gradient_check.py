"""`nn.check_gradients` names each of some faults that a backward may have, and finds none in the package's layers."""

import inspect
from typing import NamedTuple

import numpy as np
import pytest

from mpipipe import nn
from mpipipe.arrays import Branches
from mpipipe.attention import Local
from mpipipe.errors import ArgumentError, StageError
from mpipipe.nn import check_gradients

WIDTH = 6


def numbers(*shape):
    return np.random.default_rng(1).standard_normal(shape)


def drawn(generator, shape):
    return generator.standard_normal(shape)


X = numbers(5, WIDTH)


class Dense(nn.Layer):
    """y = tanh(x W^T + b), written out, so that each fault is one line of it."""

    def __init__(self):
        self.declared = {"weight": nn.Parameter((3, WIDTH), drawn), "bias": nn.Parameter((3,), drawn)}

    def forward(self, x):
        y = np.tanh(x @ self.weight.T + self.bias)
        return y, (x, y)

    def backward_input(self, dy, saved):
        x, y = saved
        dz = dy * (1 - y**2)
        return dz @ self.weight, (dz, x)

    def backward_weight(self, pending):
        dz, x = pending
        self.weight_grad += dz.T @ x
        self.bias_grad += dz.sum(0)


class SlightlyOff(Dense):
    def backward_input(self, dy, saved):
        dx, pending = super().backward_input(dy, saved)
        return dx * (1 + 1e-6), pending


class ForgottenBias(Dense):
    def backward_weight(self, pending):
        self.weight_grad += pending[0].T @ pending[1]


class SetsInPlaceOfAdding(Dense):
    def backward_weight(self, pending):
        dz, x = pending
        self.weight_grad[...] = dz.T @ x
        self.bias_grad += dz.sum(0)


class WrongInTwoParts(Dense):
    """Right in one go, wrong where a schedule splits the backward."""

    def backward(self, dy, saved):
        dx, pending = Dense.backward_input(self, dy, saved)
        Dense.backward_weight(self, pending)
        return dx

    def backward_weight(self, pending):
        super().backward_weight((1.5 * pending[0], pending[1]))


class WrongInOneGo(Dense):
    def backward(self, dy, saved):
        dx, pending = self.backward_input(dy, saved)
        self.backward_weight((3 * pending[0], pending[1]))
        return dx


class AddsWhileItComputesTheInput(Dense):
    def backward_input(self, dy, saved):
        dx, (dz, x) = super().backward_input(dy, saved)
        self.bias_grad += dz.sum(0)
        return dx, (dz, x)

    def backward_weight(self, pending):
        self.weight_grad += pending[0].T @ pending[1]


class KeepsTheInputInItself(Dense):
    def forward(self, x):
        self.x = x
        return super().forward(x)

    def backward_weight(self, pending):
        super().backward_weight((pending[0], self.x))


class WritesToItsInput(Dense):
    def forward(self, x):
        y, (_, y) = super().forward(x)
        saved = x.copy()
        x *= 1.0001
        return y, (saved, y)


class WritesToTheGradient(Dense):
    def backward_input(self, dy, saved):
        found = super().backward_input(dy, saved)
        dy += 0.1
        return found


class UsesUpWhatItSaved(Dense):
    """What it saved is its output, too, which may still be on its way."""

    def backward_input(self, dy, saved):
        dx, (dz, x) = super().backward_input(dy, saved)
        dz = dz.copy()
        saved[1][...] = 0
        return dx, (dz, x)


class AnotherForwardTheSecondTime(Dense):
    """A recomputation sees another function."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x + 1e-3 * self.calls)


class OtherShape(Dense):
    def backward_input(self, dy, saved):
        dx, pending = super().backward_input(dy, saved)
        return dx[:, :-1], pending


FAULTS = {
    SlightlyOff: r"gradient of input: .*, 1.00000\d* of",
    ForgottenBias: r"gradient of bias: 0 along",
    SetsInPlaceOfAdding: r"gradient of weight added up over two backwards",
    WrongInTwoParts: r"gradient of weight from backward_input and backward_weight",
    WrongInOneGo: r"gradient of weight: .*, 3 of",
    AddsWhileItComputesTheInput: r"backward_input touches the gradient of bias",
    KeepsTheInputInItself: r"gradient of weight after the forward of another micro-batch",
    WritesToItsInput: r"input was written to",
    WritesToTheGradient: r"dy was written to",
    UsesUpWhatItSaved: r"output was written to",
    AnotherForwardTheSecondTime: r"gives another output",
    OtherShape: r"gradient of the input has another shape",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_found_and_named(fault):
    with pytest.raises(StageError, match=FAULTS[fault]):
        check_gradients(fault(), X)


def test_a_right_layer_passes():
    found = check_gradients(Dense(), X)
    assert list(found) == ["input", "weight", "bias"] and max(found.values()) < 1e-9


ROWS, FIELD = numbers(2, 5, WIDTH), numbers(2, 8, 8, WIDTH)
LAYERS = {
    "Linear": (lambda: nn.Linear(WIDTH, 4), ROWS),
    "FeedForward": (lambda: nn.FeedForward(WIDTH, 7), ROWS),
    "SwiGLU": (lambda: nn.SwiGLU(WIDTH, 7, bias=True), ROWS),
    "Gelu": (nn.Gelu, ROWS),
    "RMSNorm": (lambda: nn.RMSNorm(WIDTH), ROWS),
    "LayerNorm": (lambda: nn.LayerNorm(WIDTH), ROWS),
    "Dropout": (lambda: nn.Dropout(0.3), ROWS),
    "Embedding": (lambda: nn.Embedding(11, WIDTH), np.arange(10).reshape(2, 5)),
    "Head": (lambda: nn.Head(WIDTH, 11), ROWS),
    "HeadSlice": (
        lambda: nn.Sequential([nn.HeadSlice(WIDTH, 11, number, 3, labels=True) for number in range(3)]),
        Branches(ROWS, labels=np.arange(10).reshape(2, 5)),
    ),
    "LearnedPositions": (lambda: nn.LearnedPositions(9, WIDTH), ROWS),
    "SelfAttention": (lambda: nn.SelfAttention(12, 2, attend=Local(), qk_norm=True, qkv_bias=True), numbers(2, 5, 12)),
    "Sequential": (lambda: nn.Sequential([nn.Linear(WIDTH, 4), nn.Gelu()]), ROWS),
    "Residual": (lambda: nn.Residual(nn.Linear(WIDTH, WIDTH)), ROWS),
    "PreNormResidual": (lambda: nn.PreNormResidual(nn.RMSNorm(WIDTH), nn.SwiGLU(WIDTH, 7)), ROWS),
    "Conv": (lambda: nn.Conv(WIDTH, 4, (3, 3), stride=2, groups=2), FIELD),
    "Patches": (lambda: nn.Patches((2, 2), (4, 4)), FIELD),
    "Recompute": (lambda: nn.Recompute(nn.FeedForward(WIDTH, 7)), ROWS),
    "Keep": (lambda: nn.Sequential([nn.Keep("arm"), nn.Linear(WIDTH, WIDTH), nn.Join("arm", axis=None)]), ROWS),
    "Join": (lambda: nn.Join("arm", axis=-2), Branches(FIELD, arm=FIELD[:, :, :2])),
    "AdaptiveNorm": (
        lambda: nn.Recompute(nn.AdaptiveNorm(WIDTH, 3)),
        Branches(FIELD, condition=numbers(len(FIELD), 3)),
    ),
    "SpectralConv": (lambda: nn.SpectralConv(WIDTH, 4, (3, 2)), FIELD),
}


def test_every_layer_of_the_package_is_checked():
    layers = {name for name, value in vars(nn).items() if inspect.isclass(value) and issubclass(value, nn.Layer)}
    assert layers - {"Layer"} == {*LAYERS}


@pytest.mark.parametrize("name", LAYERS)
def test_no_fault_is_found_in_a_layer_of_the_package(name):
    make, x = LAYERS[name]
    assert max(check_gradients(make(), x).values()) < 1e-8


def test_kinks_are_no_faults():
    class Relu(nn.Layer):
        def forward(self, x):
            return np.maximum(x, 0), x > 0

        def backward_input(self, dy, saved):
            return dy * saved, None

    for seed in range(3):
        check_gradients(Relu(), numbers(50, 60), seed=seed)


class Own:
    """A stage of a user's own with trees, skips and a flat array of parameters, and no split backward."""

    def __init__(self, factor=1.0):
        self.parameters, self.gradients = (type("Flat", (), {"flat": np.full(2, n)})() for n in (1.5, 0.0))
        self.factor = factor

    def forward(self, x):
        a, b = self.parameters.flat
        return Branches(a * x.main["u"] * x.main["v"], carried=b * x.skips["given"]), x

    def backward(self, dy, x):
        a, b = self.parameters.flat
        u, v, given = x.main["u"], x.main["v"], x.skips["given"]
        self.gradients.flat += [np.sum(dy.main * u * v), np.sum(dy.skips["carried"] * given) * self.factor]
        return Branches({"u": a * dy.main * v, "v": a * dy.main * u}, given=b * dy.skips["carried"] * self.factor)


def test_a_stage_of_ones_own_with_trees_and_skips():
    x = Branches({"u": X, "v": numbers(5, WIDTH)}, given=X)
    assert sorted(check_gradients(Own(), x)) == [
        "input.main['u']",
        "input.main['v']",
        "input.skips['given']",
        "parameters",
    ]
    with pytest.raises(
        StageError, match=r"gradient of input.skips\['given'\]: .*, 0.5 of(.|\n)*gradient of parameters"
    ):
        check_gradients(Own(0.5), x)


class Single(Dense):
    """Its sums and those of its backward are in float32, or in a coarser type."""

    factor, kind = 1.0, np.float32

    def forward(self, x):
        x, weight = x.astype(self.kind), self.weight.astype(self.kind)
        y = np.tanh(x @ weight.T + self.bias.astype(self.kind))
        return y.astype(np.float64), (x, y)

    def backward_input(self, dy, saved):
        x, y = saved
        dz = dy.astype(self.kind) * (1 - y**2)
        return (self.factor * dz @ self.weight.astype(self.kind)).astype(np.float64), (dz, x)


@pytest.mark.parametrize("kind", [np.float32, np.float16])
def test_lower_precision_inside_is_no_fault_and_hides_none(kind):
    for seed in range(5):
        layer = Single()
        layer.kind = kind
        found = check_gradients(layer, numbers(200, WIDTH), seed=seed)
        assert 1e-10 < max(found.values()) < (1e-3 if kind is np.float32 else 0.3)
        layer = Single()
        layer.kind, layer.factor = kind, 1.05 if kind is np.float32 else -1
        with pytest.raises(StageError, match=r"gradient of input: .* of the difference"):
            check_gradients(layer, numbers(200, WIDTH), seed=seed)


class Two(NamedTuple):
    first: np.ndarray
    second: np.ndarray


class Named:
    """A stage of a user's own that knows its input by names, as a loss may know its output."""

    def forward(self, x):
        return Two(x.first * x.second, x.first), x

    def backward(self, dy, saved):
        return dy.first * saved.second + dy.second, dy.first * saved.first


def test_inputs_and_outputs_may_be_named_tuples():
    assert list(check_gradients(Named(), Two(X, numbers(5, WIDTH)))) == ["input[0]", "input[1]"]


def test_what_cannot_be_checked_is_refused():
    with pytest.raises(ArgumentError, match="in float64 on the host"):
        check_gradients(nn.Stage([nn.Linear(WIDTH, 2)]), X)
    with pytest.raises(ArgumentError, match="in float64 on the host"):
        check_gradients(nn.Linear(WIDTH, 2), X.astype(np.float32))
    with pytest.raises(ArgumentError, match="nothing to differentiate"):
        check_gradients(nn.Stage([nn.Gelu()], "float64"), np.arange(3))
