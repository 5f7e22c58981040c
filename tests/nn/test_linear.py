"""Linear against plain matrix products."""

from __future__ import annotations

import numpy as np
import pytest
from support.gradcheck import check_stage
from support.tolerance import close

from mpipipe import nn
from mpipipe.errors import ArgumentError
from mpipipe.nn.kernels.host import any_dtype

RANDOM = np.random.default_rng(1)


@pytest.mark.parametrize("shape", [(5,), (1, 5), (4, 5), (2, 3, 5), (2, 1, 3, 5), (0, 5)])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_is_affine_over_the_last_axis(shape, bias):
    stage = nn.Stage([nn.Linear(5, 7, bias=bias)], dtype="float64")
    if bias:
        stage.parameters["0.bias"][...] = RANDOM.standard_normal(7)
    x = RANDOM.standard_normal(shape)
    y, _ = stage.forward(x)
    expected = np.einsum("...i,oi->...o", x, stage.parameters["0.weight"])
    size = np.einsum("...i,oi->...o", np.abs(x), np.abs(stage.parameters["0.weight"]))
    if bias:
        expected, size = expected + stage.parameters["0.bias"], size + np.abs(stage.parameters["0.bias"])
    assert y.shape == (*shape[:-1], 7)
    close(y, expected, 5 + 1, size)


@pytest.mark.parametrize("shape", [(4, 5), (2, 3, 5), (1, 5)])
def test_gradients_of_linear_agree_with_finite_differences(shape):
    check_stage(nn.Stage([nn.Linear(5, 7)], dtype="float64"), RANDOM.standard_normal(shape))


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


@pytest.mark.parametrize("outputs, inputs", [(3, 2), (300, 700), (2500, 70), (5, 200_000)])
def test_a_gradient_made_in_pieces_is_the_whole_product(outputs, inputs):
    dy, x = RANDOM.standard_normal((4, outputs)), RANDOM.standard_normal((4, inputs))
    grad = RANDOM.standard_normal((outputs, inputs))
    expected, size = grad + dy.T @ x, np.abs(grad) + np.abs(dy).T @ np.abs(x)
    any_dtype.linear_backward_weight(dy, x, grad)
    close(grad, expected, 4 + 1, size)


def test_a_wrong_input_size_is_named():
    stage = nn.Stage([nn.Linear(5, 7)], dtype="float64", first=4)
    for shape in [(2, 6), (2, 3, 4), (10,), ()]:
        with pytest.raises(ArgumentError, match=r"layer 4 \(Linear\)") as caught:
            stage.forward(np.zeros(shape))
        assert caught.value.expected == "(..., 5)"


@pytest.mark.parametrize("sizes", [(0, 3), (3, -1), (2.0, 3)])
def test_sizes_must_be_positive_integers(sizes):
    with pytest.raises(ArgumentError):
        nn.Linear(*sizes)
