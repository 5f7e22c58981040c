"""Which kernels there are for an array, and copies between any strides on the host."""

import numpy as np
import pytest

from mpipipe import arrays, nn
from mpipipe.errors import ArgumentError
from mpipipe.nn import kernels
from mpipipe.nn.kernels.host import ELEMENTS, any_dtype, full_precision


def test_kernels_are_chosen_by_device_and_dtype():
    assert kernels.of("cpu") is kernels.of("cpu", arrays.dtype("bfloat16")) is any_dtype
    assert kernels.of("cpu", np.dtype(np.float64)) is full_precision
    assert kernels.of("cuda") is kernels.of("cuda", np.dtype(np.float32)) is kernels.cuda
    assert kernels.of_array(np.zeros(1, np.float16)) is any_dtype
    assert nn.kernels.of_array(np.zeros(1)) is full_precision
    with pytest.raises(ArgumentError, match="not an array"):
        kernels.of_array([1.0])


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("width", [1, 65])
def test_copy_between_any_strides(dtype, width):
    """Large arrays with short rows are moved by rows, others by elements."""
    source = np.random.default_rng(2).standard_normal((3, 200, ELEMENTS // 300 // width + 1, width + 2))
    source = source.astype(arrays.dtype(dtype))[::-1, ::2, :, 1:-1]
    assert source.size > ELEMENTS
    room = np.zeros((100, 3, source.shape[2], width), source.dtype)
    any_dtype.copy(source, room.swapaxes(0, 1))
    np.testing.assert_array_equal(room, source.swapaxes(0, 1))
    wide = 2 * room.astype(np.float64)
    any_dtype.copy(wide, room)
    np.testing.assert_array_equal(room.astype(np.float64), wide)
