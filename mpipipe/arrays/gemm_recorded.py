"""cuBLAS while a CUDA graph is recorded, called past CuPy: its functions refuse that (14.2, cublas.pyx, setStream).

The C functions get the same arguments, and CuPy's handle. They need a workspace of ours: else cuBLAS allocates one for
each graph (pytorch/pytorch#83461).
"""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_longlong, c_size_t, c_void_p
from functools import cache

from mpipipe.arrays import graphs
from mpipipe.arrays.devices import is_amd
from mpipipe.arrays.memory import address
from mpipipe.arrays.streams import stream
from mpipipe.errors import BackendError

SIZES = (c_int,) * 5  # transpose both, m, n, k
MATRIX, STRIDED = (c_void_p, c_int, c_int), (c_void_p, c_int, c_int, c_longlong)  # address, dtype, rows apart, problems
FUNCTIONS = {  # of cublas_api.h; each begins with the handle
    "cublasSetStream_v2": (c_void_p,),
    "cublasSetWorkspace_v2": (c_void_p, c_size_t),
    "cublasGemmEx": (*SIZES, c_void_p, *MATRIX, *MATRIX, c_void_p, *MATRIX, c_int, c_int),
    "cublasGemmStridedBatchedEx": (*SIZES, c_void_p, *STRIDED, *STRIDED, c_void_p, *STRIDED, c_int, c_int, c_int),
}


@cache
def _library() -> ctypes.CDLL:
    """The library that CuPy has loaded; raises BackendError if it cannot be found."""
    try:
        from cuda import pathfinder  # a dependency of CuPy, which finds the library in the same way

        library = ctypes.CDLL(str(pathfinder.load_nvidia_dynamic_lib("cublas").abs_path))
        for name, parameters in FUNCTIONS.items():
            getattr(library, name).argtypes = (c_void_p, *parameters)
    except Exception as error:  # a broken installation raises what it likes
        lines = str(error).splitlines() or [type(error).__name__]
        raise BackendError(f"cuBLAS cannot be called while a graph is recorded ({lines[0]})") from None
    return library


def graphs_refused() -> str:
    """Return why graphs cannot be recorded on the current stream, or "" where they can.

    Returns
    -------
    str
        A reason in words.
    """
    if is_amd():
        return "CuPy records no graphs on AMD's GPUs"
    if not stream().ptr:
        return "the work goes to the null stream, which records no graphs (enter arrays.own_stream())"
    try:
        _library()
    except BackendError as error:
        return error.message
    return ""


def gemmEx(handle: int, *arguments: int) -> None:
    """Record what cupy.cuda.cublas.gemmEx would do."""
    _prepare(handle)
    _call("cublasGemmEx", handle, *arguments)


def gemmStridedBatchedEx(handle: int, *arguments: int) -> None:
    """Record what cupy.cuda.cublas.gemmStridedBatchedEx would do."""
    _prepare(handle)
    _call("cublasGemmStridedBatchedEx", handle, *arguments)


def _prepare(handle: int) -> None:
    """Give the handle the current stream and our workspace. The next call by CuPy takes both back."""
    workspace = graphs.workspace()
    _call("cublasSetStream_v2", handle, stream().ptr)  # first, for it drops the workspace
    _call("cublasSetWorkspace_v2", handle, address(workspace), workspace.nbytes)


def _call(name: str, *arguments: int) -> None:
    status = getattr(_library(), name)(*arguments)
    if status:
        raise BackendError(f"{name} has failed while a graph was recorded", found=f"status {status} of cublasStatus_t")
