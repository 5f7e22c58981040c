"""Local attention against a dense float64 reference."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reference_attention import NAMES, agrees, dense
from support.rings import arrays as whole_of
from support.rings import masks
from support.tolerance import within

from mpipipe import attention
from mpipipe.arrays import accumulator
from mpipipe.arrays import dtype as named_dtype
from mpipipe.attention.merge import merge
from mpipipe.errors import ArgumentError


def compare(q, k, v, dout, causal=True, window=None, documents=None, scale=None, segments=None):
    attend = attention.Local(causal, scale, window, segments)
    copies = [a.copy() for a in (q, k, v, dout)]
    out, saved = attend.forward(q, k, v)
    found = out, saved.lse, *attend.backward(dout, saved)
    for array, copy in zip((q, k, v, dout), copies):
        np.testing.assert_array_equal(array, copy)
    expected = dense(q, k, v, dout, causal, window, documents, scale)
    for name, one, other in zip(NAMES, found, expected):
        assert one.dtype == (accumulator(q.dtype) if name == "lse" else q.dtype) and one.shape == other.shape
    agrees(found, expected)


def arrays(seed, batch, seq, keys, heads, kv_heads, dim, dtype=np.float64, size=1.0):
    q, k, v, dout = whole_of(seq, keys, batch, heads, kv_heads, dim, seed=seed)
    return [x.astype(dtype) for x in (q * size, k * size, v, dout)]


@st.composite
def cases(draw):
    seq, kv_heads = draw(st.integers(1, 40)), draw(st.integers(1, 3))
    options, expected, keys = draw(masks(seq))
    sizes = dict(batch=draw(st.integers(1, 2)), heads=kv_heads * draw(st.integers(1, 4)), kv_heads=kv_heads)
    kind, size = draw(st.sampled_from(["float64", "float32", "float16", "bfloat16"])), draw(st.sampled_from([0.1, 1.0]))
    whole = arrays(0, seq=seq, keys=keys, **sizes, dim=draw(st.integers(1, 9)), dtype=named_dtype(kind),
                   size=100.0 if kind == "float64" and draw(st.booleans()) else size)  # fmt: skip
    return whole, expected, draw(st.none() | st.just(0.7)), options["segments"]


@settings(max_examples=60, deadline=None)
@given(cases())
def test_attention_equals_dense_attention(case):
    whole, expected, scale, segments = case
    compare(*whole, *expected, scale, segments)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("seq, keys, size", [(1100, 1100, 1.0), (300, 1101, 60.0), (1101, 300, 60.0)])
def test_many_tiles_equal_dense_attention(causal, seq, keys, size):
    compare(*arrays(0, 1, seq, keys, 2, 1, 16, size=size), causal)


def test_one_outlier_among_the_keys_does_not_spoil_other_rows():
    """A huge key raises the bound of every row; rows that hardly see it must stay exact."""
    q, k, v, dout = arrays(3, 1, 64, 64, 1, 1, 8, np.float32)
    k[0, 40] *= 1000
    q[0, :32] -= k[0, 40] * np.sum(q[0, :32] * k[0, 40], -1, keepdims=True) / np.sum(k[0, 40] ** 2)
    out, _ = attention.Local(True).forward(q, k, v)
    expected = dense(*(x[:, :40] for x in (q, k, v, dout)))  # without the huge key, which they do not see
    within(out[:, :40], expected[0], expected.bounds(np.float32)[0], "out")


def test_arrays_that_do_not_fit_are_refused():
    q, k, v, _ = arrays(9, 1, 6, 6, 4, 2, 4)
    for wrong in ((q[0], k, v), (q, k[:, :3], v), (q[:, :, :3], k, v), (q[..., :2], k, v), (q.astype("f4"), k, v)):
        with pytest.raises(ArgumentError, match="do not fit"):
            attention.Local().forward(*wrong)


def test_a_scale_is_a_finite_number_above_0():
    for scale in (np.nan, np.inf, 0, -0.5):
        with pytest.raises(ArgumentError, match="scale of attention") as caught:
            attention.Local(scale=scale)
        assert caught.value.found == repr(scale)
    for scale in (None, 1, 0.25, np.float32(0.5)):
        assert attention.Local(scale=scale).options.scale == scale


def test_two_results_over_no_keys_become_one_over_none():
    out, lse = np.zeros((3, 4)), np.full(3, -np.inf)
    merge(out, lse, np.zeros((3, 4)), lse.copy())
    assert not out.any() and np.isneginf(lse).all()
