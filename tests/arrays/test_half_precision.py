"""Functions of float32 arrays that take half precision: one upcast, one rounding."""

import warnings

import numpy as np
import pytest

from mpipipe import arrays
from mpipipe.arrays.half_precision import upcast, upcast_halves

HALVES = ("float16", "bfloat16")


@pytest.fixture(params=HALVES)
def kind(request):
    return arrays.dtype(request.param)


def test_results_that_are_told_are_rounded(kind):
    def function(x, y, factor):
        assert x.dtype == y.dtype == np.float32
        return x / y * factor, x.sum(keepdims=True)

    x, y = np.array([1.0, 2.0]).astype(kind), np.array([3.0, 7.0]).astype(kind)
    rounded, kept = upcast_halves(function, returned=(0,))(x, y, factor=2.0)
    assert rounded.dtype == kind and kept.dtype == np.float32
    exact = x.astype(np.float32) / y.astype(np.float32) * np.float32(2)
    np.testing.assert_array_equal(rounded, exact.astype(kind))


def test_a_single_result_is_rounded_or_not_and_full_precision_passes_as_it_is(kind):
    x, full = np.ones(2, kind), np.ones(3)
    assert upcast_halves(np.negative, returned=(0,))(x).dtype == kind
    assert upcast_halves(lambda x: x)(x).dtype == np.float32
    assert upcast_halves(lambda y: y, returned=(0,))(full) is full
    assert upcast(full) is full and upcast(None) is None and upcast(2.0) == 2.0


def test_arguments_that_are_set_are_rounded_once(kind):
    def function(x, out, sums):
        out[...] = x / 3
        sums += x

    x, out, sums = np.ones(4, kind), np.full(4, np.nan).astype(kind), np.ones(4, np.float32)
    assert upcast_halves(function, written=(1, 2))(x, out, sums) is None
    np.testing.assert_array_equal(out, np.full(4, 1 / 3, np.float32).astype(kind))
    np.testing.assert_array_equal(sums, np.full(4, 2.0, np.float32))


def test_what_is_too_large_becomes_infinite_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = upcast_halves(np.square, returned=(0,))(np.full(2, 1000, np.float16))
    assert np.isinf(found).all() and found.dtype == np.float16
