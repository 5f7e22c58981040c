"""What one rank of a group knows of the others: who has failed, who has left, who waits for whom, who is missing.

The ranks of a group make the same collective calls in the same order, and each counts its own: 1, 2, 3, ... A note
names the call that it is about, so the receiver can compare it with its own count:

- LEFT after call 7: a receiver in call 7 goes on, one in call 8 would wait for ever, and fails;
- WAITING in call 8, sent to rank 0: rank 0 answers HERE once it has come to call 8. So rank 0 knows who is there, and
  the others know whether rank 0 is. Whoever has not said WAITING is missing;
- ELSEWHERE: see wait.Vigil, which finds two ranks that wait for each other in different groups;
- WITHDRAWN: see wait.wait_for_ranks, in which a rank has failed while it made a communicator with the receiver.

Only long waits send the last three kinds, each once a call, so the notes are few.
"""

from __future__ import annotations

from collections.abc import Container

from mpipipe.comm import rank_list
from mpipipe.comm.notes import Kind, Note, Notes
from mpipipe.comm.process import Failure, Process
from mpipipe.comm.types import Communicator

LISTED = 8  # different waits that a text names


class Presence:
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

    def __init__(self, comm: Communicator, members: tuple[int, ...], process: Process) -> None:
        self.notes, self.members, self.process = Notes(comm), members, process
        self.rank, self.size = comm.rank, comm.size
        self.calls = 0
        self.closing = False
        self.failure: Failure | None = None
        self.elsewhere: Note | None = None
        self.left: dict[int, tuple[int, str]] = {}
        self.told = self.told_elsewhere = 0  # calls for which a note WAITING, or ELSEWHERE, was sent
        self.sent = self.answers = 0
        self.received = 0
        self.waiting: dict[int, tuple[int, str]] = {}
        self.unanswered: dict[int, int] = {}

    def fail(self, failure: Failure) -> None:
        """Tell every other rank, once, that this one cannot go on. Returns without waiting."""
        with self.process.lock:
            if self.failure is None:
                self.failure = failure
                self._send_all(Kind.FAILED, failure.number, failure.text)

    def leave(self, text: str) -> None:
        """Tell every other rank that this one takes part in no call after the current one."""
        with self.process.lock:
            self._send_all(Kind.LEFT, self.calls, text)

    def withdraw(self, members: Container[int], failure: Failure) -> None:
        """Tell the world ranks `members` of this group that this rank makes no communicator with them."""
        with self.process.lock:
            self._send_all(Kind.WITHDRAWN, failure.number, failure.text, members)

    def _send_all(self, kind: Kind, number: int, text: str, members: Container[int] | None = None) -> None:
        if self.process.lifeline is not None and self.process.lifeline.is_broken:
            return  # all hear of the death from MPI, and sending to the dead raises
        for peer, member in enumerate(self.members):
            if peer != self.rank and (members is None or (member in members and member not in self.process.left)):
                self.notes.send(peer, kind, number, text)

    def read(self) -> None:
        """Take in the notes that have arrived, and answer those that ask; never waits."""
        for note in self.notes.read():
            self._take(note)
        for peer, call in tuple(self.unanswered.items()):
            if call <= self.calls:
                del self.unanswered[peer]
                self.notes.send(peer, Kind.HERE, call, "")
        for peer, (call, text) in self.left.items():
            if call < self.calls and self.failure is None:
                missed = Failure(-1 - self.members[peer], text)
                self.fail(missed)
                self.process.hear(missed)

    def _take(self, note: Note) -> None:
        if note.kind == Kind.FAILED:
            if self.failure is None:  # else this rank has raised what ended the group, and may have gone on since
                self.failure = Failure(note.call, note.text)
                self.process.hear(self.failure)
        elif note.kind == Kind.LEFT:
            self.left[note.source] = note.call, note.text
            self.process.left[self.members[note.source]] = note.text
        elif note.kind == Kind.WITHDRAWN:
            self.process.withdrawn[self.members[note.source]] = Failure(note.call, note.text)
        elif note.kind == Kind.WAITING:
            self.received += 1
            self.waiting[note.source] = note.call, note.text
            self.unanswered[note.source] = note.call
        elif note.kind == Kind.HERE:
            self.answers += 1
        else:
            self.elsewhere = note

    def settled(self, notes: int) -> bool:
        """Whether all `notes` to rank 0 have been received and answered, and all that was sent has left."""
        self.read()
        complete = self.answers == self.sent if self.rank else self.received == notes
        return complete and not self.unanswered and self.notes.all_sent()

    # -- who is missing -----------------------------------------------------------------------------------------

    def tell_leader(self, what: str) -> None:
        """Tell rank 0, once a call, that this rank waits for all others."""
        if self.rank == 0 or self.told == self.calls or self.closing:
            return
        with self.process.lock:
            self.told = self.calls
            self.sent += 1
            self.notes.send(0, Kind.WAITING, self.calls, what)

    def tell_who_waits_here(self, mine: Presence, what: str) -> None:
        """Tell one rank that waits for this one in this group that this one waits for it in the group of `mine`."""
        for peer, call in self.unanswered.items():
            member = self.members[peer]
            if call > self.calls and member in mine.members and mine.told_elsewhere < mine.calls and not mine.closing:
                mine.told_elsewhere = mine.calls
                mine.notes.send(mine.members.index(member), Kind.ELSEWHERE, mine.calls, what)

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
        for group in self.process.groups:
            other: Presence = group.presence
            for peer, call in other.unanswered.items():
                if call > other.calls:
                    texts[other.members[peer]] = other.waiting[peer][1]
        return texts
