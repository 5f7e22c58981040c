"""What each moment of a recorded step went into: pieces of time, no two of which overlap.

Several things may be true of one moment. The first of these takes it:

    compute      an action runs, whatever else happens meanwhile (a ring of attention waits within actions)
    late         the rank waits for others who are not there yet
    transfer     it waits for a message that was sent
    sums         it starts sums over replicas, or waits for them once all replicas have come
    optimizer    the optimizer runs
    overhead     none of these: agreement, bookkeeping, copies

A wait for a message is late until its sender sent it. A wait for all ranks of a group is late until the last of them
had come. A wait for one rank to take or to send something else is late as a whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mpipipe.analysis.record import Interval, RankRecord, StepRecord, Waited
from mpipipe.schedules import Action

LATE = "late"


class Segment(NamedTuple):
    """A piece of a step: what it went into, its name, and the action that ran."""

    start: float
    end: float
    part: str
    name: str
    action: Action | None = None


class Peers(NamedTuple):
    """What a rank has to know of the others to divide its waits.

    Attributes
    ----------
    sent : (replica, step, message) -> when it was sent
    entries : (step, group, what, how many-th of these) -> when the last rank of the group had come
    """

    sent: dict[tuple, float]
    entries: dict[tuple, float]


def segments(records: Sequence[RankRecord]) -> list[list[list[Segment]]]:
    """Divide all steps, whose records are on one clock: for each rank, for each step, its pieces in order."""
    peers = _peers(records)
    return [
        [_divided(step, number, record.replica, peers) for number, step in enumerate(record.steps)]
        for record in records
    ]


def _peers(records: Sequence[RankRecord]) -> Peers:
    sent: dict[tuple, float] = {}
    entries: dict[tuple, float] = {}
    for record in records:
        for number, step in enumerate(record.steps):
            sent.update({(record.replica, number, each.message): each.time for each in step.sent})
            for key, wait in _of_groups(step, number):
                entries[key] = max(entries.get(key, wait.start), wait.start)
    return Peers(sent, entries)


def _of_groups(step: StepRecord, number: int) -> Iterable[tuple[tuple, Waited]]:
    """Waits for all ranks of a group, each with a key that is the same on all of them."""
    counts: dict[tuple, int] = defaultdict(int)
    for wait in step.waits:
        if wait.group is not None:
            name = wait.group, wait.what
            yield (number, *name, counts[name]), wait
            counts[name] += 1


def _divided(step: StepRecord, number: int, replica: int, peers: Peers) -> list[Segment]:
    keys = {wait: key for key, wait in _of_groups(step, number)}
    found = [Segment(start, end, "compute", str(action), action) for action, start, end in step.actions]
    found += [Segment(start, end, "sums", "start of sums") for start, end in step.sums]
    found += [Segment(start, end, "optimizer", "optimizer") for start, end in step.optimizer]
    for wait in step.waits:
        there = wait.end  # when the others were there
        if wait.message is not None:
            there = peers.sent.get((replica, number, wait.message), there)
        elif wait.group is not None:
            there = peers.entries[keys[wait]]
        there = min(max(there, wait.start), wait.end)
        found.append(Segment(wait.start, there, LATE, wait.what))
        if wait.message is not None or wait.sums:
            found.append(Segment(there, wait.end, "transfer" if wait.message is not None else "sums", wait.what))
    return _painted(found, (step.start, step.end))


def _painted(found: Iterable[Segment], whole: Interval) -> list[Segment]:
    """Cut the pieces to what is visible of each, and fill up with overhead."""
    order = ("compute", LATE, "transfer", "sums", "optimizer")
    visible: list[Segment] = []
    for part in order:
        layer = sorted((each for each in found if each.part == part), key=_times)
        visible = sorted([*visible, *_outside(layer, visible, whole)], key=_times)
    gaps = _outside([Segment(*whole, "overhead", "overhead")], visible, whole)
    return sorted([*visible, *gaps], key=_times)


def _times(segment: Segment) -> Interval:
    return segment.start, segment.end


def _outside(layer: Iterable[Segment], covered: Sequence[Segment], whole: Interval) -> list[Segment]:
    """The pieces of a layer, in order, without what lies beside `whole`, below `covered`, or below one another."""
    left: list[Segment] = []
    at, now = 0, whole[0]
    for segment in layer:
        now = max(now, segment.start)
        end = min(segment.end, whole[1])
        while at < len(covered) and covered[at].start < end:
            if covered[at].start > now:
                left.append(segment._replace(start=now, end=covered[at].start))
            now = max(now, covered[at].end)
            if covered[at].end > end:
                break
            at += 1
        if now < end:
            left.append(segment._replace(start=now, end=end))
            now = end
    return left
