"""Check gradients: against finite differences, and the two forms of a layer's backward against each other."""

import numpy as np

from mpipipe import nn
from support.tolerance import close, largest


def check_stage(stage, x):
    """`nn.check_gradients` finds no fault in a float64 stage, whose split backward has the bits of the whole one."""
    assert max(nn.check_gradients(stage, x).values()) < 1e-8
    y, saved = stage.forward(x)
    dy = np.random.default_rng(0).standard_normal(y.shape)
    stage.gradients.flat.fill(0)
    dx = stage.backward(dy, saved)
    check_split(stage, dy, saved, dx, stage.gradients.flat.copy())


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
