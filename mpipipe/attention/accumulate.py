"""Results of attention on either device: made, cast, added and packed, whatever the strides."""

from __future__ import annotations

import numpy as np

from mpipipe import arrays
from mpipipe.attention.mask import rows_once


def empty_result(q, v, kind, fresh=False):
    """(out, lse) over no keys at all, out in dtype `kind`: zeros and -inf; without values where `fresh`.

    out (batch, seq, heads, dim of v), lse (batch, heads, seq) in the accumulator dtype of q.
    """
    batch, seq, heads, _ = q.shape
    device = arrays.device_of(q)
    out = arrays.empty((batch, seq, heads, v.shape[3]), kind, device)
    lse = arrays.empty((batch, heads, seq), arrays.accumulator(q.dtype), device)
    if not fresh:
        arrays.set_zero(out)
        _fill(lse, -np.inf)
    return out, lse


class Sum:
    """The result over the blocks of keys so far, (0, -inf) at first, to which a kernel merges in place.

    fresh : whether the first block sets each row in exactly one slice
    """

    def __init__(self, kernel, q, v, fresh):
        self.kernel, self.kind, self.fresh = kernel, q.dtype, fresh
        self.out, self.lse = empty_result(q, v, arrays.accumulator(q.dtype), fresh)

    def attend(self, q, k, v, scale, slices, poll):
        """Take one more block of keys."""
        self.kernel.forward(q, k, v, scale, slices, self.out, self.lse, self.fresh, poll)
        self.fresh = False

    def end(self):
        """(out, lse), out in the dtype of q."""
        return cast(self.out, self.kind), self.lse


def total(kernel, q, v, fresh):
    """What gathers the results of several blocks of keys: attend(q, k, v, scale, slices, poll) for each, then end()."""
    return kernel.Total(q, v, fresh) if hasattr(kernel, "Total") else Sum(kernel, q, v, fresh)


def block_gradients(kernel, dout, q, k, v, out, lse, scale, slices, dq, poll):
    """Add to dq what one of several blocks gives, and return its (dk, dv), in any dtype; arguments as for backward."""
    if hasattr(kernel, "block_gradients"):
        return kernel.block_gradients(dout, q, k, v, out, lse, scale, slices, dq, poll)
    dk, dv = (arrays.zeros(x.shape, lse.dtype, arrays.device_of(x)) for x in (k, v))
    kernel.backward(dout, q, k, v, out, lse, scale, slices, dq, dk, dv, poll)
    return dk, dv


def attend_once(kernel, q, k, v, scale, slices, poll):
    """(out, lse) over one block of keys."""
    if rows_once(slices, q.shape[1]):
        out, lse = empty_result(q, v, q.dtype, fresh=True)
        kernel.forward(q, k, v, scale, slices, out, lse, True, poll)
        return out, lse
    result = total(kernel, q, v, fresh=False)
    result.attend(q, k, v, scale, slices, poll)
    return result.end()


def _fill(x, value):
    if isinstance(x, np.ndarray):
        x.fill(value)
    else:
        _strided().fill(x, value)


def cast(x, kind):
    """x itself where it is of dtype `kind`, else a C-contiguous copy that is."""
    if x.dtype == kind:
        return x
    if isinstance(x, np.ndarray):
        return x.astype(kind)
    return _strided().copied(x, kind)


def assign(target, source):
    """target = source: equal shapes, any strides, on one device."""
    if isinstance(target, np.ndarray):
        target[...] = source
    else:
        _strided().strided_copy(source, target)


def add(target, source):
    """target += source: equal shapes, any strides, on one device."""
    if isinstance(target, np.ndarray):
        np.add(target, source, out=target)
    else:
        _strided().strided_copy(source, target, add=True)


def _strided():
    from mpipipe.arrays import strided

    return strided
