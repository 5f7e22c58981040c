"""Layers without attention against their formulas in float64, on rows and on fields, and what they refuse."""

import math

import numpy as np
import pytest
from support.gradcheck import check_stage
from support.tolerance import close, largest

from mpipipe import arrays, nn
from mpipipe.errors import ArgumentError
from mpipipe.nn.layers import convolution
from mpipipe.planning.memory import array_bytes, new_bytes

RANDOM = np.random.default_rng(1)
DIM = 6


# -- formulas, of the input and of the parameters by name --------------------------------------------------------------


def gelu(x, _=None):
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


def patches(*size):
    def dense(x, _):
        shape = [n for points, extent in zip(x.shape[1:-1], size) for n in (points // extent, extent)]
        parts, axes = x.reshape(len(x), *shape, x.shape[-1]), range(1, 1 + 2 * len(size))
        parts = parts.transpose(0, *axes[::2], *axes[1::2], parts.ndim - 1)
        return parts.reshape(len(x), -1, math.prod(size) * x.shape[-1])

    return dense


def spectral(*modes):
    def dense(x, p):
        axes, space = tuple(range(1, x.ndim - 1)), x.shape[1:-1]
        low, weight = np.fft.rfftn(x, axes=axes), p["weight"][..., 0] + 1j * p["weight"][..., 1]
        high = np.zeros((*low.shape[:-1], weight.shape[-1]), complex)
        for place in np.ndindex(weight.shape[:-2]):
            at = (*(k if k < m else k - 2 * m for k, m in zip(place[:-1], modes)), place[-1])
            high[(slice(None), *at)] = low[(slice(None), *at)] @ weight[place]
        return np.fft.irfftn(high, s=space, axes=axes)

    return dense


def convolved(stride=1, groups=1, padding="same"):
    """Sums over points and windows."""

    def dense(x, p):
        weight, space = p["weight"], x.shape[1:-1]
        width, kinds = weight.shape[1:-1], (padding,) * len(space) if isinstance(padding, str) else padding
        counts = zip(space, width, kinds)
        sizes = [(n - k) // stride + 1 if kind == "valid" else math.ceil(n / stride) for n, k, kind in counts]
        before = [0 if kind == "valid" else (k - 1) // 2 for k, kind in zip(width, kinds)]
        outputs, inputs = len(weight) // groups, weight.shape[-1]
        y = np.zeros((len(x), *sizes, len(weight)))
        for o, k in ((o, k) for o in np.ndindex(*sizes) for k in np.ndindex(*width)):
            i = [stride * a + b - c for a, b, c in zip(o, k, before)]
            i = [a % n if kind == "periodic" else a for a, n, kind in zip(i, space, kinds)]
            for group in range(groups if all(0 <= a < n for a, n in zip(i, space)) else 0):
                of_y, of_x = (slice(group * size, (group + 1) * size) for size in (outputs, inputs))
                y[(slice(None), *o, of_y)] += x[(slice(None), *i, of_x)] @ weight[(of_y, *k)].T
        return y + p.get("bias", 0)

    return dense


def rows_cost(x, p):
    """(operations, size of terms): of products with all matrices, and of what is divided by the root of its row."""
    root = np.sqrt((x * x).mean(-1).min() + 0.01) if "gain" in p and x.size else 1
    sizes = [1 + np.abs(array).sum(-1).max() for array in p.values()]
    return 40, np.prod([(1 + largest(x) / root) ** 2, *sizes])


def field_cost(x, p):
    return 3 * x[0].size + 8, largest(x) * (1 + largest(*p.values(), 1)) * (4 if p else 1)


def conv(inputs, outputs, width, space, **options):
    dense = convolved(**options)

    def cost(x, p):
        size = dense(np.abs(x), {name: np.abs(array) for name, array in p.items()})
        return math.prod(width) * inputs + 1 + outputs, size

    return lambda: nn.Conv(inputs, outputs, width, **options), (2, *space, inputs), dense, cost


ROWS = {  # layer, formula
    "Linear": (lambda: nn.Linear(DIM, 7), linear),
    "Linear without bias": (lambda: nn.Linear(DIM, 7, bias=False), linear),
    "Gelu": (nn.Gelu, gelu),
    "FeedForward": (lambda: nn.FeedForward(DIM, 10), feed_forward),
    "FeedForward without biases": (lambda: nn.FeedForward(DIM, 10, bias=False), feed_forward),
    "SwiGLU": (lambda: nn.SwiGLU(DIM, 10), swiglu),
    "SwiGLU with biases": (lambda: nn.SwiGLU(DIM, 10, bias=True), swiglu),
    "RMSNorm": (lambda: nn.RMSNorm(DIM, eps=0.01), rms_norm),
    "LayerNorm": (lambda: nn.LayerNorm(DIM, eps=0.01), layer_norm),
}
FIELDS = {  # layer, shape of x, formula
    "Patches, 1-D": (lambda: nn.Patches((3,), (2,)), (2, 6, 2), patches(3)),
    "Patches, 2-D": (lambda: nn.Patches((2, 3), (3, 2)), (2, 6, 6, 2), patches(2, 3)),
    "Patches, 3-D": (lambda: nn.Patches((1, 2, 3), (2, 2, 1)), (2, 2, 4, 3, 2), patches(1, 2, 3)),
    "SpectralConv, 1-D": (lambda: nn.SpectralConv(2, 3, (3,)), (2, 7, 2), spectral(3)),
    "SpectralConv, all frequencies": (lambda: nn.SpectralConv(2, 3, (4,)), (2, 6, 2), spectral(4)),
    "SpectralConv, 2-D": (lambda: nn.SpectralConv(2, 3, (2, 3)), (2, 6, 8, 2), spectral(2, 3)),
    "SpectralConv, 2-D, all frequencies": (lambda: nn.SpectralConv(3, 2, (2, 4)), (1, 4, 7, 3), spectral(2, 4)),
    "SpectralConv, 3-D": (lambda: nn.SpectralConv(2, 1, (2, 1, 3)), (1, 4, 5, 6, 2), spectral(2, 1, 3)),
}
CONVS = {
    "line, even width, stride, groups": conv(4, 6, (4,), (13,), stride=2, groups=2),
    "line, stride beyond the width": conv(2, 3, (1,), (7,), stride=3, padding="valid"),
    "circle, a group for each channel": conv(6, 6, (3,), (8,), groups=6, padding="periodic"),
    "plane, a group for each channel": conv(5, 5, (3, 2), (6, 7), groups=5, padding=("periodic", "same")),
    "space, a group for each channel": conv(
        3, 3, (3, 1, 2), (4, 3, 5), groups=3, padding=("same", "valid", "periodic")
    ),
    "circle as long as the window": conv(1, 2, (5,), (5,), padding="periodic"),
    "window wider than the line": conv(2, 2, (9,), (3,)),
    "plane": conv(2, 4, (3, 3), (6, 9)),
    "plane, stride, groups": conv(4, 4, (2, 5), (7, 12), stride=3, groups=2),
    "torus, stride": conv(2, 3, (3, 2), (6, 12), stride=2, padding="periodic"),
    "points": conv(3, 5, (1, 1), (4, 3)),
    "space, stride, groups": conv(4, 2, (3, 2, 3), (4, 4, 6), stride=2, groups=2, padding="periodic"),
}
LAYERS = {name: (make, (2, 3, DIM), dense, rows_cost) for name, (make, dense) in ROWS.items()}
LAYERS |= {name: (*entry, field_cost) for name, entry in FIELDS.items()} | CONVS
WAYS = {"all at once": 1 << 19, "in pieces": 60}  # elements of windows that a convolution gathers at once
EACH = [pytest.param(name, "all at once", id=name) for name in LAYERS]
EACH += [pytest.param(name, "in pieces", id=f"{name}, in pieces") for name in CONVS]
each_layer = pytest.mark.parametrize("name, way", EACH, indirect=["way"])


@pytest.fixture
def way(request, monkeypatch):
    monkeypatch.setitem(convolution.GATHERED, "cpu", WAYS[request.param])


def made(layer, dtype="float64"):
    """A stage of one layer whose biases and gains are not their neutral elements."""
    stage = nn.Stage([layer], dtype=dtype)
    for array in stage.parameters.values():
        array += 0.3 * RANDOM.standard_normal(array.shape)
    stage.refresh()
    return stage


def check_formula(name, shape, dtype):
    make, _, dense, cost = LAYERS[name]
    stage, x = made(make(), dtype), (RANDOM.standard_normal(shape) * 3 + 1).astype(dtype)
    p = {key[2:]: array.astype(np.float64) for key, array in stage.parameters.items()}
    wide = x.astype(np.float64)
    expected = dense(wide, p)
    y, _ = stage.forward(x)
    assert y.dtype == dtype and y.shape == expected.shape
    close(y, expected, *cost(wide, p))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@each_layer
def test_a_layer_is_its_formula(way, name, dtype):
    check_formula(name, LAYERS[name][1], dtype)


@pytest.mark.parametrize("shape", [(DIM,), (2, 1, 3, DIM), (0, DIM)])
@pytest.mark.parametrize("name", ROWS)
def test_the_formula_is_over_the_last_axis(name, shape):
    check_formula(name, shape, "float64")


@each_layer
def test_gradients_agree_with_finite_differences(way, name):
    """Also of inputs that are not contiguous."""
    make, shape, *_ = LAYERS[name]
    check_stage(made(make()), np.asfortranarray(RANDOM.standard_normal(shape)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", [name for name in LAYERS if "1-D" not in name and "all" not in name])
def test_halves_are_near_float64(name, dtype):
    """Values are summed in float32, so that the largest error is that of rounding parameters, x and y."""
    make, shape, *_ = LAYERS[name]
    stage = made(make(), dtype)
    x = RANDOM.standard_normal(shape).astype(arrays.dtype(dtype))
    exact = nn.Stage([make()], dtype="float64")
    for key, array in stage.compute.items():
        exact.parameters[key][...] = array.astype(np.float64)
    y, saved = stage.forward(x)
    dy = RANDOM.standard_normal(y.shape).astype(y.dtype)
    dx = stage.backward(dy, saved)
    right, kept = exact.forward(x.astype(np.float64))
    dx_right = exact.backward(dy.astype(np.float64), kept)
    for found, expected in ((y, right), (dx, dx_right)):
        assert found.dtype == x.dtype
        close(found, expected, 4, largest(expected), dtype=x.dtype)
    for key, gradient in stage.gradients.items():
        assert gradient.dtype == np.float32
        close(gradient, exact.gradients[key], 8, largest(exact.gradients[key]), dtype=x.dtype)


KEPT = {
    "Linear": 0,
    "Gelu": 0,
    "FeedForward": 10,
    "SwiGLU": 20,
    "RMSNorm": 1,
    "LayerNorm": 1,
    "plane": 0,
    "torus, stride": 0,
}


@pytest.mark.parametrize("name, numbers", KEPT.items())
def test_the_input_and_so_many_numbers_a_row_are_all_that_is_kept(name, numbers):
    make, shape, *_ = LAYERS[name]
    stage, x = made(make()), RANDOM.standard_normal(shape)
    _, saved = stage.forward(x)
    assert new_bytes([saved], {*array_bytes((stage.buffers.all, x))}) == [numbers * x.nbytes // shape[-1]]


# -- rows --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [nn.Gelu, lambda: nn.SwiGLU(4, 4), lambda: nn.RMSNorm(4), lambda: nn.LayerNorm(4)])
def test_huge_numbers_and_rows_of_zeros_give_no_warning_and_no_nan(make):
    stage = nn.Stage([make()], dtype="float32")
    x = np.array([[1e4, -1e4, 3e3, -3e3], [0, 0, 0, 0]], np.float32)
    with np.errstate(all="raise", under="ignore"):
        y, saved = stage.forward(x)
        dx = stage.backward(np.ones_like(y), saved)
    assert np.isfinite(y).all() and np.isfinite(dx).all()


def test_what_float16_cannot_hold_becomes_infinite_without_a_warning(recwarn):
    stage = nn.Stage([nn.Linear(64, 64, bias=False), nn.RMSNorm(64)], dtype="float16")
    _, saved = stage.forward(np.full((2, 64), 60000, np.float16))
    stage.backward(np.full((2, 64), 60000, np.float16), saved)
    assert not recwarn.list


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


# -- fields ------------------------------------------------------------------------------------------------------------


def test_a_sequence_of_patches_becomes_the_field_again():
    for size, grid in (((3,), (2,)), ((2, 3), (3, 2)), ((1, 2, 3), (2, 2, 1))):
        space = [points * count for points, count in zip(size, grid)]
        x = RANDOM.standard_normal((2, *space, 3))
        sequence, _ = made(nn.Patches(size, grid)).forward(x)
        back = made(nn.Patches(size, grid, back=True))
        np.testing.assert_array_equal(back.forward(sequence)[0], x)
        check_stage(back, sequence)


@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_a_point_that_is_no_number_is_seen_by_its_windows_alone(way):
    make, shape, *_ = LAYERS["plane"]
    x = RANDOM.standard_normal(shape)
    x[1, 5, 8] = np.nan  # at the end of a line, next to the one that follows
    y, _ = made(make()).forward(x)
    seen = np.zeros(y.shape, bool)
    seen[1, 4:, 7:] = True
    np.testing.assert_array_equal(np.isfinite(y), ~seen)


def test_what_is_frozen_in_a_convolution_has_no_gradient():
    for frozen, trained in (("*.weight", "0.bias"), ("*.bias", "0.weight")):
        stage = nn.Stage([nn.Conv(2, 3, (3, 3))], dtype="float64", frozen=[frozen])
        y, saved = stage.forward(RANDOM.standard_normal((2, 4, 5, 2)))
        stage.backward(np.ones_like(y), saved)
        assert list(stage.gradients) == [trained] and stage.gradients[trained].any()


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in ROWS if name != "Gelu"])
def test_a_wrong_input_size_is_named(name):
    stage = nn.Stage([ROWS[name][0]()], dtype="float64", first=4)
    for shape in [(2, 5), (2, 3, 4), (10,), ()]:
        with pytest.raises(ArgumentError, match=rf"layer 4 \({name.split()[0]}\)") as caught:
            stage.forward(np.zeros(shape))
        assert caught.value.expected == "(..., 6)"


def plane(**options):
    return lambda: nn.Conv(4, 3, (3, 3), **options)


REFUSED = {
    "no inputs": (lambda: nn.Linear(0, 3), None, "positive integer"),
    "outputs below zero": (lambda: nn.Linear(3, -1), None, "positive integer"),
    "a size that is no integer": (lambda: nn.Linear(2.0, 3), None, "positive integer"),
    "no width": (lambda: nn.FeedForward(4, 0), None, "positive integer"),
    "a list": (lambda: nn.Patches([2], (2,)), None, "size must have a size for each axis"),
    "no modes": (lambda: nn.SpectralConv(2, 2, (0,)), None, r"modes\[0\] must be"),
    "groups": (lambda: nn.Conv(4, 6, (3,), groups=4), None, "groups must divide the channels"),
    "no window": (lambda: nn.Conv(4, 6, (3, 0)), None, r"width\[1\] must be a positive integer"),
    "a window that is a number": (lambda: nn.Conv(4, 6, 3), None, "width must have a size for each axis"),
    "no stride": (lambda: nn.Conv(4, 6, (3,), stride=0), None, "stride must be a positive integer"),
    "padding": (lambda: nn.Conv(4, 6, (3,), padding="reflect"), None, "unknown padding"),
    "space": (lambda: nn.Patches((2, 2), (2, 2)), (2, 4, 6, 1), "wrong shape"),
    "points of a patch": (lambda: nn.Patches((2, 2), (2, 2), back=True), (2, 4, 6), "wrong shape"),
    "rank of a spectrum": (lambda: nn.SpectralConv(2, 2, (2, 2)), (2, 8, 2), "not a field"),
    "frequencies of the last axis": (lambda: nn.SpectralConv(2, 2, (3, 4)), (2, 6, 5, 2), "too few points"),
    "frequencies": (lambda: nn.SpectralConv(2, 2, (3, 3)), (2, 5, 8, 2), "too few points"),
    "rank of a field": (plane(), (2, 8, 4), "not a field"),
    "an empty field": (plane(), (2, 0, 8, 4), "an empty one"),
    "channels": (plane(), (2, 8, 8, 5), "last axis of the input"),
    "window": (plane(padding="valid"), (2, 8, 2, 4), "does not fit the field"),
    "stride": (plane(padding=("same", "periodic"), stride=2), (2, 8, 7, 4), "does not fit the field"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_mistakes_are_refused_by_name(name):
    make, shape, match = REFUSED[name]
    with pytest.raises(ArgumentError, match=match) as caught:
        nn.Stage([make()], first=3).forward(np.zeros(shape, np.float32))
    if shape is not None:
        assert "layer 3 (" in str(caught.value)
        assert any(str(part) in caught.value.found for part in (shape, shape[1:-1]))


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
