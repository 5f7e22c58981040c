"""Losses against closed forms."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gradcheck import near_numeric, numeric
from support.tolerance import close, largest

from mpipipe import nn
from mpipipe.errors import ArgumentError

RANDOM = np.random.default_rng(7)


@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 3, 5)])
def test_mean_squared_error_is_its_formula(shape):
    output, target = RANDOM.standard_normal((2, *shape))
    value, gradient = nn.mean_squared_error(output, target)
    assert isinstance(value, float)
    close(value, np.mean((output - target) ** 2), output.size + 4)
    found = numeric(lambda: nn.mean_squared_error(output, target)[0], output)
    near_numeric(gradient, found, output.size + 4, value)


def test_a_float32_loss_is_summed_in_float64():
    output, target = np.full(3_000_000, 0.1, np.float32), np.zeros(3_000_000, np.float32)
    value, gradient = nn.mean_squared_error(output, target)
    # equal terms err alike, so that sqrt(n) does not hold: in float64 this is 7e-10, in float32 0.4
    close(value, float(np.float32(0.1)) ** 2, 1, output.size * float(np.float32(0.1)) ** 2, dtype=np.float64)
    assert gradient.dtype == np.float32


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 9), vocab=st.integers(1, 60), size=st.sampled_from([1.0, 30.0, 1e4]), seed=st.integers(0, 99)
)
def test_cross_entropy_is_its_formula(rows, vocab, size, seed):
    random = np.random.default_rng(seed)
    logits = random.standard_normal((2, rows, vocab)) * size
    target = random.integers(0, vocab, (2, rows))
    value, gradient = nn.softmax_cross_entropy(logits, target)
    shifted = logits - logits.max(-1, keepdims=True)
    log_softmax = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    one_hot = np.eye(vocab)[target]
    close(value, -np.mean(np.sum(log_softmax * one_hot, -1)), vocab + 2 * rows + 4, 1 + largest(shifted))
    softmax = np.exp(log_softmax)  # a difference of logits is rounded, and becomes a relative error
    close(gradient, (softmax - one_hot) / (2 * rows), vocab + 6, (softmax * (1 - shifted) + one_hot) / (2 * rows))


@pytest.mark.parametrize("vocab", [7, 5000, 70_000])
def test_cross_entropy_in_pieces_is_the_whole(vocab):
    logits = RANDOM.standard_normal((40, vocab)).astype(np.float32)
    target = RANDOM.integers(0, vocab, 40)
    value, gradient = nn.softmax_cross_entropy(logits, target)
    wide, wide_gradient = nn.softmax_cross_entropy(logits.astype(np.float64), target)
    apart = 1 + 2 * largest(logits)  # exponentials are float32, and an error of a logit is a relative one of them
    close(value, wide, vocab, apart, dtype=np.float32)
    one_hot = np.arange(vocab) == target[:, None]
    size = apart * (wide_gradient + one_hot / 40) + one_hot / 40
    close(gradient, wide_gradient, vocab, size)
    close(gradient.sum(1, dtype=np.float64), np.zeros(40), vocab, size.sum(1), dtype=np.float32)


def test_gradient_of_cross_entropy_agrees_with_finite_differences():
    logits, target = RANDOM.standard_normal((2, 3, 5)), RANDOM.integers(0, 5, (2, 3))
    _, gradient = nn.softmax_cross_entropy(logits, target)
    found = numeric(lambda: nn.softmax_cross_entropy(logits, target)[0], logits)
    near_numeric(gradient, found, 6 * 5, 1 + largest(logits))


def test_equal_logits_cost_the_logarithm_of_the_vocabulary():
    value, _ = nn.softmax_cross_entropy(np.zeros((3, 256), np.float32), np.zeros(3, np.uint8))
    close(value, np.log(256), 4)  # a sum of 256 ones is exact, and its logarithm is taken in float64


def test_arguments_that_do_not_fit_are_refused():
    with pytest.raises(ArgumentError, match="out of range"):
        nn.softmax_cross_entropy(np.zeros((2, 3)), np.array([0, 3]))
    with pytest.raises(ArgumentError, match="must be integers"):
        nn.softmax_cross_entropy(np.zeros((2, 3)), np.zeros(2))
    with pytest.raises(ArgumentError, match="one target"):
        nn.softmax_cross_entropy(np.zeros((2, 3)), np.zeros(3, int))
    with pytest.raises(ArgumentError, match="equal shapes"):
        nn.mean_squared_error(np.zeros((2, 3)), np.zeros(3))
    with pytest.raises(ArgumentError, match="equal shapes"):
        nn.mean_squared_error(np.zeros((0, 3)), np.zeros((0, 3)))
