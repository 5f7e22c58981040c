"""Copies of arrays with any strides."""

import numpy as np
import pytest
from support.tolerance import close

from mpipipe import arrays
from mpipipe.arrays import strided
from mpipipe.arrays.strided import _walk


def test_words_need_neighbours_on_both_sides_and_offsets_that_need_64_bits_have_them():
    assert _walk((6, 8), (8, 1), (1, 6)).divides == 0
    assert _walk((6, 8), (24, 3), (8, 1)).divides == 0
    for stride, index in ((2**31 // 6, np.int32), (2**31 // 3, np.int64)):
        assert _walk((4, 8), (stride, 1), (8, 1)).index is index


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_a_copy_keeps_all_bits(gpu, dtype):
    kind = arrays.dtype(dtype)
    bits = np.random.default_rng(0).integers(0, 256, (6, 4, 8 * kind.itemsize), np.uint8).view(kind)
    whole = arrays.upload(bits)
    for view in (lambda x: x[:, 1:3], lambda x: x.transpose(2, 0, 1), lambda x: x[::-2, :, 1::3], lambda x: x):
        found = strided.copied(view(whole))
        assert arrays.download(found).tobytes() == np.ascontiguousarray(view(bits)).tobytes()


@pytest.mark.parametrize("source", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("target", ["float32", "bfloat16"])
def test_moves(gpu, source, target):
    rng = np.random.default_rng(0)
    for shape, view in [((3, 5, 8), lambda x: x), ((2, 3, 4, 6), lambda x: x[:, ::-1, 1:3]), ((7,), lambda x: x[::2]),
                        ((2, 3, 1, 2, 5), lambda x: x.transpose(3, 1, 0, 2, 4)), ((4, 0), lambda x: x)]:  # fmt: skip
        x = rng.normal(size=shape).astype(arrays.dtype(source))
        start = rng.normal(size=view(x).shape).astype(arrays.dtype(target))
        place = arrays.upload(start)
        strided.strided_copy(view(arrays.upload(x)), place, add=True)
        added = arrays.download(place)
        strided.strided_copy(view(arrays.upload(x)), place)
        wide = np.float32 if source != "float64" else np.float64
        expected = view(x).astype(wide)
        np.testing.assert_array_equal(arrays.download(place), expected.astype(start.dtype))
        exact = start.astype(float) + view(x).astype(float)
        close(added, exact, 2, np.abs(start.astype(float)) + np.abs(exact), dtype=np.float32)
        other = arrays.upload(np.zeros(x.shape, start.dtype))
        strided.strided_copy(arrays.upload(np.ascontiguousarray(view(x))), view(other))
        np.testing.assert_array_equal(view(arrays.download(other)), expected.astype(start.dtype))


def test_what_is_put_together_is_contiguous_whatever_the_parts_are():
    part = np.arange(24.0).reshape(2, 4, 3).swapaxes(1, 2)
    whole = arrays.concatenate([part, part], 1)
    assert whole.flags.c_contiguous and whole.tobytes() == np.concatenate([part, part], 1).tobytes()
