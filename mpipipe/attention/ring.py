"""Ring attention for users: a class with its options bound, and two functions. `ring_pass.py` has the algorithm."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from numpy.typing import ArrayLike

from mpipipe import arrays
from mpipipe.arrays import Array
from mpipipe.attention import kernels
from mpipipe.attention.accumulate import attend_once
from mpipipe.attention.kernels import AttentionKernel, Block, Gradients, Result, no_poll
from mpipipe.attention.ring_agreement import ring_agreement_of
from mpipipe.attention.ring_pass import RingPass
from mpipipe.attention.ring_plan import RingPlan
from mpipipe.comm import runtime, settings
from mpipipe.comm.attributes import attributes
from mpipipe.comm.ring_exchange import RingExchange
from mpipipe.comm.types import Communicator
from mpipipe.nn.layers.attend import Attend


class RingSaved(NamedTuple):
    """What the forward of `Ring` keeps for its backward."""

    plan: RingPlan
    call: int  # number of the forward
    scale: float
    q: Array
    k: Array
    v: Array
    out: Array
    lse: Array
    message: Array | None  # keys and values of the last step's block; None in a ring of one step


class Ring(Attend):
    """Exact attention over a sequence that is sharded over the ranks of a communicator.

    Arrays are this rank's shards, (batch, local seq, heads, head_dim), of one dtype and on one kind of device on all
    ranks, as for `Local`. Keys may be another sequence than queries, and a shard may be empty. The constructor and the
    methods are collective: they raise the same error on every rank if arguments do not fit, or if ranks do different
    things. All rings on a communicator share private duplicates of it, which are freed with it.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm or None
        The ranks that share a sequence. None: all ranks.
    causal : bool
        A query sees no later position.
    layout : str
        "contiguous", "zigzag" or "striped": how the sequence is cut, see `Layout`.
    window : int, optional
        A query sees itself and the window - 1 positions before it; needs `causal`.
    segments : array_like of int, optional
        Documents packed into the whole sequence: the document of each position, equal numbers together, or the
        documents' lengths.
    scale : float, optional
        Factor on the scores, finite and above 0; default 1 / sqrt(head_dim).
    seq_len : int, optional
        Length of the whole sequence of queries; default: the sum of what the ranks bring.
    rotation : str
        "overlap": messages travel while tiles are computed. "sendrecv": one exchange before each step. The results
        have the same bits.

    Attributes
    ----------
    bytes_sent : int
        Bytes of keys, values and their gradients that this rank has sent.
    poll : callable
        Called after each tile.

    Raises
    ------
    ArgumentError
        For an option that makes no sense.
    MismatchError
        If ranks give different options.

    Examples
    --------
    Two threads stand for two MPI ranks here:

    >>> import numpy as np
    >>> from mpipipe.attention import Layout, Local, Ring
    >>> from mpipipe.comm import inprocess
    >>> rng = np.random.default_rng(0)
    >>> q, k, v, dout = rng.standard_normal((4, 1, 12, 2, 8))
    >>> layout = Layout("zigzag", ranks=2, seq_len=12)
    >>> def on_each_rank(comm):
    ...     ring = Ring(comm, causal=True, layout="zigzag")
    ...     out, saved = ring.forward(*(layout.shard(x, comm.rank) for x in (q, k, v)))
    ...     dq, dk, dv = ring.backward(layout.shard(dout, comm.rank), saved)
    ...     return out
    >>> out = layout.unshard(inprocess.run(2, on_each_rank))
    >>> bool(np.allclose(out, Local(causal=True).forward(q, k, v)[0]))
    True
    """

    def __init__(
        self,
        comm: Communicator | None,
        causal: bool = True,
        layout: str = "zigzag",
        window: int | None = None,
        segments: ArrayLike | None = None,
        scale: float | None = None,
        seq_len: int | None = None,
        rotation: str = "overlap",
    ) -> None:
        self._comm = runtime.resolve(comm)
        self.agreement = ring_agreement_of(self._comm)
        self.group = self.agreement.group
        self.poll: Callable[[], object] = no_poll
        self.bytes_sent = 0
        given = dict(causal=causal, layout=layout, window=window, segments=segments, scale=scale)
        self.options = self.agreement.agree_on_options({**given, "seq_len": seq_len, "rotation": rotation})
        self._digest = self.options.digest

    def forward(self, q: Array, k: Array, v: Array) -> tuple[Array, RingSaved]:
        """Attend; collective.

        Parameters
        ----------
        q : array
            (batch, local seq, heads, head_dim), with any strides.
        k : array
            (batch, local keys, kv_heads, head_dim). With g = heads / kv_heads, head h of q sees head h // g.
        v : array
            (batch, local keys, kv_heads, value_dim).

        Returns
        -------
        out : array
            (batch, local seq, heads, value_dim), C-contiguous, of the dtype of q. 0 where a row sees no key.
        saved : RingSaved
            For `backward`. `saved.lse` is the log-sum-exp of the scores, (batch, heads, local seq).

        Raises
        ------
        ArgumentError
            If the arrays of a rank do not fit together, or the shards do not cover the sequence.
        MismatchError
            If ranks make different calls, or give arrays of different sizes, dtypes or devices.
        """
        plan, kernel, call = self.agreement.agree_on_forward(self.options, self._digest, q, k, v)
        scale = q.shape[3] ** -0.5 if self.options.scale is None else self.options.scale
        with self.group.failing("the forward of a ring"):
            if plan.steps == 1:
                message = None
                out, lse = attend_once(kernel, Block(q, k, v, scale, plan.slices[0], self.poll))
            else:
                run = self._run(plan, kernel)
                (out, lse), message = run.forward(scale, q, k, v)
                self.bytes_sent += run.bytes_sent
            return out, RingSaved(plan, call, scale, q, k, v, out=out, lse=lse, message=message)

    def backward(self, dout: Array, saved: RingSaved) -> Gradients:
        """Return the gradients of the inputs; collective.

        Parameters
        ----------
        dout : array
            Gradient of `out`, in its shape and dtype.
        saved : RingSaved
            From `forward`. It may be used again.

        Returns
        -------
        dq, dk, dv : array
            In the shapes and dtype of q, k and v.

        Raises
        ------
        ArgumentError
            If the gradient of a rank does not fit its output.
        MismatchError
            If ranks make different calls, or give what different forwards saved.
        """
        return Ring.backward_into(self, dout, saved, None)

    def backward_into(self, dout: Array, saved: RingSaved, room: tuple[Array, Array, Array] | None) -> Gradients:
        # a ring of several steps has gradients in its messages
        self.agreement.agree_on_backward(saved.call, dout, saved.out)
        with self.group.failing("the backward of a ring"):
            given, result = (saved.q, saved.k, saved.v), Result(saved.out, saved.lse)
            block = Block(*given, saved.scale, saved.plan.slices[0], self.poll)
            if saved.message is None:
                gradients = Gradients(*(room or map(arrays.empty_like, given)))
                kernels.chosen(*given).backward(block, dout, result, gradients, overwrite=True)
                return gradients
            run = self._run(saved.plan, kernels.chosen(*given))
            gradients = run.backward(block, dout, result, saved.message)
            self.bytes_sent += run.bytes_sent
            return gradients

    def _exchange(self, device: str) -> RingExchange:
        """The one of all rings on the communicator with arrays on this device; collective the first time."""
        kept, key = attributes(self._comm), ("ring", device)
        if key not in kept or kept[key].group.failure is not None:
            kept[key] = RingExchange(self._comm, settings.synchronous_sends(), device)
        return kept[key]

    def _run(self, plan: RingPlan, kernel: AttentionKernel) -> RingPass:
        return RingPass(plan, kernel, self._exchange(plan.message.shapes.device), self.options.rotation, self.poll)


def ring_attention(
    q: Array,
    k: Array,
    v: Array,
    comm: Communicator | None,
    causal: bool = True,
    layout: str = "zigzag",
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
    layout : str
        "contiguous", "zigzag" or "striped", as for `Ring`.
    window : int, optional
        A query sees itself and the window - 1 positions before it; needs `causal`.
    segments : array_like of int, optional
        Documents packed into the whole sequence, as for `Ring`.
    scale : float, optional
        Factor on the scores, finite and above 0; default 1 / sqrt(head_dim).
    seq_len : int, optional
        Length of the whole sequence of queries; default: the sum of what the ranks bring.
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
