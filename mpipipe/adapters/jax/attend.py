"""Attention of this package as a function of JAX: exact over the ranks of a ring.

JAX calls back to the host, where `attention.Local` or `Ring` computes. The calls are ordered
effects: JAX makes them in the order of the program, one after the other, also over several compiled
functions, and leaves none out. So ranks that run the same program go around the ring together. The
arrays of the forward that the backward reads stay with JAX, among what it saves itself, so that
nothing is kept here for a backward that never comes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback

from mpipipe import arrays
from mpipipe.adapters.jax.functions import JaxArray, called_back, kinds_of, wait_for_calls_back
from mpipipe.attention import Local, Ring
from mpipipe.attention.kernels import check_arrays
from mpipipe.errors import ArgumentError
from mpipipe.job import own_cores

# Rows by which the shards of two ranks may differ, in any layout.
SPREAD = 2
# What every forward saves.
ARRAYS = "q", "k", "v", "out", "lse"


def attend_function(attend: Local | Ring) -> Callable[[JaxArray, JaxArray, JaxArray], JaxArray]:
    """Return the function that `mpipipe.adapters.jax_attend` makes."""
    host = HostAttend(attend)
    make_room_for_calls_back()

    def attended(*qkv: JaxArray) -> JaxArray:
        return io_callback(host.forward, host.results(*qkv), *qkv, ordered=True)

    @jax.custom_vjp
    def attention(q: JaxArray, k: JaxArray, v: JaxArray) -> JaxArray:
        return attended(q, k, v)[0]

    def forward(*qkv: JaxArray) -> tuple[JaxArray, JaxArray]:
        out, *saved = attended(*qkv)
        return out, (*qkv, out, *saved)

    def backward(saved: JaxArray, dout: JaxArray) -> JaxArray:
        like = jax.eval_shape(tuple, saved[:3])
        return io_callback(host.backward, like, dout, *saved, ordered=True)

    attention.defvjp(forward, backward)
    return attention


def make_room_for_calls_back() -> None:
    """Let JAX have two threads on the host, also on one core.

    A call back takes one and waits until its arguments have been copied, for which JAX takes
    another.
    """
    threads = os.environ.get("NPROC", "")
    has_two = int(threads) > 1 if threads.isdigit() else not own_cores().isdigit()
    if has_two:
        return
    # It may be set until JAX has begun.
    try:
        before = jax.config.jax_num_cpu_devices
        for count in (before + 1, before):
            jax.config.update("jax_num_cpu_devices", count)
    except (AttributeError, RuntimeError):
        raise ArgumentError(
            "a call from JAX to attention would wait for ever: JAX has begun, with one thread on "
            "the host",
            found=f"core {own_cores()}, NPROC={threads or 'unset'}",
            expected="two threads",
            remedy="NPROC=2 in the environment of the ranks; or make attention before JAX "
            "computes anything",
        ) from None
    os.environ["NPROC"] = "2"


class HostAttend:
    """The calls that JAX makes, with read-only arrays that are JAX's own again after the call."""

    def __init__(self, attend: Local | Ring):
        if type(attend) not in (Local, Ring):
            raise ArgumentError(
                "jax_attend",
                found=type(attend).__name__,
                expected="an attention.Local or an attention.Ring",
            )
        self.attend: Any = attend
        self.ranks = 1
        if isinstance(attend, Ring):
            self.ranks = attend.group.size
            if self.ranks > 1 and attend.group.context.is_thread:
                raise ArgumentError(
                    "a ring of threads within JAX, whose own threads would wait for each other",
                    found="a communicator of job.inprocess",
                    expected="ranks that are processes",
                    remedy="start the job with mpiexec",
                )
            attend.agreement.settle = wait_for_calls_back
        # What forwards have saved besides arrays, by shapes, dtype and lengths.
        self._saved: dict[tuple, Any] = {}

    def results(self, q: JaxArray, k: JaxArray, v: JaxArray) -> tuple[JaxArray, ...]:
        """Return shapes and dtypes: out, its LSE, three numbers, room for a ring's last message."""
        # Arrays that take no memory.
        check_arrays(*(np.broadcast_to(np.zeros((), x.dtype), x.shape) for x in (q, k, v)))
        batch, seq, heads, _ = q.shape
        room = 0
        if self.ranks > 1:
            _, rows, kv_heads, dim = k.shape
            room = batch * (rows + SPREAD) * kv_heads * (dim + v.shape[3]) * k.dtype.itemsize
        return (
            jax.ShapeDtypeStruct((batch, seq, heads, v.shape[3]), q.dtype),
            jax.ShapeDtypeStruct((batch, heads, seq), arrays.accumulator(q.dtype)),
            jax.ShapeDtypeStruct((3,), np.int32),
            jax.ShapeDtypeStruct((room,), np.uint8),
        )

    @called_back
    def forward(self, *qkv: np.ndarray) -> JaxArray:
        """Return what `results` says."""
        out, saved = self.attend.forward(*qkv)
        lengths = saved.plan.layout.seq_len, sum(saved.plan.message.lengths)
        room = np.zeros(self.results(*qkv)[3].shape, np.uint8)
        if saved.message is not None:
            room[: saved.message.size] = saved.message
        bare = saved._replace(message=None, **dict.fromkeys(ARRAYS))
        self._saved[kinds_of(qkv), lengths] = bare
        return out, saved.lse, np.array([saved.call, *lengths], np.int32), room

    @called_back
    def backward(self, dout: np.ndarray, *arguments: np.ndarray) -> JaxArray:
        """Return the gradients of q, k and v."""
        numbers, message = arguments[-2:]
        call, *lengths = numbers.tolist()
        saved = self._saved[kinds_of(arguments[:3]), tuple(lengths)]
        if saved.plan.steps > 1:
            # The rank whose block it is.
            last = self.attend.group.rank + 1 - saved.plan.steps
            saved = saved._replace(message=message[: saved.plan.message.nbytes(last)])
        saved = saved._replace(call=call, **dict(zip(ARRAYS, arguments)))
        return tuple(self.attend.backward(dout, saved))
