"""What one rank of a group knows of the others: who has failed, who has left, who waits for whom, who is missing."""

from __future__ import annotations

from mpipipe.comm.notes import Kind, Note, Notes
from mpipipe.comm.process import Failure, Process

LISTED = 8  # ranks that a text names


class Presence:
    """News among the ranks of one group.

    Parameters
    ----------
    comm : the group's private communicator, on which notes travel
    members : rank in COMM_WORLD of each rank
    process : state of this rank

    Attributes
    ----------
    calls : collective calls of the group that this rank has begun
    failure : process.Failure for which the group cannot be used any more, else None
    elsewhere : a note of rank 0, which waits for this rank in a call that this rank may not have come to

    A rank that has waited for long in a call tells rank 0 once, and rank 0 answers once it has come to that call too.
    So rank 0 knows who is there, and the others know whether rank 0 is.
    """

    def __init__(self, comm, members: tuple[int, ...], process: Process):
        self.notes, self.members, self.process = Notes(comm), members, process
        self.rank, self.size = comm.rank, comm.size
        self.calls = 0
        self.closing = False  # no more notes of who waits
        self.failure: Failure | None = None
        self.elsewhere: Note | None = None
        self.left: dict[int, tuple[int, str]] = {}  # rank -> (calls, text)
        self.told = self.told_elsewhere = 0  # calls for which such a note was sent
        self.sent = self.answers = 0  # notes to rank 0, and answers of rank 0
        self.received = 0  # on rank 0: notes of others that wait
        self.waiting: dict[int, tuple[int, str]] = {}  # on rank 0: rank -> (call, text) of the last of these
        self.unanswered: dict[int, int] = {}  # on rank 0: rank -> call

    def fail(self, failure: Failure):
        """Tell every other rank, once, that this one cannot go on. Returns without waiting."""
        with self.process.lock:
            if self.failure is None:
                self.failure = failure
                self._send_all(Kind.FAILED, failure.number, failure.text)

    def leave(self, text: str):
        """Tell every other rank that this one takes part in no call after the current one."""
        with self.process.lock:
            self._send_all(Kind.LEFT, self.calls, text)

    def _send_all(self, kind, number, text):
        for peer in range(self.size):
            if peer != self.rank:
                self.notes.send(peer, kind, number, text)

    def read(self):
        """Take note of what peers say; never waits."""
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

    def _take(self, note):
        if note.kind == Kind.FAILED:
            failed = Failure(note.call, note.text)
            self.failure = self.failure or failed
            self.process.hear(failed)
        elif note.kind == Kind.LEFT:
            self.left[note.source] = note.call, note.text
            self.process.left[self.members[note.source]] = note.text
        elif note.kind == Kind.WAITING:
            self.received += 1
            self.waiting[note.source] = note.call, note.text
            self.unanswered[note.source] = note.call
        elif note.kind == Kind.HERE:
            self.answers += 1
        else:
            self.elsewhere = note

    def settled(self, notes: int) -> bool:
        """Whether all `notes` to rank 0 have been received and answered, and all that was sent has gone."""
        self.read()
        complete = self.answers == self.sent if self.rank else self.received == notes
        return complete and not self.unanswered and self.notes.gone()

    # -- who is missing -----------------------------------------------------------------------------------------

    def tell_leader(self, what: str):
        """Tell rank 0, once a call, that this rank waits for all others."""
        if self.rank == 0 or self.told == self.calls or self.closing:
            return
        with self.process.lock:
            self.told = self.calls
            self.sent += 1
            self.notes.send(0, Kind.WAITING, self.calls, what)

    def tell_who_waits_here(self, mine: Presence, what: str):
        """Tell one rank, which waits for this one in a call of this group, that this one waits for it in `mine`."""
        for peer, call in self.unanswered.items():
            member = self.members[peer]
            if call > self.calls and member in mine.members and mine.told_elsewhere < mine.calls and not mine.closing:
                mine.told_elsewhere = mine.calls
                mine.notes.send(mine.members.index(member), Kind.ELSEWHERE, mine.calls, what)

    def describe_missing(self) -> str:
        """Which ranks have not come to the call under way, as far as this rank knows; else nothing."""
        if self.rank > 0:
            return "" if self.answers == self.sent else "nothing was heard of rank 0"
        missing = [rank for rank in range(1, self.size) if self.waiting.get(rank, (0, ""))[0] < self.calls]
        if not missing:
            return ""
        others = self._who_waits_elsewhere()
        waits = [others.get(self.members[rank]) for rank in missing]
        listed = [f"rank {r}" + (f" (waits for {text})" if text else "") for r, text in zip(missing, waits)]
        more = f" and {len(listed) - LISTED} more" if len(listed) > LISTED else ""
        return f"missing: {', '.join(listed[:LISTED])}{more}"

    def _who_waits_elsewhere(self) -> dict[int, str]:
        """World rank -> text, of the ranks that wait for this one in another group, and so must still do so."""
        found = {}
        for group in self.process.groups:
            other = group.presence
            for peer, call in other.unanswered.items():
                if call > other.calls:
                    found[other.members[peer]] = other.waiting[peer][1]
        return found
