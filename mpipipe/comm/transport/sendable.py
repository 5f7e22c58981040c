"""Which arrays can travel as messages."""

from __future__ import annotations

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array
from mpipipe.errors import ArgumentError


def check_sendable(array: Array) -> None:
    """Raise ArgumentError for what cannot travel.

    These are: other types than arrays; masked arrays; arrays of objects, records or text; arrays that are not
    C-contiguous. mpi4py sends a Fortran-ordered array without a word, and the receiver then holds its transpose.
    """
    if not arrays.is_array(array):
        raise ArgumentError("not an array", found=type(array).__name__, expected="numpy.ndarray or cupy.ndarray")
    arrays.refuse_mask(array)
    kind = array.dtype
    if kind.hasobject:
        raise ArgumentError("an object array", found=f"dtype {kind}", expected="a numeric dtype")
    if kind.type is np.void or kind.kind in "SU":
        raise ArgumentError(
            "an array of records or text",
            found=f"dtype {kind}",
            expected="a numeric dtype",
            remedy="pass its fields as a dict of arrays, such as {name: numpy.ascontiguousarray(x[name]) for name in "
            "x.dtype.names}",
        )
    if not kind.isnative:
        raise ArgumentError(
            "an array in the byte order of another machine",
            found=f"dtype {kind}",
            expected="native byte order",
            remedy="pass x.astype(x.dtype.newbyteorder('='))",
        )
    if not array.flags.c_contiguous:
        raise ArgumentError(
            "an array that is not C-contiguous",
            found=f"shape {array.shape}, strides {array.strides}",
            expected="C order",
            remedy="pass numpy.ascontiguousarray(x), or cupy's",
        )
