"""Queries against a cache of keys and values: dense attention, however the text comes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.reference_attention import dense
from support.tolerance import close, largest, within

from mpipipe import nn
from mpipipe.arrays import dtype as named_dtype
from mpipipe.attention import KVCache, Local
from mpipipe.errors import ArgumentError


def agrees(out, q, k, v, window=None, scale=None, queries=None):
    """`out` is causal attention of the last so many queries, by default of all of them."""
    expected = dense(q, k, v, np.zeros((*q.shape[:3], v.shape[3])), window=window, scale=scale)
    at = slice(None if queries is None else -queries, None)
    within(out, expected[0][:, at], expected.bounds(q.dtype)[0][:, at], "out")


def arrays(seq, batch=2, heads=4, kv_heads=2, dim=8, value_dim=6, dtype=np.float64, size=1.0, seed=0):
    rng = np.random.default_rng(seed)
    shapes = (batch, seq, heads, dim), (batch, seq, kv_heads, dim), (batch, seq, kv_heads, value_dim)
    return [(size * rng.normal(size=shape)).astype(dtype) for shape in shapes]


def in_pieces(cache, whole, pieces):
    """The output of all positions, from forwards of so many at a time."""
    ends = np.cumsum(pieces)
    return np.concatenate([cache.forward(*(x[:, end - p : end] for x in whole))[0] for p, end in zip(pieces, ends)], 1)


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(0, 9), st.none() | st.integers(1, 8),
    st.sampled_from([None, 0.3]), st.sampled_from(["float64", "float32", "float16", "bfloat16"]),
    st.sampled_from([{}, {"kv_heads": 4}, {"kv_heads": 1, "batch": 1}, {"heads": 8, "value_dim": 8}, {"value_dim": 1}]),
)  # fmt: skip
def test_any_pieces_equal_dense(pieces, spare, window, scale, dtype, sizes):
    whole = arrays(sum(pieces), dtype=named_dtype(dtype), **sizes)
    cache = KVCache(sum(pieces) + spare, window=window, scale=scale)
    out = in_pieces(cache, whole, pieces)
    assert out.dtype == dtype and cache.length == sum(pieces)
    agrees(out, *whole, window, scale)


def test_huge_scores_do_not_overflow():
    whole = arrays(12, size=60.0)
    agrees(in_pieces(KVCache(12), whole, [6, 6]), *whole)


def test_a_cleared_cache_takes_another_text_of_another_shape():
    cache = KVCache(8)
    in_pieces(cache, arrays(8), [8])
    cache.clear()
    other = arrays(5, batch=1, heads=2, kv_heads=1, seed=1)
    agrees(in_pieces(cache, other, [4, 1]), *other)


def alike(found, expected, x):
    """Outputs of two SelfAttention layers: products over dim, and a sum over the positions in between."""
    close(found, expected, 3 * x.shape[-1] + x.shape[1], largest(x) ** 2 * largest(expected))


@pytest.mark.parametrize("pieces, positions", [([9], None), ([4, 1, 1, 3], None), ([4], np.array([0, 5, 6, 50]))])
def test_layers_find_their_positions_by_themselves_unless_these_are_given(pieces, positions):
    layers = [nn.Stage([nn.SelfAttention(16, 4, 2, attend, positions)], "float64") for attend in (Local(), KVCache(9))]
    ends = np.cumsum(pieces)
    x = np.random.default_rng(0).normal(size=(2, ends[-1], 16))
    y = np.concatenate([layers[1].forward(x[:, end - p : end])[0] for p, end in zip(pieces, ends)], 1)
    alike(y, layers[0].forward(x)[0], x)


def test_more_positions_than_the_capacity_are_refused_and_nothing_is_kept():
    whole = arrays(6)
    cache = KVCache(6)
    first = cache.forward(*(x[:, :4] for x in whole))[0]
    with pytest.raises(ArgumentError, match="capacity") as caught:
        cache.forward(*arrays(3))
    assert "4 positions and 3 more" in str(caught.value) and "clear()" in str(caught.value)
    rest = cache.forward(*(x[:, 4:] for x in whole))[0]
    agrees(np.concatenate([first, rest], 1), *whole)


REFUSED = [
    (lambda q, k, v: (q[:1], k[:1], v[:1]), "k does not fit to what is in the cache"),
    (lambda q, k, v: (q, k, v[..., :3]), "v does not fit to what is in the cache"),
    (lambda q, k, v: (q.astype("f4"), k.astype("f4"), v.astype("f4")), "float32"),
    (lambda q, k, v: (q[:, :1], k, v), "as many keys as queries"),
    (lambda q, k, v: (None, k, v), "NoneType"),
]


@pytest.mark.parametrize("change, match", REFUSED)
def test_arrays_that_do_not_fit_are_refused(change, match):
    cache = KVCache(8)
    cache.forward(*arrays(2))
    with pytest.raises(ArgumentError, match=match):
        cache.forward(*change(*arrays(2)))
    assert cache.length == 2


def test_senseless_options_are_refused():
    with pytest.raises(ArgumentError, match="window"):
        KVCache(4, window=0)
    with pytest.raises(ArgumentError, match="capacity"):
        KVCache(0).forward(*arrays(2))
    with pytest.raises(TypeError, match="integer"):
        KVCache(2.5).forward(*arrays(2))
