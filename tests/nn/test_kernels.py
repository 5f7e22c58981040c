"""Every module of kernels holds the functions that the interface states."""

import inspect

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpipipe import arrays, nn
from mpipipe.errors import ArgumentError
from mpipipe.nn import kernels
from mpipipe.nn.kernels.host import ELEMENTS, any_dtype, blocks, full_precision

STATED = {name: member for name, member in vars(kernels.Kernels).items() if inspect.isfunction(member)}
STATED = {name: member for name, member in STATED.items() if not name.startswith("_")}


@pytest.mark.parametrize("module", [any_dtype, full_precision, kernels.cuda], ids=lambda module: module.__name__)
def test_a_module_has_each_stated_function(module):
    for name, function in STATED.items():
        found = list(inspect.signature(getattr(module, name)).parameters.values())
        stated = list(inspect.signature(function).parameters.values())[1:]
        assert [(p.name, p.kind) for p in found[: len(stated)]] == [(p.name, p.kind) for p in stated], name
        assert all(p.default is not p.empty for p in found[len(stated) :]), name


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


# -- Pieces that fit in a core's cache --------------------------------------------------------------------------------


@pytest.mark.long
@given(
    st.one_of(
        st.tuples(st.integers(0, 9 * ELEMENTS), st.integers(0, 4)),
        st.tuples(st.integers(0, 999), st.integers(0, 2 * ELEMENTS)),
    )
)
def test_blocks_cut_all_rows_in_order_and_none_is_too_large(sizes):
    count, width = sizes
    cut = blocks(count, width)
    ends = [0, *(block.stop for block in cut)]
    assert [block.start for block in cut] == ends[:-1] and ends[-1] == count
    sizes = [block.stop - block.start for block in cut]
    assert all(size >= 1 and (size - 1) * max(1, width) < ELEMENTS for size in sizes)
    assert len(set(sizes[:-1])) <= 1 and (not sizes or sizes[-1] <= sizes[0])
    number = max(1, -(-count * max(1, width) // ELEMENTS))
    assert len(cut) < 2 * number or len(cut) == count
