"""What every attention kernel offers and takes, and what those have in common that have no better way.

A kernel is a module of this package. `AttentionKernel` says which functions it has; `choose.py` has mypy check that
each module has them.
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
    lse: Array  # (batch, heads, seq), log-sum-exp of the scores in the accumulator dtype, -inf where there is no key


class Gradients(NamedTuple):
    """Gradients of queries, keys and values, each in the shape of its array."""

    dq: Array
    dk: Array
    dv: Array


class AttentionAccumulator(Protocol):
    """Attention over several blocks of keys: call `attend` once per block, then `end`."""

    def attend(self, block: KVBlock) -> None:
        """Add one block. All blocks have the same queries."""

    def end(self) -> OutLse:
        """Return the result over all blocks, out in the dtype of the queries."""


class AttentionKernel(Protocol):
    """Attention by one library. Results in half precision are summed in float32 and rounded once."""

    def forward(self, block: KVBlock, result: OutLse, overwrite: bool) -> None:
        """Attend to one block of keys.

        `result` holds what earlier blocks gave, (0, -inf) where there were none, with `out` in the dtype of `lse`. This
        block is merged into it.

        With `overwrite` the result is set, as with beta = 0 in BLAS: its memory holds nothing yet, and `out` may be of
        the dtype of q. Each row must then lie in exactly one slice.
        """

    def backward(
        self, block: KVBlock, dout: Array, result: OutLse, gradients: Gradients, overwrite: bool = False
    ) -> None:
        """Add what one block of keys gives to the gradients, which are of the dtype of `lse`.

        `result` is over all blocks, `out` in the dtype of q. With `overwrite` this is the only block, and the gradients
        are set: their memory holds nothing yet, and may be of the dtype of q.
        """

    def make_accumulator(self, q: Array, v: Array, overwrite: bool) -> AttentionAccumulator:
        """Return an accumulator for queries like `q` and values like `v`.

        `overwrite` promises that each row lies in exactly one slice of the first block.
        """

    def block_gradients(self, block: KVBlock, dout: Array, result: OutLse, dq: Array) -> tuple[Array, Array]:
        """Add what one of several blocks gives to `dq`, and return its own (dk, dv), in any dtype."""


def check_arrays(q: Array, k: Array, v: Array) -> None:
    """Raise ArgumentError unless q, k and v are arrays that can attend to each other."""
    for name, array in (("q", q), ("k", k), ("v", v)):
        if not arrays.is_array(array) or array.dtype not in arrays.COMPUTE_DTYPES:
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
    fits = q.ndim == k.ndim == v.ndim == 4 and q.dtype == k.dtype == v.dtype and k.shape[:3] == v.shape[:3]
    if fits:
        (batch, _, heads, dim), kv_heads = q.shape, k.shape[2]
        fits = k.shape[0] == batch and k.shape[3] == dim > 0 and kv_heads > 0 and heads > 0 and heads % kv_heads == 0
    if not fits:
        raise ArgumentError(
            "the arrays of attention do not fit together",
            found=f"q {q.shape} {q.dtype}, k {k.shape} {k.dtype}, v {v.shape} {v.dtype}",
            expected="q (batch, seq, heads, head_dim); k and v (batch, keys, kv_heads, head_dim), with kv_heads a "
            "divisor of heads; one dtype",
        )


# -- Results and gradients that are made block by block, in place ------------------------------------------------------


def uninitialised_result(q: Array, v: Array, dtype: np.dtype) -> OutLse:
    """Memory for the result of queries like `q` with values like `v`, `out` in `dtype`."""
    batch, seq, heads, _ = q.shape
    device = arrays.device_of(q)
    out = arrays.empty((batch, seq, heads, v.shape[3]), dtype, device)
    return OutLse(out, arrays.empty((batch, heads, seq), arrays.accumulator(q.dtype), device))


def empty_result(q: Array, v: Array, dtype: np.dtype) -> OutLse:
    """The result over no keys at all: zeros in `dtype`, and -inf."""
    result = uninitialised_result(q, v, dtype)
    arrays.set_zero(result.out)
    arrays.fill(result.lse, -np.inf)
    return result


class InPlaceAccumulator:
    """An `AttentionAccumulator` that merges each block into one result, by a kernel's `forward`."""

    def __init__(self, forward: Callable[[KVBlock, OutLse, bool], None], q: Array, v: Array, overwrite: bool) -> None:
        self._forward, self._dtype, self._overwrite = forward, q.dtype, overwrite
        make = uninitialised_result if overwrite else empty_result
        self._result = make(q, v, arrays.accumulator(q.dtype))

    def attend(self, block: KVBlock) -> None:
        self._forward(block, self._result, self._overwrite)
        self._overwrite = False

    def end(self) -> OutLse:
        return self._result._replace(out=arrays.cast(self._result.out, self._dtype))


def gradients_from_zeros(
    backward: Callable[[KVBlock, Array, OutLse, Gradients], None],
    block: KVBlock,
    dout: Array,
    result: OutLse,
    dq: Array,
) -> tuple[Array, Array]:
    """`AttentionKernel.block_gradients` by the kernel's `backward`, from zeros."""
    dtype = result.lse.dtype
    dk, dv = (arrays.zeros(x.shape, dtype, arrays.device_of(x)) for x in (block.k, block.v))
    backward(block, dout, result, Gradients(dq, dk, dv))
    return dk, dv


def attend_once(kernel: AttentionKernel, block: KVBlock, overwrite: bool) -> OutLse:
    """Attend to a single block of keys; `overwrite` promises that each row lies in exactly one of its slices."""
    q, v = block.q, block.v
    if overwrite:
        result = uninitialised_result(q, v, q.dtype)
        kernel.forward(block, result, True)
        return result
    accumulator = kernel.make_accumulator(q, v, overwrite=False)
    accumulator.attend(block)
    return accumulator.end()
