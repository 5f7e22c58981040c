"""The kernels on a GPU against formulas in float64 numpy."""

import math

import ml_dtypes
import numpy as np
import pytest
from support.tolerance import close, eps, largest, rounding

from mpipipe import arrays, nn
from mpipipe.errors import ArgumentError
from mpipipe.nn.random import random_bits, random_key
from mpipipe.nn.rope import angles

KINDS = ("float32", "float64", "float16", "bfloat16")


@pytest.fixture
def cuda(gpu):
    return nn.kernels.of("cuda")


@pytest.fixture(params=KINDS)
def kind(request):
    return arrays.dtype(request.param)


@pytest.fixture
def draw():
    generator = np.random.default_rng(7)
    return lambda *shape: generator.standard_normal(shape)


def device(values, kind, skew=0):
    """(device array of `values` in dtype `kind`, what it holds in float64); it starts `skew` elements off alignment."""
    host = np.asarray(values).astype(kind)
    room = np.zeros(host.size + skew, kind)
    room[skew:] = host.reshape(-1)
    return arrays.upload(room)[skew:].reshape(host.shape), host.astype(np.float64)


def check(found, expected, kind, operations=4, size=None):
    """So many operations in the accumulator of `kind` on terms of this size, and one rounding to `kind`.

    Functions count as the units in the last place by which CUDA's may err: up to 2 for expf, 4 for tanhf, 1 for a root.
    """
    found = arrays.download(found)
    assert found.dtype == kind
    close(found, expected, operations, size, dtype=arrays.accumulator(kind))


def same_bits(first, second):
    return arrays.download(first).tobytes() == arrays.download(second).tobytes()


def accumulated(values, kind):
    """As `device`, in the accumulator dtype."""
    return device(values, arrays.accumulator(kind))


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
def test_single_elements(cuda, kind, draw, size, skew):
    x, hx = device(draw(size), kind, skew)
    y, hy = device(draw(size), kind, skew)
    check(cuda.add(x, y), hx + hy, kind)
    check(cuda.scale(x, 0.3), hx * 0.3, kind)
    check(cuda.gelu(x), gelu(hx), kind, 20, 1 + np.abs(hx))
    check(cuda.gelu_backward(y, x), hy * gelu_slope(hx), kind, 20, np.abs(hy) * (1 + np.abs(hx)))
    grad, hgrad = accumulated(draw(size), kind)
    part, hpart = accumulated(draw(size), kind)
    cuda.accumulate(grad, part)
    check(grad, hgrad + hpart, grad.dtype)
    assert cuda.scale(x, 2.0, x) is x
    check(x, hx * 2, kind)


@pytest.mark.parametrize("kind", ["complex64", "complex128"])
def test_complex_numbers_are_scaled_added_and_compared_as_pairs(cuda, kind, draw):
    x, y = ((draw(5, 7, 2) @ [1, 1j]).astype(kind) for _ in range(2))
    here, there = arrays.upload(x), arrays.upload(y)
    value, gradient = nn.mean_squared_error(here, y, factor=3.0)
    cuda.accumulate(here, there)
    scaled = cuda.scale(here, 0.5)
    enough = dict(rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(float(arrays.download(value)), np.mean(abs(x - y) ** 2), rtol=1e-5)
    for found, expected in ((gradient, 6 * (x - y) / 35), (here, x + y), (scaled, (x + y) / 2)):
        assert found.dtype == x.dtype and found.shape == x.shape
        np.testing.assert_allclose(arrays.download(found), expected, **enough)


def test_elements_beyond_one_grid_keep_their_places(cuda, monkeypatch):
    monkeypatch.setattr(arrays.cuda, "MOST_BLOCKS", 2)
    x, hx = device(np.arange(5000.0), arrays.dtype("float32"))
    check(cuda.scale(x, 3.0), hx * 3, x.dtype)
    cuda.accumulate(x, arrays.copy(x))
    check(x, hx * 2, x.dtype)
    wide, narrow = device(np.arange(5000.0), arrays.dtype("float64"))[0], arrays.empty((5000,), x.dtype, "cuda")
    cuda.copy(wide, narrow)
    check(narrow, hx, x.dtype)


def test_activations_of_extreme_values(cuda, kind):
    top = 6e4 if kind.name == "float16" else 1e30
    values = np.array([0.0, -0.0, 1e4, -1e4, top, -top, 30, -30, 88, -88, -20, np.nan])
    x, hx = device(values, kind)
    ones, _ = device(np.ones(12), kind)
    with np.errstate(all="ignore"):
        expected, slope = np.where(np.abs(hx) > 50, np.maximum(hx, 0), gelu(hx)), np.where(hx > 50, 1, gelu_slope(hx))
        slope[np.abs(hx) > 50] = hx[np.abs(hx) > 50] > 0
        silu = np.where(hx < -1e3, 0, hx * sigmoid(hx))
    for found, wanted in ((cuda.gelu(x), expected), (cuda.gelu_backward(ones, x), slope)):
        found = arrays.download(found)
        assert np.isnan(found[-1]) and np.isfinite(found[:-1]).all()
        size = np.minimum(np.abs(hx), 50) + np.abs(wanted) + 1  # beyond 50 the tanh is one
        close(found[:-1], wanted[:-1], 20, size[:-1], dtype=arrays.accumulator(kind))
    both = arrays.upload(np.stack([values, np.ones(12)], 1).astype(kind))
    inner = arrays.download(cuda.swiglu(both))
    assert np.isnan(inner[-1, 0])
    # a logistic below the smallest normal number is 0 on a GPU: CuPy compiles so, and fast quotients are so
    computed = arrays.accumulator(kind)
    size = np.abs(silu) + np.abs(hx) * float(ml_dtypes.finfo(computed).smallest_normal) / eps(computed)
    close(inner[:-1, 0], silu[:-1], 10, size[:-1], dtype=computed)
    dboth, _ = cuda.swiglu_backward(both, ones.reshape(12, 1))
    dboth = arrays.download(dboth).astype(np.float64)
    assert np.isnan(dboth[-1]).all() and np.isfinite(dboth[:-1]).all()


@pytest.mark.parametrize("rows, hidden, skew", [(5, 12, 0), (70, 40, 1), (0, 8, 0)])
def test_swiglu(cuda, kind, draw, rows, hidden, skew):
    both, h = device(draw(rows, 2 * hidden), kind, skew)
    d, hd = device(draw(rows, hidden), kind, skew)
    gate, up = h[:, :hidden], h[:, hidden:]
    s = sigmoid(gate)
    check(cuda.swiglu(both), gate * s * up, kind, 10)
    dboth, inner = cuda.swiglu_backward(both, d)
    expected = np.concatenate([hd * up * (s + gate * s * (1 - s)), hd * gate * s], 1)
    check(dboth, expected, kind, 10, np.abs(np.concatenate([hd * up, hd * gate], 1)))
    check(inner, gate * s * up, kind, 10)


@pytest.mark.parametrize("source", KINDS)
def test_a_copy_rounds_to_nearest_even(cuda, kind, draw, source):
    source = arrays.dtype(source)
    ties = [1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 65519, 65520, 1e-7, 2.0**-25, 0, -0.0]
    values = np.concatenate([ties, [np.inf, -np.inf, np.nan], draw(502) * 100])
    with np.errstate(over="ignore"):
        expected = values.astype(source).astype(kind)
    for here, there in ((0, 0), (0, 1), (1, 0)):
        with np.errstate(over="ignore"):
            x, _ = device(values, source, here)
        y = arrays.empty((values.size + there,), kind, "cuda")[there:]
        cuda.copy(x, y)
        found = arrays.download(y)
        assert np.array_equal(found.astype(np.float64), expected.astype(np.float64), equal_nan=True)
        assert np.signbit(found.astype(np.float64)[9])


def test_what_does_not_fit_is_refused(cuda, draw):
    x, _ = device(draw(4, 6), arrays.dtype("float32"))
    half, _ = device(draw(4, 6), arrays.dtype("float16"))
    with pytest.raises(ArgumentError, match=r"kernels\.gelu takes C-contiguous"):
        cuda.gelu(x[:, :3])
    for wrong in (x[:2], half):
        with pytest.raises(ArgumentError, match=r"kernels\.add was given arrays that do not fit"):
            cuda.add(x, wrong)
        with pytest.raises(ArgumentError, match=r"kernels\.linear_backward_weight was given arrays that do not fit"):
            cuda.linear_backward_weight(x, wrong, arrays.zeros((6, 6), x.dtype, "cuda"))
    with pytest.raises(ArgumentError, match="axis 1 of the first as long as axis 0"):
        cuda.linear_backward_input(x, x)


# -- products ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows, inputs, outputs", [(5, 7, 3), (33, 16, 24), (0, 4, 3), (4, 0, 3)])
def test_products(cuda, kind, draw, rows, inputs, outputs):
    x, hx = device(draw(rows, inputs), kind)
    w, hw = device(draw(outputs, inputs), kind)
    b, hb = device(draw(outputs), kind)
    dy, hdy = device(draw(rows, outputs), kind)
    grad, hgrad = accumulated(draw(outputs, inputs), kind)
    check(cuda.linear(x, w), hx @ hw.T, kind, inputs, np.abs(hx) @ np.abs(hw.T))
    # cuBLAS rounds a product of halves before it adds it to the bias, which lies in the result
    early = rounding(kind, hx @ hw.T) / eps(arrays.accumulator(kind)) if arrays.is_half(kind) else 0
    check(cuda.linear(x, w, b), hx @ hw.T + hb, kind, inputs + 1, np.abs(hx) @ np.abs(hw.T) + np.abs(hb) + early)
    check(cuda.linear_backward_input(dy, w), hdy @ hw, kind, outputs, np.abs(hdy) @ np.abs(hw))
    cuda.linear_backward_weight(dy, x, grad)
    check(grad, hgrad + hdy.T @ hx, grad.dtype, rows + 1, np.abs(hdy.T) @ np.abs(hx) + np.abs(hgrad))


@pytest.mark.parametrize("shared", [None, "a", "b"])
@pytest.mark.parametrize("transpose_a, transpose_b, add", [(0, 0, False), (1, 0, True), (0, 1, False), (1, 1, True)])
def test_products_of_a_batch(cuda, kind, draw, transpose_a, transpose_b, add, shared):
    """On either side, with gaps between rows, and with one matrix for all problems."""
    count = {name: 1 if name == shared else 3 for name in "ab"}
    a, b, c = (draw(n, *rest).astype(kind) for n, *rest in ((count["a"], 4, 5), (count["b"], 5, 7), (3, 4, 7)))
    c = c.astype(arrays.accumulator(kind))
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    expected, size = wide_a @ wide_b + add * c, np.abs(wide_a) @ np.abs(wide_b) + np.abs(c)
    laid = [np.ascontiguousarray(x.swapaxes(1, 2)) if turn else x for x, turn in ((a, transpose_a), (b, transpose_b))]
    laid = [np.concatenate([x, x], 2) for x in laid]  # rows of twice the width
    for kernels, move in ((cuda, arrays.upload), (nn.kernels.of("cpu", kind), np.array)):
        result = move(c if add else np.full_like(c, np.nan))
        given = [move(x)[..., : x.shape[2] // 2] for x in laid]
        kernels.products(*given, result, transpose_a, transpose_b, add)
        found = arrays.download(result) if kernels is cuda else result
        close(found, expected, 6, size, dtype=c.dtype)


@pytest.mark.parametrize("rows, width, skew", [(300, 24, 0), (37, 9, 1), (0, 8, 0), (1100, 3, 0)])
def test_sum_rows(cuda, kind, draw, rows, width, skew):
    x, hx = device(draw(rows, width), kind, skew)
    grad, hgrad = accumulated(draw(width), kind)
    again = arrays.copy(grad)
    cuda.sum_rows(x, grad)
    check(grad, hgrad + hx.sum(0), grad.dtype, rows + 1, np.abs(hx).sum(0) + np.abs(hgrad))
    cuda.sum_rows(x, again)
    assert same_bits(grad, again)


# -- normalisation ----------------------------------------------------------------------------------------------------


def normalised(x, gain, bias, eps, centred):
    centre = x - x.mean(1, keepdims=True) * centred
    scale = 1 / np.sqrt((centre * centre).mean(1, keepdims=True) + eps)
    return gain * centre * scale + bias, scale[:, 0], centre * scale


def check_norm(cuda, kind, draw, rows, width, centred, skew=0):
    x, hx = device(draw(rows, width) * 2 + 0.5, kind, skew)
    dy, hdy = device(draw(rows, width), kind, skew)
    gain, hgain = device(1 + draw(width) / 4, kind)
    bias, hbias = device(draw(width), kind)
    y, hscale, normal = normalised(hx, hgain, hbias * centred, 1e-5, centred)
    found, scale = cuda.norm(x, gain, bias if centred else None, 1e-5)
    terms = hscale[:, None] * (np.abs(hx) + np.abs(hx).mean(1, keepdims=True) * centred)  # of a normalised number
    check(found, y, kind, 2 * width + 8, np.abs(hgain) * terms + np.abs(hbias) * centred)
    check(scale, hscale, scale.dtype, 2 * width + 8, hscale * (1 + terms.max(1, initial=0)))
    product = hgain * hdy
    dx = hscale[:, None] * (
        product
        - normal * (product * normal).mean(1, keepdims=True)
        - product.mean(1, keepdims=True) * centred
    )  # fmt: skip
    results = cuda.norm_backward(dy, x, scale, gain, centred)
    size = np.abs(product) + terms * (np.abs(product) * terms).mean(1, keepdims=True)
    size = hscale[:, None] * (size + np.abs(product).mean(1, keepdims=True) * centred)
    check(results[0], dx, kind, 3 * width + 12, size)
    sums = [(hdy * normal).sum(0), hdy.sum(0)]
    for parts, total in zip(results[1:], sums):
        size = (np.abs(hdy) * (terms + 1)).sum(0)
        grad, hgrad = accumulated(draw(width), kind)
        cuda.add_parts(parts, grad)
        check(grad, hgrad + total, parts.dtype, rows + 2 * width + 9, size + np.abs(hgrad))
    again = cuda.norm_backward(dy, x, scale, gain, centred)
    assert len(results) == 2 + centred and all(same_bits(a, b) for a, b in zip(results, again))


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("rows, width, skew", [(9, 48, 0), (2, 136, 1), (0, 16, 0), (530, 8, 0)])
def test_norms(cuda, kind, draw, rows, width, skew, centred):
    check_norm(cuda, kind, draw, rows, width, centred, skew)


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize(
    "name, width", [*(("bfloat16", width) for width in (1023, 1100, 3000, 8200)), ("float64", 1027)]
)
def test_norms_of_long_rows(cuda, draw, name, width, centred):
    check_norm(cuda, arrays.dtype(name), draw, 3, width, centred)


def test_a_nan_stays_in_its_row(cuda, kind):
    values = np.ones((6, 32))
    values[3, 5] = np.nan
    x, _ = device(values, kind)
    gain, bias = device(np.ones(32), kind)[0], device(np.zeros(32), kind)[0]
    for y, scale in (cuda.norm(x, gain, None, 1e-5), cuda.norm(x, gain, bias, 1e-5)):
        bad = np.isnan(arrays.download(y).astype(np.float64))
        assert bad[3].all() and bad.sum() == 32 and np.isnan(arrays.download(scale)).sum() == 1


# -- rotary positions -------------------------------------------------------------------------------------------------


def rotated(x, positions, base, back):
    dim = x.shape[-1]
    turned = np.asarray(positions)[:, None] * base ** (-np.arange(0, dim, 2) / dim)
    factors = np.exp((-1j if back else 1j) * turned)[:, None]
    pairs = (x[..., 0::2] + 1j * x[..., 1::2]) * factors
    return np.stack([pairs.real, pairs.imag], -1).reshape(x.shape)


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("dim", [2, 6, 16])
def test_rope(cuda, kind, draw, dim, back):
    positions = np.array([0, 1, 5, 1000, 77])
    table = cuda.rope_table(*angles(positions, dim, 1e4), kind)
    whole, host = device(draw(2, 5, 6, dim), kind)
    expected = rotated(host, positions, 1e4, back)
    target = arrays.empty(host.shape, kind, "cuda")
    cuda.apply_rope(whole, table, target, back)
    check(target, expected, kind, 4, largest(host))
    cuda.apply_rope(whole[:, :, 1:4], table, whole[:, :, 1:4], inverse=back)
    host[:, :, 1:4] = expected[:, :, 1:4]
    check(whole, host, kind, 4, largest(host))


def test_rotate_uses_the_first_rows_of_a_longer_table_and_any_strides(cuda, kind, draw):
    table = cuda.rope_table(*angles(np.arange(8), 8, 1e4), kind)
    x, host = device(draw(1, 4, 3, 9), kind)
    target = arrays.empty((1, 4, 8, 3), kind, "cuda").transpose(0, 1, 3, 2)
    cuda.apply_rope(x[..., 1:], table[:4], target)
    result = arrays.empty((1, 4, 3, 8), kind, "cuda")
    cuda.copy(target, result)
    check(result, rotated(host[..., 1:], np.arange(4), 1e4, False), kind, 4, largest(host))
    cuda.apply_rope(x[:, :0, :, 1:], table[:0], result[:, :0])


# -- embedding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim, skew", [(16, 0), (5, 0), (8, 1)])
def test_embed(cuda, kind, draw, dim, skew):
    weight, host = device(draw(11, dim), kind, skew)
    ids = np.array([[3, 0, 10], [11, -1, 3]])
    for ints in (np.int32, np.int64):
        y = arrays.download(cuda.embed(weight, arrays.upload(ids.astype(ints)))).astype(np.float64)
        assert y.shape == (2, 3, dim) and np.isnan(y[1, :2]).all()
        assert np.array_equal(y[0], host[ids[0]]) and np.array_equal(y[1, 2], host[3])
    assert cuda.embed(weight, arrays.upload(np.zeros((0, 2), np.int64))).shape == (0, 2, dim)
    with pytest.raises(ArgumentError, match="ids on a GPU"):
        cuda.embed(weight, arrays.upload(np.zeros(3, np.int16)))


def check_embed_backward(cuda, kind, draw, ids, vocab, dim, skew=0):
    dy, hdy = device(draw(len(ids), dim), kind, skew)
    grad, expected = accumulated(draw(vocab, dim), kind)
    again = arrays.copy(grad)
    scale = np.abs(expected)
    inside = (ids >= 0) & (ids < vocab)
    np.add.at(expected, ids[inside], hdy[inside])
    np.add.at(scale, ids[inside], np.abs(hdy[inside]))
    cuda.embed_backward(dy, arrays.upload(ids), grad)
    check(grad, expected, grad.dtype, len(ids) + 1, scale)
    cuda.embed_backward(dy, arrays.upload(ids.astype(np.int32)), again)
    assert same_bits(grad, again)


def test_embed_backward_of_few_ids(cuda, kind, draw):
    ids = np.concatenate([np.repeat(4, 70), np.arange(9), [9, -1, 9], np.repeat(2, 33), np.arange(9), np.repeat(4, 14)])
    check_embed_backward(cuda, kind, draw, ids, 9, 12)
    check_embed_backward(cuda, kind, draw, ids[:1], 9, 5, 1)
    check_embed_backward(cuda, kind, draw, ids[:0], 9, 4)


@pytest.mark.parametrize("way", ["random", "one", "zipf", "outside", "sorted"])
def test_embed_backward_over_several_tiles(cuda, draw, way):
    generator = np.random.default_rng(3)
    ids = {
        "random": generator.integers(0, 1500, 2500),
        "one": np.full(2500, 1023),
        "zipf": np.minimum(generator.zipf(1.3, 2500), 1499),
        "outside": generator.integers(-700, 3000, 2500),
        "sorted": np.arange(2500) // 32,
    }[way]
    check_embed_backward(cuda, arrays.dtype("bfloat16"), draw, ids, 1500, 4)


def test_embed_backward_adds_in_the_order_of_rows(cuda):
    # 2^24 + 1 - 2^24 is 0 in float32, and 1 in another order
    dy = arrays.upload(np.array([[2.0**24], [1.0], [-(2.0**24)], [5.0]], np.float32))
    grad = arrays.zeros((3, 1), np.dtype(np.float32), "cuda")
    cuda.embed_backward(dy, arrays.upload(np.array([2, 2, 2, 0])), grad)
    assert arrays.download(grad)[:, 0].tolist() == [5, 0, 0]


# -- dropout ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size, skew", [(15, 0), (4600, 0), (600, 1)])
def test_dropout_draws_the_mask_of_the_host(cuda, kind, draw, size, skew):
    x, host = device(draw(size), kind, skew)
    key, counter = random_key("dropout", 3, "1.layer"), (123456789012, 7, 2**53)
    keep = random_bits(key, counter, size) >= 20000
    y, found = cuda.dropout(x, key, counter, 20000, 1.4)
    assert np.array_equal(arrays.download(found) != 0, keep)
    check(y, host * keep * 1.4, kind)
    check(cuda.dropout_backward(x, found, 1.4), host * keep * 1.4, kind)


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
def test_softmax_cross_entropy(cuda, kind, draw, rows, vocab, skew):
    logits, host = device(draw(rows, vocab) * 3, kind, skew)
    ids = np.arange(rows) * 7 % vocab
    value, gradient = cuda.softmax_cross_entropy(logits, arrays.upload(ids), 4.0)
    expected, slope, *sizes = cross_entropy(host, ids)
    assert value.shape == () and value.dtype == np.float64
    close(arrays.download(value), expected, vocab + 8, sizes[0], dtype=arrays.accumulator(kind))
    check(gradient, slope * 4, kind, vocab + 8, sizes[1] * 4)
    again = cuda.softmax_cross_entropy(logits, arrays.upload(ids.astype(np.int32)), 4.0)
    assert same_bits(value, again[0]) and same_bits(gradient, again[1])


def test_softmax_cross_entropy_of_extreme_logits(cuda, kind, draw):
    values = draw(7, 40)
    values[0] *= 1e4
    values[1] = 1e4
    values[2] = -1e4
    values[3, 1:] = -np.inf
    values[4, :39] = -np.inf
    values[5, ::2] = -3e4
    logits, host = device(values, kind)
    ids = np.array([5, 6, 7, 0, 39, 1, 2])
    value, gradient = cuda.softmax_cross_entropy(logits, arrays.upload(ids))
    expected, slope, *sizes = cross_entropy(host, ids)
    close(arrays.download(value), expected, 40 + 8, sizes[0], dtype=arrays.accumulator(kind))
    check(gradient, slope, kind, 40 + 8, sizes[1])


def test_softmax_cross_entropy_shows_nan_and_ids_outside(cuda, kind, draw):
    values = draw(3, 20)
    values[1, 4] = np.nan
    value, gradient = cuda.softmax_cross_entropy(device(values, kind)[0], arrays.upload(np.array([1, 2, 3])))
    assert np.isnan(arrays.download(value))
    assert np.isnan(arrays.download(gradient).astype(np.float64)).any(1).tolist() == [False, True, False]
    for outside in (-1, 20):
        logits, _ = device(draw(3, 20), kind)
        value, gradient = cuda.softmax_cross_entropy(logits, arrays.upload(np.array([1, outside, 3])))
        assert np.isnan(arrays.download(value))
        assert np.isfinite(arrays.download(gradient).astype(np.float64)).all()


@pytest.mark.parametrize("shape, skew", [((1,), 0), ((3, 700), 0), ((5, 7), 1)])
def test_mean_squared_error(cuda, kind, draw, shape, skew):
    output, y = device(draw(*shape), kind, skew)
    for target_kind in {kind, arrays.dtype("float32")}:
        target, wanted = device(draw(*shape), target_kind, skew)
        value, gradient = cuda.mean_squared_error(output, target, 3.0)
        expected = np.mean((y - wanted) ** 2)
        assert value.shape == () and value.dtype == np.float64
        size = np.abs(y) + np.abs(wanted)  # a difference is taken in the accumulator dtype, its square in float64
        close(arrays.download(value), expected, 4, np.mean(size**2), dtype=arrays.accumulator(kind))
        check(gradient, 6 * (y - wanted) / y.size, kind, 4, size * 6 / y.size)
        assert same_bits(value, cuda.mean_squared_error(output, target, 3.0)[0])


# -- optimizers -------------------------------------------------------------------------------------------------------

MASTERS = ("float32", "float64")


@pytest.mark.parametrize("name", MASTERS)
@pytest.mark.parametrize("size, skew", [(1, 0), (2051, 0), (9, 1), (0, 0)])
def test_adamw(cuda, draw, name, size, skew):
    kind = arrays.dtype(name)
    (p, hp), (g, hg), (m, hm) = (device(draw(size), kind, skew) for _ in range(3))
    v, hv = device(draw(size) ** 2, kind, skew)
    numbers = nn.kernels.AdamWNumbers(0.9, 0.95, 1e-6, rate=0.1, correction1=0.3, correction2=0.2, shrink=0.99)
    cuda.adamw(p, g, m, v, numbers, nn.kernels.Update(0.5))
    m2, v2 = 0.9 * hm + (1 - 0.9) * 0.5 * hg, 0.95 * hv + (1 - 0.95) * 0.25 * hg * hg
    check(m, m2, kind, 4, np.abs(hm) + np.abs(hg))
    check(v, v2, kind, 4)
    step = 0.1 * (m2 / 0.3) / (np.sqrt(v2 / 0.2) + 1e-6)
    largest_step = 0.1 * (0.9 * np.abs(hm) + 0.05 * np.abs(hg)) / 0.3 / (np.sqrt(v2 / 0.2) + 1e-6)
    check(p, 0.99 * hp - step, kind, 16, np.abs(hp) + largest_step)
    np.testing.assert_array_equal(arrays.download(g), hg)


@pytest.mark.parametrize("name", MASTERS)
@pytest.mark.parametrize("size, skew", [(1030, 0), (7, 1), (0, 0)])
def test_sgd(cuda, draw, name, size, skew):
    kind = arrays.dtype(name)
    (p, hp), (g, hg), (u, hu) = (device(draw(size), kind, skew) for _ in range(3))
    size = np.abs(hp) + np.abs(hg) + np.abs(hu)
    cuda.sgd(p, g, None, 0.0, 0.1, 0.2, nn.kernels.Update(0.5))
    hp = hp - 0.2 * (0.5 * hg + 0.1 * hp)
    check(p, hp, kind, 8, size)
    cuda.sgd(p, g, u, 0.9, 0.1, 0.2, nn.kernels.Update(0.5))
    hu = 0.9 * hu + 0.5 * hg + 0.1 * hp
    check(u, hu, kind, 8, size)
    check(p, hp - 0.2 * hu, kind, 8, size)


def test_sums_of_squares_of_pieces_anywhere(cuda, kind, draw, monkeypatch):
    monkeypatch.setattr(nn.kernels.cuda.optimizer, "CHUNK", 700)
    flat, host = device(draw(3000), kind)
    pieces = [(0, 3000), (1, 2), (7, 7), (13, 1413), (2999, 3000), (5, 708)]
    found = arrays.download(cuda.sums_of_squares(flat, pieces))
    assert found.dtype == np.float64
    close(found, [np.sum(host[start:stop] ** 2) for start, stop in pieces], 3000)
    assert same_bits(found, cuda.sums_of_squares(flat, pieces))
    skewed = arrays.download(cuda.sums_of_squares(flat[1:], [(0, 2999)]))
    close(skewed, [np.sum(host[1:] ** 2)], 3000)


def test_sums_of_squares_show_what_is_not_finite_and_do_not_overflow(cuda):
    values = np.full(300, 1e30, np.float32)
    values[100], values[200] = np.nan, np.inf
    found = arrays.download(cuda.sums_of_squares(arrays.upload(values), [(0, 100), (50, 150), (150, 300)]))
    close(found[0], 100 * float(values[0]) ** 2, 100)
    assert np.isnan(found[1]) and np.isinf(found[2])
    assert cuda.sums_of_squares(arrays.upload(values), []).shape == (0,)
