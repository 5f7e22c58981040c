"""Self-attention: projections, rotary positions, and an attend object that is handed in."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from mpipipe import arrays
from mpipipe.arrays import Array
from mpipipe.errors import ArgumentError
from mpipipe.nn.cache_blocks import rows
from mpipipe.nn.checks import check_features, check_positive
from mpipipe.nn.layers.attend import ForwardAndBackward, as_attend
from mpipipe.nn.layers.layer import Layer
from mpipipe.nn.parameters import Parameter, normal


class SelfAttention(Layer):
    """Self-attention over x (batch, seq, dim), with rotary positions on queries and keys, without biases.

    The parameter `qkv` holds the three projections one above the other, ((heads + 2 kv_heads) head_dim, dim); `out` is
    (dim, dim).

    Parameters
    ----------
    dim : int
        Size of the last axis of x and y.
    heads : int
        Number of heads; dim / heads is the head dimension, and must be even.
    kv_heads : int, optional
        Number of heads of keys and values, a divisor of heads (grouped-query attention); by default `heads`.
    attend : object
        Such as `attention.Local()`. It has `forward(q, k, v) -> (out, saved)` and
        `backward(dout, saved) -> (dq, dk, dv)` on arrays (batch, seq, heads, head_dim) of the stage's dtype and device.
        q, k and v are views of one array. On a GPU the results must be C-contiguous. If it has `poll`, that is set to
        the stage's poll function; if it has `positions`, see there.
    positions : 1-D integers, optional
        The position of each row of the sequence in the whole. By default `attend.positions(seq)` in each forward, where
        `attend` has that function as attention.Cached does, else 0 ... seq - 1.
    rope_base : float
        Base of the rotary frequencies.
    gain : float
        `out` starts normal with standard deviation gain / sqrt(dim).

    Raises
    ------
    ArgumentError
        The sizes do not fit, or there is no `attend`.

    Examples
    --------
    >>> import numpy as np
    >>> from mpipipe import attention, nn
    >>> stage = nn.Stage([nn.SelfAttention(16, heads=4, kv_heads=2, attend=attention.Local())])
    >>> stage.forward(np.ones((2, 5, 16), np.float32))[0].shape
    (2, 5, 16)
    """

    takes_integers = False
    recordable = True
    replaced = ("qkv", "out")

    qkv: np.ndarray
    qkv_grad: np.ndarray
    out: np.ndarray
    out_grad: np.ndarray

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int | None = None,
        attend: ForwardAndBackward | None = None,
        positions: ArrayLike | None = None,
        rope_base: float = 10000.0,
        gain: float = 1.0,
    ):
        kv_heads = heads if kv_heads is None else kv_heads
        check_positive(dim=dim, heads=heads, kv_heads=kv_heads)
        _check_heads(dim, heads, kv_heads)
        if attend is None:
            raise ArgumentError(
                "SelfAttention was given nothing to attend with", remedy="pass attend=mpipipe.attention.Local()"
            )
        self.dim, self.heads, self.kv_heads, self.head_dim = dim, heads, kv_heads, dim // heads
        self.attend = attend
        self.positions = None if positions is None else np.asarray(positions)
        self.rope_base = float(rope_base)
        self._width = (heads + 2 * kv_heads) * self.head_dim
        self.declared = {
            "qkv": Parameter((self._width, dim), normal(dim**-0.5)),
            "out": Parameter((dim, dim), normal(gain * dim**-0.5)),
        }

    def unrecordable(self) -> str:
        kind = type(self.attend)
        return "" if vars(kind).get("recordable", False) else f"{kind.__name__} does not say that it can be recorded"

    def bound(self) -> None:
        self._attend = as_attend(self.attend)

    def forward(self, x: Array) -> tuple[Array, Any]:
        self._check_input(x)
        kernels, flat = self.stage.kernels, rows(x)
        qkv = kernels.linear(flat, self.qkv).reshape(*x.shape[:2], -1, self.head_dim)
        queries_and_keys = qkv[:, :, : self.heads + self.kv_heads]
        kernels.apply_rope(queries_and_keys, self._rope_table(x.shape[1]), queries_and_keys)
        self._share_poll()
        y, saved = self._attend.forward(*self._split(qkv))
        y = y.reshape(len(flat), self.dim)
        return kernels.linear(y, self.out).reshape(x.shape), (flat, y, saved)

    def backward_input(self, dy: Array, saved: Any) -> tuple[Array, Any]:
        kernels, (x, y, kept) = self.stage.kernels, saved
        dflat = rows(dy)
        dout = kernels.linear_backward_input(dflat, self.out).reshape(*dy.shape[:2], self.heads, self.head_dim)
        shape = (*dy.shape[:2], self._width // self.head_dim, self.head_dim)
        dqkv = arrays.empty(shape, dy.dtype, self.stage.device)
        self._share_poll()
        dq, dk, dv = self._split(dqkv)
        turned_dq, turned_dk, given_dv = self._attend.backward_into(dout, kept, (dq, dk, dv))
        table = self._rope_table(dy.shape[1])
        if turned_dq is dq:
            queries_and_keys = dqkv[:, :, : self.heads + self.kv_heads]
            kernels.apply_rope(queries_and_keys, table, queries_and_keys, inverse=True)
        else:
            kernels.apply_rope(turned_dq, table, dq, inverse=True)
            kernels.apply_rope(turned_dk, table, dk, inverse=True)
            kernels.copy(given_dv, dv)
        dqkv = dqkv.reshape(len(x), -1)
        dx = kernels.linear_backward_input(dqkv, self.qkv)
        return dx.reshape(dy.shape), (x, dqkv, dflat, y)

    def backward_weight(self, pending: Any) -> None:
        x, dqkv, dy, y = pending
        self.stage.kernels.linear_backward_weight(dqkv, x, self.qkv_grad, self.adds("qkv"))
        self.stage.kernels.linear_backward_weight(dy, y, self.out_grad, self.adds("out"))

    def _share_poll(self) -> None:
        """Let the attend object keep messages moving between its tiles: attention may take long."""
        if self.stage.poll is not None:
            self._attend.poll = self.stage.poll

    def _split(self, qkv: Array) -> tuple[Array, Array, Array]:
        first, second = self.heads, self.heads + self.kv_heads
        return qkv[:, :, :first], qkv[:, :, first:second], qkv[:, :, second:]

    def _rope_table(self, seq: int) -> Array:
        positions = self.positions
        if positions is None:
            positions = self._attend.positions(seq)
        tables = self.stage.tables
        if positions is None:
            return tables.first(seq, self.head_dim, self.rope_base)
        return tables.of(positions, self.head_dim, self.rope_base)

    def _check_input(self, x: Array) -> None:
        check_features(self, x, self.dim)
        expected = "seq" if self.positions is None else str(len(self.positions))
        if x.ndim != 3 or expected not in ("seq", str(x.shape[1])):
            raise ArgumentError(
                f"layer {self.name} (SelfAttention): the input has the wrong shape",
                found=f"shape {x.shape}",
                expected=f"(batch, {expected}, {self.dim})",
                remedy="one position for each row of the sequence",
            )


def _check_heads(dim: int, heads: int, kv_heads: int) -> None:
    if dim % heads or (dim // heads) % 2:
        raise ArgumentError(
            "dim must be an even multiple of heads (rotary positions turn pairs of elements)",
            found=f"dim={dim}, heads={heads}",
            expected="dim / heads even",
        )
    if heads % kv_heads:
        raise ArgumentError(
            "heads must be a multiple of kv_heads", found=f"heads={heads}, kv_heads={kv_heads}", expected="no remainder"
        )
