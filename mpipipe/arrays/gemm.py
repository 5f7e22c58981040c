"""Matrix products by cuBLAS, on device arrays.

On AMD GPUs CuPy's cuBLAS is hipBLAS: there the type of the sums is told as a dtype, and there is no bfloat16.

cuBLAS takes matrices column by column, so it sees each of ours transposed: c = a b is c^T = b^T a^T to it. float64 is
summed in float64, everything else in float32. Products of float32 use TF32, which keeps 10 bits of each factor, where
the environment variable CUPY_TF32 is above 0 at the first product: CuPy's own products follow the same setting.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np

from mpipipe.arrays.devices import cupy
from mpipipe.arrays.memory import address
from mpipipe.arrays.platform import check_computable, is_amd
from mpipipe.arrays.types import DeviceArray

# the host numbers (0, 1) that cuBLAS multiplies with, and their addresses, by itemsize
NUMBERS = {kind.itemsize: np.array([0, 1], kind) for kind in (np.dtype(np.float32), np.dtype(np.float64))}
ZERO_AND_ONE = {size: (address(pair), address(pair) + size) for size, pair in NUMBERS.items()}


class _Library(NamedTuple):
    """cuBLAS's functions and its numbers for dtypes and ways to compute."""

    gemmEx: Callable
    gemmStridedBatchedEx: Callable
    handle: Callable
    algorithm: int
    dtypes: dict[str, int]
    compute: dict[str, int]  # by the dtype of the factors


@cache
def _library() -> _Library:
    cuda = cupy().cuda
    runtime, cublas = cuda.runtime, cuda.cublas
    dtypes = {"float16": runtime.CUDA_R_16F, "float32": runtime.CUDA_R_32F, "float64": runtime.CUDA_R_64F}
    if is_amd():
        single, fast, double = runtime.CUDA_R_32F, runtime.CUDA_R_32F, runtime.CUDA_R_64F
    else:
        dtypes["bfloat16"] = runtime.CUDA_R_16BF
        single, double = cublas.CUBLAS_COMPUTE_32F, cublas.CUBLAS_COMPUTE_64F
        fast = cublas.CUBLAS_COMPUTE_32F_FAST_TF32 if int(os.environ.get("CUPY_TF32", "0")) > 0 else single
    return _Library(
        cublas.gemmEx,
        cublas.gemmStridedBatchedEx,
        cuda.device.get_cublas_handle,
        cublas.CUBLAS_GEMM_DEFAULT,
        dtypes,
        {"float16": single, "bfloat16": single, "float32": fast, "float64": double},
    )


def _number_of(library: _Library, kind: np.dtype) -> int:
    if kind.name not in library.dtypes:
        check_computable(kind, "cuda")
    return library.dtypes[kind.name]


def gemm(
    a: DeviceArray,
    b: DeviceArray,
    c: DeviceArray,
    transpose_a: bool = False,
    transpose_b: bool = False,
    add: bool = False,
) -> None:
    """C = a b or, with `add`, c += a b: C-contiguous matrices that are not empty.

    Parameters
    ----------
    a : (m, k), or (k, m) with `transpose_a`
    b : (k, n), or (n, k) with `transpose_b`; of the dtype of a
    c : (m, n) of the dtype of a, or of its accumulator dtype
    """
    library = _library()
    m, n = c.shape
    k = a.shape[0] if transpose_a else a.shape[1]
    dtype = _number_of(library, a.dtype)
    numbers = ZERO_AND_ONE[8 if a.itemsize == 8 else 4]
    library.gemmEx(
        library.handle(), int(transpose_b), int(transpose_a), n, m, k,
        numbers[1], b.data.ptr, dtype, b.shape[1], a.data.ptr, dtype, a.shape[1],
        numbers[add], c.data.ptr, library.dtypes[c.dtype.name], n, library.compute[a.dtype.name], library.algorithm,
    )  # fmt: skip


def batched_gemm(
    a: DeviceArray,
    b: DeviceArray,
    c: DeviceArray,
    transpose_a: bool = False,
    transpose_b: bool = False,
    add: bool = False,
    factor: float = 1.0,
) -> None:
    """C = factor a b or, with `add`, c += factor a b, for each problem.

    Parameters
    ----------
    a : (problems, m, k), or (problems, k, m) with `transpose_a`
    b : (problems, k, n), or (problems, n, k) with `transpose_b`; of the dtype of a, the last axis of both without gaps
    c : (problems, m, n) of the accumulator dtype of a, in which everything is summed
    """
    library = _library()
    problems, m, n = c.shape
    k = a.shape[1] if transpose_a else a.shape[2]
    factors = np.array([factor, float(add)], c.dtype)
    library.gemmStridedBatchedEx(
        library.handle(), int(transpose_b), int(transpose_a), n, m, k,
        address(factors), *_operand(b), *_operand(a), address(factors) + factors.itemsize, *_operand(c),
        problems, library.compute[a.dtype.name], library.algorithm,
    )  # fmt: skip


def _operand(x: DeviceArray) -> tuple[int, int, int, int]:
    """(address, cuBLAS's dtype, elements from row to row, elements from problem to problem)."""
    return address(x), _number_of(_library(), x.dtype), x.strides[1] // x.itemsize, x.strides[0] // x.itemsize
