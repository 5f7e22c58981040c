"""`bench transport`: messages through the mailbox against bare Isend and Irecv, over a range of sizes.

Two ranks play ping-pong. The bare candidate posts a receive, sends, and waits, with buffers laid out beforehand: two
for receiving, in turn, since a pipeline still reads one array while the next arrives.
"""

from __future__ import annotations

import numpy as np

from mpipipe.arrays import Array
from mpipipe.bench.timing import compare, report
from mpipipe.comm.mailbox import Envelope, Mailbox
from mpipipe.comm.transport.device import DeviceTransport
from mpipipe.comm.transport.host import HostTransport
from mpipipe.errors import ArgumentError
from mpipipe.job import runtime
from mpipipe.job.types import Communicator, MpiCommunicator
from mpipipe.text import counted

SIZES = (8, 1 << 10, 1 << 16, 1 << 20, 1 << 22, 1 << 24)


def run(repeats: int = 50) -> None:
    """Print a line for each size: microseconds a message, GB/s, and the ratio of bandwidths."""
    comm = runtime.world()
    if comm.size != 2:
        raise ArgumentError("bench transport", found=counted(comm.size, "rank"), expected="2 ranks")
    transport = HostTransport(comm)
    for size in SIZES:
        count = max(2, min(200, (1 << 23) // size))
        ours, bare = PingPong(comm, transport, np.ones(size // 8), count), _Bare(comm, size, count)
        times = [seconds / (2 * count) for seconds in compare(comm, [ours, bare], repeats)]
        report(
            comm,
            f"transport {size:>9} B",
            f"{times[0] * 1e6:9.2f} us {size / times[0] / 1e9:6.2f} GB/s, bare {times[1] * 1e6:9.2f} us "
            f"{size / times[1] / 1e9:6.2f} GB/s, difference {1e6 * (times[0] - times[1]):6.2f} us",
            times[1] / times[0],
            "bandwidth; at least 0.95 from 1 MiB on, at most 6 us more at 8 B",
        )
    transport.close()


class PingPong:
    """`count` turns of an array from rank 0 to rank 1 and back, through a mailbox.

    comm : two ranks
    transport : of `comm`
    array : what is sent
    """

    def __init__(
        self, comm: Communicator, transport: HostTransport | DeviceTransport, array: Array, count: int
    ) -> None:
        self.rank, self.mailbox = comm.rank, Mailbox(transport)
        self.envelopes = [Envelope(1 - comm.rank, 1, m, 0, (0, 0), (0, 1)) for m in range(count)]
        self.array = array
        leaf = (array.shape, array.dtype)
        self.schedule = self.mailbox.receive_schedule(self.envelopes, [[leaf]] * count)

    def __call__(self) -> None:
        """Play all turns."""
        mailbox, array = self.mailbox, self.array
        mailbox.begin_call(self.schedule, 1)
        for envelope in self.envelopes:
            if self.rank == 0:
                mailbox.put(envelope, [array])
            mailbox.release(mailbox.take()[1])
            if self.rank == 1:
                mailbox.put(envelope, [array])
        mailbox.flush()


class _Bare:
    """The same turns with bare mpi4py."""

    def __init__(self, comm: MpiCommunicator, size: int, count: int) -> None:
        self.comm, self.count = comm, count
        self.sent, self.received = np.ones(size // 8), [np.empty(size // 8), np.empty(size // 8)]

    def __call__(self) -> None:
        comm, peer, sent, received = self.comm, 1 - self.comm.rank, self.sent, self.received
        for turn in range(self.count):
            arriving = comm.Irecv(received[turn % 2], peer, 1)
            if comm.rank == 0:
                leaving = comm.Isend(sent, peer, 1)
                arriving.Wait()
            else:
                arriving.Wait()
                leaving = comm.Isend(sent, peer, 1)
            leaving.Wait()
