"""Layers without attention against their formulas in float64, and what they refuse."""

import math

import numpy as np
import pytest
from support.gradcheck import check_stage
from support.tolerance import close, largest

from mpipipe import nn
from mpipipe.errors import ArgumentError

RANDOM = np.random.default_rng(1)
DIM = 6


def gelu(x):
    return x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2


def linear(x, p, name="weight", bias="bias"):
    return x @ p[name].T + p.get(bias, 0)


def feed_forward(x, p):
    return linear(gelu(linear(x, p, "up", "up_bias")), p, "down", "down_bias")


def swiglu(x, p):
    gate, up = np.split(linear(x, p, "gate_up", "gate_up_bias"), 2, axis=-1)
    return linear(gate / (1 + np.exp(-gate)) * up, p, "down", "down_bias")


def rms_norm(x, p):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 0.01) * p["gain"]


def layer_norm(x, p):
    return rms_norm(x - x.mean(-1, keepdims=True), p) + p["bias"]


LAYERS = {
    "Linear": (lambda: nn.Linear(DIM, 7), linear),
    "Linear without bias": (lambda: nn.Linear(DIM, 7, bias=False), linear),
    "Gelu": (nn.Gelu, lambda x, p: gelu(x)),
    "FeedForward": (lambda: nn.FeedForward(DIM, 10), feed_forward),
    "FeedForward without biases": (lambda: nn.FeedForward(DIM, 10, bias=False), feed_forward),
    "SwiGLU": (lambda: nn.SwiGLU(DIM, 10), swiglu),
    "SwiGLU with biases": (lambda: nn.SwiGLU(DIM, 10, bias=True), swiglu),
    "RMSNorm": (lambda: nn.RMSNorm(DIM, eps=0.01), rms_norm),
    "LayerNorm": (lambda: nn.LayerNorm(DIM, eps=0.01), layer_norm),
}


def made(layer, dtype="float64", **options):
    """A stage of one layer whose biases and gains are not their neutral elements."""
    stage = nn.Stage([layer], dtype=dtype, **options)
    for array in stage.parameters.values():
        array += RANDOM.standard_normal(array.shape).astype(dtype) * 0.3
    return stage


def size_of(x, p):
    """The size of terms: of products with all matrices, and of a number that is divided by the root of its row."""
    root = np.sqrt((x * x).mean(-1).min() + 0.01) if "gain" in p and x.size else 1
    sizes = [1 + np.abs(array).sum(-1).max() for array in p.values()]
    return np.prod([(1 + largest(x) / root) ** 2, *sizes])


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("shape", [(DIM,), (2, 1, 3, DIM), (0, DIM)])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_its_formula_over_the_last_axis(name, shape, dtype):
    make, dense = LAYERS[name]
    stage, x = made(make(), dtype), (RANDOM.standard_normal(shape) * 3 + 1).astype(dtype)
    p = {key[2:]: array.astype(np.float64) for key, array in stage.parameters.items()}
    expected = dense(x.astype(np.float64), p)
    y, _ = stage.forward(x)
    assert y.dtype == dtype and y.shape == expected.shape
    close(y, expected, 40, size_of(x.astype(np.float64), p))


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_agree_with_finite_differences(name):
    check_stage(made(LAYERS[name][0]()), RANDOM.standard_normal((2, 3, DIM)))


def test_gelu_is_near_the_exact_one():
    x = np.linspace(-8, 8, 4001)
    y, _ = nn.Stage([nn.Gelu()], dtype="float64").forward(x)
    exact = x * 0.5 * (1 + np.array([math.erf(value / math.sqrt(2)) for value in x]))
    assert np.abs(y - exact).max() < 5e-4  # how far the two forms are apart, not rounding


@pytest.mark.parametrize("make", [nn.Gelu, lambda: nn.SwiGLU(4, 4), lambda: nn.RMSNorm(4), lambda: nn.LayerNorm(4)])
def test_huge_numbers_and_rows_of_zeros_give_no_warning_and_no_nan(make):
    stage = nn.Stage([make()], dtype="float32")
    x = np.array([[1e4, -1e4, 3e3, -3e3], [0, 0, 0, 0]], np.float32)
    with np.errstate(all="raise", under="ignore"):
        y, saved = stage.forward(x)
        dx = stage.backward(np.ones_like(y), saved)
    assert np.isfinite(y).all() and np.isfinite(dx).all()


def test_linear_takes_arrays_that_are_not_contiguous():
    stage = nn.Stage([nn.Linear(5, 7)], dtype="float64")
    x = RANDOM.standard_normal((5, 4, 6)).T[::2]
    y, saved = stage.forward(x)
    weight = stage.parameters["0.weight"]
    close(y, x @ weight.T, 5, np.abs(x) @ np.abs(weight.T))
    dy = RANDOM.standard_normal((7, 4, 3)).T
    dx = stage.backward(dy, saved)
    close(dx, dy @ weight, 7, np.abs(dy) @ np.abs(weight))
    size = np.einsum("abo,abi->oi", np.abs(dy), np.abs(x))
    close(stage.gradients["0.weight"], np.einsum("abo,abi->oi", dy, x), 3 * 4, size)


@pytest.mark.parametrize("name", [name for name in LAYERS if name != "Gelu"])
def test_a_wrong_input_size_is_named(name):
    stage = nn.Stage([LAYERS[name][0]()], dtype="float64", first=4)
    for shape in [(2, 5), (2, 3, 4), (10,), ()]:
        with pytest.raises(ArgumentError, match=rf"layer 4 \({name.split()[0]}\)") as caught:
            stage.forward(np.zeros(shape))
        assert caught.value.expected == "(..., 6)"


@pytest.mark.parametrize(
    "make", [lambda: nn.Linear(0, 3), lambda: nn.Linear(3, -1), lambda: nn.Linear(2.0, 3), lambda: nn.FeedForward(4, 0)]
)
def test_sizes_must_be_positive_integers(make):
    with pytest.raises(ArgumentError, match="positive integer"):
        make()


# -- embedding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(6,), (2, 3, 4), (0,)])
@pytest.mark.parametrize("dtype, scale", [("int64", 1.0), ("int32", 4.0), ("uint8", 1.0)])
def test_embedding_is_a_product_with_one_hot_rows(shape, dtype, scale):
    stage = nn.Stage([nn.Embedding(9, 4, scale=scale)], dtype="float64")
    ids = RANDOM.integers(0, 9, shape).astype(dtype)
    one_hot = np.eye(9)[ids]
    y, saved = stage.forward(ids)
    np.testing.assert_array_equal(y, scale * one_hot @ stage.parameters["0.weight"])
    dy = RANDOM.standard_normal(y.shape)
    before = dy.copy()
    assert stage.backward(dy, saved) is None
    np.testing.assert_array_equal(dy, before)
    rows, slopes = one_hot.reshape(-1, 9), scale * dy.reshape(-1, 4)
    close(stage.gradients["0.weight"], rows.T @ slopes, len(rows), rows.T @ np.abs(slopes))


@pytest.mark.parametrize("ids, match", [([0, 9], "out of range"), ([-1, 3], "out of range"), ([0.5], "be integers")])
def test_ids_are_integers_within_the_table(ids, match):
    with pytest.raises(ArgumentError, match=match):
        nn.Stage([nn.Embedding(9, 4)]).forward(np.array(ids, np.float32 if ids[0] == 0.5 else np.int64))
