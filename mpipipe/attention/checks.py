"""Whether arrays can attend to each other."""

from __future__ import annotations

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array
from mpipipe.errors import ArgumentError

DTYPES = tuple(map(arrays.dtype, ("float32", "float64", "float16", "bfloat16")))


def check_arrays(q: Array, k: Array, v: Array) -> None:
    """Raise ArgumentError unless q, k and v are arrays that can attend to each other."""
    for name, array in (("q", q), ("k", k), ("v", v)):
        if not arrays.is_array(array) or array.dtype not in DTYPES:
            found = array.dtype if arrays.is_array(array) else type(array).__name__
            expected = "array of float32 or float64, float16 or bfloat16"
            raise ArgumentError(f"attention: {name}", found=str(found), expected=expected)
    devices = [arrays.device_of(array) for array in (q, k, v)]
    if len(set(devices)) > 1:
        raise ArgumentError(
            "the arrays of attention are on different devices",
            found=", ".join(f"{name} on {device}" for name, device in zip("qkv", devices)),
            expected="one device",
            remedy="copy host arrays to the GPU first, with mpipipe.arrays.upload or cupy.asarray",
        )
    batch, _, heads, dim = q.shape if q.ndim == 4 else (0, 0, 0, 0)
    fits = (
        q.ndim == k.ndim == v.ndim == 4
        and k.shape[:3] == v.shape[:3]
        and k.shape[0] == batch
        and k.shape[3] == dim
        and k.shape[2] > 0
        and dim > 0
        and heads > 0
        and heads % k.shape[2] == 0
    )
    if not fits or not q.dtype == k.dtype == v.dtype:
        raise ArgumentError(
            "the arrays of attention do not fit together",
            found=f"q {q.shape} {q.dtype}, k {k.shape} {k.dtype}, v {v.shape} {v.dtype}",
            expected="q (batch, seq, heads, head_dim); k and v (batch, keys, kv_heads, head_dim), with kv_heads a "
            "divisor of heads; one dtype",
        )


def check_positions(found: np.ndarray, expected: np.ndarray, layout: str, rank: int) -> None:
    """Raise ArgumentError unless a layer has the positions of its rows that a ring attends by."""
    if not np.array_equal(found, expected):
        raise ArgumentError(
            "a layer and its ring differ in the positions of this rank's rows",
            rank=rank,
            found=_listed(found),
            expected=f"{_listed(expected)}, the {layout} shard that the ring attends by",
            remedy="use one Layout for all: layout.shard(x, rank), Ring(comm, layout=layout), layout.positions(rank)",
        )


def _listed(positions: np.ndarray) -> str:
    """The first positions, and how many there are."""
    numbers = positions.reshape(-1)
    more = f" ... ({numbers.size} in all)" if numbers.size > 8 else ""
    return " ".join(map(str, numbers[:8].tolist())) + more
