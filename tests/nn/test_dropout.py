"""Dropout: right on average, and the same mask wherever and however often it is drawn."""

import numpy as np
import pytest

from mpipipe import nn
from mpipipe.errors import ArgumentError
from mpipipe.nn.random import random_bits, random_key


def mask(stage, shape=(64, 64), **position):
    return stage.forward(np.ones(shape, stage.dtype), stage.position._replace(**position))[0]


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_the_mean_stays_and_the_share_is_right(probability):
    stage = nn.Stage([nn.Dropout(probability)])
    y = mask(stage, (1000, 1000))
    zeros = np.mean(y == 0)
    # five standard deviations of a random draw, and half a step of the 16 bits that decide
    assert abs(zeros - probability) < 5 * np.sqrt(probability * (1 - probability) / y.size) + 2**-17
    assert abs(y.mean(dtype=np.float64) - 1) < 5 * np.sqrt(probability / (1 - probability) / y.size) + 2**-17
    assert len(np.unique(y)) == 2


def test_the_mask_depends_on_seed_name_step_replica_and_microbatch_only():
    base = mask(nn.Stage([nn.Dropout(0.5)], first=3))
    elsewhere = nn.Stage([nn.Linear(64, 64), nn.Dropout(0.5)], dtype="float64", first=2)
    np.testing.assert_array_equal(base == 0, mask(elsewhere) == 0)
    others = [
        mask(nn.Stage([nn.Dropout(0.5)], first=4)),
        mask(nn.Stage([nn.Dropout(0.5)], first=3, seed=1)),
        mask(nn.Stage([nn.Dropout(0.5)], first=3), step=1),
        mask(nn.Stage([nn.Dropout(0.5)], first=3), replica=1),
        mask(nn.Stage([nn.Dropout(0.5)], first=3), microbatch=1),
    ]
    masks = [base, *others]
    for i, one in enumerate(masks):
        for other in masks[:i]:
            assert 0.4 < np.mean((one == 0) == (other == 0)) < 0.6


def test_dropout_is_the_identity_in_evaluation_and_with_probability_zero():
    x = np.random.default_rng(0).standard_normal((5, 5)).astype(np.float32)
    off, zero = nn.Stage([nn.Dropout(0.5)]), nn.Stage([nn.Dropout(0.0)])
    off.position = nn.Position(training=False)
    for stage in (off, zero):
        y, saved = stage.forward(x)
        np.testing.assert_array_equal(y, x)
        np.testing.assert_array_equal(stage.backward(x, saved), x)


@pytest.mark.parametrize("probability", [-0.1, 1.0, 2])
def test_an_impossible_probability_is_refused(probability):
    with pytest.raises(ArgumentError):
        nn.Dropout(probability)


def test_random_bits_are_the_words_of_philox_at_that_key_and_counter():
    stream = random_key("a", 1)
    assert stream.dtype == np.uint64 and stream.shape == (2,)
    bits = random_bits(stream, (5, 6, 7), 10)
    words = np.random.Philox(key=int(stream[0]) + (int(stream[1]) << 64), counter=(5 << 64) + (6 << 128) + (7 << 192))
    raw = [int(word) for word in words.random_raw(3)]
    assert [int(b) for b in bits] == [(raw[i // 4] >> 16 * (i % 4)) & 0xFFFF for i in range(10)]
