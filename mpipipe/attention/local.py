"""Attention over a sequence that lies wholly on this rank."""

from __future__ import annotations

from mpipipe.attention.kernels import host
from mpipipe.errors import ArgumentError


class Local:
    """Exact softmax attention, forward and backward, without ever holding the whole matrix of scores.

    Parameters
    ----------
    causal : whether row i sees only keys 0 ... i (positions of queries and keys both start at 0); False: all keys
    scale : of the scores; default 1 / sqrt(head_dim)

    Arrays are (batch, seq, heads, head_dim) of one dtype, float32 or float64. k and v may have fewer heads than q, by
    a whole factor g: head h of q then sees head h // g (grouped-query attention). k and v may have another seq than q.
    """

    def __init__(self, causal: bool = True, scale: float | None = None):
        self.causal, self.scale = causal, scale

    def forward(self, q, k, v):
        """Return (out, saved), out shaped as q."""
        _check(q, k, v)
        scale = q.shape[3] ** -0.5 if self.scale is None else self.scale
        out, lse = host.forward(q, k, v, scale, self.causal)
        return out, (q, k, v, out, lse, scale)

    def backward(self, dout, saved):
        """Return (dq, dk, dv), shaped as q, k, v."""
        q, k, v, out, lse, scale = saved
        return host.backward(dout, q, k, v, out, lse, scale, self.causal)


def _check(q, k, v):
    batch, _, heads, dim = q.shape if q.ndim == 4 else (0, 0, 0, 0)
    fits = (
        q.ndim == k.ndim == 4
        and k.shape == v.shape
        and k.shape[0] == batch
        and k.shape[3] == dim
        and k.shape[1] > 0
        and k.shape[2] > 0
        and heads % k.shape[2] == 0
    )
    if not fits or not q.dtype == k.dtype == v.dtype:
        raise ArgumentError(
            "the arrays of attention do not fit together",
            found=f"q {q.shape} {q.dtype}, k {k.shape} {k.dtype}, v {v.shape} {v.dtype}",
            expected="q (batch, seq, heads, head_dim); k and v (batch, keys, kv_heads, head_dim), with kv_heads a "
            "divisor of heads and at least one key; one dtype",
        )
