"""Half precision on the host: parameters are float32 masters, and overflow is no warning."""

import numpy as np
from support.tolerance import eps, rounding, within

from mpipipe import nn, optim


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
