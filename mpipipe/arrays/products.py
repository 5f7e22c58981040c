"""Matrix products by cuBLAS, on device arrays.

On AMD GPUs CuPy's cuBLAS is hipBLAS: there the type of the sums is given as a dtype, and there is
no bfloat16.

cuBLAS takes matrices column by column, so it sees each of ours transposed: c = a b is c^T = b^T a^T
to it. float64 is summed in float64, everything else in float32: cuBLAS, which may round partial
sums of halves by default, is told not to. Products of float32 use TF32, which keeps 10 bits of each
factor, where the environment variable CUPY_TF32 is above 0 at the first product: CuPy's own
products follow the same setting.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from ctypes import c_int, c_longlong, c_size_t, c_void_p
from functools import cache, lru_cache, partial
from typing import NamedTuple

import numpy as np

from mpipipe.arrays.devices import check_computable, cupy, first_line, is_amd
from mpipipe.arrays.dtypes import DeviceArray, Shape, accumulator, dtype
from mpipipe.arrays.graphs import RECORDING, workspace
from mpipipe.arrays.memory import address, set_zero
from mpipipe.arrays.streams import stream
from mpipipe.errors import BackendError


class _Kind(NamedTuple):
    """The arguments of cuBLAS for a dtype."""

    number: int  # its own
    compute: int  # how to compute with factors of it
    sums: np.dtype  # the dtype of its accumulator


class _Kinds(dict[np.dtype, _Kind]):
    """Those in which this GPU multiplies."""

    def __missing__(self, kind: np.dtype) -> _Kind:
        check_computable(kind, "cuda")
        raise KeyError(kind)


class _Functions(NamedTuple):
    """Two functions of cuBLAS: CuPy's, or those that a graph can record."""

    gemmEx: Callable
    gemmStridedBatchedEx: Callable


class _Library(NamedTuple):
    """cuBLAS's functions and its numbers."""

    functions: _Functions
    handle: Callable
    algorithm: int
    kinds: _Kinds


@cache
def _library() -> _Library:
    cuda = cupy().cuda
    runtime = cuda.runtime
    cublas = cuda.cublas
    kinds = _Kinds()

    def add(name: str, number: int, compute: int) -> None:
        kind = dtype(name)
        kinds[kind] = _Kind(number, compute, accumulator(kind))

    if is_amd():
        single = runtime.CUDA_R_32F
        fast = runtime.CUDA_R_32F
        double = runtime.CUDA_R_64F
    else:
        single = cublas.CUBLAS_COMPUTE_32F
        fast = single
        double = cublas.CUBLAS_COMPUTE_64F
        if int(os.environ.get("CUPY_TF32", "0")) > 0:
            fast = cublas.CUBLAS_COMPUTE_32F_FAST_TF32
        add("bfloat16", runtime.CUDA_R_16BF, single)
    add("float16", runtime.CUDA_R_16F, single)
    add("float32", runtime.CUDA_R_32F, fast)
    add("float64", runtime.CUDA_R_64F, double)
    functions = _Functions(cublas.gemmEx, cublas.gemmStridedBatchedEx)
    return _Library(functions, cuda.device.get_cublas_handle, cublas.CUBLAS_GEMM_DEFAULT, kinds)


FLOAT32_SUMS = 16  # CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION of cublasMath_t


def _summed_exactly(handle: int) -> int:
    """Return a handle that is set so that halves are rounded once.

    The user's own products round so, too.
    """
    if not is_amd():
        cupy().cuda.cublas.setMathMode(handle, FLOAT32_SUMS)
    return handle


class _ThreadHandles(threading.local):
    """`exact` sets a handle of the thread when it meets it, and returns it."""

    def __init__(self) -> None:
        self.exact = cache(_summed_exactly)


_own = _ThreadHandles()


def gemm(
    a: DeviceArray,
    b: DeviceArray,
    c: DeviceArray,
    transpose_a: bool = False,
    transpose_b: bool = False,
    add: bool = False,
) -> None:
    """C = a b or, with `add`, c += a b: C-contiguous matrices.

    a : (m, k), or (k, m) with `transpose_a`
    b : (k, n), or (n, k) with `transpose_b`; of the dtype of a
    c : (m, n) of the dtype of a, or of its accumulator dtype
    """
    library = _library()
    m, n = c.shape
    rows, columns = a.shape
    k = columns
    if transpose_a:
        k = rows
    if not (c.size and k):
        if not add:
            set_zero(c)
        return
    number, compute, sums = library.kinds[a.dtype]
    factors, where = _factors(1.0, add, sums)
    functions = library.functions if RECORDING.alive is None else _RECORDED
    functions.gemmEx(
        _own.exact(library.handle()), transpose_b, transpose_a, n, m, k,
        where, b.data.ptr, number, k if transpose_b else n, a.data.ptr, number, columns,
        where + factors.itemsize, c.data.ptr, library.kinds[c.dtype].number, n,
        compute, library.algorithm,
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

    a : (problems, m, k), or (problems, k, m) with `transpose_a` b : (problems, k, n), or (problems,
    n, k) with `transpose_b`; of the dtype of a, the last axis of both without gaps
        Where a or b has one matrix, it is that of all problems.
    c : (problems, m, n) of the accumulator dtype of a, in which everything is summed
    """
    if not c.size:
        return
    library = _library()
    problems, m, n = c.shape
    k = a.shape[1] if transpose_a else a.shape[2]
    kinds = library.kinds
    factors, where = _factors(factor, add, c.dtype)
    functions = library.functions if RECORDING.alive is None else _RECORDED
    functions.gemmStridedBatchedEx(
        _own.exact(library.handle()), transpose_b, transpose_a, n, m, k,
        where, b.data.ptr, kinds[b.dtype].number, *_steps(b.shape, b.strides, b.itemsize),
        a.data.ptr, kinds[a.dtype].number, *_steps(a.shape, a.strides, a.itemsize),
        where + factors.itemsize,
        c.data.ptr, kinds[c.dtype].number, *_steps(c.shape, c.strides, c.itemsize),
        problems, kinds[a.dtype].compute, library.algorithm,
    )  # fmt: skip


@lru_cache(maxsize=256)
def _factors(factor: float, add: bool, kind: np.dtype) -> tuple[np.ndarray, int]:
    """Return the numbers (factor, 1 or 0) and their address; cuBLAS reads them in the call."""
    numbers = np.array([factor, float(add)], kind)
    return numbers, address(numbers)


@lru_cache(maxsize=4096)
def _steps(shape: Shape, strides: Shape, itemsize: int) -> tuple[int, int]:
    """Return how many elements matrices have from row to row, and from problem to problem."""
    of_problem, of_row, _ = strides
    if shape[0] <= 1:  # one matrix is that of all problems
        of_problem = 0
    return of_row // itemsize, of_problem // itemsize


# -- Products while a CUDA graph is recorded: by cuBLAS itself, since CuPy refuses that ------------
#
# (CuPy 14.2, cublas.pyx, setStream.) The C functions get the same arguments, and CuPy's handle.
# They need a workspace of ours: else cuBLAS allocates one for each graph (pytorch/pytorch#83461).


C_SIZES = (c_int,) * 5  # transpose both, m, n, k
# address, dtype, rows apart, problems
MATRIX = (c_void_p, c_int, c_int)
STRIDED = (c_void_p, c_int, c_int, c_longlong)
# From cublas_api.h; each begins with the handle.
FUNCTIONS = {
    "cublasSetStream_v2": (c_void_p,),
    "cublasSetWorkspace_v2": (c_void_p, c_size_t),
    "cublasGemmEx": (*C_SIZES, c_void_p, *MATRIX, *MATRIX, c_void_p, *MATRIX, c_int, c_int),
    "cublasGemmStridedBatchedEx": (
        *C_SIZES,
        c_void_p,
        *STRIDED,
        *STRIDED,
        c_void_p,
        *STRIDED,
        c_int,
        c_int,
        c_int,
    ),
}


@cache
def _c_library() -> ctypes.CDLL:
    """The library that CuPy has loaded; raises BackendError if it cannot be found."""
    try:
        from cuda import pathfinder  # a dependency of CuPy, which finds the library in the same way

        library = ctypes.CDLL(str(pathfinder.load_nvidia_dynamic_lib("cublas").abs_path))
        for name, parameters in FUNCTIONS.items():
            getattr(library, name).argtypes = (c_void_p, *parameters)
    except Exception as error:  # a broken installation raises what it likes
        raise BackendError(
            f"cuBLAS cannot be called while a graph is recorded ({first_line(error)})"
        ) from None
    return library


def graphs_refused() -> str:
    """Return why graphs cannot be recorded on the current stream, or "" where they can."""
    if is_amd():
        return "CuPy records no graphs on AMD's GPUs"
    if not stream().ptr:
        return (
            "the work goes to the null stream, which records no graphs (enter arrays.own_stream())"
        )
    try:
        _c_library()
    except BackendError as error:
        return error.message
    return ""


def _record(name: str, handle: int, *arguments: int) -> None:
    """Record a product by CuPy's handle; its next call takes stream and workspace back."""
    space = workspace()
    _call_cublas("cublasSetStream_v2", handle, stream().ptr)  # first, for it drops the workspace
    _call_cublas("cublasSetWorkspace_v2", handle, address(space), space.nbytes)
    _call_cublas(name, handle, *arguments)


def _call_cublas(name: str, *arguments: int) -> None:
    status = getattr(_c_library(), name)(*arguments)
    if status:
        raise BackendError(
            f"{name} has failed while a graph was recorded",
            found=f"status {status} of cublasStatus_t",
        )


_RECORDED = _Functions(
    partial(_record, "cublasGemmEx"), partial(_record, "cublasGemmStridedBatchedEx")
)
