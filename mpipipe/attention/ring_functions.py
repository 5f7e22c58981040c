"""Ring attention as two functions, forward and backward."""

from __future__ import annotations

from numpy.typing import ArrayLike

from mpipipe.arrays import Array
from mpipipe.attention.kernels import Gradients
from mpipipe.attention.layout import Layout
from mpipipe.attention.ring import Ring
from mpipipe.attention.ring_plan import RingSaved
from mpipipe.comm.types import Communicator


def ring_attention(
    q: Array,
    k: Array,
    v: Array,
    comm: Communicator | None,
    causal: bool = True,
    layout: Layout | str = "contiguous",
    window: int | None = None,
    segments: ArrayLike | None = None,
    scale: float | None = None,
    seq_len: int | None = None,
    rotation: str = "overlap",
) -> tuple[Array, tuple[Ring, RingSaved]]:
    """Attend over a sharded sequence; collective over `comm`.

    Parameters
    ----------
    q, k, v : array
        As for `Ring.forward`.
    comm : mpi4py.MPI.Comm or None
        The ranks that share a sequence. None: all ranks.
    causal : bool
        A query sees no later position.
    layout : Layout or str
        How the sequence is cut, as for `Ring`.
    window : int, optional
        A query sees itself and the window - 1 positions before it; needs `causal`.
    segments : array_like of int, optional
        Documents packed into the whole sequence, as for `Ring`.
    scale : float, optional
        Factor on the scores, finite and above 0; default 1 / sqrt(head_dim).
    seq_len : int, optional
        Length of the whole sequence of queries; default: that of the Layout, or the sum of what the ranks bring.
    rotation : str
        "overlap" or "sendrecv", as for `Ring`.

    Returns
    -------
    out : array
        (batch, local seq, heads, value_dim).
    saved : tuple of Ring and RingSaved
        For `ring_attention_backward`.

    Raises
    ------
    ArgumentError, MismatchError
        As `Ring` and `Ring.forward`.

    Examples
    --------
    Two threads stand for two MPI ranks here:

    >>> import numpy as np
    >>> from mpipipe.attention import ring_attention, ring_attention_backward
    >>> from mpipipe.comm import inprocess
    >>> def on_each_rank(comm):
    ...     rng = np.random.default_rng(comm.rank)
    ...     q, k, v = rng.standard_normal((3, 1, 64, 4, 16))
    ...     out, saved = ring_attention(q, k, v, comm, causal=True)
    ...     dq, dk, dv = ring_attention_backward(np.ones_like(out), saved)
    ...     return out.shape, dk.shape
    >>> inprocess.run(2, on_each_rank)
    [((1, 64, 4, 16), (1, 64, 4, 16)), ((1, 64, 4, 16), (1, 64, 4, 16))]
    """
    ring = Ring(comm, causal, layout, window, segments, scale=scale, seq_len=seq_len, rotation=rotation)
    out, saved = ring.forward(q, k, v)
    return out, (ring, saved)


def ring_attention_backward(dout: Array, saved: tuple[Ring, RingSaved]) -> Gradients:
    """Return the gradients of the inputs of `ring_attention`; collective over its ring.

    Parameters
    ----------
    dout : array
        Gradient of the output, in its shape and dtype.
    saved : tuple of Ring and RingSaved
        From `ring_attention`.

    Returns
    -------
    dq, dk, dv : array
        In the shapes and dtype of q, k and v.

    Raises
    ------
    ArgumentError, MismatchError
        As `Ring.backward`.
    """
    ring, inner = saved
    return ring.backward(dout, inner)
