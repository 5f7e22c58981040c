"""Ring attention for users: a class with its options bound. `ring_pass.py` has the algorithm."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from mpipipe.arrays import Array
from mpipipe.attention.kernels import Gradients
from mpipipe.attention.layout import Layout
from mpipipe.attention.ring_pass import PlannedAttend
from mpipipe.attention.ring_plan import RingAgreement, RingOptions, RingPlan, RingSaved
from mpipipe.comm import RingExchange
from mpipipe.errors import ArgumentError
from mpipipe.job import Communicator, cached, runtime, settings
from mpipipe.text import counted


class Ring(PlannedAttend):
    """Exact attention over a sequence that is sharded over the ranks of a communicator.

    Arrays are this rank's shards, (batch, local seq, heads, head_dim), of one dtype and on one kind
    of device on all ranks, as for `Local`. Keys may be another sequence than queries, and a shard
    may be empty. The constructor and the methods are collective: they raise the same ArgumentError
    or MismatchError on every rank if arguments do not fit, shards do not cover the sequence, or
    ranks do different things. All rings on a communicator share private duplicates of it, which are
    freed with it.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm or None
        The ranks that share a sequence. None: all ranks.
    causal : bool
        A query sees no later position.
    layout : Layout or str
        How the sequence is cut: best the `Layout` that cut it, since then its length and the
        positions of layers are compared with it. Or the name alone, "contiguous", "zigzag" or
        "striped".
    window, segments, scale : int, array_like of int, float, optional
        As for `Local`; segments are those of the whole sequence.
    seq_len : int, optional
        Length of the whole sequence of queries; default: that of the Layout, or the sum of what the
        ranks bring.
    rotation : str
        "overlap": messages travel while tiles are computed. "sendrecv": one exchange before each
        step. The results have the same bits.

    Attributes
    ----------
    bytes_sent : int
        Bytes of keys, values and their gradients that this rank has sent.
    poll : callable
        Called after each tile.
    seq_len : int or None
        Length of the whole sequence, where it is known before a forward.

    Examples
    --------
    Two threads stand for two MPI ranks here:

    >>> import numpy as np
    >>> from mpipipe.attention import Layout, Local, Ring
    >>> from mpipipe.job import inprocess
    >>> rng = np.random.default_rng(0)
    >>> q, k, v, dout = rng.standard_normal((4, 1, 12, 2, 8))
    >>> layout = Layout("zigzag", ranks=2, seq_len=12)
    >>> def on_each_rank(comm):
    ...     ring = Ring(comm, causal=True, layout=layout)
    ...     out, saved = ring.forward(*(layout.shard(x, comm.rank) for x in (q, k, v)))
    ...     dq, dk, dv = ring.backward(layout.shard(dout, comm.rank), saved)
    ...     return out
    >>> out = layout.unshard(inprocess.run(2, on_each_rank))
    >>> bool(np.allclose(out, Local(causal=True).forward(q, k, v)[0]))
    True
    """

    agreement: RingAgreement

    # the pages of the API list what a class itself has
    forward = PlannedAttend.forward
    with_window = PlannedAttend.with_window
    backward = PlannedAttend.backward

    def __init__(
        self,
        comm: Communicator | None,
        causal: bool = True,
        layout: Layout | str = "contiguous",
        window: int | None = None,
        segments: ArrayLike | None = None,
        scale: float | None = None,
        seq_len: int | None = None,
        rotation: str = "overlap",
    ) -> None:
        self._comm = runtime.resolve(comm)
        agreement = cached(self._comm, "ring agreement", lambda: RingAgreement(self._comm))
        options = RingOptions(causal, layout, window, segments, scale, seq_len, rotation)
        super().__init__(agreement, options)
        self.group = agreement.group
        self.seq_len = self.options.seq_len
        self._positions = None
        if self.seq_len is not None:
            whole = self.options.whole(agreement.size, self.seq_len)
            self._positions = whole.positions(agreement.rank)

    def _forget(self) -> None:
        super()._forget()
        # What a layer takes for the positions of the next forward.
        self._expected: np.ndarray | None = None

    def positions(self, rows: int) -> np.ndarray | None:
        if self.group.size == 1:
            return None
        options = self.options
        rank = self.group.rank
        if self._positions is None:
            raise ArgumentError(
                "a layer asks a ring for positions, and the ring does not know how long the "
                "sequence is",
                rank=rank,
                found=f"layout={options.layout!r}",
                expected="a Layout, which has a length",
                remedy="Ring(comm, layout=attention.Layout(...)), or "
                "positions=layout.positions(rank) for the layer",
            )
        if len(self._positions) != rows:
            raise ArgumentError(
                "the rows of a rank are not its shard of the sequence",
                rank=rank,
                found=counted(rows, "row"),
                expected=f"{len(self._positions)}, the {options.layout} shard of "
                f"{options.seq_len} positions",
                remedy="cut the sequence with attention.Layout(...).shard",
            )
        return self._positions

    def check_positions(self, positions: np.ndarray) -> None:
        if self.options.segments is not None:
            return  # they may begin anew in each document
        if self._positions is None:
            self._expected = positions  # the length is known within the forward
        else:
            self._compare(positions, self._positions)

    def _check_expected(self, plan: RingPlan, segments: np.ndarray | None) -> None:
        expected = self._expected
        self._expected = None
        if expected is not None and segments is None:
            self._compare(expected, plan.layout.positions(plan.rank))

    def _compare(self, found: np.ndarray, expected: np.ndarray) -> None:
        if not np.array_equal(found, expected):
            raise ArgumentError(
                "a layer and its ring differ in the positions of this rank's rows",
                rank=self.group.rank,
                found=f"{found.size} positions, at first {found[:8]}",
                expected=f"{expected.size}, at first {expected[:8]}, the {self.options.layout} "
                "shard that the ring attends by",
                remedy="use one Layout for all: layout.shard(x, rank), Ring(comm, layout=layout), "
                "layout.positions(rank)",
            )

    def _exchange(self, plan: RingPlan) -> RingExchange | None:
        # all rings on the communicator with arrays on one kind of device share one; collective the
        # first time
        comm = self._comm
        device = plan.message.shapes.device
        if plan.steps == 1:
            return None
        return cached(
            comm,
            ("ring", device),
            lambda: RingExchange(comm, settings.SYNC_SENDS.text == "1", device),
        )


# -- Ring attention as two functions, forward and backward -----------------------------------------


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
    comm, causal, layout, window, segments, scale, seq_len, rotation : Communicator and options
        As for `Ring`.

    Returns
    -------
    out : array
        (batch, local seq, heads, value_dim).
    saved : tuple of Ring and RingSaved
        For `ring_attention_backward`.

    Examples
    --------
    Two threads stand for two MPI ranks here:

    >>> import numpy as np
    >>> from mpipipe.attention import ring_attention, ring_attention_backward
    >>> from mpipipe.job import inprocess
    >>> def on_each_rank(comm):
    ...     rng = np.random.default_rng(comm.rank)
    ...     q, k, v = rng.standard_normal((3, 1, 64, 4, 16))
    ...     out, saved = ring_attention(q, k, v, comm, causal=True)
    ...     dq, dk, dv = ring_attention_backward(np.ones_like(out), saved)
    ...     return dk.shape
    >>> inprocess.run(2, on_each_rank)
    [(1, 64, 4, 16), (1, 64, 4, 16)]
    """
    ring = Ring(comm, causal, layout, window, segments, scale, seq_len, rotation)
    out, saved = ring.forward(q, k, v)
    return out, (ring, saved)


def ring_attention_backward(dout: Array, saved: tuple[Ring, RingSaved]) -> Gradients:
    """Return the gradients (dq, dk, dv) of the inputs of `ring_attention`; collective.

    Parameters
    ----------
    dout : array
        Gradient of the output, in its shape and dtype.
    saved : tuple of Ring and RingSaved
        From `ring_attention`.
    """
    ring, inner = saved
    return ring.backward(dout, inner)
