"""Check gradients: against finite differences, and the two forms of a layer's backward against each other."""

import numpy as np

from support.tolerance import bound, close, largest, within

CURVED = 10.0  # third derivative of a scalar over its size, see near_numeric
DELTA = 1e-5  # about the cube root of eps, where both errors of a central difference are about equal


def numeric(function, array, delta=DELTA):
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


def near_numeric(gradient, found, terms, size, what=""):
    """`gradient` is `found` by central differences of a sum of so many operations on terms of this size.

    The sum is rounded, and divided by the step: terms * eps * size / DELTA. What the parabola leaves out is a third
    derivative, DELTA^2 / 6 of it: those of the smooth functions here are below CURVED times the size of the sum.
    """
    allowed = bound(np.float64, terms, size / DELTA) + DELTA**2 / 6 * CURVED * size
    within(gradient, found, allowed, what)


def check_stage(stage, x, seed=0, operations=100):
    """All gradients of a float64 stage against central differences of sum(forward(x) * random).

    About so many `operations` lie behind one number of the output. Also: arguments stay as they are, gradients
    accumulate, and the split backward has the bits of the whole one.
    """
    random = np.random.default_rng(seed)
    y, saved = stage.forward(x)
    dy = random.standard_normal(y.shape)
    x_before, dy_before = x.copy(), dy.copy()
    terms, size = operations + y.size, np.abs(y * dy).sum()

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
        near_numeric(dx, numeric(value, x), terms, size, "gradient of the input")
    for name, array in stage.parameters.items():
        near_numeric(stage.gradients[name], numeric(value, array), terms, size, f"gradient of {name}")
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
    close(stage.gradients.flat, 2 * whole, 100, largest(whole), what="gradients accumulate")
