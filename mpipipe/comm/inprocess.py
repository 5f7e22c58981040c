"""Several ranks in one process, a thread each, with the few methods of an mpi4py communicator that mpipipe uses.

For unit tests and for trying a pipeline on a machine without MPI; it is never chosen in place of MPI. It is stricter
than MPI: a receive must have exactly the sender's length and dtype, all ranks must call the same collective, and
nothing may be left unreceived at the end. Sends can be synchronous, and messages can be delayed at random.
"""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict

from mpipipe.comm.process import Process, adopt
from mpipipe.errors import ArgumentError, MpipipeError, PeerError

ANY = -1
PAUSE = 2e-5


class InProcessError(MpipipeError, RuntimeError):
    """The program under test broke a rule of message passing."""


def run(ranks: int, function, *, synchronous: bool = False, delay: float = 0.0, seed: int = 0, tag_ub: int = 32767):
    """Call `function(comm)` on `ranks` threads; returns the list of results in rank order.

    Parameters
    ----------
    synchronous : every Isend behaves as Issend
    delay : each message becomes visible after a random time of up to this many seconds; order is kept as in MPI
    seed : of those random times
    tag_ub : the largest tag

    Raises the error of the first rank that failed, and InProcessError when a message was never received.
    """
    if not isinstance(ranks, int) or ranks < 1:
        raise ArgumentError("ranks", found=repr(ranks), expected="an integer of at least 1")
    world = _World(ranks, synchronous, delay, seed, tag_ub)
    results: list = [None] * ranks
    errors: list = [None] * ranks

    def body(rank):
        adopt(Process())
        try:
            results[rank] = function(Communicator(world, ("world",), tuple(range(ranks)), rank))
        except BaseException as error:
            errors[rank] = error
            world.broken = True

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failed = [error for error in errors if error is not None]
    if failed:
        raise next((error for error in failed if not isinstance(error, PeerError)), failed[0])
    world.check_nothing_left()
    return results


class Communicator:
    """The calling thread's end of a communicator; ranks and tags as in mpi4py."""

    IN_PLACE = "in place"

    def __init__(self, world, context, members, rank):
        self.world, self.context, self.members, self.rank = world, context, members, rank
        self.size = len(members)
        self.tag_ub = world.tag_ub
        self.store: dict = {}  # see mpipipe.comm.attributes
        self._collectives = 0

    def Isend(self, array, dest, tag=0):
        return self._send(array, dest, tag, self.world.synchronous)

    def Issend(self, array, dest, tag=0):
        return self._send(array, dest, tag, True)

    def _send(self, array, dest, tag, synchronous):
        if not 0 <= tag <= self.tag_ub:
            raise InProcessError("tag out of range", rank=self.rank, found=tag, expected=f"0 to {self.tag_ub}")
        if not 0 <= dest < self.size:
            raise InProcessError("no such rank", rank=self.rank, found=dest, expected=f"0 to {self.size - 1}")
        return self.world.send(_Send(self, dest, tag, array, synchronous))

    def Irecv(self, array, source=ANY, tag=ANY):
        return self.world.post(_Receive(self, source, tag, array))

    def Recv(self, array, source=ANY, tag=ANY):
        request = self.Irecv(array, source, tag)
        while not request.Test():
            time.sleep(PAUSE)

    def Sendrecv(self, sendbuf, dest, sendtag=0, recvbuf=None, source=ANY, recvtag=ANY):
        requests = [self.Irecv(recvbuf, source, recvtag), self.Isend(sendbuf, dest, sendtag)]
        while requests:
            if requests[-1].Test():
                requests.pop()
            else:
                time.sleep(PAUSE)

    def Iprobe(self, source=ANY, tag=ANY):
        return self.world.probe(self.context, self.rank, source, tag)

    def Iallreduce(self, sendbuf, recvbuf):
        mine = recvbuf.copy() if sendbuf is self.IN_PLACE else sendbuf.copy()

        def finish(parts):
            total = parts[0].copy()
            for part in parts[1:]:
                total += part
            recvbuf[...] = total

        return self._collective("Iallreduce", mine, finish)

    def Iallgather(self, sendbuf, recvbuf):
        def finish(parts):
            recvbuf.reshape(self.size, -1)[...] = [part.reshape(-1) for part in parts]

        return self._collective("Iallgather", sendbuf.copy(), finish)

    def Ibcast(self, array, root=0):
        def finish(parts):
            array[...] = parts[root]

        return self._collective("Ibcast", array.copy(), finish)

    def allgather(self, value):
        gathered: list = []
        self._complete(self._collective("allgather", value, gathered.extend))
        return gathered

    def bcast(self, value, root=0):
        return self.allgather(value)[root]

    def Barrier(self):
        self.allgather(None)

    def Split(self, color, key=0):
        number = self._collectives
        entries = sorted((k, r) for r, (c, k) in enumerate(self.allgather((color, key))) if c == color)
        ranks = [r for _, r in entries]
        context = (*self.context, number, color)
        members = tuple(self.members[r] for r in ranks)
        return Communicator(self.world, context, members, ranks.index(self.rank))

    def Dup(self):
        return self.Split(0, self.rank)

    def Idup(self):
        number = self._collectives
        request = self._collective("Idup", None, None)
        return Communicator(self.world, (*self.context, number, "dup"), self.members, self.rank), request

    def Set_name(self, name):
        self.name = name

    def Free(self):
        for item in self.store.values():
            item.close()
        self.Barrier()
        self.world.check_nothing_left(self.context)

    def _collective(self, kind, value, finish):
        self._collectives += 1
        return self.world.meet((self.context, self._collectives), kind, self.rank, self.size, value, finish)

    def _complete(self, request):
        while not request.Test():
            time.sleep(PAUSE)


class _Send:
    def __init__(self, comm, dest, tag, array, synchronous):
        self.context, self.source, self.dest, self.tag = comm.context, comm.rank, dest, tag
        self.array = array if synchronous else array.copy()
        self.visible = time.monotonic() + comm.world.next_delay()
        self.done = not synchronous
        self.progress = comm.world.progress

    def Test(self):
        self.progress(self.context, self.dest)
        return self.done


class _Receive:
    def __init__(self, comm, source, tag, array):
        self.context, self.dest, self.source, self.tag, self.array = comm.context, comm.rank, source, tag, array
        self.done, self.error = False, None
        self.progress, self.withdraw = comm.world.progress, comm.world.withdraw

    def wants(self, send):
        return self.source in (ANY, send.source) and self.tag in (ANY, send.tag)

    def complete(self, send):
        self.done = True
        found, expected = (send.array.nbytes, send.array.dtype), (self.array.nbytes, self.array.dtype)
        if found != expected:
            self.error = InProcessError(
                f"message from rank {send.source} with tag {send.tag} does not fit the receive buffer",
                rank=self.dest,
                found=f"{found[0]} bytes of {found[1]}",
                expected=f"{expected[0]} of {expected[1]}",
            )
            return
        self.array.reshape(-1)[...] = send.array.reshape(-1)

    def Test(self):
        self.progress(self.context, self.dest)
        if self.error is not None:
            raise self.error
        return self.done

    def Cancel(self):
        self.withdraw(self)


class _Meeting:
    """One collective call on one communicator."""

    def __init__(self, world, kind, size):
        self.world, self.kind, self.size, self.values = world, kind, size, {}


class _Entry:
    """One rank's request in a meeting."""

    def __init__(self, meeting, finish):
        self.meeting, self.finish = meeting, finish

    def Test(self):
        meeting = self.meeting
        if len(meeting.values) < meeting.size:
            if meeting.world.broken:
                raise PeerError("another rank failed during a collective")
            return False
        if self.finish is not None:
            finish, self.finish = self.finish, None
            finish([meeting.values[rank] for rank in range(meeting.size)])
        return True

    def Cancel(self):
        self.finish = None


class _World:
    """What the threads share."""

    def __init__(self, ranks, synchronous, delay, seed, tag_ub):
        self.ranks, self.synchronous, self.delay, self.tag_ub = ranks, synchronous, delay, tag_ub
        self.random = random.Random(seed)
        self.lock = threading.RLock()
        self.sent: dict = defaultdict(list)
        self.posted: dict = defaultdict(list)
        self.meetings: dict = {}
        self.broken = False

    def next_delay(self):
        return self.random.uniform(0, self.delay) if self.delay else 0.0

    def send(self, message):
        with self.lock:
            self.sent[message.context, message.dest].append(message)
        return message

    def post(self, receive):
        with self.lock:
            self.posted[receive.context, receive.dest].append(receive)
        return receive

    def withdraw(self, receive):
        with self.lock:
            waiting = self.posted[receive.context, receive.dest]
            if receive in waiting:
                waiting.remove(receive)

    def progress(self, context, dest):
        """Match posted receives with sent messages, in the order that MPI prescribes."""
        with self.lock:
            sent, posted = self.sent[context, dest], self.posted[context, dest]
            for receive in list(posted):
                message = next((m for m in sent if receive.wants(m)), None)
                if message is not None and message.visible <= time.monotonic():
                    posted.remove(receive)
                    sent.remove(message)
                    receive.complete(message)
                    message.done = True

    def probe(self, context, dest, source, tag):
        with self.lock:
            now = time.monotonic()
            return any(
                source in (ANY, m.source) and tag in (ANY, m.tag) and m.visible <= now for m in self.sent[context, dest]
            )

    def meet(self, key, kind, rank, size, value, finish):
        with self.lock:
            meeting = self.meetings.setdefault(key, _Meeting(self, kind, size))
            if meeting.kind != kind:
                self.broken = True
                raise InProcessError("ranks call different collectives", rank=rank, found=kind, expected=meeting.kind)
            meeting.values[rank] = value
            if len(meeting.values) == size:
                del self.meetings[key]
        return _Entry(meeting, finish)

    def check_nothing_left(self, context=None):
        with self.lock:
            for boxes, what in ((self.sent, "was never received"), (self.posted, "was posted, and nothing came")):
                for (where, dest), box in boxes.items():
                    if box and (context is None or where == context):
                        peer = f"from rank {box[0].source} " if box[0].source != ANY else ""
                        raise InProcessError(f"a message {peer}to rank {dest} with tag {box[0].tag} {what}", rank=dest)
