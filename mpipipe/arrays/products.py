"""Matrix products by cuBLAS, on device arrays.

On AMD GPUs CuPy's cuBLAS is hipBLAS: there the type of the sums is given as a dtype, and there is no bfloat16.

cuBLAS takes matrices column by column, so it sees each of ours transposed: c = a b is c^T = b^T a^T to it. float64 is
summed in float64, everything else in float32: cuBLAS, which may round partial sums of halves by default, is told not
to. Products of float32 use TF32, which keeps 10 bits of each factor, where the environment variable CUPY_TF32 is above
0 at the first product: CuPy's own products follow the same setting.

With MPIPIPE_PRODUCTS=cublaslt, read at the first product, `gemm` asks cublasLt first, see below.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import c_int, c_longlong, c_size_t, c_void_p
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from mpipipe.arrays.devices import check_computable, cupy, is_amd
from mpipipe.arrays.dtypes import DeviceArray, accumulator, dtype
from mpipipe.arrays.graphs import is_recording, workspace
from mpipipe.arrays.memory import address, empty, set_zero
from mpipipe.arrays.streams import record, seconds_between, stream
from mpipipe.errors import ArgumentError, BackendError
from mpipipe.text import how_to_install

VARIABLE = "MPIPIPE_PRODUCTS"

# the host numbers (0, 1) that cuBLAS multiplies with, and their addresses, by itemsize
NUMBERS = {kind.itemsize: np.array([0, 1], kind) for kind in (np.dtype(np.float32), np.dtype(np.float64))}
ZERO_AND_ONE = {size: (address(pair), address(pair) + size) for size, pair in NUMBERS.items()}


class _Kind(NamedTuple):
    """The arguments of cuBLAS for a dtype."""

    number: int  # its own
    compute: int  # how to compute with factors of it
    zero_and_one: tuple[int, int]  # where these numbers are, in its accumulator's dtype


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
    handle = cuda.device.get_cublas_handle if is_amd() else _exact_handle
    functions = _Functions(cublas.gemmEx, cublas.gemmStridedBatchedEx)
    return _Library(functions, handle, default, kinds, _asks_for_cublaslt())


FLOAT32_SUMS = 16  # CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION of cublasMath_t
_exact = threading.local()  # its `handles`: those of a thread whose partial sums of halves stay in float32


def _exact_handle() -> int:
    """Return CuPy's handle for this thread and device; from now on its products, the user's too, round halves once."""
    cuda = cupy().cuda
    handle: int = cuda.device.get_cublas_handle()
    handles = vars(_exact).setdefault("handles", set())
    if handle not in handles:
        cuda.cublas.setMathMode(handle, FLOAT32_SUMS)
        handles.add(handle)
    return handle


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
    """C = a b or, with `add`, c += a b: C-contiguous matrices.

    a : (m, k), or (k, m) with `transpose_a`
    b : (k, n), or (n, k) with `transpose_b`; of the dtype of a
    c : (m, n) of the dtype of a, or of its accumulator dtype
    """
    library = _library()
    m, n = c.shape
    rows, columns = a.shape
    k = rows if transpose_a else columns
    if not (c.size and k):
        if not add:
            set_zero(c)
        return
    number, compute, zero_and_one = library.kinds[a.dtype]
    if library.measured:
        factors = (number, k, n) if transpose_b else (number, n, k), (number, columns, rows)
        result = library.kinds[c.dtype].number, n, m
        sizes = ProductSizes(*factors, result, (transpose_b, transpose_a), add, compute)
        if multiply(sizes, b, a, c, zero_and_one):
            return
    functions = _RECORDED if is_recording() else library.functions
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

    a : (problems, m, k), or (problems, k, m) with `transpose_a`
    b : (problems, k, n), or (problems, n, k) with `transpose_b`; of the dtype of a, the last axis of both without gaps
        Where a or b has one matrix, it is that of all problems.
    c : (problems, m, n) of the accumulator dtype of a, in which everything is summed
    """
    if not c.size:
        return
    library = _library()
    problems, m, n = c.shape
    k = a.shape[1] if transpose_a else a.shape[2]
    factors, where = _factors(factor, add, c.dtype)
    functions = _RECORDED if is_recording() else library.functions
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
    of_problem = of_problem if len(x) > 1 else 0  # one matrix is that of all problems
    return x.data.ptr, library.kinds[x.dtype].number, of_row // x.itemsize, of_problem // x.itemsize


# -- Products while a CUDA graph is recorded: by cuBLAS itself, past CuPy, whose functions refuse that ----------------
#
# (CuPy 14.2, cublas.pyx, setStream.) The C functions get the same arguments, and CuPy's handle. They need a workspace
# of ours: else cuBLAS allocates one for each graph (pytorch/pytorch#83461).


C_SIZES = (c_int,) * 5  # transpose both, m, n, k
MATRIX, STRIDED = (c_void_p, c_int, c_int), (c_void_p, c_int, c_int, c_longlong)  # address, dtype, rows apart, problems
FUNCTIONS = {  # of cublas_api.h; each begins with the handle
    "cublasSetStream_v2": (c_void_p,),
    "cublasSetWorkspace_v2": (c_void_p, c_size_t),
    "cublasGemmEx": (*C_SIZES, c_void_p, *MATRIX, *MATRIX, c_void_p, *MATRIX, c_int, c_int),
    "cublasGemmStridedBatchedEx": (*C_SIZES, c_void_p, *STRIDED, *STRIDED, c_void_p, *STRIDED, c_int, c_int, c_int),
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
        lines = str(error).splitlines() or [type(error).__name__]
        raise BackendError(f"cuBLAS cannot be called while a graph is recorded ({lines[0]})") from None
    return library


def graphs_refused() -> str:
    """Return why graphs cannot be recorded on the current stream, or "" where they can."""
    if is_amd():
        return "CuPy records no graphs on AMD's GPUs"
    if not stream().ptr:
        return "the work goes to the null stream, which records no graphs (enter arrays.own_stream())"
    try:
        _c_library()
    except BackendError as error:
        return error.message
    return ""


def _record(name: str, handle: int, *arguments: int) -> None:
    """Record a product, by CuPy's handle with the current stream and our workspace; its next call takes both back."""
    space = workspace()
    _call_cublas("cublasSetStream_v2", handle, stream().ptr)  # first, for it drops the workspace
    _call_cublas("cublasSetWorkspace_v2", handle, address(space), space.nbytes)
    _call_cublas(name, handle, *arguments)


def _call_cublas(name: str, *arguments: int) -> None:
    status = getattr(_c_library(), name)(*arguments)
    if status:
        raise BackendError(f"{name} has failed while a graph was recorded", found=f"status {status} of cublasStatus_t")


_RECORDED = _Functions(partial(_record, "cublasGemmEx"), partial(_record, "cublasGemmStridedBatchedEx"))


# -- Matrix products by cublasLt: for each product, the fastest of the algorithms that its heuristics propose ---------
#
# Off unless the environment variable MPIPIPE_PRODUCTS is "cublaslt". The first time that a product of some sizes,
# dtypes and alignments is asked for, its proposals are run a few times each, into memory of its own, and the host
# waits for the device. The choice depends on time, so the last bits may differ between runs, and between ranks; with
# MPIPIPE_DETERMINISTIC=1 the first proposal is taken unmeasured.
#
# By NVIDIA's Python package nvmath-python, whose `nvmath.bindings.cublasLt` has the functions of the C library
# (https://docs.nvidia.com/cuda/cublas/#using-the-cublaslt-api). It has not run on a GPU.


WORKSPACE = 32 << 20  # bytes that an algorithm may ask for: what NVIDIA's page on cuBLAS advises for Hopper
PROPOSALS = 8
RUNS = 5  # of one proposal, after one that does not count
MOST = 1024  # products that are measured; what comes later is left to cuBLAS
SUMS_OF_COMPUTE_TYPE = 2  # of cublasLtReductionScheme_t: no partial sums in half precision
ALIGNED = 256  # bytes; cublasLt asks for no more
DOUBLE = 1  # CUDA_R_64F, the type of the factors 0 and 1 of float64; that of all others is CUDA_R_32F
INSTALL = f"{how_to_install('cublaslt')}, or unset MPIPIPE_PRODUCTS"


class ProductSizes(NamedTuple):
    """What is computed, as cublasLt sees it: column by column, so that the first factor is b, and the second a."""

    first: tuple[int, int, int]  # (number of the dtype, rows, columns) of each matrix as it lies in memory
    second: tuple[int, int, int]
    result: tuple[int, int, int]
    transpose: tuple[bool, bool]  # the first and the second
    add: bool  # the result to what is there
    compute: int  # cuBLAS's number of the way to compute


class _Algorithm(NamedTuple):
    """One proposal; `held` is the memory that `where` points to."""

    held: np.ndarray
    where: int
    workspace: int


class _Product(NamedTuple):
    """Descriptors of cublasLt's, which live as long as the process, and the algorithm that was chosen."""

    operation: int
    layouts: tuple[int, ...]  # of the first factor, the second, and the result
    algorithm: _Algorithm
    factors: tuple[int, int]  # addresses of what the product and the old result are multiplied by
    device: int


@cache
def _known() -> dict[tuple, _Product | None]:
    """What has been chosen by now, by device, sizes and alignments; None if cublasLt has no algorithm."""
    return {}


@cache
def _bindings() -> Any:
    try:
        from nvmath.bindings import cublasLt
    except Exception as error:  # a broken installation raises what it likes
        why = f"{type(error).__name__}: {error}"
        raise BackendError(
            f"MPIPIPE_PRODUCTS=cublaslt, and nvmath cannot be imported ({why})", remedy=INSTALL
        ) from None
    return cublasLt


@cache
def _handle(_device: int) -> int:
    return _bindings().create()


def multiply(
    sizes: ProductSizes, first: DeviceArray, second: DeviceArray, result: DeviceArray, zero_and_one: tuple[int, int]
) -> bool:
    """Compute a product; return False, with nothing done, where cublasLt proposes nothing or MOST are known already.

    `zero_and_one` are addresses of these numbers on the host, in the dtype that sums are made in.
    """
    device = cupy().cuda.runtime.getDevice()
    alignments = tuple((x.data.ptr | ALIGNED) & -(x.data.ptr | ALIGNED) for x in (first, second, result))
    key = device, sizes, alignments
    known = _known()
    if key not in known:
        if len(known) >= MOST:
            return False
        known[key] = _chosen(sizes, alignments, (first, second, result), zero_and_one, device)
    product = known[key]
    if product is None:
        return False
    _run(product, product.algorithm, (first, second, result, result))
    return True


def _run(product: _Product, algorithm: _Algorithm, matrices: tuple[DeviceArray, ...]) -> None:
    first, second, old, new = matrices
    # of the pool, in the order of the stream: it is free for others once this product is queued
    space: DeviceArray = empty((algorithm.workspace,), np.dtype(np.uint8), "cuda") if algorithm.workspace else None
    of_first, of_second, of_result = product.layouts
    _bindings().matmul(
        _handle(product.device), product.operation, product.factors[0], first.data.ptr, of_first, second.data.ptr,
        of_second, product.factors[1], old.data.ptr, of_result, new.data.ptr, of_result,
        algorithm.where, 0 if space is None else space.data.ptr, algorithm.workspace, stream().ptr,
    )  # fmt: skip


def _chosen(
    sizes: ProductSizes,
    alignments: tuple[int, ...],
    matrices: tuple[DeviceArray, DeviceArray, DeviceArray],
    zero_and_one: tuple[int, int],
    device: int,
) -> _Product | None:
    """Describe a product to cublasLt, and choose among its proposals; None if there are none."""
    lt = _bindings()
    number_of_scale = DOUBLE if sizes.result[0] == DOUBLE else 0
    operation = lt.matmul_desc_create(sizes.compute, number_of_scale)
    which = lt.MatmulDescAttribute
    for attribute, turned in zip((which.TRANSA, which.TRANSB), sizes.transpose):
        _set(lt.matmul_desc_set_attribute, operation, attribute, np.int32(turned))
    sides = (sizes.first, sizes.second, sizes.result)
    layouts = tuple(lt.matrix_layout_create(*matrix, matrix[1]) for matrix in sides)
    proposals = _proposals(operation, layouts, alignments, device)
    if not proposals:
        return None
    product = _Product(operation, layouts, proposals[0], (zero_and_one[1], zero_and_one[sizes.add]), device)
    if len(proposals) == 1 or os.environ.get("MPIPIPE_DETERMINISTIC") == "1":
        return product
    first, second, old = matrices
    scratch = empty(old.shape, old.dtype, "cuda")  # so that measuring adds nothing to the result
    places = first, second, old, scratch
    times = [_seconds(partial(_run, product, one, places)) for one in proposals]
    return product._replace(algorithm=proposals[times.index(min(times))])


def _set(function: Any, descriptor: int, attribute: int, value: np.generic) -> None:
    cell = np.array([value])
    function(descriptor, attribute, address(cell), cell.nbytes)


def _proposals(operation: int, layouts: tuple[int, ...], alignments: tuple[int, ...], device: int) -> list[_Algorithm]:
    """Return the algorithms that cublasLt's heuristics propose, the one that they hold for the fastest first."""
    lt = _bindings()
    preference, which = lt.matmul_preference_create(), lt.MatmulPreferenceAttribute
    _set(lt.matmul_preference_set_attribute, preference, which.MAX_WORKSPACE_BYTES, np.uint64(WORKSPACE))
    _set(lt.matmul_preference_set_attribute, preference, which.REDUCTION_SCHEME_MASK, np.uint32(SUMS_OF_COMPUTE_TYPE))
    names = which.MIN_ALIGNMENT_A_BYTES, which.MIN_ALIGNMENT_B_BYTES, which.MIN_ALIGNMENT_C_BYTES
    for attribute, bytes_ in zip((*names, which.MIN_ALIGNMENT_D_BYTES), (*alignments, alignments[2])):
        _set(lt.matmul_preference_set_attribute, preference, attribute, np.uint32(bytes_))
    rows, count = np.zeros(PROPOSALS, lt.matmul_heuristic_result_dtype), np.zeros(1, np.int32)
    first, second, result = layouts
    try:
        lt.matmul_algo_get_heuristic(
            _handle(device), operation, first, second, result, result, preference, PROPOSALS, address(rows),
            address(count),
        )  # fmt: skip
    except lt.cuBLASLtError:  # its way to say that it has none
        return []
    finally:
        lt.matmul_preference_destroy(preference)
    usable = [i for i in range(count[0]) if rows[i]["state"] == 0]
    return [_Algorithm(rows, address(rows) + i * rows.itemsize, int(rows[i]["workspace_size"])) for i in usable]


def _seconds(run: Callable[[], None]) -> float:
    """Return the device time of RUNS products by one algorithm."""
    run()
    start = record(timing=True)
    for _ in range(RUNS):
        run()
    end = record(timing=True)
    end.synchronize()
    return seconds_between(start, end)
