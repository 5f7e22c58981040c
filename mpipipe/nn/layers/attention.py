"""Self-attention: projections, norms of heads, rotary positions, and an attend object."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from mpipipe.arrays import Array
from mpipipe.errors import ArgumentError
from mpipipe.nn.checks import check_positive, check_sequence, rows
from mpipipe.nn.layers.attend import ForwardAndBackward, ThreeArrays, as_attend, why_unrecordable
from mpipipe.nn.layers.layer import (
    Layer,
    Pending,
    Position,
    Projection,
    Saved,
    WithPending,
    WithSaved,
    stacked_projections,
)
from mpipipe.nn.parameters import matrix, ones, vector
from mpipipe.nn.rope import RopeScaling, checked_coordinates


class SelfAttention(Layer):
    """Self-attention over x (batch, seq, dim), with rotary positions on queries and keys.

    The parameter `qkv` holds the three projections one above the other, ((heads + 2 kv_heads)
    head_dim, dim); `out` is (dim, heads head_dim).

    Parameters
    ----------
    dim, heads : int
        Size of the last axis of x and y, and number of heads.
    kv_heads : int, optional
        Number of heads of keys and values, a divisor of heads (grouped-query attention); by default
        `heads`.
    attend : object
        Such as `attention.Local()`. It has `forward(q, k, v) -> (out, saved)` and `backward(dout,
        saved) -> (dq, dk, dv)` on arrays (batch, seq, heads, head_dim) of the stage's dtype and
        device. q, k and v are views of one array. On a GPU the results must be C-contiguous. If it
        has `poll`, that is set to the stage's poll function; if it has `positions`, see there.
    positions : 1-D integers, optional
        The position of each row of the sequence in the whole; compared with those of an
        attention.Ring. By default `attend.positions(seq)` in each forward, where `attend` has that
        function as attention.KVCache does, and a Ring of several ranks with a Layout, else 0 ...
        seq - 1.
    rope_base : float or None
        Base of the rotary frequencies; None: nothing is turned.
    gain : float
        `out` starts normal with standard deviation gain / sqrt(heads head_dim).
    head_dim : int, optional
        Width of a head, even where heads are turned; by default dim / heads.
    rope_scaling : RopeScaling, optional
        Scaling of the rotary frequencies, such as `nn.Llama3Scaling`.
    coordinates : array_like, optional
        Numbers (positions of the whole sequence, axes), the same on all ranks: queries and keys are
        turned by row p of them, in place of p itself, at position p. Each axis turns its share of a
        head, head_dim / axes wide, with the frequencies of a head of that width; scores depend on
        differences along each axis alone.
    qkv_bias, out_bias : bool
        Whether there are parameters `qkv_bias` ((heads + 2 kv_heads) head_dim,) and `out_bias`
        (dim,), of zeros at the start.
    qk_norm, eps : bool, float
        Whether each head of queries and of keys is normalised as by `nn.RMSNorm`, before it is
        turned, and the epsilon of these norms; the parameters `q_norm` and `k_norm`, (head_dim,),
        are their gains.
    """

    takes_integers = False
    recordable = True
    mixes_positions = True

    qkv: Array
    out: Array
    qkv_bias: Array | None = None
    out_bias: Array | None = None
    q_norm: Array | None = None
    k_norm: Array | None = None

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int | None = None,
        attend: ForwardAndBackward | None = None,
        positions: ArrayLike | None = None,
        rope_base: float | None = 10000.0,
        gain: float = 1.0,
        *,
        head_dim: int | None = None,
        rope_scaling: RopeScaling | None = None,
        coordinates: ArrayLike | None = None,
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm: bool = False,
        eps: float = 1e-6,
    ):
        if kv_heads is None:
            kv_heads = heads
        check_positive(dim=dim, heads=heads, kv_heads=kv_heads)
        fits = heads % kv_heads == 0
        if head_dim is None:
            fits = fits and dim % heads == 0
            head_dim = dim // heads
        else:
            check_positive(head_dim=head_dim)
        if not fits or (rope_base is not None and head_dim % 2):
            raise ArgumentError(
                "the heads of SelfAttention do not fit",
                found=f"dim={dim}, heads={heads}, kv_heads={kv_heads}, head_dim={head_dim}",
                expected="heads a multiple of kv_heads, and dim one of heads unless head_dim is "
                "given; head_dim even, since rotary positions turn pairs of elements",
                remedy="choose other sizes, or rope_base=None",
            )
        if attend is None:
            raise ArgumentError(
                "SelfAttention was given nothing to attend with",
                remedy="pass attend=mpipipe.attention.Local()",
            )
        self.dim = dim
        self.heads = heads
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.attend = attend
        self.mixes_positions = as_attend(attend).slice_rows is None
        self.positions = None
        if positions is not None:
            self.positions = np.asarray(positions)
            as_attend(attend).check_positions(self.positions)
        self.rope_base = rope_base
        self.rope_scaling = rope_scaling
        self.eps = eps
        self.coordinates: np.ndarray | None = None
        if coordinates is not None:
            if rope_base is None:
                raise ArgumentError(
                    "coordinates turn nothing where rope_base is None",
                    remedy="leave one of them out",
                )
            self.coordinates = checked_coordinates(
                coordinates, head_dim, getattr(attend, "seq_len", None)
            )
        self._width = (heads + 2 * kv_heads) * head_dim
        self.declared = {
            "qkv": matrix(self._width, dim),
            "out": matrix(dim, heads * head_dim, gain),
        }
        if qkv_bias:
            self.declared["qkv_bias"] = vector(self._width)
        if out_bias:
            self.declared["out_bias"] = vector(dim)
        if qk_norm:
            self.declared |= {name: vector(head_dim, ones) for name in ("q_norm", "k_norm")}

    def unrecordable(self) -> str:
        return why_unrecordable(self.attend)

    def projections(self) -> dict[str, Projection]:
        queries = self.heads * self.head_dim
        keys = self.kv_heads * self.head_dim
        three = stacked_projections("qkv", {"q_proj": queries, "k_proj": keys, "v_proj": keys})
        out = Projection("out", 0, self.dim)
        return {**three, "o_proj": out, "c_attn": Projection("qkv", 0, self._width), "c_proj": out}

    def bound(self) -> None:
        self._attend = as_attend(self.attend).for_layer()

    def forward(self, x: Array) -> WithSaved:
        check_sequence(self, x, self.dim, self.positions)
        kernels = self.stage.kernels
        flat = rows(x)
        qkv = kernels.linear(flat, self.qkv, self.qkv_bias)
        qkv = qkv.reshape(*x.shape[:2], -1, self.head_dim)
        position = Position(*self.stage.position)
        if not self.has_backward:
            position = position._replace(keeps=False)
        self._begin(position)
        q, k, v = self._split(qkv)
        plain = []
        if self.q_norm is not None:
            plain = [self._normalise(q, self.q_norm), self._normalise(k, self.k_norm)]
        self._turn(qkv)
        if self.positions is not None:
            self._attend.check_positions(self.positions)
        y, saved = self._attend.forward(q, k, v)
        y = y.reshape(len(flat), self.heads * self.head_dim)
        out = kernels.linear(y, self.out, self.out_bias)
        return out.reshape(x.shape), (flat, y, saved, plain, position)

    def backward_input(self, dy: Array, saved: Saved) -> WithPending:
        x, y, of_attend, plain, position = saved
        kernels = self.stage.kernels
        batch, seq = dy.shape[:2]
        dflat = rows(dy)
        dout = kernels.linear_backward_input(dflat, self.out)
        dout = dout.reshape(batch, seq, self.heads, self.head_dim)
        shape = (batch, seq, self._width // self.head_dim, self.head_dim)
        dqkv = self._empty(shape, dy.dtype)
        room = self._split(dqkv)
        self._begin(position)  # the positions below are those of this micro-batch
        for gradient, place in zip(self._attend.backward(dout, of_attend, room), room):
            if gradient is not place:
                kernels.copy(gradient, place)
        self._turn(dqkv, inverse=True)
        parts = []
        for heads, (before, scale), gain in zip(room, plain, (self.q_norm, self.k_norm)):
            dheads = rows(self._copied(heads))
            dx, part = kernels.norm_backward(dheads, before, scale, gain, False)
            kernels.copy(dx.reshape(heads.shape), heads)
            parts.append(part)
        dqkv = dqkv.reshape(len(x), self._width)
        dx = kernels.linear_backward_input(dqkv, self.qkv)
        return dx.reshape(dy.shape), (x, dqkv, dflat, y, parts)

    def backward_weight(self, pending: Pending) -> None:
        x, dqkv, dy, y, parts = pending
        self._add_product("qkv", dqkv, x, "qkv_bias")
        self._add_product("out", dy, y, "out_bias")
        for name, part in zip(("q_norm", "k_norm"), parts):
            self._add(name, self.stage.kernels.add_parts, part)

    def _normalise(self, heads: Array, gain: Array) -> tuple[Array, Array]:
        """Normalise heads in place; return what they were, as rows, and the scales of the rows."""
        plain = rows(self._copied(heads))
        normal, scale = self.stage.kernels.norm(plain, gain, None, self.eps)
        self.stage.kernels.copy(normal.reshape(heads.shape), heads)
        return plain, scale

    def _turn(self, qkv: Array, inverse: bool = False) -> None:
        """Turn queries and keys in place by their positions, or back."""
        if self.rope_base is None:
            return
        seq = qkv.shape[1]
        positions = self.positions
        if positions is None:
            positions = self._attend.positions(seq)
        if self.coordinates is not None:
            positions = self._coordinates_of(self.coordinates, positions, seq)
        if positions is None:
            positions = seq
        tables = self.stage.tables
        table = tables.of(positions, self.head_dim, self.rope_base, self.rope_scaling)
        heads = qkv[:, :, : self.heads + self.kv_heads]
        self.stage.kernels.apply_rope(heads, table, heads, inverse)

    def _begin(self, position: Position) -> None:
        """Tell the attend object the micro-batch, and let it keep messages moving."""
        self._attend.begin(position)
        if self.stage.poll is not None:
            self._attend.poll = self.stage.poll

    def _split(self, qkv: Array) -> ThreeArrays:
        first = self.heads
        second = self.heads + self.kv_heads
        return qkv[:, :, :first], qkv[:, :, first:second], qkv[:, :, second:]

    def _coordinates_of(
        self, whole: np.ndarray, positions: np.ndarray | None, seq: int
    ) -> np.ndarray:
        if positions is None and seq == len(whole):
            return whole
        if positions is None or ((positions < 0) | (positions >= len(whole))).any():
            raise ArgumentError(
                f"layer {self.name} (SelfAttention): the sequence is not that of the coordinates",
                found=f"{seq} rows",
                expected=f"{len(whole)} positions, a row of coordinates for each",
                remedy="hand in coordinates of the whole sequence, and attend=Ring(..., "
                "layout=Layout(...)) for shards",
            )
        return whole[positions]
