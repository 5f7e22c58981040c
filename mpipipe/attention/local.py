"""Attention over a sequence that lies wholly on this rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, NamedTuple

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array
from mpipipe.attention import kernels, mask
from mpipipe.attention.bias import Bias, BiasFunction, name_of
from mpipipe.attention.kernels import Gradients, KVBlock, OutLse, no_poll
from mpipipe.attention.kernels.interface import attend_once, check_arrays
from mpipipe.attention.mask import PositionRange, Slice, document_offsets
from mpipipe.errors import ArgumentError
from mpipipe.nn import Attend


class LocalSaved(NamedTuple):
    """What the forward of `Local` keeps for its backward."""

    q: Array
    k: Array
    v: Array
    out: Array
    lse: Array
    scale: float
    slices: Sequence[Slice]


class Local(Attend):
    """Exact softmax attention, forward and backward, without ever holding the whole matrix of scores.

    Arrays are (batch, seq, heads, head_dim), all on the host or all on one GPU, of one dtype: float32, float64, float16
    or bfloat16. In half precision, sums and the log-sum-exp are float32, and results are rounded once. On a GPU nothing
    waits for the device.

    Parameters
    ----------
    causal : bool
        Row i sees only keys 0 ... i (positions of queries and keys both start at 0). False: it sees all keys.
    scale : float, optional
        Factor on the scores, finite and above 0; default 1 / sqrt(head_dim).
    window : int, optional
        A row sees itself and the window - 1 positions before it; needs `causal`.
    segments : array_like of int, optional
        Documents packed into the sequence: the document of each position, equal numbers together, or the documents'
        lengths.
    bias : callable, optional
        ``bias(queries, keys)`` gives what is added to the scaled scores: real numbers that broadcast to (heads,
        queries, keys), for positions in the whole sequence, integers (queries, 1) and (keys,), of one tile at a time;
        -inf hides a key. It has no gradient, and is for host arrays and the numpy kernel. See `alibi`.

    Attributes
    ----------
    poll : callable
        Called after each tile.

    Examples
    --------
    >>> import numpy as np
    >>> from mpipipe.attention import Local
    >>> rng = np.random.default_rng(0)
    >>> q = rng.standard_normal((2, 16, 8, 32))
    >>> k, v = rng.standard_normal((2, 2, 16, 4, 32))  # half as many heads
    >>> attend = Local(causal=True)
    >>> out, saved = attend.forward(q, k, v)
    >>> dq, dk, dv = attend.backward(np.ones_like(out), saved)
    >>> out.shape, dk.shape
    ((2, 16, 8, 32), (2, 16, 4, 32))

    The first row sees its own key alone:

    >>> bool(np.allclose(out[:, 0, ::2], v[:, 0]))
    True
    """

    recordable = True

    def __init__(
        self,
        causal: bool = True,
        scale: float | None = None,
        window: int | None = None,
        segments: Any = None,
        bias: BiasFunction | None = None,
    ) -> None:
        mask.check_window(causal, window)
        mask.check_scale(scale)
        name_of(bias)
        self.causal, self.scale, self.window, self.segments, self.bias = causal, scale, window, segments, bias
        self.poll: Callable[[], object] = no_poll
        self._planned: tuple[tuple[int, int], list[Slice]] | None = None  # lengths and slices of the last call
        self._others: dict[int, Local] = {}  # by their windows
        self._packed: tuple[bytes, int, list[Slice]] | None = None  # of the last segments by row

    def forward(self, q: Array, k: Array, v: Array, segments: np.ndarray | None = None) -> tuple[Array, LocalSaved]:
        """Attend.

        Parameters
        ----------
        q : array
            (batch, seq, heads, head_dim), with any strides.
        k : array
            (batch, keys, kv_heads, head_dim). With g = heads / kv_heads, head h of q sees head h // g.
        v : array
            (batch, keys, kv_heads, value_dim).
        segments : array of int, optional
            (batch, seq): the document of each position of each row, equal numbers together. They stand in place of
            those of the constructor.

        Returns
        -------
        out : array
            (batch, seq, heads, value_dim), C-contiguous, of the dtype of q. 0 where a row sees no key.
        saved : LocalSaved
            For `backward`. `saved.lse` is the log-sum-exp of the scores, (batch, heads, seq); with `segments` the rows
            stand one after the other as one sequence in it, as in all arrays of `saved`.
        """
        check_arrays(q, k, v)
        scale = q.shape[3] ** -0.5 if self.scale is None else self.scale
        shape = (*q.shape[:3], v.shape[3])
        if segments is None:
            slices = self._slices(q.shape[1], k.shape[1])
        else:
            slices = self._packed_slices(segments, q, k)
            q, k, v = map(as_one_sequence, (q, k, v))
        kernel = kernels.chosen(q, k, v, self.bias)
        bias = self._bias(q, k, shape[1])
        out, lse = attend_once(kernel, KVBlock(q, k, v, scale, slices, self.poll, bias))
        return out.reshape(shape), LocalSaved(q, k, v, out, lse, scale, slices)

    def backward(self, dout: Array, saved: LocalSaved) -> Gradients:
        room = Gradients(*(by_rows(arrays.empty_like(x), dout.shape[0]) for x in saved[:3]))
        return Local.backward_into(self, dout, saved, room)

    def backward_into(self, dout: Array, saved: LocalSaved, room: tuple[Array, Array, Array]) -> Gradients:
        q, k, v, out, lse, scale, slices = saved
        bias = self._bias(q, k, dout.shape[1])
        block, result = KVBlock(q, k, v, scale, slices, self.poll, bias), OutLse(out, lse)
        dout, targets, fits = like(dout, out), Gradients(*room), True
        if room[0].shape != q.shape:  # the rows are one sequence
            fits = all(map(writable_as_one, room))
            targets = Gradients(*(map(as_one_sequence, room) if fits else map(arrays.empty_like, (q, k, v))))
        kernels.chosen(q, k, v, bias).backward(block, dout, result, targets, overwrite=True)
        return Gradients(*(room if fits else (by_rows(x, room[0].shape[0]) for x in targets)))

    def with_window(self, window: int) -> Local:
        if window not in self._others:
            mask.check_window(self.causal, window)
            other = copy(self)
            other.window, other._planned, other._packed, other._others = window, None, None, {}
            self._others[window] = other
        return self._others[window]

    def _bias(self, q: Array, k: Array, seq: int) -> Bias | None:
        """The bias, for rows of a batch that may be one sequence."""
        if self.bias is None:
            return None
        keys = k.shape[1] if q.shape[1] == seq else seq
        return Bias(self.bias, np.resize(np.arange(seq), q.shape[1]), np.resize(np.arange(keys), k.shape[1]))

    def _packed_slices(self, segments: np.ndarray, q: Array, k: Array) -> list[Slice]:
        """The slices of the rows of a batch as one sequence."""
        key, (batch, seq) = np.asarray(segments).tobytes(), q.shape[:2]
        if self._packed is None or self._packed[:2] != (key, batch):
            rows = documents_of_rows(segments, batch)
            if k.shape[1] != seq or any(offsets[-1] != seq for offsets in rows):
                found = f"segments of {rows[0][-1]}, {seq} queries, {k.shape[1]} keys"
                raise ArgumentError("segments need queries and keys of one sequence", found=found)
            starts = [row * seq + start for row, offsets in enumerate(rows) for start in offsets[:-1]]
            all_rows = [PositionRange(0, batch * seq, 0, 1)]
            slices = mask.mask_slices(all_rows, all_rows, self.causal, self.window, [*starts, batch * seq])
            self._packed = key, batch, slices
        return self._packed[2]

    def _slices(self, seq: int, keys: int) -> list[Slice]:
        if self._planned is None or self._planned[0] != (seq, keys):
            if self.segments is not None and seq != keys:
                found = f"{seq} queries, {keys} keys"
                raise ArgumentError("segments need queries and keys of one sequence", found=found)
            documents = mask.document_offsets(self.segments, seq)
            queries, all_keys = [PositionRange(0, seq, 0, 1)], [PositionRange(0, keys, 0, 1)]
            slices = mask.mask_slices(queries, all_keys, self.causal, self.window, documents)
            self._planned = (seq, keys), slices
        return self._planned[1]


# -- Rows of a batch that hold several documents each: they are attended to as one sequence, row after row ------------
#
#     row 0   a a a b b b b b        as one sequence   a a a b b b b b|c c c c c c d d
#     row 1   c c c c c c d d
#
# A row begins a document, so nothing is seen across rows, and one call does them all.


def documents_of_rows(segments: np.ndarray, batch: int) -> tuple[tuple[int, ...], ...]:
    """Return, for each row of `segments`, where its documents begin, rising from 0, and its length at the end.

    `segments` (batch, seq) are integers, the document of each position; equal numbers of a row stand together.
    """
    numbers = np.asarray(segments)
    if numbers.ndim != 2 or len(numbers) != batch or numbers.dtype.kind not in "iu":
        raise ArgumentError(
            "segments of a forward",
            found=f"{numbers.dtype}{list(numbers.shape)}",
            expected=f"integers ({batch}, seq), the document of each position of each row",
        )
    return tuple(tuple(document_offsets(row, numbers.shape[1]) or ()) for row in numbers)


def as_one_sequence(x: Array) -> Array:
    """Return (1, batch * seq, heads, dim) of an array (batch, seq, heads, dim): a view where its strides allow it."""
    return x.reshape(1, x.shape[0] * x.shape[1], *x.shape[2:])


def by_rows(x: Array, batch: int) -> Array:
    """Return a contiguous array (1, batch * seq, heads, dim) as (batch, seq, heads, dim); others as they are."""
    return x if x.shape[0] == batch else x.reshape(batch, x.shape[1] // batch, *x.shape[2:])


def writable_as_one(x: Array) -> bool:
    """Whether `as_one_sequence` of an array is a view, so that what is written to it arrives."""
    return x.shape[0] == 1 or x.strides[0] == x.shape[1] * x.strides[1]


def like(dout: Array, out: Array) -> Array:
    """Return a gradient in the shape of what a forward has saved of its output, where it has as many elements."""
    return dout.reshape(out.shape) if dout.shape != out.shape and dout.size == out.size else dout
