"""Matrix products of many problems at once, by cuBLAS on device arrays."""

from __future__ import annotations

import numpy as np

from mpipipe.arrays.devices import cupy
from mpipipe.arrays.memory import address

KINDS = {"float32": "CUDA_R_32F", "float64": "CUDA_R_64F", "float16": "CUDA_R_16F", "bfloat16": "CUDA_R_16BF"}


def batched_gemm(a, b, c, transpose_a: bool = False, transpose_b: bool = False, add: bool = False, factor: float = 1.0):
    """c = factor a b or, with `add`, c += factor a b, for each problem.

    Parameters
    ----------
    a : (problems, m, k), or (problems, k, m) with `transpose_a`
    b : (problems, k, n), or (problems, n, k) with `transpose_b`; of the dtype of a, the last axis of both without gaps
    c : (problems, m, n) of the accumulator dtype of a, in which everything is summed
    """
    library = cupy().cuda
    cublas, runtime = library.cublas, library.runtime
    problems, m, n = c.shape
    k = a.shape[1] if transpose_a else a.shape[2]
    double = c.dtype == np.float64
    factors = np.array([factor, float(add)], c.dtype)
    kind, sum_kind = (getattr(runtime, KINDS[x.dtype.name]) for x in (a, c))
    # cuBLAS counts down columns: to it each of these is its transpose, and c^T = b^T a^T
    cublas.gemmStridedBatchedEx(
        library.device.get_cublas_handle(), int(transpose_b), int(transpose_a), n, m, k,
        factors.ctypes.data, *_where(b, kind), *_where(a, kind),
        factors.ctypes.data + factors.itemsize, *_where(c, sum_kind),
        problems, cublas.CUBLAS_COMPUTE_64F if double else cublas.CUBLAS_COMPUTE_32F, cublas.CUBLAS_GEMM_DEFAULT,
    )  # fmt: skip


def _where(x, kind) -> tuple[int, int, int, int]:
    """(address, dtype, elements from row to row, elements from problem to problem)."""
    return address(x), kind, x.strides[1] // x.itemsize, x.strides[0] // x.itemsize
