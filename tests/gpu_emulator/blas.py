"""cupy.cuda.cublas: gemmEx and gemmStridedBatchedEx as cuBLAS does them, column-major, through raw pointers."""

import ctypes

import ml_dtypes
import numpy as np

from . import runtime, toolkit
from .machine import HiddenAccess, machine
from .memory import view_of
from .streams import get_current_stream

CUBLAS_OP_N, CUBLAS_OP_T = 0, 1
CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_64F, CUBLAS_COMPUTE_32F_FAST_TF32 = 68, 70, 77
CUBLAS_GEMM_DEFAULT = -1

TYPES = {
    runtime.CUDA_R_16F: np.dtype(np.float16),
    runtime.CUDA_R_16BF: np.dtype(ml_dtypes.bfloat16),
    runtime.CUDA_R_32F: np.dtype(np.float32),
    runtime.CUDA_R_64F: np.dtype(np.float64),
}
HALVES = (runtime.CUDA_R_16F, runtime.CUDA_R_16BF)
SUPPORTED = {  # (compute type, type of A and B, type of C)
    *((CUBLAS_COMPUTE_32F, half, c) for half in HALVES for c in (half, runtime.CUDA_R_32F)),
    (CUBLAS_COMPUTE_32F, runtime.CUDA_R_32F, runtime.CUDA_R_32F),
    (CUBLAS_COMPUTE_32F_FAST_TF32, runtime.CUDA_R_32F, runtime.CUDA_R_32F),
    (CUBLAS_COMPUTE_64F, runtime.CUDA_R_64F, runtime.CUDA_R_64F),
}


class CUBLASError(RuntimeError):
    """What cuBLAS refuses."""


CUBLASError.__module__ = "cupy_backends.cuda.libs.cublas"
_HANDLE = 0xCB1A5
_FLOAT32_SUMS = 16  # CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION
_math_modes: dict[int, int] = {}  # by handle


def get_cublas_handle() -> int:
    toolkit.require_cublas()
    return _HANDLE + runtime.getDevice()


get_cublas_handle.__module__ = "cupy.cuda.device"


def setMathMode(handle, mode) -> None:
    assert handle == get_cublas_handle() and not machine().amd
    _math_modes[handle] = mode


def getVersion(handle) -> int:
    assert handle == get_cublas_handle()
    return 130100


def _matrices(ptr, kind, rows, columns, ld, stride, count) -> np.ndarray:
    """The (count, rows, columns) column-major matrices at an address."""
    size = kind.itemsize
    span = ((count - 1) * stride + (columns - 1) * ld + rows) * size if rows and columns else 0
    if span:
        machine().device_ranges.check(ptr, span)
    if ptr % size:
        raise CUBLASError("CUBLAS_STATUS_INVALID_VALUE: a misaligned pointer")
    whole = view_of(ptr, span).view(kind)
    return np.lib.stride_tricks.as_strided(whole, (count, rows, columns), (stride * size, size, ld * size))


def _as_hipblas(types: tuple[int, int, int], compute: int, algo: int) -> int:
    """What CuPy's cupy_hipblas.h makes of cuBLAS's arguments: the type of the sums is a dtype, and what it does not
    know is a C++ exception that ends the process."""
    known = {runtime.CUDA_R_32F: CUBLAS_COMPUTE_32F, runtime.CUDA_R_64F: CUBLAS_COMPUTE_64F}
    if any(kind not in (runtime.CUDA_R_32F, runtime.CUDA_R_64F, runtime.CUDA_R_16F) for kind in types):
        raise HiddenAccess(f"cupy_hipblas.h: unrecognized type, the process aborts: {types}")
    if compute not in known:
        raise HiddenAccess(f"cupy_hipblas.h: unsupported compute type, the process aborts: {compute}")
    if algo != CUBLAS_GEMM_DEFAULT:
        raise CUBLASError("CUBLAS_STATUS_NOT_SUPPORTED: hipBLAS has one algorithm")
    return known[compute]


def _set_stream():
    """What CuPy does before each call: it refuses to be recorded, and cuBLAS drops the workspace that it was given."""
    if get_current_stream().is_capturing() and not machine().amd:
        raise NotImplementedError("calling cuBLAS API during stream capture is currently unsupported")
    machine().cublas_workspace = None


def gemmStridedBatchedEx(handle, transa, transb, m, n, k, alpha, A, Atype, lda, strideA, B, Btype, ldb, strideB,
                         beta, C, Ctype, ldc, strideC, batchCount, computeType, algo):  # fmt: skip
    _set_stream()
    _multiply(handle, transa, transb, m, n, k, alpha, A, Atype, lda, strideA, B, Btype, ldb, strideB, beta, C, Ctype,
              ldc, strideC, batchCount, computeType, algo)  # fmt: skip


def gemmEx(handle, transa, transb, m, n, k, alpha, A, Atype, lda, B, Btype, ldb, beta, C, Ctype, ldc,
           computeType, algo):  # fmt: skip
    """C = alpha op(A) op(B) + beta C."""
    gemmStridedBatchedEx(handle, transa, transb, m, n, k, alpha, A, Atype, lda, 0, B, Btype, ldb, 0, beta, C, Ctype,
                         ldc, 0, 1, computeType, algo)  # fmt: skip


def _multiply(handle, transa, transb, m, n, k, alpha, A, Atype, lda, strideA, B, Btype, ldb, strideB, beta, C, Ctype,
              ldc, strideC, batchCount, computeType, algo):  # fmt: skip
    """C = alpha op(A) op(B) + beta C for every matrix; alpha and beta are read from host memory now."""
    for value in (handle, transa, transb, m, n, k, alpha, A, lda, B, ldb, beta, C, ldc, strideA, strideB, strideC):
        if not isinstance(value, int):
            raise TypeError(f"an integer is required, not {type(value).__name__}")
    if handle != get_cublas_handle():
        raise CUBLASError("CUBLAS_STATUS_NOT_INITIALIZED: not the handle of this device")
    if machine().amd:
        computeType = _as_hipblas((Atype, Btype, Ctype), computeType, algo)
    if Atype != Btype or (computeType, Atype, Ctype) not in SUPPORTED:
        raise CUBLASError(f"CUBLAS_STATUS_NOT_SUPPORTED: A {Atype}, B {Btype}, C {Ctype}, compute {computeType}")
    if Atype in HALVES and not machine().amd and not _math_modes.get(handle, 0) & _FLOAT32_SUMS:
        raise CUBLASError("the handle lets partial sums be rounded to half precision: this package asks for exact ones")
    if transa not in (0, 1) or transb not in (0, 1) or min(m, n, k, batchCount) < 0:
        raise CUBLASError("CUBLAS_STATUS_INVALID_VALUE: transpose or size")
    a_shape, b_shape = (k, m) if transa else (m, k), (n, k) if transb else (k, n)
    if lda < max(1, a_shape[0]) or ldb < max(1, b_shape[0]) or ldc < max(1, m):
        raise CUBLASError(f"CUBLAS_STATUS_INVALID_VALUE: leading dimensions {lda}, {ldb}, {ldc} of ({m}, {n}, {k})")
    if not (m and n and batchCount):
        return
    if batchCount > 1 and strideC < ldc * (n - 1) + m:
        raise CUBLASError("CUBLAS_STATUS_INVALID_VALUE: the results overlap")
    scalar = ctypes.c_double if computeType == CUBLAS_COMPUTE_64F else ctypes.c_float
    work = np.dtype(scalar)
    alpha, beta = work.type(scalar.from_address(alpha).value), work.type(scalar.from_address(beta).value)
    a = _matrices(A, TYPES[Atype], *a_shape, lda, strideA, batchCount)
    b = _matrices(B, TYPES[Btype], *b_shape, ldb, strideB, batchCount)
    c = _matrices(C, TYPES[Ctype], m, n, ldc, strideC, batchCount)

    def run():
        left = (a.transpose(0, 2, 1) if transa else a).astype(work)
        right = (b.transpose(0, 2, 1) if transb else b).astype(work)
        with np.errstate(all="ignore"):
            result = alpha * np.matmul(left, right)
            if beta:
                result += beta * c.astype(work)
            c[...] = result.astype(c.dtype)

    machine().launch(get_current_stream().queue, "gemm", run)
