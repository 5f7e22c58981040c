"""Merge two attention results over different keys into one.

Softmax over the union of two sets of keys, from the normalised outputs O and the log-sum-exps L
over each:

    M = max(L, L'),  w = exp(L' - M) / (exp(L - M) + exp(L' - M)),  O <- O + w (O' - O),  L <- M +
    log(sum)

(Dao et al., "FlashAttention", 2022, section 3.1.) A set without keys has O = 0 and L = -inf, and so
has the union of two such sets. The operation is associative up to rounding, so blocks may come in
any order.
"""

from __future__ import annotations

import numpy as np


def merge(out: np.ndarray, lse: np.ndarray, block_out: np.ndarray, block_lse: np.ndarray) -> None:
    """Merge (block_out, block_lse) into (out, lse), in place.

    out, block_out : (..., rows, dim); block_out is overwritten
    lse, block_lse : (..., rows), natural logarithms, float32 (float64 for float64 arrays)
    """
    high = np.maximum(lse, block_lse)
    np.copyto(high, 0, where=np.isneginf(high))  # nothing on both sides: weights 0, no NaN
    old = np.exp(lse - high)
    new = np.exp(block_lse - high)
    total = old + new
    np.copyto(total, 1, where=total == 0)
    weight = (new / total)[..., None]
    np.subtract(block_out, out, out=block_out)
    np.multiply(block_out, weight, out=block_out)
    np.add(out, block_out, out=out)
    with np.errstate(divide="ignore"):
        lse[...] = high + np.log(old + new)
