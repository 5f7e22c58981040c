"""Gelu and SwiGLU against their formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
from support.gradcheck import check_stage
from support.tolerance import bound, close, within

from mpipipe import nn
from mpipipe.errors import ArgumentError

RANDOM = np.random.default_rng(4)


def test_gelu_is_the_tanh_form_and_near_the_exact_one():
    x = np.linspace(-8, 8, 4001)
    y, _ = nn.Stage([nn.Gelu()], dtype="float64").forward(x)
    form = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    exact = x * 0.5 * (1 + np.array([math.erf(value / math.sqrt(2)) for value in x]))
    close(y, form, 12, np.abs(x) * (1 + x * x))  # the cube in the argument of the tanh, and 1 + tanh near -1
    assert np.abs(y - exact).max() < 5e-4  # how far the two forms are apart, not rounding


@pytest.mark.parametrize(
    "make", [lambda: [nn.Gelu()], lambda: [nn.SwiGLU(6, 10)], lambda: [nn.Linear(6, 9), nn.Gelu(), nn.Linear(9, 6)]]
)
@pytest.mark.parametrize("shape", [(3, 6), (2, 3, 6)])
def test_gradients_agree_with_finite_differences(make, shape):
    check_stage(nn.Stage(make(), dtype="float64"), RANDOM.standard_normal(shape))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_swiglu_is_its_formula_in_every_piece(dtype):
    stage = nn.Stage([nn.SwiGLU(20, 300)], dtype=dtype)
    x = RANDOM.standard_normal((2, 400, 20)).astype(dtype)
    y, _ = stage.forward(x)
    x, both, down = (a.astype(np.float64) for a in (x, *(stage.parameters[f"0.{n}"].T for n in ("gate_up", "down"))))
    gate, up = np.split(x @ both, 2, axis=-1)
    gates, ups = np.split(np.abs(x) @ np.abs(both), 2, axis=-1)
    inner = gate / (1 + np.exp(-gate)) * up
    assert y.dtype == dtype
    allowed = bound(dtype, 20 + 8, (gates * ups) @ np.abs(down)) + bound(dtype, 300, np.abs(inner) @ np.abs(down))
    within(y, inner @ down, allowed)


@pytest.mark.parametrize("layer", [nn.Gelu, lambda: nn.SwiGLU(4, 4)])
def test_huge_arguments_give_no_warning_and_no_nan(layer):
    stage = nn.Stage([layer()], dtype="float32")
    x = np.array([[1e4, -1e4, 3e3, -3e3]], np.float32)
    with np.errstate(all="raise", under="ignore"):
        y, saved = stage.forward(x)
        dx = stage.backward(np.ones_like(y), saved)
    assert np.isfinite(y).all() and np.isfinite(dx).all()


def test_a_wrong_input_size_is_named():
    with pytest.raises(ArgumentError, match=r"layer 0 \(SwiGLU\)"):
        nn.Stage([nn.SwiGLU(4, 8)]).forward(np.zeros((2, 5), np.float32))
