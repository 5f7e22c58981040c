"""Ring attention: exact attention over a sequence that is spread over the ranks of a communicator.

Every rank keeps its queries. Blocks of keys and values travel around the ring, and each rank merges
what it finds with each block (Liu, Zaharia and Abbeel, "Ring attention with blockwise
transformers", 2023).

    forward, N = 4, rank r               backward
    step 0  own block                    step 0  block r+1 (kept from the forward's end)
    step 1  block r-1                    step 1  block r+2
    step 2  block r-2                    step 2  block r+3
    step 3  block r-3 = r+1              step 3  own block: its gradients arrive here, complete

The forward has N - 1 exchanges of one packed message (K, V). The backward goes the other way round
with the own block last, so the gradients of a block are at home after N - 1 exchanges and need no
way back. The message of step i is (dK and dV of the block of step i, K and V of the block of step i
+ 1). K and V take N - 2 hops, since the own ones are there already. Behind a window, steps that no
rank needs are left out: N is then the number of steps.

In half precision, K and V travel in their dtype, dK and dV in float32, in which all sums are. Each
result is rounded once. On a GPU the host only queues the kernels of a step; they run while messages
travel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array
from mpipipe.attention import kernels
from mpipipe.attention.kernels import AttentionKernel, Gradients, KVBlock, OutLse, no_poll
from mpipipe.attention.kernels.interface import attend_once, new_result, new_sums
from mpipipe.attention.layout import ring_hops
from mpipipe.attention.ring_plan import (
    Agreed,
    Alone,
    RingAgreement,
    RingOptions,
    RingPlan,
    RingSaved,
    described,
    documents_of_rows,
    is_view,
    like,
    with_batch,
)
from mpipipe.comm import RingExchange
from mpipipe.nn import Attend


class RingPass:
    """One forward or backward: of a rank alone, or of a ring of several steps by an exchange."""

    def __init__(self, attend: PlannedAttend, plan: RingPlan, kernel: AttentionKernel) -> None:
        self.attend = attend
        self.kernel = kernel
        self.exchange = attend._exchange(plan)
        self.plan = plan

    def forward(self, q: Array, k: Array, v: Array, call: int) -> tuple[Array, RingSaved]:
        """Return the output, and what the backward needs."""
        shape = (*q.shape[:3], v.shape[3])
        q, k, v = [with_batch(x, self.plan.message.shapes.batch) for x in (q, k, v)]
        message = None
        if self.exchange is None:
            out, lse = attend_once(self.kernel, self.block(q, k, v), self.plan.overwrite)
        else:
            (out, lse), message = self._around(self.exchange, q, k, v)
        return out.reshape(shape), RingSaved(self.plan, call, q, k, v, out, lse, message)

    def backward(
        self, dout: Array, saved: RingSaved, room: tuple[Array, Array, Array] | None
    ) -> Gradients:
        """Return the gradients in the dtype of `dout`, in `room` if they fit in one step."""
        batch = len(dout)
        if self.exchange is not None:
            sums = self._back_around(self.exchange, dout, saved)
            return Gradients(*[with_batch(arrays.cast(x, dout.dtype), batch) for x in sums])
        inputs = (saved.q, saved.k, saved.v)
        if room is None or not all([is_view(x, len(saved.q)) for x in room]):
            room = Gradients(*[with_batch(arrays.empty_like(x), batch) for x in inputs])
        targets = Gradients(*[with_batch(x, len(saved.q)) for x in room])
        self._add(dout, saved, targets, overwrite=True)
        return Gradients(*room)

    def sums(self, dout: Array, saved: RingSaved, room: Sequence[Array]) -> Gradients:
        """Return the gradients as sums, as what was saved.

        In one step dk and dv are added to `room`, if it has the shapes of keys and values.
        """
        if self.exchange is not None:
            return self._back_around(self.exchange, dout, saved)
        if len(room[0]) != len(saved.k):
            room = new_sums(saved.k), new_sums(saved.v)
        sums = Gradients(new_sums(saved.q), *room)
        self._add(dout, saved, sums)
        return sums

    def _add(
        self, dout: Array, saved: RingSaved, sums: Gradients, step: int = 0, overwrite: bool = False
    ) -> None:
        """Add what the keys and values of a step give."""
        block = self.block(saved.q, saved.k, saved.v, step)
        result = OutLse(saved.out, saved.lse)
        self.kernel.backward(block, like(dout, saved.out), result, sums, overwrite)

    def block(self, q: Array, k: Array, v: Array, step: int = 0) -> KVBlock:
        """Return the work of a step."""
        return KVBlock(q, k, v, self.plan.scale, self.plan.slices[step], self._poll)

    def _around(self, exchange: RingExchange, q: Array, k: Array, v: Array) -> tuple[OutLse, Array]:
        """Return the result, and the message with the keys and values of the last step."""
        plan = self.plan
        packing = plan.message
        result = new_result(q, v, plan.gradients.dtype, plan.overwrite)
        message = packing.pack(plan.rank, k, v)
        for step, dest, source, owner in ring_hops(plan.rank, plan.layout.ranks, plan.steps):
            if dest is not None:
                incoming = packing.empty(packing.nbytes(owner - 1))
                self._start(message, dest, incoming, source)
            keys, values = (k, v) if step == 0 else packing.unpack(message, owner)
            overwrite = step == 0 and plan.overwrite
            self.kernel.forward(self.block(q, keys, values, step), result, overwrite)
            exchange.finish()
            if dest is not None:
                message = incoming
        return result._replace(out=arrays.cast(result.out, q.dtype)), message

    def _back_around(self, exchange: RingExchange, dout: Array, saved: RingSaved) -> Gradients:
        """Return the gradients as sums.

        The message is that of the forward. From the second step on it also has gradients, before
        keys and values.
        """
        message = saved.message
        assert message is not None
        dq = new_sums(saved.q)
        plan = self.plan
        packing = plan.message
        gradients = plan.gradients
        behind = 0  # bytes of gradients at the front of the message
        for step, dest, source, owner in ring_hops(
            plan.rank, plan.layout.ranks, plan.steps, backward=True
        ):
            # The next block is not our own, so its keys and values must come.
            ahead = step < plan.steps - 2
            split = gradients.nbytes(owner)
            # The message of the next step.
            size = split
            if ahead:
                size = split + packing.nbytes(owner + 1)
            incoming = packing.empty(size)
            if dest is not None:
                if ahead:
                    outgoing = message
                else:
                    outgoing = message[:behind]
                self._start(outgoing, dest, incoming if step > 0 else incoming[split:], source)
            k, v = saved.k, saved.v
            if step < plan.steps - 1:
                k, v = packing.unpack(message[behind:], owner)
            parts = new_sums(k), new_sums(v)
            self._add(dout, saved._replace(k=k, v=v), Gradients(dq, *parts), plan.steps - 1 - step)
            exchange.finish()
            for sums, part in zip(gradients.unpack(incoming, owner), parts):
                arrays.strided_copy(part, sums, add=step > 0)
            message = incoming
            behind = split
        return Gradients(dq, *gradients.unpack(message, plan.rank))

    def _start(self, outgoing: Array, dest: int, incoming: Array, source: int) -> None:
        assert self.exchange is not None
        self.attend.bytes_sent += outgoing.nbytes
        self.exchange.start(self.attend.options.rotation, outgoing, dest, incoming, source)

    def _poll(self) -> None:
        if self.exchange is not None:
            self.exchange.poll()
        self.attend.poll()


# -- What `Local` and `Ring` have in common --------------------------------------------------------


Kind = TypeVar("Kind", bound="PlannedAttend")


class PlannedAttend(Attend):
    """Attention with its options bound: plans follow from them, and a pass executes a plan."""

    def __init__(self, agreement: Alone | RingAgreement, options: RingOptions) -> None:
        self.agreement = agreement
        self.options = agreement.agree_on_options(lambda: options)
        self.poll: Callable[[], object] = no_poll
        self.bytes_sent = 0
        self._forget()

    @property
    def window(self) -> int | None:
        """The positions that a query sees, its own the last."""
        return self.options.window

    def _forget(self) -> None:
        self._others: dict[int, Any] = {}  # keys are windows
        self._packed: tuple[tuple, RingOptions] | None = None  # the last segments by row

    def forward(
        self, q: Array, k: Array, v: Array, segments: np.ndarray | None = None
    ) -> tuple[Array, RingSaved]:
        """Attend; over a ring collective, with the local rows and keys.

        Parameters
        ----------
        q : array
            (batch, seq, heads, head_dim), with any strides.
        k : array
            (batch, keys, kv_heads, head_dim). With g = heads / kv_heads, head h of q sees head h //
            g.
        v : array
            (batch, keys, kv_heads, value_dim).
        segments : array of int, optional
            (batch, seq) of the whole sequences: the document of each position of each row, equal
            numbers together. They stand in place of those of the constructor.

        Returns
        -------
        out : array
            (batch, seq, heads, value_dim), C-contiguous, of the dtype of q. 0 where a row sees no
            key.
        saved : RingSaved
            For `backward`. `saved.lse` is the log-sum-exp of the scores, (batch, heads, seq); with
            `segments` the rows stand one after the other as one sequence in it, as in all arrays of
            `saved`.
        """
        plan, kernel, call = self._agreed(q, k, v, segments)
        with self.agreement.failing("the forward of a ring"):
            self._check_expected(plan, segments)
            return RingPass(self, plan, kernel).forward(q, k, v, call)

    def backward(
        self, dout: Array, saved: RingSaved, room: tuple[Array, Array, Array] | None = None
    ) -> Gradients:
        """Return the gradients (dq, dk, dv) of q, k and v; over a ring collective.

        Parameters
        ----------
        dout : array
            Gradient of `out`, in its shape and dtype.
        saved : RingSaved
            From `forward`; it may be used again.
        room : tuple of array, optional
            Arrays like q, k and v, which become the results.
        """
        self.agreement.agree_on_backward(saved.call, like(dout, saved.out), described(saved.out))
        with self.agreement.failing("the backward of a ring"):
            kernel = kernels.chosen(saved.q, saved.k, saved.v)
            return RingPass(self, saved.plan, kernel).backward(dout, saved, room)

    def with_window(self: Kind, window: int) -> Kind:
        # over a ring the first time for each window is collective
        if window not in self._others:
            other = copy(self)
            options = replace(self.options, window=window)
            other.options = self.agreement.agree_on_options(lambda: options)
            other.bytes_sent = 0
            other._forget()
            self._others[window] = other
        return self._others[window]

    def _agreed(
        self, q: Array, k: Array, v: Array, segments: np.ndarray | None, more: str = ""
    ) -> Agreed:
        return self.agreement.agree_on_forward(
            lambda: (self._options_for(segments, q), q, k, v), more
        )

    def _options_for(self, segments: np.ndarray | None, q: Array) -> RingOptions:
        if segments is None:
            return self.options
        numbers = np.asarray(segments)
        key = numbers.tobytes(), numbers.dtype, numbers.shape, len(q)
        if self._packed is None or self._packed[0] != key:
            self._packed = (
                key,
                replace(self.options, segments=None, rows=documents_of_rows(numbers, len(q))),
            )
        return self._packed[1]

    def _check_expected(self, plan: RingPlan, segments: np.ndarray | None) -> None:
        """Compare the positions that a layer has named with those of the plan."""

    def _exchange(self, plan: RingPlan) -> RingExchange | None:
        """Return what sends the messages of a plan; None where it has a single step."""
        return None
