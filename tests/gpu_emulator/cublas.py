"""libcublas, for those who open it by ctypes: a real shared library, whose functions lead to the emulated cuBLAS."""

import ctypes
from ctypes import CFUNCTYPE, c_int, c_longlong, c_size_t, c_void_p
from functools import cache

from . import blas, compiler
from .machine import machine
from .streams import get_current_stream

SOURCE = r"""
#include <stddef.h>
#define SIZES int transa, int transb, int m, int n, int k
#define MATRIX(X, qualifier) qualifier void *X, int X##type, int ld##X
#define STRIDED(X, qualifier) MATRIX(X, qualifier), long long stride##X
#define HOW int computeType, int algo

typedef int (*Gemm)(void* handle, SIZES, const void* alpha, STRIDED(A, const), STRIDED(B, const), const void* beta,
                    STRIDED(C, ), int batchCount, HOW);
typedef int (*Stream)(void*, void*);
typedef int (*Workspace)(void*, void*, size_t);
static Gemm to_gemm;
static Stream to_stream;
static Workspace to_workspace;

extern "C" {
void emulated_forward(Gemm gemm, Stream stream, Workspace workspace) {
    to_gemm = gemm, to_stream = stream, to_workspace = workspace;
}
int cublasSetStream_v2(void* handle, void* stream) { return to_stream(handle, stream); }
int cublasSetWorkspace_v2(void* handle, void* memory, size_t bytes) { return to_workspace(handle, memory, bytes); }
int cublasGemmEx(void* handle, SIZES, const void* alpha, MATRIX(A, const), MATRIX(B, const), const void* beta,
                 MATRIX(C, ), HOW) {
    return to_gemm(handle, transa, transb, m, n, k, alpha, A, Atype, ldA, 0, B, Btype, ldB, 0, beta, C, Ctype, ldC, 0,
                   1, computeType, algo);
}
int cublasGemmStridedBatchedEx(void* handle, SIZES, const void* alpha, STRIDED(A, const), STRIDED(B, const),
                               const void* beta, STRIDED(C, ), int batchCount, HOW) {
    return to_gemm(handle, transa, transb, m, n, k, alpha, A, Atype, ldA, strideA, B, Btype, ldB, strideB, beta, C,
                   Ctype, ldC, strideC, batchCount, computeType, algo);
}
}
"""
SUCCESS, INVALID = 0, 7  # of cublasStatus_t
STRIDED = (c_void_p, c_int, c_int, c_longlong)
GEMM = CFUNCTYPE(c_int, c_void_p, *(c_int,) * 5, c_void_p, *STRIDED, *STRIDED, c_void_p, *STRIDED, *(c_int,) * 3)
STREAM, WORKSPACE = CFUNCTYPE(c_int, c_void_p, c_void_p), CFUNCTYPE(c_int, c_void_p, c_void_p, c_size_t)


def _status(function):
    """The status in place of an exception, which C cannot carry; the machine keeps its text."""

    def call(*arguments):
        try:
            function(*[0 if value is None else value for value in arguments])
        except Exception as error:
            machine().refused.append(f"{type(error).__name__}: {error}")
            return INVALID
        return SUCCESS

    return call


def _set_stream(handle, stream):
    if handle != blas.get_cublas_handle() or stream != get_current_stream().ptr:
        raise ValueError("another handle than CuPy's, or another stream than the current one")
    machine().cublas_workspace = None


def _set_workspace(handle, memory, nbytes):
    machine().device_ranges.check(memory, nbytes)
    machine().cublas_workspace = memory, nbytes


def _gemm(*arguments):
    if machine().cublas_workspace is None:
        raise ValueError("without a workspace cuBLAS allocates within the graph")
    blas._multiply(*arguments)


@cache
def library() -> str:
    """The file of the library, which is loaded and leads back here."""
    path = compiler.library_of(SOURCE)
    loaded = ctypes.CDLL(str(path))
    loaded.emulated_forward(*_keep)
    return str(path)


_keep = GEMM(_status(_gemm)), STREAM(_status(_set_stream)), WORKSPACE(_status(_set_workspace))
