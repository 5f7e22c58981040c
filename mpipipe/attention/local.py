"""Attention over a sequence that lies wholly on this rank."""

from __future__ import annotations

from mpipipe import arrays
from mpipipe.arrays.dtypes import COMPUTE_DTYPES as DTYPES
from mpipipe.attention import kernels, mask
from mpipipe.attention.accumulate import attend_once
from mpipipe.attention.kernels import host
from mpipipe.errors import ArgumentError


class Local:
    """Exact softmax attention, forward and backward, without ever holding the whole matrix of scores.

    Parameters
    ----------
    causal : whether row i sees only keys 0 ... i (positions of queries and keys both start at 0); False: all keys
    scale : of the scores, a finite number above 0; default 1 / sqrt(head_dim)
    window : a row sees itself and the window - 1 positions before it; needs causal
    segments : documents packed into the sequence, as numbers or lengths (see `mask.boundaries`)

    Arrays are (batch, seq, heads, head_dim), all on the host or all on one GPU, of one dtype: float32, float64, or
    float16 or bfloat16, in which sums and the log-sum-exp are float32 and results are rounded once. k and v may have
    fewer heads than q, by a whole factor g: head h of q then sees head h // g (grouped-query attention). k and v may
    have another seq than q, and v another head_dim than k. `poll` is called after each tile. On a GPU nothing waits
    for the device.
    """

    def __init__(self, causal: bool = True, scale: float | None = None, window: int | None = None, segments=None):
        mask.check_window(causal, window)
        mask.check_scale(scale)
        self.causal, self.scale, self.window, self.segments = causal, scale, window, segments
        self.poll = host.nothing
        self.planned: tuple = ()  # (lengths of queries and keys, slices) of the last call

    def forward(self, q, k, v):
        """Return (out, saved); out has the shape of q, with the head_dim of v."""
        check_arrays(q, k, v)
        scale = q.shape[3] ** -0.5 if self.scale is None else self.scale
        lengths = q.shape[1], k.shape[1]
        if not self.planned or self.planned[0] != lengths:
            self.planned = lengths, self._slices(*lengths)
        slices = self.planned[1]
        out, lse = attend_once(kernels.chosen(q, k, v), q, k, v, scale, slices, self.poll)
        return out, (q, k, v, out, lse, scale, slices)

    def backward(self, dout, saved):
        """Return (dq, dk, dv), shaped as q, k, v."""
        q, k, v, out, lse, scale, slices = saved
        dq, dk, dv = (arrays.empty_like(x) for x in (q, k, v))
        kernels.chosen(q, k, v).backward(dout, q, k, v, out, lse, scale, slices, dq, dk, dv, self.poll, fresh=True)
        return dq, dk, dv

    def _slices(self, seq, keys):
        if self.segments is not None and seq != keys:
            raise ArgumentError("segments need queries and keys of one sequence", found=f"{seq} queries, {keys} keys")
        documents = mask.boundaries(self.segments, seq)
        queries, all_keys = [mask.Run(0, seq, 0, 1)], [mask.Run(0, keys, 0, 1)]
        return mask.plan(queries, all_keys, self.causal, self.window, documents)


def check_arrays(q, k, v):
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
