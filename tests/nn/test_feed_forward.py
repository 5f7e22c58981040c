"""Feed-forward layers with GELU, and SwiGLU with biases, against their formulas in float64."""

from __future__ import annotations

import numpy as np
import pytest
from support.gradcheck import check_stage
from support.tolerance import close, largest

from mpipipe import nn
from mpipipe.errors import ArgumentError

RANDOM = np.random.default_rng(8)


def made(layer, dtype="float64"):
    stage = nn.Stage([layer], dtype=dtype)
    for array in stage.parameters.values():
        array += RANDOM.standard_normal(array.shape).astype(dtype) * 0.3
    return stage


def gelu_dense(x, p):
    u = x @ p["0.up"].T + p.get("0.up_bias", 0)
    return u * (1 + np.tanh(np.sqrt(2 / np.pi) * (u + 0.044715 * u**3))) / 2 @ p["0.down"].T + p.get("0.down_bias", 0)


def swiglu_dense(x, p):
    gate, up = np.split(x @ p["0.gate_up"].T + p["0.gate_up_bias"], 2, axis=-1)
    return gate / (1 + np.exp(-gate)) * up @ p["0.down"].T + p["0.down_bias"]


LAYERS = {
    "with biases": (lambda: nn.FeedForward(6, 10), gelu_dense),
    "without biases": (lambda: nn.FeedForward(6, 10, bias=False), gelu_dense),
    "SwiGLU with biases": (lambda: nn.SwiGLU(6, 10, bias=True), swiglu_dense),
}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("shape", [(6,), (4, 6), (2, 3, 6)])
@pytest.mark.parametrize("name", LAYERS)
def test_the_layer_is_its_formula(name, shape, dtype):
    make, dense = LAYERS[name]
    stage, x = made(make(), dtype), RANDOM.standard_normal(shape).astype(dtype)
    p = {key: array.astype(np.float64) for key, array in stage.parameters.items()}
    y, _ = stage.forward(x)
    assert y.dtype == dtype and y.shape == shape
    expected = dense(x.astype(np.float64), p)
    sizes = [largest(x) ** 2, *(1 + np.abs(array).sum(-1).max() for array in p.values())]
    close(y, expected, 40, np.prod(sizes))


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_agree_with_finite_differences(name):
    check_stage(made(LAYERS[name][0]()), RANDOM.standard_normal((2, 3, 6)))


def test_the_forward_keeps_the_input_of_gelu_alone():
    stage, x = made(nn.FeedForward(6, 10)), RANDOM.standard_normal((4, 6))
    _, ((kept, inner),) = stage.forward(x)
    assert kept is x and inner.shape == (4, 10)


def test_names_values_at_the_start_and_decay():
    stage = nn.Stage([nn.FeedForward(64, 256, gain=0.5)], dtype="float64")
    assert sorted(stage.parameters) == ["0.down", "0.down_bias", "0.up", "0.up_bias"]
    assert not stage.parameters["0.up_bias"].any() and not stage.parameters["0.down_bias"].any()
    assert stage.parameters["0.up"].std() == pytest.approx(1 / 8, rel=0.05)
    assert stage.parameters["0.down"].std() == pytest.approx(0.5 / 16, rel=0.05)
    decays = [decays for _, _, decays in stage.decay_ranges]
    assert decays == [True, False]


def test_wrong_sizes_are_named():
    with pytest.raises(ArgumentError, match="hidden"):
        nn.FeedForward(4, 0)
    with pytest.raises(ArgumentError, match=r"layer 0 \(FeedForward"):
        nn.Stage([nn.FeedForward(4, 8)]).forward(np.zeros((2, 5), np.float32))
