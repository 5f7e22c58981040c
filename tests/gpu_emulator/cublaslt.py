"""nvmath.bindings.cublasLt: the functions that this package calls, with the names and parameters of the real ones.

Descriptors are numbers, algorithms are structures in memory that the caller keeps, attributes are read from addresses.
Three algorithms are proposed for each product: one needs a workspace, one needs addresses at multiples of 16 bytes.
"""

from __future__ import annotations

import ctypes
import enum
from itertools import count

import numpy as np

from . import blas, runtime
from .machine import machine

matmul_heuristic_result_dtype = np.dtype(
    [("algo", [("data_", "<u8", (8,))]), ("workspace_size", "<u8"), ("state", "<i4"), ("waves_count", "<f4"),
     ("reserved", "<i4", (4,))]
)  # fmt: skip
NEEDS = {7: (16, 0), 8: (1, 4096), 9: (1, 0)}  # algorithm -> (alignment of addresses, bytes of workspace)


class MatmulDescAttribute(enum.IntEnum):
    COMPUTE_TYPE, SCALE_TYPE, POINTER_MODE, TRANSA, TRANSB = range(5)


class MatmulPreferenceAttribute(enum.IntEnum):
    MAX_WORKSPACE_BYTES = 1
    REDUCTION_SCHEME_MASK = 3
    MIN_ALIGNMENT_A_BYTES, MIN_ALIGNMENT_B_BYTES, MIN_ALIGNMENT_C_BYTES, MIN_ALIGNMENT_D_BYTES = range(5, 9)


class cuBLASLtError(Exception):
    """What cublasLt refuses."""


_numbers = count(0x1000)
_made: dict[int, dict] = {}
used: list[int] = []  # the algorithm of each product since the start


def _new(**facts) -> int:
    number = next(_numbers)
    _made[number] = facts
    return number


def _of(number: int, kind: str) -> dict:
    facts = _made.get(number, {})
    if facts.get("kind") != kind:
        raise cuBLASLtError(f"INVALID_VALUE: {number} is no {kind}")
    return facts


def _store(facts: dict, attr: int, buf: int, size_in_bytes: int, width: int):
    if size_in_bytes != width:
        raise cuBLASLtError(f"INVALID_VALUE: attribute {attr} has {width} bytes, not {size_in_bytes}")
    facts[attr] = int.from_bytes(ctypes.string_at(buf, size_in_bytes), "little")


def create() -> int:
    return _new(kind="handle", device=runtime.getDevice())


def matmul_desc_create(compute_type, scale_type) -> int:
    return _new(kind="operation", compute=compute_type, scale=scale_type)


def matmul_desc_set_attribute(matmul_desc, attr, buf, size_in_bytes):
    _store(_of(matmul_desc, "operation"), MatmulDescAttribute(attr), buf, size_in_bytes, 4)


def matrix_layout_create(type, rows, cols, ld) -> int:
    return _new(kind="layout", type=type, rows=rows, cols=cols, ld=ld)


def matmul_preference_create() -> int:
    return _new(kind="preference")


def matmul_preference_destroy(pref):
    _of(pref, "preference")
    del _made[pref]


def matmul_preference_set_attribute(pref, attr, buf, size_in_bytes):
    width = 8 if attr == MatmulPreferenceAttribute.MAX_WORKSPACE_BYTES else 4
    _store(_of(pref, "preference"), MatmulPreferenceAttribute(attr), buf, size_in_bytes, width)


def matmul_algo_get_heuristic(light_handle, operation_desc, adesc, bdesc, cdesc, ddesc, preference,
                              requested_algo_count, heuristic_results_array, return_algo_count):  # fmt: skip
    _of(light_handle, "handle")
    operation, wanted = _of(operation_desc, "operation"), _of(preference, "preference")
    for layout in (adesc, bdesc, cdesc, ddesc):
        _of(layout, "layout")
    which = MatmulPreferenceAttribute
    alignment = min(wanted.get(name, 256) for name in which if name.name.startswith("MIN_ALIGNMENT"))
    if wanted.get(which.REDUCTION_SCHEME_MASK) != 2:
        raise cuBLASLtError("partial sums may be rounded to the type of the result: this package asks for exact ones")
    room = wanted.get(which.MAX_WORKSPACE_BYTES, 0)
    fitting = [one for one, (aligned, space) in NEEDS.items() if aligned <= alignment and space <= room]
    fitting = [] if operation["compute"] == blas.CUBLAS_COMPUTE_64F else fitting  # as if it had none for float64
    found = np.zeros(requested_algo_count, matmul_heuristic_result_dtype)
    for place, algorithm in zip(found, fitting):
        place["algo"]["data_"][0], place["workspace_size"] = algorithm, NEEDS[algorithm][1]
    ctypes.memmove(heuristic_results_array, found.ctypes.data, found.nbytes)
    ctypes.c_int.from_address(return_algo_count).value = len(fitting)
    if not fitting:
        raise cuBLASLtError("NOT_SUPPORTED: no heuristic for this product")


def matmul(light_handle, compute_desc, alpha, a, adesc, b, bdesc, beta, c, cdesc, d, ddesc, algo, workspace,
           workspace_size_in_bytes, stream):  # fmt: skip
    if _of(light_handle, "handle")["device"] != runtime.getDevice():
        raise cuBLASLtError("INVALID_VALUE: the handle of another device")
    operation, (first, second, old, new) = _of(compute_desc, "operation"), (
        _of(layout, "layout") for layout in (adesc, bdesc, cdesc, ddesc)
    )  # fmt: skip
    algorithm = ctypes.c_uint64.from_address(algo).value
    aligned, space = NEEDS[algorithm]
    if any(ptr % aligned for ptr in (a, b, c, d)) or space > workspace_size_in_bytes or (space and workspace % 16):
        raise cuBLASLtError(f"NOT_SUPPORTED: algorithm {algorithm} with these addresses and this workspace")
    if space:
        machine().device_ranges.check(workspace, space)
    double = operation["compute"] == blas.CUBLAS_COMPUTE_64F
    if operation["scale"] != (runtime.CUDA_R_64F if double else runtime.CUDA_R_32F) or old != new:
        raise cuBLASLtError("NOT_SUPPORTED: the type of alpha, or a result of another layout")
    if stream != blas.get_current_stream().ptr:
        raise cuBLASLtError("not the stream that this package computes on")
    transa, transb = (operation.get(name, 0) for name in (MatmulDescAttribute.TRANSA, MatmulDescAttribute.TRANSB))
    k = first["rows"] if transa else first["cols"]
    size, rest = np.dtype(blas.TYPES[new["type"]]).itemsize, (new["type"], new["ld"])
    used.append(algorithm)
    if c != d:  # as a copy, and a product in place
        runtime.memcpyAsync(d, c, new["ld"] * new["cols"] * size, runtime.memcpyDeviceToDevice, stream)
    blas._multiply(blas.get_cublas_handle(), transa, transb, new["rows"], new["cols"], k, alpha, a, first["type"],
                  first["ld"], 0, b, second["type"], second["ld"], 0, beta, d, *rest, 0, 1, operation["compute"],
                  -1)  # fmt: skip
