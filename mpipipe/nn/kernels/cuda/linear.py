"""Matrix products by cuBLAS, and sums over rows, on a GPU.

cuBLAS has matrices with their columns side by side, so that it sees each of ours transposed: y = x W^T is
y^T = W x^T to it, with W as the transpose of what it sees. Halves are multiplied into float32 sums.
"""

from __future__ import annotations

import os
from functools import cache

import numpy as np

from mpipipe import arrays
from mpipipe.nn.kernels.cuda.launch import FOLDER, check_contiguous, check_matrices, over, word

LINEAR, SUMS = FOLDER / "linear.cu", FOLDER / "sums.cu"
STRIPES, LANES = 8, 32  # threads of a block for sum_rows, one under and one beside the other
PARTS = 512  # blocks for sum_rows, where there is work for so many

NUMBERS = {kind.itemsize: np.array([0, 1], kind) for kind in (np.dtype(np.float32), np.dtype(np.float64))}
ZERO_AND_ONE = {size: (arrays.address(pair), arrays.address(pair) + size) for size, pair in NUMBERS.items()}


@cache
def _cublas() -> dict:
    """cuBLAS, and its numbers for dtypes and ways to compute."""
    library = arrays.cupy().cuda
    runtime, cublas = library.runtime, library.cublas
    single = cublas.CUBLAS_COMPUTE_32F
    tf32 = int(os.environ.get("CUPY_TF32", "0")) > 0
    return {
        "gemm": cublas.gemmEx,
        "algorithm": cublas.CUBLAS_GEMM_DEFAULT,
        "handle": library.device.get_cublas_handle,
        "float16": (runtime.CUDA_R_16F, single),
        "bfloat16": (runtime.CUDA_R_16BF, single),
        "float32": (runtime.CUDA_R_32F, cublas.CUBLAS_COMPUTE_32F_FAST_TF32 if tf32 else single),
        "float64": (runtime.CUDA_R_64F, cublas.CUBLAS_COMPUTE_64F),
    }


def _multiply(a, transpose_a: bool, b, transpose_b: bool, c, m: int, n: int, k: int, keep: bool):
    """c = op(a) op(b), or c += with `keep`: (m, k), (k, n) and (m, n) in cuBLAS's view of them, with op to turn."""
    library = _cublas()
    kind, compute = library[a.dtype.name]
    numbers = ZERO_AND_ONE[8 if a.itemsize == 8 else 4]
    library["gemm"](
        library["handle"](), int(transpose_a), int(transpose_b), m, n, k,
        numbers[1], a.data.ptr, kind, k if transpose_a else m, b.data.ptr, kind, n if transpose_b else k,
        numbers[keep], c.data.ptr, library[c.dtype.name][0], m, compute, library["algorithm"],
    )  # fmt: skip


def linear(x, weight, bias=None):
    """y = x weight^T + bias, with x (rows, inputs) and weight (outputs, inputs)."""
    check_matrices("linear", x, 1, weight, 1)
    (rows, inputs), outputs = x.shape, weight.shape[0]
    y = arrays.empty((rows, outputs), x.dtype, "cuda")
    if not y.size:
        return y
    if bias is not None:
        args = (bias, y, np.int64(y.size), np.int64(outputs))
        over(LINEAR, "spread", y.size, args, T=y.dtype, V=word(bias, y, divides=outputs))
    elif not inputs:
        arrays.set_zero(y)
    if inputs:
        _multiply(weight, True, x, False, y, outputs, rows, inputs, keep=bias is not None)
    return y


def linear_backward_input(dy, weight):
    """dx = dy weight."""
    check_matrices("linear_backward_input", dy, 1, weight, 0)
    (rows, outputs), inputs = dy.shape, weight.shape[1]
    dx = arrays.empty((rows, inputs), dy.dtype, "cuda")
    if not outputs:
        arrays.set_zero(dx)
    elif dx.size:
        _multiply(weight, False, dy, False, dx, inputs, rows, outputs, keep=False)
    return dx


def linear_backward_weight(dy, x, grad):
    """grad += dy^T x, with dy (rows, outputs), x (rows, inputs), grad (outputs, inputs)."""
    check_matrices("linear_backward_weight", dy, 0, x, 0)
    check_contiguous("linear_backward_weight", grad)
    if grad.size and len(x):
        _multiply(x, False, dy, True, grad, grad.shape[1], grad.shape[0], len(x), keep=True)


def sum_rows(dy, grad):
    """grad += sum of the rows of dy."""
    check_contiguous("sum_rows", dy, grad)
    rows, width = dy.shape
    if not dy.size:
        return
    lanes = word(dy, divides=width)
    tiles = -(-width // (LANES * lanes))
    chunk = max(STRIPES * 4, -(-rows // max(1, PARTS // tiles)))
    count = -(-rows // chunk)
    partial = arrays.empty((count, width), grad.dtype, "cuda")
    args = (dy, partial, np.int64(rows), np.int64(width), np.int64(chunk))
    arrays.cuda_function(SUMS, "sum_rows", T=dy.dtype, V=lanes)((tiles, count), (LANES, STRIPES), args)
    add_columns(partial, grad, True)


def add_columns(partial, out, keep: bool):
    """out (width) = the sums of the columns of partial (count, width), added to what is there where `keep`."""
    count, width = partial.shape
    args = (partial, out, np.int32(count), np.int64(width), np.int32(keep))
    arrays.cuda_function(SUMS, "add_columns", T=out.dtype, V=1)((-(-width // 32),), (32, 32), args)
