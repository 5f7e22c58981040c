"""Linear layers on a GPU: matrix products by cuBLAS, and sums over rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import DeviceArray
from mpipipe.arrays.gemm import gemm
from mpipipe.arrays.launch import Call, over, vector_width
from mpipipe.arrays.packed import Packed
from mpipipe.nn.kernels.cuda.checks import check_contiguous, check_matrices

LINEAR, SUMS = (Path(__file__).with_name(f"{name}.cu") for name in ("linear", "sums"))
STRIPES, LANES = 8, 32  # threads of a block for sum_rows, one under and one beside the other
COLUMNS, PART_STRIPES = 8, 32  # the same for add_parts: few columns, so that a GPU has a block for each multiprocessor
PARTS = 512  # blocks for sum_rows, where there is work for so many


def linear(x: DeviceArray, weight: DeviceArray, bias: DeviceArray | None = None) -> DeviceArray:
    """Return y = x weight^T + bias."""
    check_matrices("linear", x, 1, weight, 1)
    (rows, inputs), outputs = x.shape, weight.shape[0]
    y = arrays.empty((rows, outputs), x.dtype, "cuda")
    if not y.size:
        return y
    if bias is not None:
        _broadcast((bias,), (y,), (rows,))
    elif not inputs:
        arrays.set_zero(y)
    if inputs:
        gemm(x, weight, y, transpose_b=True, add=bias is not None)
    return y


def _pack_broadcast(bias: DeviceArray, y: DeviceArray, _: int) -> Call | None:
    outputs = y.shape[1]
    width = vector_width(bias, y, divides=outputs)
    return over(LINEAR, "broadcast_bias", y.size, (np.int64(y.size), np.int64(outputs)), T=y.dtype, V=width)


def linear_backward_input(dy: DeviceArray, weight: DeviceArray) -> DeviceArray:
    """Return dx = dy weight."""
    check_matrices("linear_backward_input", dy, 1, weight, 0)
    (rows, outputs), inputs = dy.shape, weight.shape[1]
    dx = arrays.empty((rows, inputs), dy.dtype, "cuda")
    if not outputs:
        arrays.set_zero(dx)
    elif dx.size:
        gemm(dy, weight, dx)
    return dx


def linear_backward_weight(dy: DeviceArray, x: DeviceArray, grad: DeviceArray, add: bool = True) -> None:
    """Grad += dy^T x; without `add` grad = dy^T x, and what was there is not read."""
    check_matrices("linear_backward_weight", dy, 0, x, 0)
    check_contiguous("linear_backward_weight", grad)
    if grad.size and len(x):
        gemm(dy, x, grad, transpose_a=True, add=add)
    elif not add:
        arrays.set_zero(grad)


def sum_rows(dy: DeviceArray, grad: DeviceArray, add: bool = True) -> None:
    """Grad += the sum of the rows of dy; without `add` grad is that sum."""
    check_contiguous("sum_rows", dy, grad)
    if not dy.size:
        if not add:
            arrays.set_zero(grad)
        return
    call = _sum_rows.call((dy,))
    partial = arrays.empty((call.grid[1], dy.shape[1]), grad.dtype, "cuda")
    call.launch((dy, partial))
    add_parts(partial, grad, add)


def _pack_sum_rows(dy: DeviceArray) -> Call:
    rows, width = dy.shape
    lanes = vector_width(dy, divides=width)
    tiles = -(-width // (LANES * lanes))
    chunk = max(STRIPES * 4, -(-rows // max(1, PARTS // tiles)))
    function = arrays.cuda_function(SUMS, "sum_rows", T=dy.dtype, V=lanes)
    return Call(function, (tiles, -(-rows // chunk)), (LANES, STRIPES), tuple(map(np.int64, (rows, width, chunk))))


def add_parts(parts: DeviceArray, grad: DeviceArray, add: bool = True) -> None:
    """Grad += the sum of the rows of parts; without `add` grad is that sum."""
    _add_parts((parts, grad), (), (add,))


def _pack_add_parts(parts: DeviceArray, grad: DeviceArray, add: bool) -> Call:
    check_contiguous("add_parts", parts, grad)
    count, width = parts.shape
    function = arrays.cuda_function(SUMS, "add_parts", T=grad.dtype, V=1)
    block = COLUMNS, PART_STRIPES
    return Call(function, (-(-width // COLUMNS),), block, (np.int32(count), np.int64(width), np.int32(add)))


_broadcast, _sum_rows, _add_parts = Packed(_pack_broadcast), Packed(_pack_sum_rows), Packed(_pack_add_parts)
