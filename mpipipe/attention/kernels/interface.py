"""What every attention kernel offers and takes, and what kernels have in common.

A kernel is a module of this package. `AttentionKernel` says which functions it has; `choose.py` has
mypy check that each module has them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array
from mpipipe.attention.mask import Slice
from mpipipe.errors import ArgumentError


def no_poll() -> None:
    """The poll that does nothing."""


@dataclass(frozen=True, eq=False)
class KVBlock:
    """Queries, and one block of keys and values that they attend to.

    Arrays are of one dtype on one device, with any strides.
    """

    q: Array  # (batch, seq, heads, dim)
    k: Array  # (batch, keys, kv_heads, dim)
    v: Array  # (batch, keys, kv_heads, value_dim)
    scale: float  # factor on the scores
    slices: Sequence[Slice]  # the parts of the block that are seen
    poll: Callable[[], object] = no_poll  # called after each tile


class OutLse(NamedTuple):
    """Attention over some keys."""

    out: Array  # (batch, seq, heads, value_dim), 0 in rows that see no key
    # (batch, heads, seq), log-sum-exp of the scores in the accumulator dtype, -inf where there is
    # no key.
    lse: Array


class Gradients(NamedTuple):
    """Gradients of queries, keys and values, each in the shape of its array."""

    dq: Array
    dk: Array
    dv: Array


class AttentionKernel(Protocol):
    """Attention by one library.

    Results in half precision are summed in float32 and rounded once.
    """

    def forward(self, block: KVBlock, result: OutLse, overwrite: bool) -> None:
        """Attend to one block of keys.

        `result` holds what earlier blocks gave, (0, -inf) where there were none, with `out` in the
        dtype of `lse`. This block is merged into it.

        With `overwrite` the result is set, as with beta = 0 in BLAS: its memory holds nothing yet,
        and `out` may be of the dtype of q. Each row must then lie in exactly one slice.
        """

    def backward(
        self,
        block: KVBlock,
        dout: Array,
        result: OutLse,
        gradients: Gradients,
        overwrite: bool = False,
    ) -> None:
        """Add what one block of keys gives to the gradients, which are of the dtype of `lse`.

        `result` is over all blocks, `out` in the dtype of q. With `overwrite` this is the only
        block, and the gradients are set: their memory holds nothing yet, and may be of the dtype of
        q.
        """


def check_arrays(q: Array, k: Array, v: Array) -> None:
    """Raise ArgumentError unless q, k and v are arrays that can attend to each other."""
    for name, array in (("q", q), ("k", k), ("v", v)):
        arrays.refuse_mask(array)
        if getattr(array, "dtype", None) not in arrays.COMPUTE_DTYPES:
            raise ArgumentError(
                f"attention: {name}",
                found=str(getattr(array, "dtype", type(array).__name__)),
                expected="array of float32 or float64, float16 or bfloat16",
            )
    devices = [arrays.device_of(array) for array in (q, k, v)]
    if len(set(devices)) > 1:
        raise ArgumentError(
            "the arrays of attention are on different devices",
            found=", ".join(f"{name} on {device}" for name, device in zip("qkv", devices)),
            expected="one device",
            remedy="copy host arrays to the GPU first, with mpipipe.arrays.upload or cupy.asarray",
        )
    fits = (
        q.ndim == k.ndim == v.ndim == 4
        and q.dtype == k.dtype == v.dtype
        and k.shape[:3] == v.shape[:3]
        and (len(q), q.shape[3]) == (len(k), k.shape[3])
        and 0 not in (*q.shape[2:], *v.shape[2:])
        and q.shape[2] % k.shape[2] == 0
    )
    if not fits:
        raise ArgumentError(
            "the arrays of attention do not fit together",
            found=f"q {q.shape} {q.dtype}, k {k.shape} {k.dtype}, v {v.shape} {v.dtype}",
            expected="q (batch, seq, heads, head_dim); k and v (batch, keys, kv_heads, head_dim), "
            "with kv_heads a divisor of heads; one dtype",
        )


# -- Results and gradients that are made block by block, in place ----------------------------------


def new_result(q: Array, v: Array, dtype: np.dtype, overwrite: bool) -> OutLse:
    """Memory for the result of queries like `q` with values like `v`, `out` in `dtype`.

    It holds nothing yet where the first block overwrites it, else the result over no keys at all.
    """
    batch, seq, heads, _ = q.shape
    device = arrays.device_of(q)
    out = arrays.empty((batch, seq, heads, v.shape[3]), dtype, device)
    lse = arrays.empty((batch, heads, seq), arrays.accumulator(q.dtype), device)
    if not overwrite:
        arrays.set_zero(out)
        arrays.fill(lse, -np.inf)
    return OutLse(out, lse)


def attend_once(kernel: AttentionKernel, block: KVBlock, overwrite: bool) -> OutLse:
    """Attend to one block; `overwrite` promises that each row lies in one of its slices."""
    dtype = block.q.dtype
    result = new_result(
        block.q, block.v, dtype if overwrite else arrays.accumulator(dtype), overwrite
    )
    kernel.forward(block, result, overwrite)
    return result._replace(out=arrays.cast(result.out, dtype))


def new_sums(x: Array) -> Array:
    """Zeros in the shape of an array and the dtype of sums."""
    return arrays.zeros(x.shape, arrays.accumulator(x.dtype), arrays.device_of(x))


def rows_like(
    x: Array, rows: int, dtype: np.dtype, make: Callable[..., Array] = arrays.empty
) -> Array:
    """Memory for rows as those of x, in which those of a head lie together: kernels copy none."""
    batch, _, heads, dim = x.shape
    return make((batch, heads, rows, dim), dtype, arrays.device_of(x)).swapaxes(1, 2)


# -- Slices are computed tile by tile --------------------------------------------------------------


class RowTile(NamedTuple):
    """Queries start ... stop - 1 of a slice, and the pieces of its keys that they see."""

    part: Slice
    start: int
    stop: int
    pieces: list[slice]

    def rows(self, group: int) -> slice:
        """The rows of these queries, `group` for each."""
        return slice(self.start * group, self.stop * group)


def row_tiles(part: Slice, queries: int, keys: int) -> list[RowTile]:
    """Tiles of `queries` rows of a slice, in pieces of `keys` columns."""
    seq = part.q_stop - part.q_start
    all_keys = part.k_stop - part.k_start
    tiles = []
    for start in range(0, seq, queries):
        stop = min(start + queries, seq)
        first = 0
        if part.low is not None:
            first = max(0, start + part.low)
        end = all_keys
        if part.high is not None:
            end = min(all_keys, stop + part.high)
        pieces = [slice(at, min(at + keys, end)) for at in range(first, end, keys)]
        # Rows that see nothing have a result too.
        tiles.append(RowTile(part, start, stop, pieces or [slice(0, min(keys, all_keys))]))
    return tiles
