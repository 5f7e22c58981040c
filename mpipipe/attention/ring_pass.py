"""Ring attention: exact attention over a sequence that is spread over the ranks of a communicator.

Every rank keeps its queries. Blocks of keys and values travel around the ring, and each rank merges what it finds with
each block (Liu, Zaharia and Abbeel, "Ring attention with blockwise transformers", 2023).

    forward, N = 4, rank r               backward
    step 0  own block                    step 0  block r+1 (kept from the forward's end)
    step 1  block r-1                    step 1  block r+2
    step 2  block r-2                    step 2  block r+3
    step 3  block r-3 = r+1              step 3  own block: its gradients arrive here, complete

The forward has N - 1 exchanges of one packed message (K, V). The backward goes the other way round with the own block
last, so the gradients of a block are at home after N - 1 exchanges and need no way back. The message of step i is (dK
and dV of the block of step i, K and V of the block of step i + 1). K and V take N - 2 hops, since the own ones are
there already. Behind a window, steps that no rank needs are left out: N is then the number of steps.

In half precision, K and V travel in their dtype, dK and dV in float32, in which all sums are. Each result is rounded
once. On a GPU the host only queues the kernels of a step; they run while messages travel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mpipipe import arrays
from mpipipe.arrays import Array
from mpipipe.attention.kernels import AttentionKernel, Gradients, KVBlock, OutLse
from mpipipe.attention.layout import ring_hops
from mpipipe.attention.ring_plan import RingPlan
from mpipipe.comm import RingExchange


class RingPass:
    """One forward or backward of a ring with more than one step.

    `poll` is called after each tile, besides that of the exchange; `bytes_sent` are those of this rank, in this pass.
    """

    def __init__(
        self, plan: RingPlan, kernel: AttentionKernel, exchange: RingExchange, rotation: str, poll: Callable[[], object]
    ) -> None:
        self.plan, self.kernel, self.exchange, self.rotation = plan, kernel, exchange, rotation
        self.rank, self.size = exchange.group.rank, exchange.group.size
        self.bytes_sent = 0
        self._user_poll = poll

    def forward(self, scale: float, q: Array, k: Array, v: Array) -> tuple[OutLse, Array]:
        """Return the result, and the message with the keys and values of the last step."""
        plan, packing, rank = self.plan, self.plan.message, self.rank
        accumulator = self.kernel.make_accumulator(q, v, plan.overwrite)
        message = packing.pack(k, v, rank)
        for step, dest, source, owner in ring_hops(rank, self.size, plan.steps):
            if dest is not None:
                incoming = packing.empty(packing.kv_bytes(owner - 1))
                self._start(message, dest, incoming, source)
            keys, values = (k, v) if step == 0 else packing.unpack(message, owner)
            bias = plan.bias(step, q, keys)
            accumulator.attend(KVBlock(q, keys, values, scale, plan.slices[step], self._poll, bias))
            self.exchange.finish()
            if dest is not None:
                message = incoming
        return accumulator.end(), message

    def backward(self, own: KVBlock, dout: Array, result: OutLse, message: Array) -> Gradients:
        """Return the gradients of the arrays of `own`, this rank's block, as sums, in the dtype in which they travel.

        `message` is what the forward returned. From the second step on it also has gradients, before keys and values.
        """
        plan, packing, rank = self.plan, self.plan.message, self.rank
        dq = arrays.zeros(own.q.shape, packing.sum_dtype, packing.shapes.device)
        behind = 0  # bytes of gradients at the front of the message
        for step, dest, source, owner in ring_hops(rank, self.size, plan.steps, backward=True):
            ahead = step < plan.steps - 2  # the next block is not our own, so its keys and values must come
            split = packing.gradient_bytes(owner)
            incoming = packing.empty(split + (packing.kv_bytes(owner + 1) if ahead else 0))  # the next step's message
            if dest is not None:
                outgoing = message if ahead else message[:behind]
                self._start(outgoing, dest, incoming if step > 0 else incoming[split:], source)
            k, v = (own.k, own.v) if step == plan.steps - 1 else packing.unpack(message[behind:], owner)
            back = plan.steps - 1 - step
            bias = plan.bias(back, own.q, k)
            block = replace(own, k=k, v=v, slices=plan.slices[back], poll=self._poll, bias=bias)
            parts = self.kernel.block_gradients(block, dout, result, dq)
            self.exchange.finish()
            for sums, part in zip(packing.unpack_gradients(incoming, owner), parts):
                arrays.strided_copy(part, sums, add=step > 0)
            message, behind = incoming, split
        return Gradients(dq, *packing.unpack_gradients(message, rank))

    def _start(self, outgoing: Array, dest: int, incoming: Array, source: int) -> None:
        self.bytes_sent += outgoing.nbytes
        self.exchange.start(self.rotation, outgoing, dest, incoming, source)

    def _poll(self) -> None:
        self.exchange.poll()
        self._user_poll()
