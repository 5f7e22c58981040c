"""What one rank of a group knows of the others: who has failed, who has left, who waits for whom, who is missing.

The ranks of a group make the same collective calls in the same order, and each counts its own: 1, 2, 3, ... A note
names the call that it is about, so the receiver can compare it with its own count:

- LEFT after call 7: a receiver in call 7 goes on, one in call 8 would wait for ever, and fails;
- WAITING in call 8, sent to rank 0: rank 0 answers HERE once it has come to call 8. So rank 0 knows who is there, and
  the others know whether rank 0 is. Whoever has not said WAITING is missing;
- ELSEWHERE: see wait.LongWait, which finds two ranks that wait for each other in different groups;
- WITHDRAWN: see wait.wait_for_ranks, in which a rank has failed while it made a communicator with the receiver.

Only long waits send the last three kinds, each once a call, so the notes are few.
"""

from __future__ import annotations

from collections.abc import Container
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from mpipipe.job import rank_list
from mpipipe.job.context import Failure, RankContext
from mpipipe.job.requests import own
from mpipipe.job.types import Communicator, Request

LISTED = 8  # different waits that a text names


class PeerStatus:
    """News among the ranks of one group.

    Parameters
    ----------
    comm : Communicator
        The group's private communicator, on which notes travel.
    members : tuple of int
        Rank in COMM_WORLD of each rank.
    process : Process
        State of this rank.

    Attributes
    ----------
    calls : int
        Collective calls of the group that this rank has begun.
    failure : Failure or None
        Why the group cannot be used any more.
    elsewhere : Note or None
        From rank 0, which waits for this rank in a call that this rank may not have come to.
    closing : bool
        Whether the group closes, so that no rank sends notes about waits any more.
    left : dict
        Rank -> (calls, text) of each rank whose script has ended.
    sent, answers : int
        Notes WAITING that this rank has sent to rank 0, and its answers.
    received : int
        On rank 0: number of notes WAITING from all other ranks.
    waiting : dict
        On rank 0: rank -> (call, text) of the last note WAITING from that rank.
    unanswered : dict
        On rank 0: rank -> call of each note WAITING that has no answer yet.
    """

    def __init__(self, comm: Communicator, members: tuple[int, ...], context: RankContext) -> None:
        self.messages, self.members, self.context = ControlMessages(comm), members, context
        self.rank, self.size = comm.rank, comm.size
        self.calls = 0
        self.closing = False
        self.failure: Failure | None = None
        self.elsewhere: ControlMessage | None = None
        self.left: dict[int, tuple[int, str]] = {}
        self.told = self.told_elsewhere = 0  # calls for which a note WAITING, or ELSEWHERE, was sent
        self.sent = self.answers = 0
        self.received = 0
        self.waiting: dict[int, tuple[int, str]] = {}
        self.unanswered: dict[int, int] = {}

    def fail(self, failure: Failure) -> None:
        """Tell every other rank, once, that this one cannot go on. Returns without waiting."""
        with self.context.lock:
            if self.failure is None:
                self.failure = failure
                self._send_all(ControlKind.FAILED, failure.number, failure.text)

    def leave(self, text: str) -> None:
        """Tell every other rank that this one takes part in no call after the current one."""
        with self.context.lock:
            self._send_all(ControlKind.LEFT, self.calls, text)

    def withdraw(self, members: Container[int], failure: Failure) -> None:
        """Tell the world ranks `members` of this group that this rank makes no communicator with them."""
        with self.context.lock:
            self._send_all(ControlKind.WITHDRAWN, failure.number, failure.text, members)

    def _send_all(self, kind: ControlKind, number: int, text: str, members: Container[int] | None = None) -> None:
        if self.context.lifeline is not None and self.context.lifeline.is_broken:
            return  # all hear of the death from MPI, and sending to the dead raises
        for peer, member in enumerate(self.members):
            if peer != self.rank and (members is None or (member in members and member not in self.context.left)):
                self.messages.send(peer, kind, number, text)

    def read(self) -> None:
        """Take in the notes that have arrived, and answer those that ask; never waits."""
        for message in self.messages.read():
            self._take(message)
        for peer, call in tuple(self.unanswered.items()):
            if call <= self.calls:
                del self.unanswered[peer]
                self.messages.send(peer, ControlKind.HERE, call, "")
        for peer, (call, text) in self.left.items():
            if call < self.calls and self.failure is None:
                missed = Failure(-1 - self.members[peer], text)
                self.fail(missed)
                self.context.add_failure(missed)

    def _take(self, message: ControlMessage) -> None:
        if message.kind == ControlKind.FAILED:
            if self.failure is None:  # else this rank has raised what ended the group, and may have gone on since
                self.failure = Failure(message.call, message.text)
                self.context.add_failure(self.failure)
        elif message.kind == ControlKind.LEFT:
            self.left[message.source] = message.call, message.text
            self.context.left[self.members[message.source]] = message.text
        elif message.kind == ControlKind.WITHDRAWN:
            self.context.withdrawn[self.members[message.source]] = Failure(message.call, message.text)
        elif message.kind == ControlKind.WAITING:
            self.received += 1
            self.waiting[message.source] = message.call, message.text
            self.unanswered[message.source] = message.call
        elif message.kind == ControlKind.HERE:
            self.answers += 1
        else:
            self.elsewhere = message

    def settled(self, messages: int) -> bool:
        """Whether all `notes` to rank 0 have been received and answered, and all that was sent has left."""
        self.read()
        complete = self.answers == self.sent if self.rank else self.received == messages
        return complete and not self.unanswered and self.messages.all_sent()

    # -- who is missing -----------------------------------------------------------------------------------------

    def tell_leader(self, what: str) -> None:
        """Tell rank 0, once a call, that this rank waits for all others."""
        if self.rank == 0 or self.told == self.calls or self.closing:
            return
        with self.context.lock:
            self.told = self.calls
            self.sent += 1
            self.messages.send(0, ControlKind.WAITING, self.calls, what)

    def tell_who_waits_here(self, mine: PeerStatus, what: str) -> None:
        """Tell one rank that waits for this one in this group that this one waits for it in the group of `mine`."""
        for peer, call in self.unanswered.items():
            member = self.members[peer]
            if call > self.calls and member in mine.members and mine.told_elsewhere < mine.calls and not mine.closing:
                mine.told_elsewhere = mine.calls
                mine.messages.send(mine.members.index(member), ControlKind.ELSEWHERE, mine.calls, what)

    def describe_missing(self) -> str:
        """Which ranks have not come to the call under way; "" where this rank does not know."""
        if self.rank > 0:
            return "" if self.answers == self.sent else "nothing was heard of rank 0"
        missing = [rank for rank in range(1, self.size) if self.waiting.get(rank, (0, ""))[0] < self.calls]
        if not missing:
            return ""
        others = self._who_waits_elsewhere()
        ranks_of: dict[str, list[int]] = {}
        for rank in missing:
            ranks_of.setdefault(others.get(self.members[rank], ""), []).append(rank)
        listed = [
            rank_list.named(ranks) + (f" (wait{'s' if len(ranks) == 1 else ''} for {text})" if text else "")
            for text, ranks in ranks_of.items()
        ]
        more = f" and {sum(map(len, list(ranks_of.values())[LISTED:]))} more" if len(listed) > LISTED else ""
        return f"missing: {', '.join(listed[:LISTED])}{more}"

    def _who_waits_elsewhere(self) -> dict[int, str]:
        """World rank -> text, of the ranks that wait for this one in another group, and so must still do so."""
        texts = {}
        for group in self.context.groups:
            other: PeerStatus = group.peers
            for peer, call in other.unanswered.items():
                if call > other.calls:
                    texts[other.members[peer]] = other.waiting[peer][1]
        return texts


# -- Short notes between the ranks of a group, beside all other traffic: who failed, who left, who waits for whom -----
#
# A note is a message of fixed size, so small that every MPI takes it at once, whether anybody receives it or not. So
# telling others never waits, not even for a rank that is itself about to end. Notes travel on a communicator of their
# own, and whoever waits looks for them: see wait.py for when, and presence.py for what they mean together.


MESSAGE_BYTES = 1024
HEAD = 3  # int64 numbers before the text: kind, source, call


class ControlKind(IntEnum):
    """What a note says."""

    FAILED = 0  # the sender cannot go on with this group; `call` is the number of the failure
    LEFT = 1  # the sender's script has ended after `call`
    WAITING = 2  # the sender waits for all ranks in `call`; goes to rank 0, which answers each with HERE
    HERE = 3  # rank 0 has come to `call`, too
    ELSEWHERE = 4  # the sender waits for the receiver in `call` of this group, and the receiver waits in another group
    WITHDRAWN = 5  # the sender makes no communicator with the receiver any more; `call` is the number of a failure


class ControlMessage(NamedTuple):
    """A note that was received."""

    kind: ControlKind
    source: int
    call: int
    text: str


class ControlMessages:
    """The notes of one rank on a private communicator, on which no other point-to-point message travels."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.sending: list[Request] = []
        self.receiving: tuple[Request, np.ndarray] | None = None  # a note that has arrived, and its buffer

    def send(self, peer: int, kind: ControlKind, call: int, text: str) -> None:
        """Start sending; never waits. A text that is too long is cut."""
        message = np.zeros(MESSAGE_BYTES, np.uint8)
        message[: 8 * HEAD].view(np.int64)[:] = kind, self.comm.rank, call
        data = np.frombuffer(text.encode("utf-8", "backslashreplace")[: MESSAGE_BYTES - 8 * HEAD], np.uint8)
        message[8 * HEAD :][: data.size] = data
        self.all_sent()
        self.sending.append(own(self.comm.Isend(message, peer, 0)))

    def read(self) -> list[ControlMessage]:
        """All notes that have arrived; never waits."""
        if self.sending:
            self.all_sent()  # drops those that have left
        arrived = []
        while self.receiving is not None or self.comm.Iprobe():
            if self.receiving is None:
                buffer = np.empty(MESSAGE_BYTES, np.uint8)
                self.receiving = own(self.comm.Irecv(buffer)), buffer
            request, message = self.receiving
            if not request.Test():
                break
            self.receiving = None
            kind, source, call = message[: 8 * HEAD].view(np.int64).tolist()
            text = message[8 * HEAD :].tobytes().rstrip(b"\0").decode("utf-8", "replace")
            arrived.append(ControlMessage(ControlKind(kind), source, call, text))
        return arrived

    def all_sent(self) -> bool:
        """Whether every note has left this rank."""
        self.sending = [request for request in self.sending if not request.Test()]
        return not self.sending
