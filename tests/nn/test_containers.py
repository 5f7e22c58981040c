"""Sequential, Residual and Recompute: same numbers as the layers by hand."""

from __future__ import annotations

import numpy as np
import pytest
from support.gradcheck import check_stage
from support.tolerance import close

from mpipipe import attention, nn

RANDOM = np.random.default_rng(5)


def block(wrap=lambda layer: layer):
    attend = attention.Local()
    return [
        wrap(nn.Residual(nn.Sequential([nn.RMSNorm(8), nn.SelfAttention(8, 2, 1, attend), nn.Dropout(0.3)]))),
        wrap(
            nn.Residual(
                nn.Sequential([nn.LayerNorm(8), nn.Linear(8, 12), nn.Gelu(), nn.Dropout(0.2), nn.Linear(12, 8)])
            )
        ),
    ]


def test_gradients_of_a_block_agree_with_finite_differences():
    check_stage(nn.Stage(block(), dtype="float64"), RANDOM.standard_normal((2, 3, 8)))


def test_residual_adds_its_input():
    stage = nn.Stage([nn.Residual(nn.Linear(3, 3))], dtype="float64")
    x = RANDOM.standard_normal((4, 3))
    weight = stage.parameters["0.layer.weight"].T
    close(stage.forward(x)[0], x + x @ weight, 4, np.abs(x) + np.abs(x) @ np.abs(weight))


def test_an_empty_sequential_is_the_identity():
    stage = nn.Stage([nn.Sequential([])], dtype="float64")
    x = RANDOM.standard_normal((4, 3))
    y, saved = stage.forward(x)
    np.testing.assert_array_equal(y, x)
    np.testing.assert_array_equal(stage.backward(x, saved), x)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_recompute_gives_the_same_bits_and_keeps_only_the_input(dtype):
    plain = nn.Stage(block(), dtype=dtype)
    again = nn.Stage(block(nn.Recompute), dtype=dtype)
    assert list(plain.parameters) == list(again.parameters)
    np.testing.assert_array_equal(plain.parameters.flat, again.parameters.flat)
    x, dy = RANDOM.standard_normal((2, 2, 5, 8)).astype(dtype)
    there = nn.Position(step=7, microbatch=3)
    (y, saved), (y_again, saved_again) = plain.forward(x, there), again.forward(x, there)
    np.testing.assert_array_equal(y, y_again)
    again.position = nn.Position(step=9, microbatch=0, training=False)
    np.testing.assert_array_equal(plain.backward(dy, saved), again.backward(dy, saved_again))
    np.testing.assert_array_equal(plain.gradients.flat, again.gradients.flat)
    assert again.position == nn.Position(step=9, microbatch=0, training=False)
    kept = [part[0] for part in saved_again]
    assert kept[0] is x and all(isinstance(part, np.ndarray) for part in kept)


def test_gradients_of_recompute_agree_with_finite_differences():
    check_stage(nn.Stage(block(nn.Recompute), dtype="float64"), RANDOM.standard_normal((1, 3, 8)))


def test_poll_is_called_between_layers_in_both_directions():
    calls = []
    stage = nn.Stage([nn.Linear(3, 3), nn.Sequential([nn.Gelu(), nn.Linear(3, 3)])], dtype="float64")
    stage.poll = lambda: calls.append(1)
    x = RANDOM.standard_normal((4, 3))
    y, saved = stage.forward(x)
    assert len(calls) == 2
    stage.backward(y, saved)
    assert len(calls) == 4
    _, pending = stage.backward_input(y, saved)
    stage.backward_weight(pending)
    assert len(calls) == 8
