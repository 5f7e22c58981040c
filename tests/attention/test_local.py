"""Local attention against a dense float64 reference."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reference_attention import agrees, dense
from support.tolerance import within

from mpipipe import attention
from mpipipe.arrays import dtype as named_dtype
from mpipipe.attention.kernels import host
from mpipipe.errors import ArgumentError


def compare(q, k, v, dout, causal, scale=None):
    attend = attention.Local(causal, scale)
    copies = [a.copy() for a in (q, k, v, dout)]
    out, saved = attend.forward(q, k, v)
    found = out, saved.lse, *attend.backward(dout, saved)
    for array, copy in zip((q, k, v, dout), copies):
        np.testing.assert_array_equal(array, copy)
    expected = dense(q, k, v, dout, causal, scale=scale)
    assert all(one.dtype == q.dtype and one.shape == other.shape for one, other in zip(found, expected))
    agrees(found, expected)


def arrays(seed, batch, seq, keys, heads, kv_heads, dim, dtype=np.float64, size=1.0):
    random = np.random.default_rng(seed)
    shapes = [(batch, seq, heads, dim), (batch, keys, kv_heads, dim), (batch, keys, kv_heads, dim)]
    q, k, v = ((random.standard_normal(shape)).astype(dtype) for shape in shapes)
    return q * dtype(size), k * dtype(size), v, random.standard_normal(shapes[0]).astype(dtype)


LENGTHS = st.tuples(st.integers(0, 99), st.integers(1, 2), st.integers(1, 40), st.integers(1, 40))


@settings(max_examples=40, deadline=None)
@given(
    LENGTHS, st.integers(1, 3), st.integers(1, 4), st.integers(1, 9), st.booleans(), st.sampled_from([0.1, 1.0, 100.0])
)
def test_attention_equals_dense_attention(seed_and_lengths, kv_heads, group, dim, causal, size):
    compare(*arrays(*seed_and_lengths, kv_heads * group, kv_heads, dim, size=size), causal)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("seq, keys, size", [(1100, 1100, 1.0), (300, 1101, 60.0), (1101, 300, 60.0)])
def test_many_tiles_equal_dense_attention(causal, seq, keys, size):
    compare(*arrays(0, 1, seq, keys, 2, 1, 16, size=size), causal)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (4, 1), (140, 1)])
def test_float32_is_near_float64(causal, heads, kv_heads):
    compare(*arrays(1, 1, 60, 60, heads, kv_heads, 32, np.float32), causal)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("causal", [True, False])
def test_scores_of_ten_thousand_neither_overflow_nor_vanish(dtype, causal):
    q, k, v, dout = arrays(2, 1, 300, 300, 2, 2, 16, dtype, size=55.0)
    assert np.abs(np.einsum("bihd,bjhd->bhij", q, k)).max() / 4 > 1e4
    with np.errstate(all="raise", under="ignore"):
        compare(q, k, v, dout, causal)


def test_one_outlier_among_the_keys_does_not_spoil_other_rows():
    """A huge key raises the bound of every row; rows that hardly see it must stay exact."""
    q, k, v, dout = arrays(3, 1, 64, 64, 1, 1, 8, np.float32)
    k[0, 40] *= 1000
    q[0, :32] -= k[0, 40] * np.sum(q[0, :32] * k[0, 40], -1, keepdims=True) / np.sum(k[0, 40] ** 2)
    out, _ = attention.Local(True).forward(q, k, v)
    expected = dense(*(x[:, :40] for x in (q, k, v, dout)))  # without the huge key, which they do not see
    within(out[:, :40], expected[0], expected.bounds(np.float32)[0], "out")


def test_both_references_give_the_same_result_at_the_edge():
    q, k, v, dout = arrays(4, 1, 100, 100, 2, 1, 16, np.float32)
    attend = attention.Local(True, 0.25)
    bounded = attend.forward(q, k, v)[1]
    safe = dict(host._SAFE)
    try:
        host._SAFE[np.dtype(np.float32)] = 0.0
        online = attend.forward(q, k, v)[1]
    finally:
        host._SAFE.update(safe)
    bounds = dense(q, k, v, dout, scale=0.25).bounds(np.float32)
    for one, other, allowed in zip((bounded.out, bounded.lse), (online.out, online.lse), bounds):
        assert (one != other).any()
        within(one, other, allowed)


def test_views_with_any_strides_are_taken():
    random = np.random.default_rng(5)
    fused = random.standard_normal((2, 30, 8, 6))
    q, k, v = fused[:, :, :4], fused[:, :, 4:6], fused[:, :, 6:]
    compare(q, k, v, random.standard_normal((2, 4, 30, 6)).transpose(0, 2, 1, 3), True)
    turned = random.standard_normal((6, 2, 30, 4)).transpose(1, 2, 3, 0)
    compare(turned, turned[:, ::-1], turned[:, ::2].repeat(2, axis=1), turned[..., ::-1], True)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("options", [dict(), dict(causal=False), dict(window=5), dict(segments=[10, 20])], ids=str)
def test_half_precision_is_float32_rounded_once(dtype, options):
    """Arrays upcast to float32 give the same before the rounding, but for the rounded output in the backward."""
    half = [x.astype(named_dtype(dtype)) for x in arrays(10, 2, 30, 30, 4, 2, 8)]
    wide = [x.astype(np.float32) for x in half]
    attend = attention.Local(**options)
    out, saved = attend.forward(*half[:3])
    expected, expected_saved = attend.forward(*wide[:3])
    gradients = attend.backward(half[3], saved)
    assert {x.dtype for x in (out, *gradients)} == {half[0].dtype} and saved.lse.dtype == np.float32
    np.testing.assert_array_equal(out, expected.astype(half[0].dtype))
    np.testing.assert_array_equal(saved.lse, expected_saved.lse)
    dq, dk, dv = attend.backward(wide[3], expected_saved)
    np.testing.assert_array_equal(gradients[2], dv.astype(half[0].dtype))
    documents = [0, 10, 30] if "segments" in options else None
    exact = dense(*half, options.get("causal", True), options.get("window"), documents)
    for found, right, allowed in zip(gradients, (dq, dk), exact.bounds(dtype)[2:]):
        within(found, right, allowed)


def test_a_given_scale_is_used():
    q, k, v, dout = arrays(6, 1, 9, 9, 2, 2, 4)
    compare(q, k, v, dout, True, scale=0.7)


def test_a_head_does_not_depend_on_its_neighbours():
    q, k, v, dout = arrays(7, 2, 70, 70, 4, 2, 16, np.float32)
    attend = attention.Local()
    out, saved = attend.forward(q, k, v)
    gradients = attend.backward(dout, saved)
    one, kept = attend.forward(q[1:, :, 2:], k[1:, :, 1:], v[1:, :, 1:])
    np.testing.assert_array_equal(one, out[1:, :, 2:])
    for part, whole, first in zip(attend.backward(dout[1:, :, 2:], kept), gradients, (2, 1, 1)):
        np.testing.assert_array_equal(part, whole[1:, :, first:])


def test_nan_stays_visible():
    q, k, v, _ = arrays(8, 1, 6, 6, 1, 1, 4)
    q[0, 3] = np.nan
    out, saved = attention.Local().forward(q, k, v)
    assert np.isnan(out[0, 3]).all() and np.isnan(saved.lse[0, :, 3]).all() and np.isfinite(out[0, :3]).all()


def test_arrays_that_do_not_fit_are_refused_and_no_keys_give_zeros():
    q, k, v, _ = arrays(9, 1, 6, 6, 4, 2, 4)
    for wrong in ((q[0], k, v), (q, k[:, :3], v), (q[:, :, :3], k, v), (q[..., :2], k, v), (q.astype("f4"), k, v)):
        with pytest.raises(ArgumentError, match="do not fit"):
            attention.Local().forward(*wrong)
    out, saved = attention.Local(False).forward(q, k[:, :0], v[:, :0])
    assert not out.any() and np.isneginf(saved.lse).all()
    assert not attention.Local(False).backward(out, saved)[0].any()


def test_a_scale_is_a_finite_number_above_0():
    for scale in (np.nan, np.inf, 0, -0.5, "0.5", 1j):
        with pytest.raises(ArgumentError, match="scale of attention") as caught:
            attention.Local(scale=scale)
        assert caught.value.found == repr(scale)
    for scale in (None, 1, 0.25, np.float32(0.5)):
        assert attention.Local(scale=scale).options.scale == scale
