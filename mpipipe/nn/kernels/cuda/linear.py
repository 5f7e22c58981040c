"""Linear layers on a GPU: matrix products by cuBLAS, and sums over rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import DeviceArray
from mpipipe.arrays.gemm import gemm
from mpipipe.arrays.launch import launch, vector_width
from mpipipe.nn.kernels.cuda.checks import check_contiguous, check_matrices

LINEAR, SUMS = (Path(__file__).with_name(f"{name}.cu") for name in ("linear", "sums"))
STRIPES, LANES = 8, 32  # threads of a block for sum_rows, one under and one beside the other
PARTS = 512  # blocks for sum_rows, where there is work for so many


def linear(x: DeviceArray, weight: DeviceArray, bias: DeviceArray | None = None) -> DeviceArray:
    """Return y = x weight^T + bias."""
    check_matrices("linear", x, 1, weight, 1)
    (rows, inputs), outputs = x.shape, weight.shape[0]
    y = arrays.empty((rows, outputs), x.dtype, "cuda")
    if not y.size:
        return y
    if bias is not None:
        arguments = (bias, y, np.int64(y.size), np.int64(outputs))
        width = vector_width(bias, y, divides=outputs)
        launch(LINEAR, "broadcast_bias", y.size, arguments, T=y.dtype, V=width)
    elif not inputs:
        arrays.set_zero(y)
    if inputs:
        gemm(x, weight, y, transpose_b=True, add=bias is not None)
    return y


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
    rows, width = dy.shape
    if not dy.size:
        if not add:
            arrays.set_zero(grad)
        return
    lanes = vector_width(dy, divides=width)
    tiles = -(-width // (LANES * lanes))
    chunk = max(STRIPES * 4, -(-rows // max(1, PARTS // tiles)))
    count = -(-rows // chunk)
    partial = arrays.empty((count, width), grad.dtype, "cuda")
    arguments = (dy, partial, np.int64(rows), np.int64(width), np.int64(chunk))
    arrays.cuda_function(SUMS, "sum_rows", T=dy.dtype, V=lanes)((tiles, count), (LANES, STRIPES), arguments)
    add_columns(partial, grad, add)


def add_columns(partial: DeviceArray, out: DeviceArray, add: bool) -> None:
    """Out (width,) = the sums of the columns of partial (count, width); with `add` they are added to it."""
    count, width = partial.shape
    arguments = (partial, out, np.int32(count), np.int64(width), np.int32(add))
    arrays.cuda_function(SUMS, "add_columns", T=out.dtype, V=1)((-(-width // 32),), (32, 32), arguments)
