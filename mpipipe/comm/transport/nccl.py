"""Messages of device arrays by NCCL, in the order of streams: no host waits until a device has come to them.

    rank 0   compute  | kernels of 0F0 | kernels of 0F1 | ...
             lane 0>1          waits    | send 0F0 ....|        and a note by MPI: "0F0, so many bytes, is on its way"
    rank 1   lane 0>1                   | receive ....|         put there once the note has come
             compute  |                      waits    | kernels of 1F0 | ...

The host of rank 1 launches the kernels of 1F0 when it has seen the note. The note says that rank 0 has *issued* the
send; neither host waits for the data. A message is complete for the mailbox (`Test`) when its receive is on the stream,
and the current stream waits for it there.

Why this cannot deadlock
------------------------
A kernel of NCCL waits for its other end and holds its place on the device meanwhile. So the rules are:

1. Each ordered pair of ranks has a communicator and a stream of its own, a lane: NCCL lets what is on one communicator
   run one after the other. In a lane the receives are in the order of the sends, for they follow the notes, and MPI
   keeps the notes of one pair in order. Both ends take the size from the note, so the two never differ.
2. A receive is put on its lane only after its send is on its lane.
3. A send is put on its lane only once the one before it is done, and nothing on a device waits for a send.
4. The host never waits inside CUDA or NCCL for another rank: lanes are opened, and NCCL's connections made, on threads
   (nccl/task.py), and calls whose kernels may still have to be compiled or loaded, or memory be allocated, do without
   NCCL (`begin_call`).
5. The kernels of all lanes take less than half of a GPU (nccl/choice.py).

Take the order in which the operations of all ranks are issued, a note being sent before it is read. Assume that not
all of them end, and look at the earliest that does not, leaving sends aside that run and wait for their receive. What
it waits for on its own device was issued before it, and has ended: producers, the readers of a buffer, the stream, and,
where streams share a queue of the hardware, all that stands before it there. A running send holds none of these up: by
rule 3 nothing of its lane stands behind it. So it runs, since there is room for it. If it computes, it ends. If it is a
receive, its send was issued before it, and so runs, and both end. Hence all end but sends whose receive is not issued.
Of these the host of the receiver knows by a note, and it issues the receive at the latest when an action needs that
message, or a later one of that lane, or when the call ends. By the proof of the schedule (schedules.check) each host
comes to all its actions. A message that comes before the mailbox has asked for it is received into memory of its own,
so it is never in the way of a later one.

None of this needs the order of the actions at the two ends to be the same: the note has the name of the message.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array, DeviceArray, Shape
from mpipipe.comm import communicators
from mpipipe.comm.group import Group
from mpipipe.comm.nccl.channel import close_together
from mpipipe.comm.process import register_progress, unregister_progress
from mpipipe.comm.requests import keep_forever
from mpipipe.comm.transport.device import DeviceTransport
from mpipipe.comm.transport.lanes import IncomingLane, OutgoingLane, Pair, open_channels
from mpipipe.comm.transport.sendable import check_sendable
from mpipipe.comm.types import Communicator, Request


class NcclTransport:
    """Messages of device arrays by NCCL, all others by another transport; the constructor and `close` are collective.

    Parameters
    ----------
    comm : Communicator
    group : Group
        Of the same ranks, in which they wait for each other.
    pairs : iterable of (int, int)
        Ranks of which one sends to the other, the same on all ranks.
    other : DeviceTransport
        Takes host arrays, and all arrays of calls that are not repeated.
    """

    def __init__(self, comm: Communicator, group: Group, pairs: Iterable[Pair], other: DeviceTransport) -> None:
        self.other, self.group, self.channels = other, group, other.channels
        self.notes = communicators.duplicate(comm)
        self.outgoing: dict[int, OutgoingLane] = {}
        self.incoming: dict[int, IncomingLane] = {}
        ends = open_channels(group, sorted(pairs))
        self._ends = list(ends.values())
        for (source, to), channel in ends.items():
            if source == group.rank:
                self.outgoing[to] = OutgoingLane(self, to, channel)
            else:
                self.incoming[source] = IncomingLane(self, source, channel)
        self.repeated = False
        register_progress(self)

    def empty(self, shape: Shape, kind: np.dtype) -> DeviceArray:
        """A receive buffer on the device; its content is undefined."""
        return self.other.empty(shape, kind)

    def retire(self, array: Array) -> None:
        """The work queued so far on the current stream is the last that reads this receive buffer."""
        self.other.retire(array)

    def begin_call(self, repeated: bool) -> None:
        """Begin a call; only one whose like has run before sends by NCCL, for its kernels and its memory are there."""
        self.repeated = repeated

    def isend(self, array: Array, peer: int, channel: int, tag: int) -> Request:
        """Start sending; the array must stay as it is until the request tests true."""
        lane = self.outgoing.get(peer)
        if lane is None or not self.repeated or not arrays.is_device(array):
            return self.other.isend(array, peer, channel, tag)
        check_sendable(array)
        register_progress(self)  # for the thread that uses it now
        return lane.send(array, (peer, channel, tag))

    def irecv(self, array: Array, peer: int, channel: int, tag: int) -> Request:
        """Start receiving into `array`, which must have the sender's size in bytes."""
        lane = self.incoming.get(peer)
        if lane is None or not self.repeated or not arrays.is_device(array):
            return self.other.irecv(array, peer, channel, tag)
        check_sendable(array)
        register_progress(self)
        return lane.receive(array, (peer, channel, tag), self.other.free_event(array))

    def progress(self) -> bool:
        """Let everything under way advance; never waits for the device."""
        self.other.progress()
        for sending in self.outgoing.values():
            sending.advance()
        for receiving in self.incoming.values():
            receiving.advance()
        return True

    def settled(self) -> bool:
        """Whether all that was received is really there."""
        self.progress()
        return all(lane.settled() for lane in self.incoming.values()) and self.other.settled()

    def drop_buffers(self) -> None:
        """Let go of retired buffers, which will not be used again."""
        self.other.drop_buffers()

    def abort(self) -> None:
        """After a failure: let kernels end that wait for other ranks, and free nothing that they may still touch."""
        unregister_progress(self)
        keep_forever(self)
        for channel in self._ends:
            channel.abort()
        self.other.abort()

    def close(self) -> None:
        """Free the communicators; collective, and only when nothing is under way."""
        unregister_progress(self)
        close_together(self._ends, partial(self.group.wait, what="the end of NCCL's communicators"))
        self.outgoing, self.incoming, self._ends = {}, {}, []
        self.notes.Free()
        self.other.close()
        self.channels = []
