"""The kernels of the host, whole and in pieces, of PyTorch, and of a GPU, against formulas in float64 numpy."""

import math

import ml_dtypes
import numpy as np
import pytest
from support.pieces import SMALL, new_pool, set_sizes
from support.tolerance import close, eps, largest, rounding

from mpipipe import arrays, nn
from mpipipe.errors import ArgumentError
from mpipipe.nn.random import random_bits, random_key
from mpipipe.nn.rope import angles

KINDS = ("float32", "float64", "float16", "bfloat16")


class Place:
    """Where kernels compute, and arrays that lie there."""

    def __init__(self, device, library=""):
        self.device, self.library = device, library

    def of(self, kind):
        return nn.kernels.of(self.device, kind)

    def put(self, values):
        return arrays.upload(np.asarray(values)) if self.device == "cuda" else np.array(values)

    def array(self, values, kind, skew=0):
        """(`values` in dtype `kind`, what they are in float64); they start `skew` elements off alignment."""
        host = np.asarray(values).astype(kind)
        room = np.zeros(host.size + skew, kind)
        room[skew:] = host.reshape(-1)
        return self.put(room)[skew:].reshape(host.shape), host.astype(np.float64)

    def sums(self, values, kind):
        """As `array`, in the accumulator dtype."""
        return self.array(values, arrays.accumulator(kind))

    def empty(self, shape, kind):
        return arrays.empty(shape, kind, self.device)


GPU, TORCH = pytest.param("cuda", marks=pytest.mark.gpu), pytest.param("torch", marks=pytest.mark.judges)
only_gpu = pytest.mark.parametrize("on", [GPU], indirect=True)


@pytest.fixture(params=["host", "pieces", TORCH, GPU])
def on(request, monkeypatch):
    if request.param == "cuda":
        request.getfixturevalue("gpu")
        return Place("cuda")
    if request.param == "pieces":
        set_sizes(monkeypatch, SMALL)
        new_pool(monkeypatch, 2)
    if request.param == "torch":
        pytest.importorskip("torch")
        monkeypatch.setenv(nn.kernels.VARIABLE, "torch")
    return Place("cpu", request.param)


@pytest.fixture(params=KINDS)
def kind(request):
    return arrays.dtype(request.param)


@pytest.fixture
def kernels(on, kind):
    return on.of(np.dtype(kind))


@pytest.fixture
def draw():
    generator = np.random.default_rng(7)
    return lambda *shape: generator.standard_normal(shape)


def check(found, expected, kind, operations=4, size=None):
    """So many operations in the accumulator of `kind` on terms of this size, and one rounding to `kind`.

    Functions count as the units in the last place by which CUDA's may err: up to 2 for expf, 4 for tanhf, 1 for a root.
    """
    found = arrays.on_host(found)
    assert found.dtype == kind
    close(found, expected, operations, size, dtype=arrays.accumulator(kind))


def same_bits(first, second):
    return arrays.on_host(first).tobytes() == arrays.on_host(second).tobytes()


def number(value):
    """The value of a loss: a number of Python on the host, an array of float64 on a GPU."""
    value = value if isinstance(value, float) else arrays.on_host(value)
    assert np.shape(value) == () and np.asarray(value).dtype == np.float64
    return float(value)


# -- single elements --------------------------------------------------------------------------------------------------

ROOT = math.sqrt(2 / math.pi)


def gelu(x):
    return x * 0.5 * (1 + np.tanh(ROOT * (x + 0.044715 * x**3)))


def gelu_slope(x):
    t = np.tanh(ROOT * (x + 0.044715 * x**3))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * ROOT * (1 + 3 * 0.044715 * x * x)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize("size, skew", [(7, 0), (2091, 0), (2091, 1)])
def test_single_elements(on, kernels, kind, draw, size, skew):
    x, hx = on.array(draw(size), kind, skew)
    y, hy = on.array(draw(size), kind, skew)
    check(kernels.add(x, y), hx + hy, kind)
    check(kernels.scale(x, 0.3), hx * 0.3, kind)
    check(kernels.gelu(x), gelu(hx), kind, 20, 1 + np.abs(hx))
    check(kernels.gelu_backward(y, x), hy * gelu_slope(hx), kind, 20, np.abs(hy) * (1 + np.abs(hx)))
    grad, hgrad = on.sums(draw(size), kind)
    part, hpart = on.sums(draw(size), kind)
    kernels.accumulate(grad, part)
    check(grad, hgrad + hpart, grad.dtype)
    assert kernels.scale(x, 2.0, x) is x
    check(x, hx * 2, kind)


@pytest.mark.parametrize("kind", ["complex64", "complex128"])
def test_complex_numbers_are_scaled_added_and_compared_as_pairs(on, kernels, kind, draw):
    x, y = ((draw(5, 7, 2) @ [1, 1j]).astype(kind) for _ in range(2))
    here, there = on.put(x), on.put(y)
    value, gradient = nn.mean_squared_error(here, y, factor=3.0)
    kernels.accumulate(here, there)
    scaled = kernels.scale(here, 0.5)
    enough = dict(rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(number(value), np.mean(abs(x - y) ** 2), rtol=1e-5)
    for found, expected in ((gradient, 6 * (x - y) / 35), (here, x + y), (scaled, (x + y) / 2)):
        assert found.dtype == x.dtype and found.shape == x.shape
        np.testing.assert_allclose(arrays.on_host(found), expected, **enough)


@only_gpu
def test_elements_beyond_one_grid_keep_their_places(on, monkeypatch):
    kernels = on.of(np.float32)
    monkeypatch.setattr(arrays.cuda, "MOST_BLOCKS", 2)
    x, hx = on.array(np.arange(5000.0), arrays.dtype("float32"))
    check(kernels.scale(x, 3.0), hx * 3, x.dtype)
    kernels.accumulate(x, arrays.copy(x))
    check(x, hx * 2, x.dtype)
    wide, narrow = on.array(np.arange(5000.0), arrays.dtype("float64"))[0], on.empty((5000,), x.dtype)
    kernels.copy(wide, narrow)
    check(narrow, hx, x.dtype)


@only_gpu
def test_activations_of_extreme_values(on, kernels, kind):
    top = 6e4 if kind.name == "float16" else 1e30
    values = np.array([0.0, -0.0, 1e4, -1e4, top, -top, 30, -30, 88, -88, -20, np.nan])
    x, hx = on.array(values, kind)
    ones, _ = on.array(np.ones(12), kind)
    with np.errstate(all="ignore"):
        expected, slope = np.where(np.abs(hx) > 50, np.maximum(hx, 0), gelu(hx)), np.where(hx > 50, 1, gelu_slope(hx))
        slope[np.abs(hx) > 50] = hx[np.abs(hx) > 50] > 0
        silu = np.where(hx < -1e3, 0, hx * sigmoid(hx))
    for found, wanted in ((kernels.gelu(x), expected), (kernels.gelu_backward(ones, x), slope)):
        found = arrays.on_host(found)
        assert np.isnan(found[-1]) and np.isfinite(found[:-1]).all()
        size = np.minimum(np.abs(hx), 50) + np.abs(wanted) + 1  # beyond 50 the tanh is one
        close(found[:-1], wanted[:-1], 20, size[:-1], dtype=arrays.accumulator(kind))
    both = on.put(np.stack([values, np.ones(12)], 1).astype(kind))
    inner = arrays.on_host(kernels.swiglu(both))
    assert np.isnan(inner[-1, 0])
    # a logistic below the smallest normal number is 0 on a GPU: CuPy compiles so, and fast quotients are so
    computed = arrays.accumulator(kind)
    size = np.abs(silu) + np.abs(hx) * float(ml_dtypes.finfo(computed).smallest_normal) / eps(computed)
    close(inner[:-1, 0], silu[:-1], 10, size[:-1], dtype=computed)
    dboth, _ = kernels.swiglu_backward(both, ones.reshape(12, 1))
    dboth = arrays.on_host(dboth).astype(np.float64)
    assert np.isnan(dboth[-1]).all() and np.isfinite(dboth[:-1]).all()


@pytest.mark.parametrize("rows, hidden, skew", [(5, 12, 0), (70, 40, 1), (0, 8, 0)])
def test_swiglu(on, kernels, kind, draw, rows, hidden, skew):
    both, h = on.array(draw(rows, 2 * hidden), kind, skew)
    d, hd = on.array(draw(rows, hidden), kind, skew)
    gate, up = h[:, :hidden], h[:, hidden:]
    s = sigmoid(gate)
    check(kernels.swiglu(both), gate * s * up, kind, 10)
    dboth, inner = kernels.swiglu_backward(both, d)
    expected = np.concatenate([hd * up * (s + gate * s * (1 - s)), hd * gate * s], 1)
    check(dboth, expected, kind, 10, np.abs(np.concatenate([hd * up, hd * gate], 1)))
    check(inner, gate * s * up, kind, 10)


@pytest.mark.parametrize("source", KINDS)
def test_a_copy_rounds_to_nearest_even(on, kernels, kind, draw, source):
    source = arrays.dtype(source)
    ties = [1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 65519, 65520, 1e-7, 2.0**-25, 0, -0.0]
    values = np.concatenate([ties, [np.inf, -np.inf, np.nan], draw(502) * 100])
    with np.errstate(over="ignore"):
        expected = values.astype(source).astype(kind)
    for here, there in ((0, 0), (0, 1), (1, 0)):
        with np.errstate(over="ignore"):
            x, _ = on.array(values, source, here)
        y = on.empty((values.size + there,), kind)[there:]
        kernels.copy(x, y)
        found = arrays.on_host(y)
        assert np.array_equal(found.astype(np.float64), expected.astype(np.float64), equal_nan=True)
        assert np.signbit(found.astype(np.float64)[9])


@only_gpu
def test_what_does_not_fit_is_refused(on, draw):
    kernels = on.of(np.float32)
    x, _ = on.array(draw(4, 6), arrays.dtype("float32"))
    half, _ = on.array(draw(4, 6), arrays.dtype("float16"))
    with pytest.raises(ArgumentError, match=r"kernels\.gelu takes C-contiguous"):
        kernels.gelu(x[:, :3])
    for wrong in (x[:2], half):
        with pytest.raises(ArgumentError, match=r"kernels\.add was given arrays that do not fit"):
            kernels.add(x, wrong)
        with pytest.raises(ArgumentError, match=r"kernels\.linear_backward_weight was given arrays that do not fit"):
            kernels.linear_backward_weight(x, wrong, arrays.zeros((6, 6), x.dtype, on.device))
    with pytest.raises(ArgumentError, match="axis 1 of the first as long as axis 0"):
        kernels.linear_backward_input(x, x)


# -- products ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows, inputs, outputs", [(5, 7, 3), (33, 16, 24), (9, 40, 72), (0, 4, 3), (4, 0, 3)])
def test_products(on, kernels, kind, draw, rows, inputs, outputs):
    x, hx = on.array(draw(rows, inputs), kind)
    w, hw = on.array(draw(outputs, inputs), kind)
    b, hb = on.array(draw(outputs), kind)
    dy, hdy = on.array(draw(rows, outputs), kind)
    grad, hgrad = on.sums(draw(outputs, inputs), kind)
    check(kernels.linear(x, w), hx @ hw.T, kind, inputs, np.abs(hx) @ np.abs(hw.T))
    # cuBLAS rounds a product of halves before it adds it to the bias, which lies in the result
    cublas = on.device == "cuda" and arrays.is_half(kind)
    early = rounding(kind, hx @ hw.T) / eps(arrays.accumulator(kind)) if cublas else 0
    check(kernels.linear(x, w, b), hx @ hw.T + hb, kind, inputs + 1, np.abs(hx) @ np.abs(hw.T) + np.abs(hb) + early)
    check(kernels.linear_backward_input(dy, w), hdy @ hw, kind, outputs, np.abs(hdy) @ np.abs(hw))
    kernels.linear_backward_weight(dy, x, grad)
    # PyTorch rounds a product of halves before it is added to the gradient
    early = rounding(kind, hdy.T @ hx) / eps(grad.dtype) if on.library == "torch" and arrays.is_half(kind) else 0
    check(grad, hgrad + hdy.T @ hx, grad.dtype, rows + 1, np.abs(hdy.T) @ np.abs(hx) + np.abs(hgrad) + early)


@pytest.mark.parametrize("shared", [None, "a", "b"])
@pytest.mark.parametrize("transpose_a, transpose_b, add", [(0, 0, False), (1, 0, True), (0, 1, False), (1, 1, True)])
def test_products_of_a_batch(on, kernels, kind, draw, transpose_a, transpose_b, add, shared):
    """On either side, with gaps between rows, and with one matrix for all problems."""
    count = {name: 1 if name == shared else 3 for name in "ab"}
    a, b, c = (draw(n, *rest).astype(kind) for n, *rest in ((count["a"], 4, 5), (count["b"], 5, 7), (3, 4, 7)))
    c = c.astype(arrays.accumulator(kind))
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    expected, size = wide_a @ wide_b + add * c, np.abs(wide_a) @ np.abs(wide_b) + np.abs(c)
    laid = [np.ascontiguousarray(x.swapaxes(1, 2)) if turn else x for x, turn in ((a, transpose_a), (b, transpose_b))]
    laid = [np.concatenate([x, x], 2) for x in laid]  # rows of twice the width
    result = on.put(c if add else np.full_like(c, np.nan))
    cut = [on.put(x)[..., : x.shape[2] // 2] for x in laid]
    kernels.products(*cut, result, transpose_a, transpose_b, add)
    close(arrays.on_host(result), expected, 6, size, dtype=c.dtype)


@pytest.mark.parametrize("rows, width, skew", [(300, 72, 0), (37, 9, 1), (0, 8, 0), (1100, 3, 0)])
def test_sum_rows(on, kernels, kind, draw, rows, width, skew):
    x, hx = on.array(draw(rows, width), kind, skew)
    grad, hgrad = on.sums(draw(width), kind)
    again = arrays.copy(grad)
    kernels.sum_rows(x, grad)
    check(grad, hgrad + hx.sum(0), grad.dtype, rows + 1, np.abs(hx).sum(0) + np.abs(hgrad))
    kernels.sum_rows(x, again)
    assert same_bits(grad, again)


# -- normalisation ----------------------------------------------------------------------------------------------------


def normalised(x, gain, bias, eps, centred):
    centre = x - x.mean(1, keepdims=True) * centred
    scale = 1 / np.sqrt((centre * centre).mean(1, keepdims=True) + eps)
    return gain * centre * scale + bias, scale[:, 0], centre * scale


def check_norm(on, kind, draw, rows, width, centred, skew=0):
    kernels = on.of(kind)
    x, hx = on.array(draw(rows, width) * 2 + 0.5, kind, skew)
    dy, hdy = on.array(draw(rows, width), kind, skew)
    gain, hgain = on.array(1 + draw(width) / 4, kind)
    bias, hbias = on.array(draw(width), kind)
    y, hscale, normal = normalised(hx, hgain, hbias * centred, 1e-5, centred)
    found, scale = kernels.norm(x, gain, bias if centred else None, 1e-5)
    terms = hscale[:, None] * (np.abs(hx) + np.abs(hx).mean(1, keepdims=True) * centred)  # of a normalised number
    check(found, y, kind, 2 * width + 8, np.abs(hgain) * terms + np.abs(hbias) * centred)
    check(scale, hscale, scale.dtype, 2 * width + 8, hscale * (1 + terms.max(1, initial=0)))
    product = hgain * hdy
    dx = hscale[:, None] * (
        product
        - normal * (product * normal).mean(1, keepdims=True)
        - product.mean(1, keepdims=True) * centred
    )  # fmt: skip
    results = kernels.norm_backward(dy, x, scale, gain, centred)
    size = np.abs(product) + terms * (np.abs(product) * terms).mean(1, keepdims=True)
    size = hscale[:, None] * (size + np.abs(product).mean(1, keepdims=True) * centred)
    check(results[0], dx, kind, 3 * width + 12, size)
    sums = [(hdy * normal).sum(0), hdy.sum(0)]
    for parts, total in zip(results[1:], sums):
        size = (np.abs(hdy) * (terms + 1)).sum(0)
        grad, hgrad = on.sums(draw(width), kind)
        kernels.add_parts(parts, grad)
        check(grad, hgrad + total, parts.dtype, rows + 2 * width + 9, size + np.abs(hgrad))
    more, _ = on.array(draw(rows, width), kind, skew)
    summed, *parts = kernels.norm_backward(dy, x, scale, gain, centred, more)
    assert same_bits(summed, kernels.add(more, results[0]))
    assert all(same_bits(a, b) for a, b in zip(results[1:], parts))
    again = kernels.norm_backward(dy, x, scale, gain, centred)
    assert len(results) == 2 + centred and all(same_bits(a, b) for a, b in zip(results, again))


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("rows, width, skew", [(9, 48, 0), (2, 136, 1), (0, 16, 0), (530, 8, 0)])
def test_norms(on, kernels, kind, draw, rows, width, skew, centred):
    check_norm(on, kind, draw, rows, width, centred, skew)


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize(
    "name, width", [*(("bfloat16", width) for width in (1023, 1100, 3000, 8200)), ("float64", 1027)]
)
def test_norms_of_long_rows(on, draw, name, width, centred):
    check_norm(on, arrays.dtype(name), draw, 3, width, centred)


# -- rotary positions -------------------------------------------------------------------------------------------------


def rotated(x, positions, base, back):
    dim = x.shape[-1]
    turned = np.asarray(positions)[:, None] * base ** (-np.arange(0, dim, 2) / dim)
    factors = np.exp((-1j if back else 1j) * turned)[:, None]
    pairs = (x[..., 0::2] + 1j * x[..., 1::2]) * factors
    return np.stack([pairs.real, pairs.imag], -1).reshape(x.shape)


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("dim", [2, 6, 16])
def test_rope(on, kernels, kind, draw, dim, back):
    positions = np.array([0, 1, 5, 1000, 77])
    table = kernels.rope_table(*angles(positions, dim, 1e4), kind)
    whole, host = on.array(draw(2, 5, 6, dim), kind)
    expected = rotated(host, positions, 1e4, back)
    target = on.empty(host.shape, kind)
    kernels.apply_rope(whole, table, target, back)
    check(target, expected, kind, 4, largest(host))
    kernels.apply_rope(whole[:, :, 1:4], table, whole[:, :, 1:4], inverse=back)
    host[:, :, 1:4] = expected[:, :, 1:4]
    check(whole, host, kind, 4, largest(host))


def test_rotate_uses_the_first_rows_of_a_longer_table_and_any_strides(on, kernels, kind, draw):
    table = kernels.rope_table(*angles(np.arange(8), 8, 1e4), kind)
    x, host = on.array(draw(1, 4, 3, 9), kind)
    target = on.empty((1, 4, 8, 3), kind).transpose(0, 1, 3, 2)
    kernels.apply_rope(x[..., 1:], table[:4], target)
    result = on.empty((1, 4, 3, 8), kind)
    kernels.copy(target, result)
    check(result, rotated(host[..., 1:], np.arange(4), 1e4, False), kind, 4, largest(host))
    kernels.apply_rope(x[:, :0, :, 1:], table[:0], result[:, :0])


# -- embedding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim, skew", [(16, 0), (5, 0), (8, 1)])
def test_embed(on, kernels, kind, draw, dim, skew):
    weight, host = on.array(draw(11, dim), kind, skew)
    ids = np.array([[3, 0, 10], [0, 7, 3]])
    for ints in (np.int32, np.int64):
        y = arrays.on_host(kernels.embed(weight, on.put(ids.astype(ints)))).astype(np.float64)
        assert np.array_equal(y, host[ids])
    assert kernels.embed(weight, on.put(np.zeros((0, 2), np.int64))).shape == (0, 2, dim)


@only_gpu
def test_embed_shows_ids_outside_and_takes_two_dtypes_of_them(on, kernels, kind, draw):
    weight, _ = on.array(draw(11, 5), kind)
    y = arrays.on_host(kernels.embed(weight, on.put(np.array([11, -1, 3])))).astype(np.float64)
    assert np.isnan(y).all(1).tolist() == [True, True, False]
    with pytest.raises(ArgumentError, match="ids on a GPU"):
        kernels.embed(weight, on.put(np.zeros(3, np.int16)))


def check_embed_backward(on, kind, draw, ids, vocab, dim, skew=0):
    kernels = on.of(kind)
    if on.device == "cpu":
        ids = ids % vocab  # the layer refuses others
    dy, hdy = on.array(draw(len(ids), dim), kind, skew)
    grad, expected = on.sums(draw(vocab, dim), kind)
    again = arrays.copy(grad)
    scale = np.abs(expected)
    inside = (ids >= 0) & (ids < vocab)
    np.add.at(expected, ids[inside], hdy[inside])
    np.add.at(scale, ids[inside], np.abs(hdy[inside]))
    kernels.embed_backward(dy, on.put(ids), grad)
    check(grad, expected, grad.dtype, len(ids) + 1, scale)
    kernels.embed_backward(dy, on.put(ids.astype(np.int32)), again)
    assert same_bits(grad, again)


def test_embed_backward_of_few_ids(on, kernels, kind, draw):
    ids = np.concatenate([np.repeat(4, 70), np.arange(9), [9, -1, 9], np.repeat(2, 33), np.arange(9), np.repeat(4, 14)])
    check_embed_backward(on, kind, draw, ids, 9, 12)
    check_embed_backward(on, kind, draw, ids[:1], 9, 5, 1)
    check_embed_backward(on, kind, draw, ids[:0], 9, 4)


@pytest.mark.parametrize("way", ["random", "one", "zipf", "outside", "sorted"])
def test_embed_backward_over_several_tiles(on, draw, way):
    generator = np.random.default_rng(3)
    ids = {
        "random": generator.integers(0, 1500, 2500),
        "one": np.full(2500, 1023),
        "zipf": np.minimum(generator.zipf(1.3, 2500), 1499),
        "outside": generator.integers(-700, 3000, 2500),
        "sorted": np.arange(2500) // 32,
    }[way]
    check_embed_backward(on, arrays.dtype("bfloat16"), draw, ids, 1500, 4)


@only_gpu
def test_embed_backward_adds_in_the_order_of_rows(on):
    kernels = on.of(np.dtype(np.float32))
    # 2^24 + 1 - 2^24 is 0 in float32, and 1 in another order
    dy = on.put(np.array([[2.0**24], [1.0], [-(2.0**24)], [5.0]], np.float32))
    grad = arrays.zeros((3, 1), np.dtype(np.float32), on.device)
    kernels.embed_backward(dy, on.put(np.array([2, 2, 2, 0])), grad)
    assert arrays.on_host(grad)[:, 0].tolist() == [5, 0, 0]


# -- dropout ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size, skew", [(15, 0), (4600, 0), (600, 1)])
def test_dropout_draws_the_mask_of_the_host(on, kernels, kind, draw, size, skew):
    x, host = on.array(draw(size), kind, skew)
    key, counter = random_key("dropout", 3, "1.layer"), (123456789012, 7, 2**53)
    keep = random_bits(key, counter, size) >= 20000
    y, found = kernels.dropout(x, key, counter, 20000, 1.4)
    assert np.array_equal(arrays.on_host(found) != 0, keep)
    check(y, host * keep * 1.4, kind)
    check(kernels.dropout_backward(x, found, 1.4), host * keep * 1.4, kind)


# -- losses -----------------------------------------------------------------------------------------------------------


def cross_entropy(logits, ids):
    """(value, gradient, sizes of the terms of both)"""
    with np.errstate(invalid="ignore", over="ignore"):
        shifted = logits - logits.max(1, keepdims=True)
        exps = np.exp(shifted)
        sums = exps.sum(1, keepdims=True)
        value = np.mean(np.log(sums[:, 0]) - shifted[np.arange(len(ids)), ids])
        shares = exps / sums
    one_hot = np.arange(logits.shape[1]) == ids[:, None]
    apart = np.where(shares > 0, np.abs(shifted), 0)  # errors of an exponent are relative ones of its exponential
    size = shares * (1 + apart) + one_hot
    largest_pick = largest(shifted[one_hot])
    return value, (shares - one_hot) / len(ids), 1 + largest_pick + (shares * apart).sum(1).max(), size / len(ids)


# the last one has rows that start between words
@pytest.mark.parametrize("rows, vocab, skew", [(1, 1, 0), (2, 1031, 0), (1, 33001, 0), (3, 50, 3)])
def test_softmax_cross_entropy(on, kernels, kind, draw, rows, vocab, skew):
    logits, host = on.array(draw(rows, vocab) * 3, kind, skew)
    ids = np.arange(rows) * 7 % vocab
    value, gradient = kernels.softmax_cross_entropy(logits, on.put(ids), 4.0)
    expected, slope, *sizes = cross_entropy(host, ids)
    close(number(value), expected, vocab + 8, sizes[0], dtype=arrays.accumulator(kind))
    check(gradient, slope * 4, kind, vocab + 8, sizes[1] * 4)
    again = kernels.softmax_cross_entropy(logits, on.put(ids.astype(np.int32)), 4.0)
    assert number(value) == number(again[0]) and same_bits(gradient, again[1])


def test_softmax_cross_entropy_of_extreme_logits(on, kernels, kind, draw):
    values = draw(7, 40)
    values[0] *= 1e4
    values[1] = 1e4
    values[2] = -1e4
    values[3, 1:] = -np.inf
    values[4, :39] = -np.inf
    values[5, ::2] = -3e4
    logits, host = on.array(values, kind)
    ids = np.array([5, 6, 7, 0, 39, 1, 2])
    value, gradient = kernels.softmax_cross_entropy(logits, on.put(ids))
    expected, slope, *sizes = cross_entropy(host, ids)
    close(number(value), expected, 40 + 8, sizes[0], dtype=arrays.accumulator(kind))
    check(gradient, slope, kind, 40 + 8, sizes[1])


@only_gpu
def test_softmax_cross_entropy_shows_nan_and_ids_outside(on, kernels, kind, draw):
    values = draw(3, 20)
    values[1, 4] = np.nan
    value, gradient = kernels.softmax_cross_entropy(on.array(values, kind)[0], on.put(np.array([1, 2, 3])))
    assert np.isnan(number(value))
    assert np.isnan(arrays.on_host(gradient).astype(np.float64)).any(1).tolist() == [False, True, False]
    for outside in (-1, 20):
        logits, _ = on.array(draw(3, 20), kind)
        value, gradient = kernels.softmax_cross_entropy(logits, on.put(np.array([1, outside, 3])))
        assert np.isnan(number(value))
        assert np.isfinite(arrays.on_host(gradient).astype(np.float64)).all()


@pytest.mark.parametrize("shape, skew", [((1,), 0), ((3, 700), 0), ((5, 7), 1)])
def test_mean_squared_error(on, kernels, kind, draw, shape, skew):
    output, y = on.array(draw(*shape), kind, skew)
    for target_kind in {kind, arrays.dtype("float32")}:
        target, wanted = on.array(draw(*shape), target_kind, skew)
        value, gradient = kernels.mean_squared_error(output, target, 3.0)
        expected = np.mean((y - wanted) ** 2)
        size = np.abs(y) + np.abs(wanted)  # a difference is taken in the accumulator dtype, its square in float64
        close(number(value), expected, 4, np.mean(size**2), dtype=arrays.accumulator(kind))
        check(gradient, 6 * (y - wanted) / y.size, kind, 4, size * 6 / y.size)
        assert number(value) == number(kernels.mean_squared_error(output, target, 3.0)[0])


# -- optimizers -------------------------------------------------------------------------------------------------------

MASTERS = ("float32", "float64")


@pytest.mark.parametrize("name", MASTERS)
@pytest.mark.parametrize("size, skew", [(1, 0), (2051, 0), (9, 1), (0, 0)])
def test_adamw(on, draw, name, size, skew):
    kind = arrays.dtype(name)
    kernels = on.of(kind)
    (p, hp), (g, hg), (m, hm) = (on.array(draw(size), kind, skew) for _ in range(3))
    v, hv = on.array(draw(size) ** 2, kind, skew)
    numbers = nn.kernels.AdamWNumbers(0.9, 0.95, 1e-6, rate=0.1, correction1=0.3, correction2=0.2, shrink=0.99)
    kernels.adamw(p, g, m, v, numbers, nn.kernels.Update(0.5))
    m2, v2 = 0.9 * hm + (1 - 0.9) * 0.5 * hg, 0.95 * hv + (1 - 0.95) * 0.25 * hg * hg
    check(m, m2, kind, 4, np.abs(hm) + np.abs(hg))
    check(v, v2, kind, 4)
    step = 0.1 * (m2 / 0.3) / (np.sqrt(v2 / 0.2) + 1e-6)
    largest_step = 0.1 * (0.9 * np.abs(hm) + 0.05 * np.abs(hg)) / 0.3 / (np.sqrt(v2 / 0.2) + 1e-6)
    check(p, 0.99 * hp - step, kind, 16, np.abs(hp) + largest_step)
    np.testing.assert_array_equal(arrays.on_host(g), hg)


@pytest.mark.parametrize("name", MASTERS)
@pytest.mark.parametrize("size, skew", [(1030, 0), (7, 1), (0, 0)])
def test_sgd(on, draw, name, size, skew):
    kind = arrays.dtype(name)
    kernels = on.of(kind)
    (p, hp), (g, hg), (u, hu) = (on.array(draw(size), kind, skew) for _ in range(3))
    size = np.abs(hp) + np.abs(hg) + np.abs(hu)
    kernels.sgd(p, g, None, 0.0, 0.1, 0.2, nn.kernels.Update(0.5))
    hp = hp - 0.2 * (0.5 * hg + 0.1 * hp)
    check(p, hp, kind, 8, size)
    kernels.sgd(p, g, u, 0.9, 0.1, 0.2, nn.kernels.Update(0.5))
    hu = 0.9 * hu + 0.5 * hg + 0.1 * hp
    check(u, hu, kind, 8, size)
    check(p, hp - 0.2 * hu, kind, 8, size)


def test_sums_of_squares_of_pieces_anywhere(on, kernels, kind, draw, monkeypatch):
    monkeypatch.setattr(nn.kernels.cuda.optimizer, "CHUNK", 700)
    flat, host = on.array(draw(3000), kind)
    pieces = [(0, 3000), (1, 2), (7, 7), (13, 1413), (2999, 3000), (5, 708)]
    found = arrays.on_host(kernels.sums_of_squares(flat, pieces))
    assert found.dtype == np.float64
    close(found, [np.sum(host[start:stop] ** 2) for start, stop in pieces], 3000)
    assert same_bits(found, kernels.sums_of_squares(flat, pieces))
    skewed = arrays.on_host(kernels.sums_of_squares(flat[1:], [(0, 2999)]))
    close(skewed, [np.sum(host[1:] ** 2)], 3000)


def test_sums_of_squares_show_what_is_not_finite_and_do_not_overflow(on):
    kernels = on.of(np.dtype(np.float32))
    values = np.full(300, 1e30, np.float32)
    values[100], values[200] = np.nan, np.inf
    found = arrays.on_host(kernels.sums_of_squares(on.put(values), [(0, 100), (50, 150), (150, 300)]))
    close(found[0], 100 * float(values[0]) ** 2, 100)
    assert np.isnan(found[1]) and np.isinf(found[2])
    assert kernels.sums_of_squares(on.put(values), []).shape == (0,)
