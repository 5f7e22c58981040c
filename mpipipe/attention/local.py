"""Attention over a sequence that lies wholly on this rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from numpy.typing import ArrayLike

from mpipipe import arrays
from mpipipe.arrays import Array
from mpipipe.attention import kernels, mask
from mpipipe.attention.accumulate import attend_once
from mpipipe.attention.checks import check_arrays
from mpipipe.attention.kernels import Block, Gradients, Result, no_poll
from mpipipe.attention.mask import PositionRange, Slice
from mpipipe.errors import ArgumentError
from mpipipe.nn.layers.attend import Attend


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

    Attributes
    ----------
    poll : callable
        Called after each tile.

    Raises
    ------
    ArgumentError
        For a window or a scale that makes no sense.

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
        segments: ArrayLike | None = None,
    ) -> None:
        mask.check_window(causal, window)
        mask.check_scale(scale)
        self.causal, self.scale, self.window, self.segments = causal, scale, window, segments
        self.poll: Callable[[], object] = no_poll
        self._planned: tuple[tuple[int, int], list[Slice]] | None = None  # lengths and slices of the last call

    def forward(self, q: Array, k: Array, v: Array) -> tuple[Array, LocalSaved]:
        """Attend.

        Parameters
        ----------
        q : array
            (batch, seq, heads, head_dim), with any strides.
        k : array
            (batch, keys, kv_heads, head_dim). With g = heads / kv_heads, head h of q sees head h // g.
        v : array
            (batch, keys, kv_heads, value_dim).

        Returns
        -------
        out : array
            (batch, seq, heads, value_dim), C-contiguous, of the dtype of q. 0 where a row sees no key.
        saved : LocalSaved
            For `backward`. `saved.lse` is the log-sum-exp of the scores, (batch, heads, seq).

        Raises
        ------
        ArgumentError
            If the arrays do not fit together.
        """
        check_arrays(q, k, v)
        scale = q.shape[3] ** -0.5 if self.scale is None else self.scale
        slices = self._slices(q.shape[1], k.shape[1])
        out, lse = attend_once(kernels.chosen(q, k, v), Block(q, k, v, scale, slices, self.poll))
        return out, LocalSaved(q, k, v, out, lse, scale, slices)

    def backward(self, dout: Array, saved: LocalSaved) -> Gradients:
        """Return the gradients of the inputs.

        Parameters
        ----------
        dout : array
            Gradient of `out`, in its shape and dtype.
        saved : LocalSaved
            From `forward`.

        Returns
        -------
        dq, dk, dv : array
            In the shapes and dtype of q, k and v, C-contiguous.
        """
        return Local.backward_into(self, dout, saved, Gradients(*map(arrays.empty_like, saved[:3])))

    def backward_into(self, dout: Array, saved: LocalSaved, room: tuple[Array, Array, Array]) -> Gradients:
        q, k, v, out, lse, scale, slices = saved
        gradients = Gradients(*room)
        block = Block(q, k, v, scale, slices, self.poll)
        kernels.chosen(q, k, v).backward(block, dout, Result(out, lse), gradients, overwrite=True)
        return gradients

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
