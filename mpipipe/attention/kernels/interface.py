"""What every attention kernel offers, and what it is given.

A kernel is a module of this package. `AttentionKernel` says which functions it has; `choose.py` has mypy check that
each module has them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from mpipipe.arrays import Array
from mpipipe.attention.mask import Slice


def no_poll() -> None:
    """The poll that does nothing."""


@dataclass(frozen=True, eq=False)
class Block:
    """Queries, and one block of keys and values that they attend to.

    Attributes
    ----------
    q : (batch, seq, heads, dim)
    k : (batch, keys, kv_heads, dim)
    v : (batch, keys, kv_heads, value_dim)
        All of one dtype on one device, with any strides.
    scale : factor on the scores
    slices : the parts of the block that are seen
    poll : called after each tile
    """

    q: Array
    k: Array
    v: Array
    scale: float
    slices: Sequence[Slice]
    poll: Callable[[], object] = no_poll


class Result(NamedTuple):
    """Attention over some keys.

    out : (batch, seq, heads, value_dim), 0 in rows that see no key
    lse : (batch, heads, seq), natural log-sum-exp of the scores in the accumulator dtype, -inf where there is no key
    """

    out: Array
    lse: Array


class Gradients(NamedTuple):
    """Gradients of queries, keys and values, each in the shape of its array."""

    dq: Array
    dk: Array
    dv: Array


class AttentionAccumulator(Protocol):
    """Attention over several blocks of keys: call `attend` once per block, then `end`."""

    def attend(self, block: Block) -> None:
        """Add one block. All blocks have the same queries."""

    def end(self) -> Result:
        """Return the result over all blocks, out in the dtype of the queries."""


class AttentionKernel(Protocol):
    """Attention by one library. Results in half precision are summed in float32 and rounded once."""

    def forward(self, block: Block, result: Result, overwrite: bool) -> None:
        """Attend to one block of keys.

        `result` holds what earlier blocks gave, (0, -inf) where there were none, with `out` in the dtype of `lse`. This
        block is merged into it.

        With `overwrite` the result is set, as with beta = 0 in BLAS: its memory holds nothing yet, and `out` may be of
        the dtype of q. Each row must then lie in exactly one slice.
        """

    def backward(
        self, block: Block, dout: Array, result: Result, gradients: Gradients, overwrite: bool = False
    ) -> None:
        """Add what one block of keys gives to the gradients, which are of the dtype of `lse`.

        `result` is over all blocks, `out` in the dtype of q. With `overwrite` this is the only block, and the gradients
        are set: their memory holds nothing yet, and may be of the dtype of q.
        """

    def make_accumulator(self, q: Array, v: Array, overwrite: bool) -> AttentionAccumulator:
        """Return an accumulator for queries like `q` and values like `v`.

        `overwrite` promises that each row lies in exactly one slice of the first block.
        """

    def block_gradients(self, block: Block, dout: Array, result: Result, dq: Array) -> tuple[Array, Array]:
        """Add what one of several blocks gives to `dq`, and return its own (dk, dv), in any dtype."""
