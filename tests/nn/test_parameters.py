"""Flat buffers, and their ranges of equal weight decay."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpipipe import arrays
from mpipipe.nn.parameters import FlatBuffer, decay_ranges

SHAPES = {"a": (3, 5), "b": (16,), "c": (0, 4), "d": (7,)}


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_each_array_starts_on_a_cache_line(dtype):
    buffer = FlatBuffer(SHAPES, arrays.dtype(dtype))
    assert {name: array.shape for name, array in buffer.items()} == SHAPES and len(buffer) == 4
    for name, array in buffer.items():
        if not array.size:
            continue
        assert array.ctypes.data % 64 == 0
        assert array.ctypes.data == buffer.flat.ctypes.data + buffer.offsets[name] * array.itemsize
    buffer["b"][...] = 1
    assert buffer.flat.astype(np.float64).sum() == 16


def test_buffers_of_two_dtypes_have_the_offsets_of_the_narrower():
    half = arrays.dtype("bfloat16")
    wide = FlatBuffer(SHAPES, np.dtype(np.float32), narrowest=half)
    assert wide.offsets == FlatBuffer(SHAPES, half).offsets != FlatBuffer(SHAPES, np.dtype(np.float32)).offsets
    assert all(array.ctypes.data % 64 == 0 for array in wide.values() if array.size)


def test_ranges_of_equal_decay_are_joined_with_the_gaps_behind_them():
    offsets = {"a": 0, "b": 16, "c": 32, "d": 48}
    decays = {"a": True, "b": False, "c": False, "d": True}
    assert decay_ranges(offsets, decays, 64) == [(0, 16, True), (16, 48, False), (48, 64, True)]
    assert decay_ranges({}, {}, 0) == []


@given(st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=20))
def test_ranges_cover_the_buffer_once_and_alternate(parameters):
    sizes = [size for size, _ in parameters]
    starts = np.cumsum([0, *sizes])
    offsets = {str(i): int(start) for i, start in enumerate(starts[:-1])}
    ranges = decay_ranges(offsets, {str(i): decay for i, (_, decay) in enumerate(parameters)}, int(starts[-1]))
    expected = np.repeat([decay for _, decay in parameters], sizes)
    assert [start for start, _, _ in ranges] == [0, *(stop for _, stop, _ in ranges[:-1])]
    assert np.array_equal(np.concatenate([[decay] * (stop - start) for start, stop, decay in ranges]), expected)
    assert all(before[2] != after[2] for before, after in pairwise(ranges))
