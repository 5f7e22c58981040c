"""Matrix products by cuBLAS, on device arrays.

On AMD GPUs CuPy's cuBLAS is hipBLAS: there the type of the sums is told as a dtype, and there is no bfloat16.

cuBLAS takes matrices column by column, so it sees each of ours transposed: c = a b is c^T = b^T a^T to it. float64 is
summed in float64, everything else in float32. Products of float32 use TF32, which keeps 10 bits of each factor, where
the environment variable CUPY_TF32 is above 0 at the first product: CuPy's own products follow the same setting.

With MPIPIPE_PRODUCTS=cublaslt, read at the first product, `gemm` asks gemm_measured.py first.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np

from mpipipe.arrays import gemm_measured, gemm_recorded
from mpipipe.arrays.devices import cupy
from mpipipe.arrays.dtypes import accumulator, dtype
from mpipipe.arrays.graphs import is_recording
from mpipipe.arrays.memory import address
from mpipipe.arrays.platform import check_computable, is_amd
from mpipipe.arrays.types import DeviceArray
from mpipipe.errors import ArgumentError, BackendError

VARIABLE = "MPIPIPE_PRODUCTS"

# the host numbers (0, 1) that cuBLAS multiplies with, and their addresses, by itemsize
NUMBERS = {kind.itemsize: np.array([0, 1], kind) for kind in (np.dtype(np.float32), np.dtype(np.float64))}
ZERO_AND_ONE = {size: (address(pair), address(pair) + size) for size, pair in NUMBERS.items()}


class _Kind(NamedTuple):
    """What cuBLAS is told about a dtype.

    number : its own
    compute : how to compute with factors of it
    zero_and_one : where these numbers are, in its accumulator's dtype
    """

    number: int
    compute: int
    zero_and_one: tuple[int, int]


class _Kinds(dict[np.dtype, _Kind]):
    """Those in which this GPU multiplies."""

    def __missing__(self, kind: np.dtype) -> _Kind:
        check_computable(kind, "cuda")
        raise KeyError(kind)


class _Library(NamedTuple):
    """cuBLAS's functions and its numbers."""

    gemmEx: Callable
    gemmStridedBatchedEx: Callable
    handle: Callable
    algorithm: int
    kinds: _Kinds
    measured: bool  # whether cublasLt multiplies, where it can


@cache
def _library() -> _Library:
    cuda = cupy().cuda
    runtime, cublas = cuda.runtime, cuda.cublas
    numbers = {"float16": runtime.CUDA_R_16F, "float32": runtime.CUDA_R_32F, "float64": runtime.CUDA_R_64F}
    if is_amd():
        single, fast, double = runtime.CUDA_R_32F, runtime.CUDA_R_32F, runtime.CUDA_R_64F
    else:
        numbers["bfloat16"] = runtime.CUDA_R_16BF
        single, double = cublas.CUBLAS_COMPUTE_32F, cublas.CUBLAS_COMPUTE_64F
        fast = cublas.CUBLAS_COMPUTE_32F_FAST_TF32 if int(os.environ.get("CUPY_TF32", "0")) > 0 else single
    compute = {"float16": single, "bfloat16": single, "float32": fast, "float64": double}
    kinds = _Kinds()
    for name, number in numbers.items():
        kind = dtype(name)
        kinds[kind] = _Kind(number, compute[name], ZERO_AND_ONE[accumulator(kind).itemsize])
    default = cublas.CUBLAS_GEMM_DEFAULT
    handle = cuda.device.get_cublas_handle
    return _Library(cublas.gemmEx, cublas.gemmStridedBatchedEx, handle, default, kinds, _asks_for_cublaslt())


def _asks_for_cublaslt() -> bool:
    """Whether MPIPIPE_PRODUCTS asks for cublasLt; raises where it is to be had nowhere, or for another name."""
    name = os.environ.get(VARIABLE, "")
    if name not in ("", "cublas", "cublaslt"):
        raise ArgumentError(f"environment variable {VARIABLE}", found=repr(name), expected="cublas or cublaslt")
    if name == "cublaslt" and is_amd():
        raise BackendError(f"{VARIABLE}=cublaslt, and AMD GPUs have no cublasLt", remedy=f"unset {VARIABLE}")
    return name == "cublaslt"


@contextmanager
def products_by(name: str) -> Iterator[None]:
    """Let `cublas` or `cublaslt` multiply within, whatever MPIPIPE_PRODUCTS says: for measurements on one thread."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = name
    _library.cache_clear()
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before
        _library.cache_clear()


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
    rows, columns = a.shape
    k = rows if transpose_a else columns
    number, compute, zero_and_one = library.kinds[a.dtype]
    if library.measured:
        factors = (number, k, n) if transpose_b else (number, n, k), (number, columns, rows)
        result = library.kinds[c.dtype].number, n, m
        sizes = gemm_measured.Sizes(*factors, result, (transpose_b, transpose_a), add, compute)
        if gemm_measured.multiply(sizes, b, a, c, zero_and_one):
            return
    functions: Any = gemm_recorded if is_recording() else library
    functions.gemmEx(
        library.handle(), transpose_b, transpose_a, n, m, k,
        zero_and_one[1], b.data.ptr, number, k if transpose_b else n, a.data.ptr, number, columns,
        zero_and_one[add], c.data.ptr, library.kinds[c.dtype].number, n, compute, library.algorithm,
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
    factors, where = _factors(factor, add, c.dtype)
    functions: Any = gemm_recorded if is_recording() else library
    functions.gemmStridedBatchedEx(
        library.handle(), transpose_b, transpose_a, n, m, k,
        where, *_operand(library, b), *_operand(library, a), where + factors.itemsize, *_operand(library, c),
        problems, library.kinds[a.dtype].compute, library.algorithm,
    )  # fmt: skip


@lru_cache(maxsize=256)
def _factors(factor: float, add: bool, kind: np.dtype) -> tuple[np.ndarray, int]:
    """Return the numbers (factor, 1 or 0) for cuBLAS, which reads them during the call, and their address."""
    numbers = np.array([factor, float(add)], kind)
    return numbers, address(numbers)


def _operand(library: _Library, x: DeviceArray) -> tuple[int, int, int, int]:
    """(address, cuBLAS's dtype, elements from row to row, elements from problem to problem)."""
    of_problem, of_row, _ = x.strides
    return x.data.ptr, library.kinds[x.dtype].number, of_row // x.itemsize, of_problem // x.itemsize
