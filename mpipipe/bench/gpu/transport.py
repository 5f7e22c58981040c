"""Messages between the GPUs of two ranks: by pinned host memory, directly where MPI takes device memory, and by NCCL.

Two ranks play ping-pong through the mailbox, as in `bench transport`; by NCCL without it, since a ping-pong has its own
order. Two processes on one GPU take turns on it by time slices, unless NVIDIA's MPS runs. Most of what is measured then
is waiting for the turn, and no rate of the transports.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from typing import Any

from mpipipe import arrays
from mpipipe.bench.gpu.rows import Row, normal
from mpipipe.bench.timing import compare
from mpipipe.bench.transport import PingPong
from mpipipe.comm.nccl.channel import agree_on_nccl
from mpipipe.comm.transport import gpu_aware
from mpipipe.comm.transport.choose import make_transport
from mpipipe.comm.transport.gpu_aware import GpuAwareness
from mpipipe.job import runtime
from mpipipe.job.group import Group, group_of
from mpipipe.job.types import Communicator
from mpipipe.job.wait import wait_for

SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 26)
QUICK = dict(repeats=3, sizes=(1 << 16, 1 << 24))


def measure(repeats: int = 10, sizes: Sequence[int] = SIZES, comm: Communicator | None = None) -> Iterator[Row]:
    """Yield a row for each size and transport; collective over the two ranks of `comm` (COMM_WORLD by default)."""
    comm = runtime.resolve(comm)
    group = group_of(comm)
    verdict = gpu_aware.detect(comm)
    ways = {"staged": GpuAwareness(False, "measured")}
    if verdict.direct:
        ways["direct"] = verdict
    place = socket.gethostname(), arrays.bus_id()
    shared = len(set(group.gather("bench: the GPUs", place))) < comm.size
    by_nccl = agree_on_nccl([group], "cuda", messages=2).messages  # one each way
    note = ", by processes that take turns on one GPU: no rate of the transport" if shared else ""
    for size in sizes:
        rates = {}
        for name, way in ways.items():
            rates[name] = _rate(comm, make_transport(comm, 1, False, "cuda", way), size, repeats)
        if by_nccl:
            rates["nccl"] = _nccl_rate(comm, group, ways["staged"], size, repeats)
        staged = rates.pop("staged")
        yield Row(f"staged, {size} B{note}", staged, "GB/s")
        for name, rate in rates.items():
            goal = "none" if shared else "above 1 for large messages"
            yield Row(f"{name}, {size} B{note}", rate, "GB/s", "staged", staged, goal)


def _rate(comm: Communicator, transport: Any, size: int, repeats: int) -> float:
    """Return GB/s of messages of `size` bytes, and close the transport."""
    count = _turns(size)
    game = PingPong(comm, transport, normal((size // 4,), "float32"), count)
    (seconds,) = compare(comm, [game], repeats)
    transport.close()
    return 2 * count * size / seconds / 1e9


def _turns(size: int) -> int:
    return max(2, min(50, (1 << 26) // size))


def _nccl_rate(comm: Communicator, group: Group, other: GpuAwareness, size: int, repeats: int) -> float:
    """Return GB/s of messages of `size` bytes by NCCL; `other` is for what it does not take."""
    transport = make_transport(comm, 1, False, "cuda", other, group, [(0, 1), (1, 0)])
    transport.begin_call(repeated=True)  # all memory is there
    peer, count = 1 - comm.rank, _turns(size)
    sent = normal((size // 4,), "float32")
    received = transport.empty(sent.shape, sent.dtype)
    moves = [lambda: transport.isend(sent, peer, 0, 1), lambda: transport.irecv(received, peer, 0, 1)]

    def game() -> None:
        for _ in range(count):
            for move in moves if comm.rank == 0 else moves[::-1]:
                wait_for(move())
        arrays.stream().synchronize()

    (seconds,) = compare(comm, [game], repeats)
    transport.close()
    return 2 * count * size / seconds / 1e9
