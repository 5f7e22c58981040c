"""Convolution against sums over all windows in float64, however the windows are gathered, and what it refuses."""

import math

import numpy as np
import pytest
from support.tolerance import close, within

from mpipipe import arrays, nn
from mpipipe.errors import ArgumentError
from mpipipe.nn.layers import convolution

RANDOM = np.random.default_rng(3)
CASES = {  # (inputs, outputs, width), space, options
    "line, even width, stride, groups": ((4, 6, (4,)), (13,), dict(stride=2, groups=2)),
    "line, stride beyond the width": ((2, 3, (1,)), (7,), dict(stride=3, padding="valid")),
    "circle, a group for each channel": ((6, 6, (3,)), (8,), dict(groups=6, padding="periodic")),
    "plane, a group for each channel": ((5, 5, (3, 2)), (6, 7), dict(groups=5, padding=("periodic", "same"))),
    "space, a group for each channel": (
        (3, 3, (3, 1, 2)),
        (4, 3, 5),
        dict(groups=3, padding=("same", "valid", "periodic")),
    ),
    "circle as long as the window": ((1, 2, (5,)), (5,), dict(padding="periodic")),
    "window wider than the line": ((2, 2, (9,)), (3,), {}),
    "plane": ((2, 4, (3, 3)), (6, 9), {}),
    "plane, stride, groups": ((4, 4, (2, 5)), (7, 12), dict(stride=3, groups=2)),
    "torus, stride": ((2, 3, (3, 2)), (6, 12), dict(stride=2, padding="periodic")),
    "points": ((3, 5, (1, 1)), (4, 3), {}),
    "space, stride, groups": ((4, 2, (3, 2, 3)), (4, 4, 6), dict(stride=2, groups=2, padding="periodic")),
}
WAYS = {"all at once": 1 << 19, "in pieces": 60}  # elements that are gathered at once


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    monkeypatch.setitem(convolution.GATHERED, "cpu", WAYS[request.param])


def made(name, dtype="float64", **more):
    sizes, space, options = CASES[name]
    layer = nn.Conv(*sizes, **options)
    stage = nn.Stage([layer], dtype=dtype, **more)
    for array in stage.parameters.values():
        array += 0.3 * RANDOM.standard_normal(array.shape)
    stage.refresh()
    return stage, RANDOM.standard_normal((2, *space, sizes[0]))


def dense(layer, x, dy=None, sign=lambda x: x):
    """(y, dx, gradient of the weight, that of the bias) by sums over points and windows; of sizes with sign=abs."""
    weight, x = sign(np.asarray(layer.weight, np.float64)), sign(x)
    width, space, step = weight.shape[1:-1], x.shape[1:-1], layer.stride
    sizes = [
        (n - k) // step + 1 if kind == "valid" else math.ceil(n / step)
        for n, k, kind in zip(space, width, layer.padding)
    ]
    before = [0 if kind == "valid" else (k - 1) // 2 for k, kind in zip(width, layer.padding)]
    outputs, inputs = len(weight) // layer.groups, weight.shape[-1]
    y = np.zeros((len(x), *sizes, len(weight)))
    dy = sign(RANDOM.standard_normal(y.shape) if dy is None else dy)
    dx, dweight = np.zeros(x.shape), np.zeros(weight.shape)
    for o in np.ndindex(*sizes):
        for k in np.ndindex(*width):
            i = [step * a + b - c for a, b, c in zip(o, k, before)]
            i = [a % n if kind == "periodic" else a for a, n, kind in zip(i, space, layer.padding)]
            if not all(0 <= a < n for a, n in zip(i, space)):
                continue
            for group in range(layer.groups):
                there = slice(None), *o, slice(group * outputs, (group + 1) * outputs)
                here = slice(None), *i, slice(group * inputs, (group + 1) * inputs)
                part = there[-1], *k
                y[there] += x[here] @ weight[part].T
                dx[here] += dy[there] @ weight[part]
                dweight[part] += dy[there].T @ x[here]
    return y + (0 if layer.bias is None else sign(np.asarray(layer.bias, np.float64))), dx, dweight, dy


@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients_are_sums_over_all_windows(way, name):
    stage, x = made(name)
    layer = stage.layers[0]
    y, saved = stage.forward(x)
    dy = RANDOM.standard_normal(y.shape)
    dx = stage.backward(dy, saved)
    expected, sizes = dense(layer, x, dy), dense(layer, x, dy, np.abs)
    terms = math.prod(layer.width) * layer.inputs + 1
    for found, right, size, what in zip((y, dx), expected, sizes, ("output", "input")):
        assert found.dtype == x.dtype
        close(found, right, terms + layer.outputs, size, what=what)
    close(stage.gradients["0.weight"], expected[2], y[..., 0].size, sizes[2], what="weight")
    if layer.bias is not None:
        points = tuple(range(dy.ndim - 1))
        close(stage.gradients["0.bias"], expected[3].sum(points), y[..., 0].size, sizes[3].sum(points), what="bias")


@pytest.mark.parametrize("name", ["plane", "space, stride, groups"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves_are_summed_in_float32_and_rounded_once(name, dtype):
    stage, x = made(name, dtype)
    x = x.astype(arrays.dtype(dtype))
    y, saved = stage.forward(x)
    dy = RANDOM.standard_normal(y.shape).astype(y.dtype)
    dx = stage.backward(dy, saved)
    wide = [array.astype(np.float64) for array in (x, dy)]
    for found, right, size in zip((y, dx), dense(stage.layers[0], *wide), dense(stage.layers[0], *wide, np.abs)):
        assert found.dtype == x.dtype
        close(found, right, 100, size, dtype=np.float32)
    assert stage.gradients["0.weight"].dtype == np.float32


def test_a_point_that_is_no_number_is_seen_by_its_windows_alone(way):
    stage, x = made("plane")
    x[1, 5, 8] = np.nan  # at the end of a line, next to the one that follows
    y, _ = stage.forward(x)
    seen = np.zeros(y.shape, bool)
    seen[1, 4:, 7:] = True
    np.testing.assert_array_equal(np.isfinite(y), ~seen)


def test_weights_start_with_the_spread_that_keeps_the_size_of_a_field():
    layer = nn.Conv(16, 64, (3, 3), groups=2, gain=2.0)
    stage = nn.Stage([layer], dtype="float64")
    weight = stage.parameters["0.weight"]
    assert weight.shape == (64, 3, 3, 8) and stage.parameters["0.bias"].shape == (64,)
    within(weight.std(), 2 / math.sqrt(3 * 3 * 8), 5 * weight.std() / math.sqrt(2 * weight.size))  # 5 standard errors
    assert not stage.parameters["0.bias"].any() and not layer.declared["bias"].decay


def test_what_is_frozen_has_no_gradient():
    for frozen, trained in (("*.weight", "0.bias"), ("*.bias", "0.weight")):
        stage = nn.Stage([nn.Conv(2, 3, (3, 3))], dtype="float64", frozen=[frozen])
        y, saved = stage.forward(RANDOM.standard_normal((2, 4, 5, 2)))
        stage.backward(np.ones_like(y), saved)
        assert list(stage.gradients) == [trained] and stage.gradients[trained].any()


def test_arrays_that_are_not_contiguous_give_the_same():
    stage, x = made("plane")
    dy = RANDOM.standard_normal((2, 6, 9, 4))
    expected, saved = stage.forward(x)
    dx = stage.backward(dy, saved)
    layer = stage.layers[0]
    y, saved = layer.forward(np.asfortranarray(x))
    np.testing.assert_array_equal(y, expected)
    np.testing.assert_array_equal(layer.backward_input(np.asfortranarray(dy), saved)[0], dx)


@pytest.mark.parametrize(
    "arguments, options, match",
    [
        ((4, 6, (3,)), dict(groups=4), "groups must divide the channels"),
        ((4, 6, (3, 0)), {}, r"width\[1\] must be a positive integer"),
        ((4, 6, 3), {}, "width must have a size for each axis"),
        ((4, 6, (3,)), dict(stride=0), "stride must be a positive integer"),
        ((4, 6, (3,)), dict(padding="reflect"), "unknown padding"),
    ],
)
def test_a_wrong_layer_is_refused(arguments, options, match):
    with pytest.raises(ArgumentError, match=match):
        nn.Conv(*arguments, **options)


@pytest.mark.parametrize(
    "options, shape, match",
    [
        ({}, (2, 8, 4), "not a field"),
        ({}, (2, 0, 8, 4), "an empty one"),
        ({}, (2, 8, 8, 5), "last axis of the input"),
        (dict(padding="valid"), (2, 8, 2, 4), "does not fit the field"),
        (dict(padding=("same", "periodic"), stride=2), (2, 8, 7, 4), "does not fit the field"),
    ],
)
def test_a_field_that_does_not_fit_is_refused_by_name(options, shape, match):
    stage = nn.Stage([nn.Conv(4, 3, (3, 3), **options)], first=5)
    with pytest.raises(ArgumentError, match=match) as caught:
        stage.forward(np.zeros(shape, np.float32))
    assert "layer 5 (Conv)" in str(caught.value) and str(shape) in caught.value.found
