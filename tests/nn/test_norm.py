"""RMSNorm and LayerNorm against their formulas in float64."""

from __future__ import annotations

import numpy as np
import pytest
from support.gradcheck import check_stage
from support.tolerance import close, largest

from mpipipe import nn
from mpipipe.errors import ArgumentError

RANDOM = np.random.default_rng(3)
NORMS = [nn.RMSNorm, nn.LayerNorm]


def made(norm, dim, dtype="float64"):
    stage = nn.Stage([norm(dim)], dtype=dtype)
    stage.parameters.flat += RANDOM.standard_normal(stage.parameters.flat.size).astype(dtype) * 0.3
    return stage


def dense(norm, x, parameters, eps):
    if norm is nn.LayerNorm:
        x = x - x.mean(-1, keepdims=True)
    y = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * parameters["0.gain"]
    return y + parameters["0.bias"] if norm is nn.LayerNorm else y


def cost(norm, x):
    """(operations of a normalised number times a gain of 2 at most, and a bias, and the size of its terms)."""
    x = x.astype(np.float64)
    deviation = x.std(-1, keepdims=True) if norm is nn.LayerNorm else np.sqrt((x * x).mean(-1, keepdims=True))
    return 2 * x.shape[-1] + 8, 2 * (1 + (np.abs(x) + np.abs(x).mean(-1, keepdims=True)) / deviation)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("shape", [(6,), (1, 6), (2, 3, 6), (9000, 6)])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_norm_is_its_formula(norm, shape, dtype):
    stage = made(norm, 6, dtype)
    x = (RANDOM.standard_normal(shape) * 3 + 1).astype(dtype)
    y, _ = stage.forward(x)
    assert y.dtype == dtype and y.shape == shape
    expected = dense(norm, x.astype(np.float64), stage.parameters, stage.layers[0].eps)
    close(y, expected, *cost(norm, x))


@pytest.mark.parametrize("norm", NORMS)
def test_gradients_of_norms_agree_with_finite_differences(norm):
    check_stage(made(norm, 6), RANDOM.standard_normal((2, 3, 6)))
    check_stage(made(norm, 1), RANDOM.standard_normal((3, 1)))


@pytest.mark.parametrize("norm", NORMS)
def test_gradients_of_many_rows_are_the_sums_over_pieces(norm):
    stage = made(norm, 40)
    x, dy = RANDOM.standard_normal((2, 2000, 40))
    _, saved = stage.forward(x)
    dx = stage.backward(dy, saved)
    whole = stage.gradients.flat.copy()
    stage.gradients.flat.fill(0)
    for row in range(0, 2000, 7):
        at = slice(row, row + 7)
        _, saved = stage.forward(x[at])
        terms, size = cost(norm, x[at])
        close(stage.backward(dy[at], saved), dx[at], 2 * terms, size * largest(dy))
    terms, size = cost(norm, x)
    close(stage.gradients.flat, whole, terms + len(x), (size * np.abs(dy)).sum(0).max())


@pytest.mark.parametrize("norm", NORMS)
def test_a_row_of_zeros_stays_finite(norm):
    stage = made(norm, 4)
    y, saved = stage.forward(np.zeros((2, 4)))
    dx = stage.backward(np.ones((2, 4)), saved)
    assert np.isfinite(y).all() and np.isfinite(dx).all()


@pytest.mark.parametrize("norm", NORMS)
def test_a_wrong_input_size_is_named(norm):
    with pytest.raises(ArgumentError, match="layer 0"):
        nn.Stage([norm(4)]).forward(np.zeros((2, 5), np.float32))
