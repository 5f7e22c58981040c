"""Half precision on the host: every layer is its float32 self rounded once, and parameters are float32 masters."""

import numpy as np
import pytest
from support.tolerance import close, eps, largest, rounding, within

from mpipipe import arrays, nn, optim
from mpipipe.nn.kernels.host import any_dtype
from mpipipe.nn.rope import angles

RANDOM = np.random.default_rng(12)
HALVES = ["float16", "bfloat16"]
ROWS = 150
ONCE = 0.501  # units in the last place: a half, and a few of float32's own, each 2^-13 of one of float16 or less


def layers():
    return {
        "Linear": lambda: [nn.Linear(24, 40)],
        "Linear without bias": lambda: [nn.Linear(24, 24, bias=False)],
        "RMSNorm": lambda: [nn.RMSNorm(24)],
        "LayerNorm": lambda: [nn.LayerNorm(24)],
        "Gelu": lambda: [nn.Gelu()],
        "Dropout": lambda: [nn.Dropout(0.3)],
        "Residual": lambda: [nn.Residual(nn.RMSNorm(24))],
    }


def half(dtype, *shape, size=1.0):
    return (RANDOM.standard_normal(shape) * size).astype(arrays.dtype(dtype))


def ulps(found, exact):
    """Largest distance of halves from float32 values, in units in the last place of the half."""
    digits = 10 if found.dtype == np.float16 else 7
    smallest = -14 if found.dtype == np.float16 else -126
    exact = exact.astype(np.float64)
    exponent = np.maximum(np.frexp(exact)[1] - 1, smallest)
    return float(np.max(np.abs(found.astype(np.float64) - exact) / np.exp2(exponent - digits), initial=0))


def twins(make, dtype):
    """A stage in a half dtype, and one in float32 whose parameters are the rounded ones the first computes with."""
    mixed, single = nn.Stage(make(), dtype=dtype, seed=1), nn.Stage(make(), dtype="float32", seed=1)
    mixed.parameters.flat += RANDOM.standard_normal(mixed.parameters.flat.size).astype(np.float32) * 0.2
    mixed.refresh()
    for name, array in mixed.compute.items():
        single.parameters[name][...] = array
    return mixed, single


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", layers())
def test_a_layer_in_halves_is_its_float32_self_rounded_once(name, dtype):
    mixed, single = twins(layers()[name], dtype)
    x = half(dtype, 3, ROWS // 3, 24, size=2)
    (y, saved), (y_single, saved_single) = mixed.forward(x), single.forward(x.astype(np.float32))
    # a residual is rounded twice: the layer's output, and the sum
    assert y.dtype == mixed.dtype and ulps(y, y_single) <= (2 * ONCE if name == "Residual" else ONCE)
    dy = half(dtype, *y.shape)
    dx, pending = mixed.backward_input(dy, saved)
    mixed.backward_weight(pending)
    dx_single = single.backward(dy.astype(np.float32), saved_single)
    assert dx.dtype == mixed.dtype
    if name != "Residual":  # whose terms may cancel
        assert ulps(dx, dx_single) <= ONCE
    for key, gradient in mixed.gradients.items():
        assert gradient.dtype == np.float32
        close(gradient, single.gradients[key], ROWS + 24, largest(single.gradients[key]), what=key)
    whole = mixed.gradients.flat.copy()
    mixed.gradients.flat.fill(0)
    np.testing.assert_array_equal(mixed.backward(dy, saved), dx)
    np.testing.assert_array_equal(mixed.gradients.flat, whole)


@pytest.mark.parametrize("dtype", HALVES)
def test_each_kernel_of_swiglu_rounds_once(dtype):
    both, dinner = half(dtype, 70, 48, size=3), half(dtype, 70, 24)
    wide = both.astype(np.float32)
    assert ulps(any_dtype.swiglu(both), any_dtype.swiglu(wide)) <= ONCE
    before = dinner.copy()
    dboth, inner = any_dtype.swiglu_backward(both, dinner)
    expected = any_dtype.swiglu_backward(wide, before.astype(np.float32))
    assert dboth.dtype == inner.dtype == both.dtype
    assert ulps(dboth, expected[0]) <= ONCE and ulps(inner, expected[1]) <= ONCE


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("back", [False, True])
def test_rotation_in_place_and_from_strided_arrays_rounds_once(dtype, back):
    positions = np.arange(5) * 100
    table = any_dtype.rope_table(*angles(positions, 8, 10000.0), arrays.dtype(dtype))
    whole = half(dtype, 2, 5, 6, 8)
    x = whole[:, :, :4]
    exact = np.empty(x.shape, np.float32)
    any_dtype.apply_rope(x.astype(np.float32), table, exact, back)
    rest = whole[:, :, 4:].copy()
    elsewhere = np.empty((2, 4, 5, 8), x.dtype).swapaxes(1, 2)
    any_dtype.apply_rope(x, table, elsewhere, back)
    any_dtype.apply_rope(x, table, x, back)
    assert ulps(x, exact) <= ONCE
    np.testing.assert_array_equal(elsewhere, x)
    np.testing.assert_array_equal(whole[:, :, 4:], rest)


@pytest.mark.parametrize("dtype", HALVES)
def test_embedding_in_halves_takes_rounded_rows_and_sums_gradients_in_float32(dtype):
    stage = nn.Stage([nn.Embedding(7, 4)], dtype=dtype)
    ids = np.full((1000,), 3)
    y, saved = stage.forward(ids)
    np.testing.assert_array_equal(y, np.repeat(stage.parameters["0.weight"][3:4].astype(y.dtype), 1000, axis=0))
    stage.backward(np.full(y.shape, 1.5, y.dtype), saved)
    assert (stage.gradients["0.weight"][3] == 1500).all()  # a bfloat16 sum would stop growing at 256


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("factor", [1.0, 1000.0])
def test_losses_of_halves_are_those_of_float32_with_a_rounded_gradient(dtype, factor):
    logits, ids = half(dtype, 2, 300, 500, size=4), RANDOM.integers(0, 500, (2, 300))
    value, gradient = nn.softmax_cross_entropy(logits, ids, factor)
    exact, wide = nn.softmax_cross_entropy(logits.astype(np.float32), ids, factor)
    assert value == exact and gradient.dtype == logits.dtype and ulps(gradient, wide) <= ONCE
    target = half(dtype, 2, 300, 500)
    value, gradient = nn.mean_squared_error(logits, target, factor)
    exact, wide = nn.mean_squared_error(logits.astype(np.float32), target.astype(np.float32), factor)
    assert value == exact and gradient.dtype == logits.dtype and ulps(gradient, wide) <= ONCE


@pytest.mark.parametrize("loss", [nn.softmax_cross_entropy, nn.mean_squared_error])
def test_the_factor_multiplies_the_gradient_alone(loss):
    output = RANDOM.standard_normal((6, 5))
    target = RANDOM.integers(0, 5, 6) if loss is nn.softmax_cross_entropy else np.zeros((6, 5))
    (value, gradient), (same, larger) = loss(output, target), loss(output, target, 24.0)
    assert value == same
    # a probability less one may cancel: its terms are as large as one part of the mean
    close(larger, 24 * gradient, 4, 24 * np.maximum(np.abs(gradient), 1 / 6 if target.ndim == 1 else 0))


@pytest.mark.parametrize("dtype", HALVES)
def test_a_factor_is_not_rounded_to_half(dtype):
    x = np.full(9, 0.25, arrays.dtype(dtype))
    y = any_dtype.scale(x, 65536.0 * 2)  # float16 has no such number
    assert y.dtype == x.dtype and (y.astype(np.float32) == 32768).all()
    np.testing.assert_array_equal(
        any_dtype.scale(x, 1.005, out=x), np.full(9, 0.25 * 1.005, np.float32).astype(x.dtype)
    )
    np.testing.assert_array_equal(x, np.full(9, 0.25 * 1.005, np.float32).astype(x.dtype))


def test_what_float16_cannot_hold_becomes_infinite_without_a_warning(recwarn):
    stage = nn.Stage([nn.Linear(64, 64, bias=False), nn.RMSNorm(64)], dtype="float16")
    _, saved = stage.forward(np.full((2, 64), 60000, np.float16))
    stage.backward(np.full((2, 64), 60000, np.float16), saved)
    assert not recwarn.list


def test_masters_add_up_updates_that_bfloat16_would_lose():
    stage = nn.Stage([nn.Linear(4, 4, bias=False)], dtype="bfloat16")
    stage.parameters["0.weight"].fill(1)
    stage.refresh()
    optimizer = optim.SGD([stage], lr=1e-4)
    lone = stage.compute.flat.copy()
    for _ in range(1000):
        stage.gradients["0.weight"].fill(1)
        optimizer.step()
        stage.refresh()
        lone[:16] -= lone.dtype.type(1e-4)
    assert (lone[:16] == 1).all()
    # equal updates are rounded alike, a thousand times at a size of one
    within(stage.parameters["0.weight"], np.full((4, 4), 0.9), 1000 * eps("float32"))
    within(stage.compute["0.weight"], np.full((4, 4), 0.9), 1000 * eps("float32") + rounding("bfloat16", 0.9))
