"""What attention over a ring of ranks takes beyond attention on one rank: the messages with keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mpipipe import arrays, nn
from mpipipe.train.rehearsal import StageBytes


def with_ring(found: StageBytes, layers: Sequence[nn.Layer], tokens: int, dtype: str) -> StageBytes:
    """Return the bytes of a stage that was rehearsed on one rank, for a ring.

    A forward keeps the last block that has come by, and has another one on its way. In a backward two messages are
    under way, each with a block and its gradients, which are sums in the wider dtype.

    Parameters
    ----------
    found : of the rehearsal
    layers : of the stage, unbound
    tokens : of a micro-batch on this rank
    dtype : of activations
    """
    kind = arrays.dtype(dtype)
    wide = arrays.accumulator(kind).itemsize
    attentions = [each for top in layers for _, each in top.walk("") if isinstance(each, nn.SelfAttention)]
    widths = [2 * each.kv_heads * each.head_dim * tokens for each in attentions]
    kept, largest = sum(widths) * kind.itemsize, max(widths, default=0)
    under_way = 2 * largest * (kind.itemsize + wide)
    return replace(
        found,
        saved=found.saved + kept,
        forward=found.forward + kept + largest * kind.itemsize,
        backward=found.backward + under_way,
        input_grad=found.input_grad + under_way,
    )
