"""Windows of tokens: they follow from seed and step alone, and replicas share them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.windows import training_batch, validation_batch

from mpipipe.language.data import Array


@pytest.fixture
def counting():
    """Tokens in which that at position i is i mod 251."""
    return Array(np.arange(5000) % 251)


def test_targets_are_the_inputs_moved_on_by_one(counting):
    inputs, targets = training_batch(counting, seed=0, step=3, batch=6, rows=slice(0, 6), seq_len=50)
    assert inputs.shape == targets.shape == (6, 50)
    assert inputs.dtype == targets.dtype == np.int64
    assert inputs.flags.c_contiguous and targets.flags.c_contiguous
    np.testing.assert_array_equal(inputs[:, 1:], targets[:, :-1])
    np.testing.assert_array_equal(targets, (inputs + 1) % 251)


@given(replicas=st.integers(1, 5), rows=st.integers(1, 4), step=st.integers(0, 2**40))
@settings(max_examples=20)
def test_the_shares_of_the_replicas_make_up_the_batch_of_one(replicas, rows, step):
    tokens, batch = Array(np.random.default_rng(1).integers(0, 256, 300)), replicas * rows
    for draw, which in ((training_batch, {"seed": 5, "step": step}), (validation_batch, {"index": 1, "batches": 3})):
        whole = draw(tokens, **which, batch=batch, rows=slice(0, batch), seq_len=7)
        parts = [
            draw(tokens, **which, batch=batch, rows=slice(r * rows, (r + 1) * rows), seq_len=7) for r in range(replicas)
        ]
        for side in (0, 1):
            np.testing.assert_array_equal(np.concatenate([part[side] for part in parts]), whole[side])


def test_training_windows_reach_both_ends_of_the_text():
    tokens, firsts = Array(np.arange(12)), set()
    for step in range(40):
        firsts |= set(training_batch(tokens, seed=0, step=step, batch=4, rows=slice(0, 4), seq_len=9)[0][:, 0].tolist())
    assert firsts == {0, 1, 2}


def test_validation_windows_spread_over_the_whole_text(counting):
    batches = [
        validation_batch(counting, index=index, batches=4, batch=5, rows=slice(0, 5), seq_len=20) for index in range(4)
    ]
    inputs = np.concatenate([inputs for inputs, _ in batches])
    assert batches[-1][1][-1, -1] == 4999 % 251
    np.testing.assert_array_equal(inputs[:, 0], np.arange(20) * (5000 - 21) // 19 % 251)
    np.testing.assert_array_equal(inputs[0], np.arange(20))
    exact = validation_batch(Array(np.arange(5)), index=0, batches=1, batch=1, rows=slice(0, 1), seq_len=4)
    assert [side.tolist() for side in exact] == [[[0, 1, 2, 3]], [[1, 2, 3, 4]]]  # a text that just holds one window
