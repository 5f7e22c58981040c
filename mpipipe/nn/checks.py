"""Checks of arguments that several layers and losses share."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array
from mpipipe.errors import ArgumentError


def rows(x: Array) -> Array:
    """Return x, of any rank above 0, as a matrix of its last axis; a view where x is contiguous."""
    if x.ndim == 2:
        return x
    return x.reshape(-1, x.shape[-1])


def check_features(layer: Any, x: Array, expected: int) -> None:
    """Raise ArgumentError unless the last axis of x has `expected` elements."""
    if x.ndim == 0 or x.shape[-1] != expected:
        raise ArgumentError(
            f"layer {layer.name} ({type(layer).__name__}): the last axis of the input has the "
            "wrong size",
            found=f"shape {x.shape}",
            expected=f"(..., {expected})",
            remedy="give each layer the size that the layer before it puts out",
        )


def check_sequence(layer: Any, x: Array, dim: int, positions: np.ndarray | None) -> None:
    """Raise ArgumentError unless x is (batch, seq, dim), with a position for each row.

    `positions` is None where they are not known.
    """
    check_features(layer, x, dim)
    seq: int | str = "seq"
    if positions is not None:
        seq = len(positions)
    if x.ndim != 3 or seq not in ("seq", x.shape[1]):
        raise ArgumentError(
            f"layer {layer.name} ({type(layer).__name__}): the input has the wrong shape",
            found=f"shape {x.shape}",
            expected=f"(batch, {seq}, {dim})",
            remedy="one position for each row of the sequence",
        )


def check_axes(name: str, sizes: tuple[int, ...]) -> None:
    """Raise ArgumentError unless `sizes` are positive integers for one to three axes of space."""
    if not isinstance(sizes, tuple) or not 1 <= len(sizes) <= 3:
        raise ArgumentError(
            f"{name} must have a size for each axis of space",
            found=repr(sizes),
            expected="a tuple of 1, 2 or 3 integers",
        )
    check_positive(**{f"{name}[{axis}]": size for axis, size in enumerate(sizes)})


def check_field(layer: Any, x: Array, axes: int, channels: int) -> None:
    """Raise ArgumentError unless x is a field with these axes of space and channels."""
    if x.ndim != axes + 2 or 0 in x.shape:
        raise ArgumentError(
            f"layer {layer.name} ({type(layer).__name__}): the input is not a field, or an empty "
            "one",
            found=f"shape {x.shape}",
            expected=f"{axes + 2} axes, of 1 or more: batch, {axes} of space, channels",
            remedy="channels are the last axis; give the layer a size for each axis of space",
        )
    check_features(layer, x, channels)


def check_positive(**sizes: int) -> None:
    """Raise ArgumentError unless every named size is an integer of at least 1."""
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise ArgumentError(
                f"{name} must be a positive integer",
                found=repr(size),
                expected="1 or more",
                remedy=f"set {name}",
            )


def check_slice_count(slices: int, vocab: int) -> None:
    """Raise ArgumentError for more slices of the head than the vocabulary has rows."""
    if slices > vocab:
        raise ArgumentError(
            "a head has more slices than rows",
            found=f"{slices} slices of a vocabulary of {vocab}",
            expected=f"at most {vocab}",
            remedy="take fewer slices: twice as many as there are stages are enough",
        )


def checked_ids(x: Array, limit: int, what: str, device: str) -> Array:
    """Return integers on `device`; raise ArgumentError for those on the host out of range."""
    if x.dtype.kind not in "iu":
        raise ArgumentError(
            f"{what} must be integers",
            found=str(x.dtype),
            expected=f"integers in 0 ... {limit - 1}",
        )
    # Kernels read these two.
    if x.dtype.name not in ("int32", "int64"):
        x = arrays.on_host(x)
    if not arrays.is_device(x) and x.size and (x.min() < 0 or x.max() >= limit):
        raise ArgumentError(
            f"{what} is out of range",
            found=f"{x.min()} ... {x.max()}",
            expected=f"0 ... {limit - 1}",
            remedy="check the data against the size of the vocabulary",
        )
    if device == "cuda" and not arrays.is_device(x):
        return arrays.upload(x.astype(np.int64))
    return x


def checked_dtype(name: str | np.dtype) -> np.dtype:
    """Return the dtype of a name; raise ArgumentError unless a stage can compute in it."""
    kind = arrays.dtype(name)
    names = [dtype.name for dtype in arrays.COMPUTE_DTYPES]
    if kind.name not in names:
        raise ArgumentError(
            "a stage cannot compute in this dtype",
            found=kind.name,
            expected=" or ".join(names),
            remedy="pass one of them as dtype",
        )
    return kind
