"""Attention over a sequence that lies wholly on this rank."""

from __future__ import annotations

from mpipipe.attention.ring_pass import PlannedAttend
from mpipipe.attention.ring_plan import Alone, RingOptions


class Local(PlannedAttend):
    """Exact softmax attention that never holds the whole matrix of scores.

    Arrays are (batch, seq, heads, head_dim), all on the host or all on one GPU, of one dtype:
    float32, float64, float16 or bfloat16. In half precision, sums and the log-sum-exp are float32,
    and results are rounded once. On a GPU nothing waits for the device.

    Parameters
    ----------
    causal : bool
        Row i sees only keys 0 ... i (positions of queries and keys both start at 0). False: it sees
        all keys.
    scale : float, optional
        Factor on the scores, finite and above 0; default 1 / sqrt(head_dim).
    window : int, optional
        A row sees itself and the window - 1 positions before it; needs `causal`.
    segments : array_like of int, optional
        Documents packed into the sequence: the document of each position, equal numbers together,
        or the documents' lengths.

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

    # the pages of the API list what a class itself has
    forward = PlannedAttend.forward
    with_window = PlannedAttend.with_window
    backward = PlannedAttend.backward

    def __init__(
        self,
        causal: bool = True,
        scale: float | None = None,
        window: int | None = None,
        segments: object = None,
    ) -> None:
        super().__init__(Alone(), RingOptions(causal, "contiguous", window, segments, scale))
