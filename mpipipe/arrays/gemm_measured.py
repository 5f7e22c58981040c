"""Matrix products by cublasLt: for each product, the fastest of the algorithms that its heuristics propose.

Off unless the environment variable MPIPIPE_PRODUCTS is "cublaslt". The first time that a product of some sizes, dtypes
and alignments is asked for, its proposals are run a few times each, into memory of its own, and the host waits for the
device. The choice depends on time, so the last bits may differ between runs, and between ranks; with
MPIPIPE_DETERMINISTIC=1 the first proposal is taken unmeasured.

By NVIDIA's Python package nvmath-python, whose `nvmath.bindings.cublasLt` has the functions of the C library
(https://docs.nvidia.com/cuda/cublas/#using-the-cublaslt-api). Nothing of this has run on a GPU.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from mpipipe.arrays.devices import cupy
from mpipipe.arrays.memory import address, empty
from mpipipe.arrays.streams import record, seconds_between, stream
from mpipipe.arrays.types import DeviceArray
from mpipipe.errors import BackendError
from mpipipe.wording import how_to_install

WORKSPACE = 32 << 20  # bytes that an algorithm may ask for: what NVIDIA's page on cuBLAS advises for Hopper
PROPOSALS = 8
RUNS = 5  # of one proposal, after one that does not count
MOST = 1024  # products that are measured; what comes later is left to cuBLAS
ALIGNED = 256  # bytes; cublasLt asks for no more
DOUBLE = 1  # CUDA_R_64F, the type of the factors 0 and 1 of float64; that of all others is CUDA_R_32F
INSTALL = f"{how_to_install('cublaslt')}, or unset MPIPIPE_PRODUCTS"


class Sizes(NamedTuple):
    """What is computed, as cublasLt sees it: column by column, so that the first factor is b, and the second a.

    first, second, result : (number of the dtype, rows, columns) of each matrix as it lies in memory
    transpose : whether the first and the second are transposed
    add : whether the result is added to what is there
    compute : cuBLAS's number of the way to compute
    """

    first: tuple[int, int, int]
    second: tuple[int, int, int]
    result: tuple[int, int, int]
    transpose: tuple[bool, bool]
    add: bool
    compute: int


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
    sizes: Sizes, first: DeviceArray, second: DeviceArray, result: DeviceArray, zero_and_one: tuple[int, int]
) -> bool:
    """Compute a product; return False, with nothing done, where cublasLt proposes nothing or MOST are known already.

    Parameters
    ----------
    sizes : what is computed
    first, second, result : its matrices
    zero_and_one : addresses of these numbers on the host, in the dtype that sums are made in
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
    _run(product, product.algorithm, (first, second, result, result), zero_and_one, sizes.add, device)
    return True


def _run(
    product: _Product,
    algorithm: _Algorithm,
    matrices: tuple[DeviceArray, ...],
    zero_and_one: tuple[int, int],
    add: bool,
    device: int,
) -> None:
    first, second, old, new = matrices
    # of the pool, in the order of the stream: it is free for others once this product is queued
    space: DeviceArray = empty((algorithm.workspace,), np.dtype(np.uint8), "cuda") if algorithm.workspace else None
    of_first, of_second, of_result = product.layouts
    _bindings().matmul(
        _handle(device), product.operation, zero_and_one[1], first.data.ptr, of_first, second.data.ptr, of_second,
        zero_and_one[add], old.data.ptr, of_result, new.data.ptr, of_result,
        algorithm.where, 0 if space is None else space.data.ptr, algorithm.workspace, stream().ptr,
    )  # fmt: skip


def _chosen(
    sizes: Sizes,
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
    given = (sizes.first, sizes.second, sizes.result)
    layouts = tuple(lt.matrix_layout_create(*matrix, matrix[1]) for matrix in given)
    proposals = _proposals(operation, layouts, alignments, device)
    if not proposals:
        return None
    product = _Product(operation, layouts, proposals[0])
    if len(proposals) == 1 or os.environ.get("MPIPIPE_DETERMINISTIC") == "1":
        return product
    first, second, old = matrices
    scratch = empty(old.shape, old.dtype, "cuda")  # so that measuring adds nothing to the result
    times = []
    for algorithm in proposals:
        times.append(_seconds(product, algorithm, (first, second, old, scratch), zero_and_one, sizes.add, device))
    return product._replace(algorithm=proposals[times.index(min(times))])


def _set(function: Any, descriptor: int, attribute: int, value: np.generic) -> None:
    cell = np.array([value])
    function(descriptor, attribute, address(cell), cell.nbytes)


def _proposals(operation: int, layouts: tuple[int, ...], alignments: tuple[int, ...], device: int) -> list[_Algorithm]:
    """Return the algorithms that cublasLt's heuristics propose, the one that they hold for the fastest first."""
    lt = _bindings()
    preference, which = lt.matmul_preference_create(), lt.MatmulPreferenceAttribute
    _set(lt.matmul_preference_set_attribute, preference, which.MAX_WORKSPACE_BYTES, np.uint64(WORKSPACE))
    names = which.MIN_ALIGNMENT_A_BYTES, which.MIN_ALIGNMENT_B_BYTES, which.MIN_ALIGNMENT_C_BYTES
    for attribute, bytes_ in zip((*names, which.MIN_ALIGNMENT_D_BYTES), (*alignments, alignments[2])):
        _set(lt.matmul_preference_set_attribute, preference, attribute, np.uint32(bytes_))
    found, count = np.zeros(PROPOSALS, lt.matmul_heuristic_result_dtype), np.zeros(1, np.int32)
    first, second, result = layouts
    try:
        lt.matmul_algo_get_heuristic(
            _handle(device), operation, first, second, result, result, preference, PROPOSALS, address(found),
            address(count),
        )  # fmt: skip
    except lt.cuBLASLtError:  # its way to say that it has none
        return []
    finally:
        lt.matmul_preference_destroy(preference)
    usable = [i for i in range(count[0]) if found[i]["state"] == 0]
    return [_Algorithm(found, address(found) + i * found.itemsize, int(found[i]["workspace_size"])) for i in usable]


def _seconds(
    product: _Product,
    algorithm: _Algorithm,
    matrices: tuple[DeviceArray, ...],
    zero_and_one: tuple[int, int],
    add: bool,
    device: int,
) -> float:
    """Return the device time of RUNS products by one algorithm."""
    _run(product, algorithm, matrices, zero_and_one, add, device)
    start = record(timing=True)
    for _ in range(RUNS):
        _run(product, algorithm, matrices, zero_and_one, add, device)
    end = record(timing=True)
    end.synchronize()
    return seconds_between(start, end)
