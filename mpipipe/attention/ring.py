"""Ring attention: exact attention over a sequence that is spread over the ranks of a communicator.

Every rank keeps its queries; blocks of keys and values travel around the ring, and what a rank finds with each block is
merged into what it has (Liu, Zaharia and Abbeel, "Ring attention with blockwise transformers", 2023).

    forward, N = 4, rank r               backward
    step 0  own block                    step 0  block r+1 (kept from the forward's end)
    step 1  block r-1                    step 1  block r+2
    step 2  block r-2                    step 2  block r+3
    step 3  block r-3 = r+1              step 3  own block: its gradients arrive here, complete

Forward: N - 1 exchanges of one packed message (K, V). Backward: the other way round, with the own block last, so that a
block's gradients are at home after N - 1 exchanges and need no way back; the message of step i is (K, V of the block of
step i + 1, dK and dV of the block of step i). K and V take N - 2 hops, since the own ones are there already. Steps that
nobody needs, behind a window, are not taken: N is then the number of steps.
"""

from __future__ import annotations

import numpy as np

from mpipipe.arrays import aligned_empty, aligned_zeros
from mpipipe.attention import kernels
from mpipipe.attention.agreement import agree_on_backward, agree_on_forward, agree_on_options
from mpipipe.attention.kernels import host
from mpipipe.attention.local import empty_result
from mpipipe.comm import runtime
from mpipipe.comm.private import private
from mpipipe.comm.rotation import Rotation


class Ring:
    """What SelfAttention attends with where the sequence is sharded; also the functions below, with options bound.

    Parameters
    ----------
    comm : the ranks that share a sequence; all rings on it share one duplicate of it, which is freed with it
    causal : a query sees no later position
    layout : "contiguous", "zigzag" or "striped", see attention.Layout
    window : a query sees itself and the window - 1 positions before it; needs causal
    segments : documents packed into the sequence, for the whole of it; see blocks.boundaries
    scale : of the scores; default 1 / sqrt(head_dim)
    seq_len : length of the whole sequence of queries; by default the sum of what the ranks bring
    rotation : "overlap" (messages travel while tiles are computed) or "sendrecv" (one exchange before each step); the
        results have the same bits

    Arrays are this rank's shards, (batch, local seq, heads, head_dim), of one dtype, float32 or float64. Heads are
    grouped and head_dim of values may differ as in attention.Local; keys may be another sequence than queries. A shard
    may be empty. Constructor and methods are collective: arguments that do not fit, and ranks that do different things,
    raise the same ArgumentError on every rank. `bytes_sent` counts this rank's keys, values and their gradients.
    """

    def __init__(self, comm, causal=True, layout="zigzag", window=None, segments=None, scale=None, seq_len=None,
                 rotation="overlap"):
        self.rotation = private(comm, "ring", lambda: Rotation(comm, runtime.synchronous_sends()))
        self.comm, self.poll, self.bytes_sent = self.rotation.comm, host.nothing, 0
        given = dict(causal=causal, layout=layout, window=window, segments=segments, scale=scale, seq_len=seq_len)
        self.options = agree_on_options(self.rotation, {**given, "rotation": rotation})

    def forward(self, q, k, v):
        """Return (out, saved); out (batch, local seq, heads, head_dim of v)."""
        work, call = agree_on_forward(self.rotation, self.options, q, k, v)
        scale = q.shape[3] ** -0.5 if self.options.scale is None else self.options.scale
        steps, rank, size = work.steps, self.comm.rank, self.comm.size
        out, lse = empty_result(q, v)
        attend = kernels.chosen().forward
        held = work.pack(k, v, rank) if steps > 1 else None
        for step in range(steps):
            if step + 1 < steps:
                incoming = work.empty(rank - step - 1)
                self._start(held, (rank + 1) % size, incoming, (rank - 1) % size)
            keys, values = (k, v) if step == 0 else work.unpack(held, rank - step)
            attend(q, keys, values, scale, work.slices[step], out, lse, work.fresh and step == 0, self._poll)
            self.rotation.finish()
            if step + 1 < steps:
                held = incoming
        return out, (work, call, scale, q, k, v, out, lse, held)

    def backward(self, dout, saved):
        """Return (dq, dk, dv), shaped as q, k, v."""
        work, call, scale, q, k, v, out, lse, held = saved
        agree_on_backward(self.rotation, call, dout, out)
        steps, rank, size = work.steps, self.comm.rank, self.comm.size
        attend_backward = kernels.chosen().backward
        dq = np.zeros(q.shape, q.dtype)
        message = held
        for step in range(steps):
            block = rank - (steps - 1) + step
            ahead = step < steps - 2  # the next step's block is not our own: its keys and values must come
            split = work.size(block + 1) if ahead else 0
            received = aligned_empty(split + work.size(block), q.dtype)  # (K, V of the next block, dK and dV of this)
            if step > 0:
                outgoing = message if ahead else message[message.size - work.size(block - 1) :]
                self._start(outgoing, (rank - 1) % size, received, (rank + 1) % size)
            elif ahead:
                self._start(message, (rank - 1) % size, received[:split], (rank + 1) % size)
            own = aligned_zeros(work.size(block), q.dtype)
            keys, values = (k, v) if step == steps - 1 else work.unpack(message, block)
            given = dq, *work.unpack(own, block)
            ring_step = steps - 1 - step
            attend_backward(dout, q, keys, values, out, lse, scale, work.slices[ring_step], *given, self._poll)
            self.rotation.finish()
            if step > 0:
                received[split:] += own
            else:
                received[split:] = own
            message = received
        return dq, *work.unpack(message, rank)

    def _start(self, outgoing, dest, incoming, source):
        self.bytes_sent += outgoing.nbytes
        self.rotation.start(self.options.rotation, outgoing, dest, incoming, source)

    def _poll(self):
        self.rotation.poll()
        self.poll()


def ring_attention(q, k, v, comm, causal=True, layout="zigzag", window=None, segments=None, scale=None, seq_len=None,
                   rotation="overlap"):
    """Attention over a sharded sequence; returns (out, saved). Arguments as for `Ring`; collective over `comm`.
    """
    ring = Ring(comm, causal, layout, window, segments, scale, seq_len, rotation)
    out, saved = ring.forward(q, k, v)
    return out, (ring, saved)


def ring_attention_backward(dout, saved):
    """(dq, dk, dv) from the gradient of the output and what `ring_attention` saved; collective over its ring."""
    ring, inner = saved
    return ring.backward(dout, inner)
