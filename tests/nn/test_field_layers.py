"""Patches and spectral convolution against dense numpy in float64, and what they refuse."""

import math

import numpy as np
import pytest
from support.gradcheck import check_stage
from support.tolerance import close, largest, within

from mpipipe import arrays, nn
from mpipipe.errors import ArgumentError

RANDOM = np.random.default_rng(4)


def made(layer, dtype="float64"):
    stage = nn.Stage([layer], dtype=dtype)
    for array in stage.parameters.values():
        array += 0.3 * RANDOM.standard_normal(array.shape)
    stage.refresh()
    return stage


def boxes(x, factor):
    """x with two axes for each of space, boxes and points in a box, and the axes of the latter."""
    shape = [n for pair in ((points // size, size) for points, size in zip(x.shape[1:-1], factor)) for n in pair]
    return x.reshape(len(x), *shape, x.shape[-1]), tuple(range(2, 2 + 2 * len(factor), 2))


def patches(*size):
    def dense(x, _):
        parts, within_box = boxes(x, size)
        of_boxes = tuple(axis - 1 for axis in within_box)
        parts = parts.transpose(0, *of_boxes, *within_box, parts.ndim - 1)
        return parts.reshape(len(x), -1, math.prod(size) * x.shape[-1])

    return dense


def spectral(*modes):
    def dense(x, p):
        axes, space = tuple(range(1, x.ndim - 1)), x.shape[1:-1]
        low, weight = np.fft.rfftn(x, axes=axes), p["0.weight"][..., 0] + 1j * p["0.weight"][..., 1]
        high = np.zeros((*low.shape[:-1], weight.shape[-1]), complex)
        for place in np.ndindex(weight.shape[:-2]):
            at = (*(k if k < m else k - 2 * m for k, m in zip(place[:-1], modes)), place[-1])
            high[(slice(None), *at)] = low[(slice(None), *at)] @ weight[place]
        return np.fft.irfftn(high, s=space, axes=axes)

    return dense


LAYERS = {  # layer, shape of x, formula
    "Patches, 1-D": (lambda: nn.Patches((3,), (2,)), (2, 6, 2), patches(3)),
    "Patches, 2-D": (lambda: nn.Patches((2, 3), (3, 2)), (2, 6, 6, 2), patches(2, 3)),
    "Patches, 3-D": (lambda: nn.Patches((1, 2, 3), (2, 2, 1)), (2, 2, 4, 3, 2), patches(1, 2, 3)),
    "SpectralConv, 1-D": (lambda: nn.SpectralConv(2, 3, (3,)), (2, 7, 2), spectral(3)),
    "SpectralConv, all frequencies": (lambda: nn.SpectralConv(2, 3, (4,)), (2, 6, 2), spectral(4)),
    "SpectralConv, 2-D": (lambda: nn.SpectralConv(2, 3, (2, 3)), (2, 6, 8, 2), spectral(2, 3)),
    "SpectralConv, 2-D, all frequencies": (lambda: nn.SpectralConv(3, 2, (2, 4)), (1, 4, 7, 3), spectral(2, 4)),
    "SpectralConv, 3-D": (lambda: nn.SpectralConv(2, 1, (2, 1, 3)), (1, 4, 5, 6, 2), spectral(2, 1, 3)),
}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_its_formula(name, dtype):
    make, shape, dense = LAYERS[name]
    stage, x = made(make(), dtype), RANDOM.standard_normal(shape).astype(dtype)
    p = {key: array.astype(np.float64) for key, array in stage.parameters.items()}
    expected = dense(x.astype(np.float64), p)
    y, _ = stage.forward(x)
    assert y.dtype == dtype
    close(y, expected, 3 * x[0].size + 8, largest(x) * (1 + largest(*p.values(), 1)) * (4 if p else 1))


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_agree_with_finite_differences(name):
    make, shape, _ = LAYERS[name]
    check_stage(made(make()), RANDOM.standard_normal(shape))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", [name for name in LAYERS if "1-D" not in name and "all" not in name])
def test_halves_are_near_float64(name, dtype):
    """Values are summed in float32, so that the largest error is that of rounding parameters, x and y."""
    make, shape, dense = LAYERS[name]
    stage = made(make(), dtype)
    x = RANDOM.standard_normal(shape).astype(arrays.dtype(dtype))
    exact = nn.Stage([make()], dtype="float64")
    for key, array in stage.compute.items():
        exact.parameters[key][...] = array.astype(np.float64)
    y, saved = stage.forward(x)
    dy = RANDOM.standard_normal(y.shape).astype(y.dtype)
    dx = stage.backward(dy, saved)
    right, kept = exact.forward(x.astype(np.float64))
    close(right, dense(x.astype(np.float64), dict(exact.parameters)), 10_000, largest(right))
    dx_right = exact.backward(dy.astype(np.float64), kept)
    for found, expected in ((y, right), (dx, dx_right)):
        assert found.dtype == x.dtype
        close(found, expected, 4, largest(expected), dtype=x.dtype)
    for key, gradient in stage.gradients.items():
        assert gradient.dtype == np.float32
        close(gradient, exact.gradients[key], 8, largest(exact.gradients[key]), dtype=x.dtype)


def test_a_sequence_of_patches_becomes_the_field_again():
    for size, grid in (((3,), (2,)), ((2, 3), (3, 2)), ((1, 2, 3), (2, 2, 1))):
        space = [points * count for points, count in zip(size, grid)]
        x = RANDOM.standard_normal((2, *space, 3))
        sequence, _ = made(nn.Patches(size, grid)).forward(x)
        back = made(nn.Patches(size, grid, back=True))
        np.testing.assert_array_equal(back.forward(sequence)[0], x)
        check_stage(back, sequence)


def test_spectral_weights_start_with_the_spread_that_keeps_the_size_of_a_frequency():
    weight = nn.Stage([nn.SpectralConv(8, 16, (6, 6))], dtype="float64").parameters["0.weight"]
    assert weight.shape == (12, 6, 8, 16, 2)
    within(weight.std(), 1 / 4, 5 * weight.std() / math.sqrt(2 * weight.size))


REFUSED = {
    "a list": (lambda: nn.Patches([2], (2,)), None, "size must have a size for each axis"),
    "a patch of other rank": (lambda: nn.Patches((2,), (2, 2)), None, "as many axes"),
    "no modes": (lambda: nn.SpectralConv(2, 2, (0,)), None, r"modes\[0\] must be"),
    "space": (lambda: nn.Patches((2, 2), (2, 2)), (2, 4, 6, 1), "wrong shape"),
    "points of a patch": (lambda: nn.Patches((2, 2), (2, 2), back=True), (2, 4, 6), "wrong shape"),
    "rank of a spectrum": (lambda: nn.SpectralConv(2, 2, (2, 2)), (2, 8, 2), "not a field"),
    "frequencies of the last axis": (lambda: nn.SpectralConv(2, 2, (3, 4)), (2, 6, 5, 2), "too few points"),
    "frequencies": (lambda: nn.SpectralConv(2, 2, (3, 3)), (2, 5, 8, 2), "too few points"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_mistakes_are_refused_by_name(name):
    make, shape, match = REFUSED[name]
    with pytest.raises(ArgumentError, match=match) as caught:
        stage = nn.Stage([make()], first=3)
        stage.forward(np.zeros(shape, np.float32))
    assert shape is None or "layer 3 (" in str(caught.value)
