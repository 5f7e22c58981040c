"""Messages of device arrays by NCCL, in the order of streams: no host waits for the data of a message.

    rank 0   compute  | kernels of 0F0 | kernels of 0F1 | ...
             lane 0>1          waits    | send 0F0 ....|
    rank 1   lane 0>1 waits ..........  | receive .....|
             compute  waits ..........                 | kernels of 1F0 | ...

The host of rank 1 puts the receive on its lane, lets its stream of computation wait for it there, and launches the
kernels of 1F0, whatever rank 0 has done by then. A receive is complete for the mailbox (`Test`) as soon as it is on its
lane, except that the host runs ahead of the device by one received message and no more (`AHEAD`): so it is never kept
inside CUDA, whose queue of launches is limited, by a rank that has failed.

Why this cannot deadlock
------------------------
A kernel of NCCL waits for its other end, and holds its place meanwhile. Everything after it on its stream waits, and
where the GPU maps several streams to one queue of its hardware, everything after it there. So nothing is assumed of
streams but that what was issued first may have to end first. The rules:

1. All messages of a call, of all ranks, have one order (ActionPlan.order_keys). A message stands where the action that
   makes it ends: in the schedule's simulation or, for large schedules, by a formula. Sums over replicas stand in the
   order as well, all buckets of a stage where the action ends that completes its gradients, in an order on which the
   replicas have agreed. Each rank issues its sends, receives and buckets in that order: receives that come before a
   send or a bucket are issued before it (Mailbox.start_before).
2. What an operation waits for on its own device was issued before it: producers, the last readers of a buffer.
3. The host waits for the device only for messages that it has taken before, in the one loop of wait.py.
4. NCCL's kernels that can wait at once take less than half of a GPU (nccl/channel.py).
5. Connections of NCCL are made beforehand. Calls whose kernels may still have to be compiled or loaded, or memory be
   allocated, do without NCCL (`begin_call`) until their last message has ended; then come their sums. So do calls whose
   messages travel in another way (pipeline/gradient_sums.py).

The order fits the actions: an action ends after the messages that it needs are made and before those that it makes.
So when a rank takes message m, it has issued all its sends that come before m, since they are made by actions that
precede the one that needs m.

Now assume that some messages do not end, and let m be the first of them in the order. On either rank, the receives and
sends before m end. A host that has not come to issue m waits for a message n that it has taken (rule 3), or issued
before m. Then n comes before m, by rule 1 and since each action comes after the messages that it needs; so n ends, and
the host goes on. Hence both ends of m are issued. Before them, on their devices, stand operations of messages that end,
and computations that wait for such messages only (rule 2); so these end too, even in a single queue. Then both kernels
of m run, since there is room (rule 4), and m ends. The same holds for a bucket of a sum, whose ranks are more than two.
Where replicas are joined by sums, the order of each pipeline is the same, for they have the same schedule.

A bucket may be issued while its action goes on (pipeline/gradient_sums.py). Nothing above changes: the messages that
the action needs, and the layers that have ended, were issued before it (rule 2), and what is left of the action waits
for buckets that were issued before. The message of the same action may come before or after a bucket: it belongs to one
pipeline, and its receiver has nothing else at this moment.

Layers may exchange messages of their own by MPI within an action, as rings of attention do, also between the ranks of
a sum. On each of these ranks a bucket comes after all messages of the layers that have ended, and before those of the
layers to come. A receiver that waits for a message is in the same layer as its sender. Hence both have issued the same
buckets before, and these end.

Messages of one ordered pair of ranks meet in the order in which each side issues them, as NCCL promises for a
communicator of their own. Their sizes agree: both ends have them from an earlier call, and a stage whose output differs
is refused before it is sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array, DeviceArray, Event, Shape
from mpipipe.comm.nccl.channel import Channel, NcclTask, close_together, new_identity, open_together
from mpipipe.comm.transport.device import DeviceTransport
from mpipipe.comm.transport.host import Transport, check_sendable
from mpipipe.job import RankGroup, Request, keep_forever, register_progress, unregister_progress

AHEAD = 1  # messages taken by the host whose data the device is still waiting for
Pair = tuple[int, int]  # of ranks: from, to


class NcclTransport(Transport):
    """Messages of device arrays by NCCL, all others by another transport; the constructor and `close` are collective.

    `pairs` are (from, to) of ranks that exchange messages, the same on all ranks; each has a lane of its own. `other`
    takes host arrays, and all arrays of calls that are not repeated.
    """

    def __init__(self, group: RankGroup, pairs: Iterable[Pair], other: DeviceTransport) -> None:
        self.other, self.group, self.channels = other, group, other.channels
        self.lanes = _open_lanes(group, sorted(pairs))
        # rank at the other end -> the channel of the lane
        self.outgoing = {to: lane for (source, to), lane in self.lanes.items() if source == group.rank}
        self.incoming = {source: lane for (source, to), lane in self.lanes.items() if to == group.rank}
        # on the lanes, in the order in which it was put there
        self.underway: deque[tuple[Event, _Send, Channel]] = deque()
        self.taken: deque[Event] = deque()  # of receives that have tested true
        self.repeated = False
        register_progress(self)

    def empty(self, shape: Shape, kind: np.dtype) -> DeviceArray:
        return self.other.empty(shape, kind)

    def retire(self, array: Array) -> None:
        self.other.retire(array)

    def begin_call(self, repeated: bool) -> bool:
        self.repeated = repeated  # only then are kernels and memory there
        return repeated

    def isend(self, array: Array, peer: int, channel: int, tag: int) -> Request:
        lane = self.outgoing.get(peer)
        if lane is None or not self.repeated or not arrays.is_device(array):
            return self.other.isend(array, peer, channel, tag)
        check_sendable(array)
        return self._put(_Send(self, array), lane, 0, arrays.record())

    def irecv(self, array: Array, peer: int, channel: int, tag: int) -> Request:
        lane = self.incoming.get(peer)
        if lane is None or not self.repeated or not arrays.is_device(array):
            return self.other.irecv(array, peer, channel, tag)
        check_sendable(array)
        return self._put(_Receive(self, array), lane, 1, self.other.free_event(array))

    def _put(self, message: _Send, lane: Channel, end: int, ready: Event) -> _Send:
        register_progress(self)  # for the thread that uses it now
        message.event = ready
        if message.array.nbytes:
            message.event = lane.put(partial(_move, message.array, end), [ready])
            self.underway.append((message.event, message, lane))
        return message

    def progress(self) -> bool:
        self.other.progress()
        for _ in range(len(self.underway)):
            event, message, lane = self.underway.popleft()
            lane.check()
            if not arrays.is_done(event):
                self.underway.append((event, message, lane))
        return True

    def settled(self) -> bool:
        self.progress()
        return not self.underway and self.other.settled()

    def may_take(self) -> bool:
        """Whether the host may go on to work that needs one more message."""
        while self.taken and arrays.is_done(self.taken[0]):
            self.taken.popleft()
        return len(self.taken) < AHEAD

    def drop_buffers(self) -> None:
        self.other.drop_buffers()

    def abort(self) -> None:
        unregister_progress(self)
        keep_forever(self)
        for channel in self.lanes.values():
            channel.abort()
        self.other.abort()

    def close(self) -> None:
        unregister_progress(self)
        close_together(self.lanes.values(), self.group)
        self.lanes, self.outgoing, self.incoming = {}, {}, {}
        self.other.close()
        self.channels = []


def _open_lanes(group: RankGroup, pairs: list[Pair]) -> dict[Pair, Channel]:
    """Return the lanes that end at this rank. Threads open them, so they need no common order."""
    what = "opening NCCL between the ranks of the pipeline"
    mine = {pair: new_identity() for pair in pairs if pair[0] == group.rank}
    identities = {pair: identity for each in group.gather(what, mine) for pair, identity in each.items()}
    here = [pair for pair in pairs if group.rank in pair]
    tasks = [NcclTask(partial(_open_lane, int(pair[1] == group.rank), identities[pair]), what) for pair in here]
    return dict(zip(here, open_together(tasks, group, what)))


def _open_lane(end: int, identity: bytes) -> Channel:
    """One end of a lane, 0 for the one that sends; one byte goes through, so that NCCL has connected the two."""
    byte = arrays.zeros(1, np.uint8, "cuda")
    arrays.stream().synchronize()
    return Channel(2, end, identity, partial(_move, byte, end))


def _move(array: DeviceArray, end: int, communicator: Any, stream: int) -> None:
    """Send an array as bytes from end 0 of a lane to end 1."""
    move = communicator.recv if end else communicator.send
    move(arrays.address(array), array.nbytes, arrays.nccl().NCCL_UINT8, 1 - end, stream)


class _Send:
    """The request of one array that is sent on a lane; `event` is after it there."""

    event: Event

    def __init__(self, transport: NcclTransport, array: DeviceArray) -> None:
        self.transport, self.array, self.finished = transport, array, False

    def Test(self) -> bool:
        """Whether the array may change."""
        self.finished = self.finished or arrays.is_done(self.event)
        return self.finished

    def Cancel(self) -> None:
        """Nothing on a device can be withdrawn: the transport's `abort` ends it."""
        keep_forever((self, self.transport))


class _Receive(_Send):
    """The same of one that is received."""

    def Test(self) -> bool:
        """Whether its consumer may be queued: once it is true, later work on the current stream finds the data."""
        if not self.finished and self.transport.may_take():
            self.finished = True
            self.transport.taken.append(self.event)
            arrays.wait_for(self.event)
        return self.finished
