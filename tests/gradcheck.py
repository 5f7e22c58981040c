"""One helper for gradients: finite differences, the adjoint identity, and the two forms of a layer's backward."""

from __future__ import annotations

import numpy as np


def numeric(function, array, delta=1e-6):
    """Central differences of the scalar `function()` with respect to each element of `array`, which it reads."""
    gradient = np.empty(array.shape)
    for place in np.ndindex(array.shape):
        old = array[place]
        array[place] = old + delta
        above = function()
        array[place] = old - delta
        below = function()
        array[place] = old
        gradient[place] = (above - below) / (2 * delta)
    return gradient


def check_stage(stage, x, seed=0, rtol=1e-6, atol=1e-7):
    """All gradients of a float64 stage against central differences of sum(forward(x) * random).

    Also: arguments stay as they are, gradients accumulate, and the split backward has the bits of the whole one.
    """
    random = np.random.default_rng(seed)
    y, saved = stage.forward(x)
    dy = random.standard_normal(y.shape)
    x_before, dy_before = x.copy(), dy.copy()

    def value():
        return float(np.sum(stage.forward(x)[0] * dy))

    stage.gradients.flat.fill(0)
    dx = stage.backward(dy, saved)
    whole = stage.gradients.flat.copy()
    np.testing.assert_array_equal(x, x_before)
    np.testing.assert_array_equal(dy, dy_before)
    if x.dtype.kind in "iu":
        assert dx is None
    else:
        assert dx.shape == x.shape and dx.dtype == x.dtype
        np.testing.assert_allclose(dx, numeric(value, x), rtol, atol, err_msg="gradient of the input")
    for name, array in stage.parameters.items():
        found = numeric(value, array)
        np.testing.assert_allclose(stage.gradients[name], found, rtol, atol, err_msg=f"gradient of {name}")
    check_split(stage, dy, saved, dx, whole)


def check_split(stage, dy, saved, dx, whole):
    """backward_input and backward_weight give the bits of backward, which were dx and the gradients `whole`."""
    stage.gradients.flat.fill(0)
    again, pending = stage.backward_input(dy, saved)
    assert not stage.gradients.flat.any(), "backward_input touched the gradients of parameters"
    stage.backward_weight(pending)
    if dx is None:
        assert again is None
    else:
        np.testing.assert_array_equal(again, dx)
    np.testing.assert_array_equal(stage.gradients.flat, whole)
    stage.backward(dy, saved)
    np.testing.assert_allclose(stage.gradients.flat, 2 * whole, rtol=1e-6, err_msg="gradients do not accumulate")
