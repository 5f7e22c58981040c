"""`bench attention`: kernels next to PyTorch's, and a ring next to one rank alone.

PyTorch has one thread, as BLAS has.

Rates count 4 pairs heads dim operations in a forward and 2.5 times as many in a backward, S^2 / 2
pairs under the causal mask. The efficiency of a ring of N is T1 / (N TN): the time that one rank
takes for the whole problem while the others wait, over N times that of the slowest rank of the
ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from typing import Annotated, Any

import numpy as np

from mpipipe import attention
from mpipipe.attention import cost
from mpipipe.attention.kernels import no_poll
from mpipipe.bench.timing import Call, Repeats, compare, on_ranks, report
from mpipipe.comm import ROTATIONS
from mpipipe.job import Communicator, runtime
from mpipipe.options import Option

WARMUP = 1
GOAL = "at least 0.75"


@on_ranks
def run(
    repeats: Repeats = 5,
    seq_len: Annotated[int, Option("on one rank, for the kernels")] = 4096,
    ring_seq_len: Annotated[int, Option("on several ranks, for the ring")] = 8192,
    heads: int = 4,
    head_dim: int = 64,
) -> None:
    """Measure attention kernels next to PyTorch, on several ranks a ring next to one."""
    comm = runtime.world()
    if comm.size == 1:
        _kernels(comm, repeats, seq_len, heads, head_dim)
    else:
        _ring(comm, repeats, ring_seq_len, heads, head_dim)


def _random_arrays(seq_len: int, heads: int, dim: int) -> list[np.ndarray]:
    """Return q, k, v and the gradient of the output."""
    rng = np.random.default_rng(0)
    return list(rng.standard_normal((4, 1, seq_len, heads, dim), dtype=np.float32))


def _kernels(comm: Communicator, repeats: int, seq_len: int, heads: int, dim: int) -> None:
    calls = [*_calls(attention.Local(), _random_arrays(seq_len, heads, dim))]
    if find_spec("torch"):
        import torch

        torch.set_num_threads(1)
        calls += _pytorch(seq_len, heads, dim)
    times = compare(comm, calls, repeats, WARMUP)
    for at, direction in enumerate(("forward", "backward")):
        host, *pytorch = times[at::2]
        measured = _rate(direction, seq_len, heads, dim, host)
        ratio = None
        for seconds in pytorch:
            measured += f", PyTorch {_rate(direction, seq_len, heads, dim, seconds)}"
            ratio = seconds / host
        what = f"attention {direction}, host kernel, sequence {seq_len}"
        report(comm, what, measured, ratio, GOAL)


def _pytorch(seq_len: int, heads: int, dim: int) -> tuple[Call, Call]:
    """Return the same for PyTorch's own kernel, on arrays in the order that it likes best."""
    import torch

    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    tensors = map(torch.from_numpy, _random_arrays(seq_len, heads, dim))
    *block, dout = (tensor.transpose(1, 2).contiguous() for tensor in tensors)
    out, lse = flash(*block, 0.0, True)
    forward = partial(flash, *block, 0.0, True)
    return forward, partial(flash_backward, dout, *block, out, lse, 0.0, True)


def _ring(comm: Communicator, repeats: int, seq_len: int, heads: int, dim: int) -> None:
    whole = _random_arrays(seq_len, heads, dim)
    layout = attention.Layout("zigzag", comm.size, seq_len)
    shards = [layout.shard(array, comm.rank) for array in whole]
    calls: list[Call] = [no_poll, no_poll]
    if comm.rank == 0:
        calls = [*_calls(attention.Local(), whole)]
    for rotation in ROTATIONS:
        calls += _calls(attention.Ring(comm, layout=layout, rotation=rotation), shards)
    times = compare(comm, calls, repeats, WARMUP)
    for at, direction in enumerate(("forward", "backward")):
        single, *together = times[at::2]
        for rotation, seconds in zip(ROTATIONS, together):
            report(
                comm,
                f"attention {direction}, ring of {comm.size}, {rotation}, sequence {seq_len}",
                f"{_rate(direction, seq_len, heads, dim, seconds, comm.size)} a rank, one rank "
                f"alone {_rate(direction, seq_len, heads, dim, single)}",
                single / (comm.size * seconds),
                "efficiency; at least 0.93",
            )


def _calls(
    attend: attention.Local | attention.Ring, arrays: Sequence[np.ndarray]
) -> tuple[Call, Call]:
    """Return forward, and the backward of the latest forward."""
    *inputs, dout = arrays
    latest: list[Any] = []

    def forward() -> None:
        latest[:] = attend.forward(*inputs)

    return forward, lambda: attend.backward(dout, latest[1])


def _rate(
    direction: str, seq_len: int, heads: int, dim: int, seconds: float, ranks: int = 1
) -> str:
    flops = cost.attention_flops(seq_len**2 / 2, heads, dim)
    if direction == "backward":
        flops *= cost.BACKWARD_WORK
    return f"{flops / seconds / ranks / 1e9:.1f} GF/s"
