"""Ring attention: exact attention over a sequence that is spread over the ranks of a communicator.

Every rank keeps its queries; blocks of keys and values travel around the ring, and what a rank finds with each block is
merged into what it has (Liu, Zaharia and Abbeel, "Ring attention with blockwise transformers", 2023).

    forward, N = 4, rank r               backward
    step 0  own block                    step 0  block r+1 (kept from the forward's end)
    step 1  block r-1                    step 1  block r+2
    step 2  block r-2                    step 2  block r+3
    step 3  block r-3 = r+1              step 3  own block: its gradients arrive here, complete

Forward: N - 1 exchanges of one packed message (K, V). Backward: the other way round, with the own block last, so that a
block's gradients are at home after N - 1 exchanges and need no way back; the message of step i is (dK and dV of the
block of step i, K, V of the block of step i + 1). K and V take N - 2 hops, since the own ones are there already. Steps
that nobody needs, behind a window, are not taken: N is then the number of steps.

Of arrays in half precision, K and V travel in their dtype and dK and dV in float32, in which everything is summed; each
result is rounded once. On a GPU the kernels of a step are only put on its stream, and run while messages travel.
"""

from __future__ import annotations

from mpipipe import arrays
from mpipipe.attention import kernels
from mpipipe.attention.accumulate import add, assign, attend_once, block_gradients, cast, total
from mpipipe.attention.kernels import host
from mpipipe.attention.ring_agreement import agree_on_backward, agree_on_forward, agree_on_options
from mpipipe.comm import runtime, settings
from mpipipe.comm.attributes import attributes
from mpipipe.comm.ring_exchange import RingExchange


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

    Arrays are this rank's shards, (batch, local seq, heads, head_dim), of one dtype and on one kind of device on all
    ranks, as for attention.Local: heads may be grouped, and values have another head_dim. Keys may be another sequence
    than queries. A shard may be empty. Constructor and methods are collective: arguments that do not fit, and ranks
    that do different things, raise the same ArgumentError on every rank. `bytes_sent` counts this rank's keys, values
    and their gradients.
    """

    def __init__(
        self,
        comm,
        causal=True,
        layout="zigzag",
        window=None,
        segments=None,
        scale=None,
        seq_len=None,
        rotation="overlap",
    ):
        self._given = comm = runtime.resolve(comm)
        self.rotation = self._rotation("cpu")
        self.comm, self.poll, self.bytes_sent = self.rotation.comm, host.nothing, 0
        self.link = self.rotation  # on which ranks agree, wherever their arrays are
        given = dict(causal=causal, layout=layout, window=window, segments=segments, scale=scale, seq_len=seq_len)
        self.options = agree_on_options(self.rotation, {**given, "rotation": rotation})
        self.digest = self.options.digest

    def forward(self, q, k, v):
        """Return (out, saved); out (batch, local seq, heads, head_dim of v)."""
        work, call = agree_on_forward(self.link, self.options, self.digest, q, k, v)
        with self.link.group.failing("the forward of a ring"):
            return self._forward(work, call, q, k, v)

    def _forward(self, work, call, q, k, v):
        self.rotation = self._rotation(work.device)
        scale = q.shape[3] ** -0.5 if self.options.scale is None else self.options.scale
        steps, rank, size = work.steps, self.comm.rank, self.comm.size
        kernel = kernels.chosen(q, k, v)
        if steps == 1:
            out, lse = attend_once(kernel, q, k, v, scale, work.slices[0], self._poll)
            return out, (work, call, scale, q, k, v, out, lse, None)
        result = total(kernel, q, v, work.fresh)
        held = work.pack(k, v, rank)
        for step in range(steps):
            if step + 1 < steps:
                incoming = work.empty(work.kv_bytes(rank - step - 1))
                self._start(held, (rank + 1) % size, incoming, (rank - 1) % size)
            keys, values = (k, v) if step == 0 else work.unpack(held, rank - step)
            result.attend(q, keys, values, scale, work.slices[step], self._poll)
            self.rotation.finish()
            if step + 1 < steps:
                held = incoming
        out, lse = result.end()
        return out, (work, call, scale, q, k, v, out, lse, held)

    def backward(self, dout, saved):
        """Return (dq, dk, dv), shaped as q, k, v."""
        _, call, *_, out, _, _ = saved
        agree_on_backward(self.link, call, dout, out)
        with self.link.group.failing("the backward of a ring"):
            return self._backward(dout, saved)

    def _backward(self, dout, saved):
        work, _, scale, q, k, v, out, lse, held = saved
        self.rotation = self._rotation(work.device)
        steps, rank, size = work.steps, self.comm.rank, self.comm.size
        kernel = kernels.chosen(q, k, v)
        if steps == 1:
            gradients = tuple(arrays.empty_like(x) for x in (q, k, v))
            kernel.backward(dout, q, k, v, out, lse, scale, work.slices[0], *gradients, self._poll, fresh=True)
            return gradients
        dq = arrays.zeros(q.shape, work.sum_dtype, work.device)
        message = held  # the keys and values of this step's block; from the second step on behind gradients
        for step in range(steps):
            block = rank - (steps - 1) + step
            ahead = step < steps - 2  # the next step's block is not our own: its keys and values must come
            split = work.gradient_bytes(block)
            received = work.empty(split + (work.kv_bytes(block + 1) if ahead else 0))  # as the next step's message
            if step > 0:
                outgoing = message if ahead else message[: work.gradient_bytes(block - 1)]
                self._start(outgoing, (rank - 1) % size, received, (rank + 1) % size)
            elif ahead:
                self._start(message, (rank - 1) % size, received[split:], (rank + 1) % size)
            behind = work.gradient_bytes(block - 1) if step > 0 else 0
            keys, values = (k, v) if step == steps - 1 else work.unpack(message[behind:], block)
            slices = work.slices[steps - 1 - step]
            own = block_gradients(kernel, dout, q, keys, values, out, lse, scale, slices, dq, self._poll)
            self.rotation.finish()
            for sums, part in zip(work.unpack_gradients(received, block), own):
                (add if step > 0 else assign)(sums, part)
            message = received
        return tuple(cast(x, work.dtype) for x in (dq, *work.unpack_gradients(message, rank)))

    def _rotation(self, device) -> RingExchange:
        """What moves blocks of arrays on this device; one for all rings on the communicator."""
        kept, key = attributes(self._given), ("ring", device)
        if key not in kept or kept[key].group.failure is not None:
            kept[key] = RingExchange(self._given, settings.synchronous_sends(), device)
        return kept[key]

    def _start(self, outgoing, dest, incoming, source):
        self.bytes_sent += outgoing.nbytes
        self.rotation.start(self.options.rotation, outgoing, dest, incoming, source)

    def _poll(self):
        self.rotation.poll()
        self.poll()


def ring_attention(
    q,
    k,
    v,
    comm,
    causal=True,
    layout="zigzag",
    window=None,
    segments=None,
    scale=None,
    seq_len=None,
    rotation="overlap",
):
    """Attention over a sharded sequence; returns (out, saved). Arguments as for `Ring`; collective over `comm`."""
    ring = Ring(comm, causal, layout, window, segments, scale, seq_len, rotation)
    out, saved = ring.forward(q, k, v)
    return out, (ring, saved)


def ring_attention_backward(dout, saved):
    """(dq, dk, dv) from the gradient of the output and what `ring_attention` saved; collective over its ring."""
    ring, inner = saved
    return ring.backward(dout, inner)
