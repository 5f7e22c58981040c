"""Merging partial results of attention against the softmax over all keys at once."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tolerance import close, largest

from mpipipe.attention.merge import merge

ROWS, DIM = 3, 4


def attention(scores, values):
    """(normalised output, log-sum-exp) of each row in float64; zeros and -inf without keys."""
    if not scores.shape[1]:
        return np.zeros((ROWS, DIM)), np.full(ROWS, -np.inf)
    high = scores.max(1, keepdims=True)
    weights = np.exp(scores - high)
    total = weights.sum(1, keepdims=True)
    return weights / total @ values, (high + np.log(total))[:, 0]


def scores_and_values(keys, reach, seed):
    random = np.random.default_rng(seed)
    return random.uniform(-reach, reach, (ROWS, keys)), random.normal(size=(keys, DIM))


def merged(scores, values, blocks, dtype):
    """The results of blocks of keys, merged one after the other into those of no keys."""
    out, lse = np.zeros((ROWS, DIM), dtype), np.full(ROWS, -np.inf, dtype)
    for keys in blocks:
        block_out, block_lse = attention(scores[:, keys], values[keys])
        merge(out, lse, block_out.astype(dtype), block_lse.astype(dtype))
    return out, lse


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=6), st.sampled_from([1.0, 40.0]), st.integers(0, 99), st.booleans()
)
def test_blocks_in_any_order_give_the_softmax_over_their_union(dtype, sizes, reach, seed, backwards):
    cuts = np.cumsum([0, *sizes])
    scores, values = scores_and_values(cuts[-1], reach, seed)
    blocks = [slice(start, stop) for start, stop in pairwise(cuts)]
    out, lse = merged(scores, values, blocks[::-1] if backwards else blocks, dtype)
    expected_out, expected_lse = attention(scores, values)
    # about ten operations a merge; rounding a logarithm of size `reach` moves its exponential by so many units
    operations = len(blocks) * (10 + 2 * reach) + cuts[-1]
    close(out, expected_out, operations, largest(values) if values.size else 1.0)
    close(lse, expected_lse, operations, reach + np.log(max(cuts[-1], 1)))


def test_a_block_without_keys_changes_no_bit():
    out, lse = attention(*scores_and_values(5, 1.0, 0))
    same_out, same_lse = out.copy(), lse.copy()
    merge(same_out, same_lse, *attention(np.zeros((ROWS, 0)), np.zeros((0, DIM))))
    np.testing.assert_array_equal(same_out, out)
    np.testing.assert_array_equal(same_lse, lse)


def test_two_sets_without_keys_give_one_without_keys_and_far_log_sum_exps_do_not_overflow():
    out, lse = merged(np.zeros((ROWS, 0)), np.zeros((0, DIM)), [slice(0), slice(0)], "float32")
    assert not out.any() and np.isneginf(lse).all()
    out, lse = np.ones((1, DIM)), np.array([-1e4])
    merge(out, lse, np.full((1, DIM), 2.0), np.array([1e4]))
    assert (out == 2).all() and lse == 1e4
