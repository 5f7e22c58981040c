"""What the functions on a GPU ask of their arrays."""

from __future__ import annotations

from mpipipe.arrays import DeviceArray
from mpipipe.errors import ArgumentError


def check_contiguous(name: str, *given: DeviceArray) -> None:
    """Raise ArgumentError unless all arrays are C-contiguous."""
    for array in given:
        if not array.flags.c_contiguous:
            raise ArgumentError(
                f"kernels.{name} takes C-contiguous arrays on a GPU",
                found=f"shape {array.shape}, strides {array.strides}",
                remedy="copy it first, with kernels.copy",
            )


def check_alike(name: str, first: DeviceArray, *others: DeviceArray) -> None:
    """Raise ArgumentError unless all arrays are C-contiguous, of one shape and dtype."""
    check_contiguous(name, first, *others)
    for array in others:
        if array.shape != first.shape or array.dtype != first.dtype:
            raise _unequal(name, first, array, "one shape and one dtype")


def check_matrices(name: str, first: DeviceArray, axis: int, other: DeviceArray, axis_of_other: int) -> None:
    """Raise ArgumentError unless both are C-contiguous matrices of one dtype, of equal extents along these axes."""
    check_contiguous(name, first, other)
    if (
        not first.ndim == other.ndim == 2
        or first.dtype != other.dtype
        or first.shape[axis] != other.shape[axis_of_other]
    ):
        expected = f"matrices of one dtype, axis {axis} of the first as long as axis {axis_of_other} of the other"
        raise _unequal(name, first, other, expected)


def check_ids(ids: DeviceArray) -> None:
    """Raise ArgumentError unless device ids are of a dtype that the kernels read."""
    if ids.dtype.name not in ("int32", "int64"):
        raise ArgumentError(
            "ids on a GPU have the wrong dtype", found=ids.dtype.name, expected="int32 or int64", remedy="convert them"
        )


def _unequal(name: str, first: DeviceArray, other: DeviceArray, expected: str) -> ArgumentError:
    found = " and ".join(f"{array.dtype.name} {array.shape}" for array in (first, other))
    return ArgumentError(f"kernels.{name} was given arrays that do not fit", found=found, expected=expected)
