"""How early each action of each micro-batch can be, in any schedule; backwards: how much time follows it at least.

Each kind runs in the order of micro-batches (see `kinds`). Then four things hold for the start of action k of a kind,
and the latest one counts.

    chain       what it waits for has ended, and the message has come; so has action k-1 of its kind
    memory      in n stages of the rank (k+1)n activations have been opened by then, at least; all but as many as the
                limit are closed, and the earliest so many closings have ended
    busy rank   for any time t: t + the work of those actions of the rank that come before it and cannot begin before t
    full start  before the first closing of the rank can begin, no more than the limit is opened: what else must be
                opened and closed before action k comes after that time, one after the other

Backwards it is the same problem: W opens an activation and F closes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush

from mpipipe.schedules.kinds import NEVER, Ends, Form

Before = list[tuple[int, float]]  # kinds that come before a kind, and the time of their messages
AFFORDABLE = 2_000_000  # looks at an action that a bound may take: about two seconds


def earliest_bound(form: Form) -> float:
    """Return a time that no orders of the form beat, from the earliest begin of each action and what follows it.

    An action that begins no earlier than its head, takes its time, and has its tail behind it: of each set of a rank's
    actions the smallest head, all the work and the smallest tail are one after the other. The preemptive schedule that
    always runs the action with the longest tail finds the largest of these sums (Jackson; Carlier 1982).
    """
    heads, tails = _starts(form, backwards=False), _starts(form, backwards=True)
    last = form.microbatches - 1
    found = 0.0
    for stages in form.own:
        kinds = [3 * stage + op for stage in stages for op in range(3)]
        jobs = [
            (heads[kind][k], form.seconds[kind], tails[kind][last - k])
            for kind in kinds
            for k in range(form.microbatches)
        ]
        found = max(found, _one_machine(jobs))
    return found


def is_affordable(form: Form) -> bool:
    """Whether the bound takes seconds rather than minutes."""
    return 3 * max(map(len, form.own)) * len(form.seconds) * form.microbatches**2 <= AFFORDABLE


class _Direction:
    """The problem forwards or backwards.

    Attributes
    ----------
    chain : the kinds, each after those it waits for
    before : of each kind what it waits for
    forced : of each kind the kinds of its rank that come before it, with itself
    opens, closes : the number of the op that opens an activation, and that closes it
    closing : the numbers of the ops that only come when something can be closed
    """

    def __init__(self, form: Form, backwards: bool) -> None:
        self.chain = form.chain()[::-1] if backwards else form.chain()
        self.opens, self.closes = (2, 0) if backwards else (0, 2)
        self.closing = (0,) if backwards else (1, 2)
        self.before: list[Before] = [[] for _ in form.seconds]
        for kind, awaited in enumerate(form.waits_for):
            if awaited >= 0:
                here, there = (awaited, kind) if backwards else (kind, awaited)
                self.before[here].append((there, form.lag[kind]))
        everything: dict[int, set[int]] = {}
        for kind in self.chain:
            everything[kind] = {kind}.union(*(everything[other] for other, _ in self.before[kind]))
        self.forced = [
            sorted(other for other in everything[kind] if form.rank[other] == form.rank[kind])
            for kind in range(len(form.seconds))
        ]


def _starts(form: Form, backwards: bool) -> Ends:
    """Return for each kind the earliest starts of its actions."""
    way, seconds = _Direction(form, backwards), form.seconds
    starts: Ends = [[] for _ in seconds]
    full = [_FullStart(form, way, rank) for rank in range(len(form.own))]
    for k in range(form.microbatches):
        for kind in way.chain:
            start = starts[kind][-1] + seconds[kind] if k else 0.0
            for other, lag in way.before[kind]:
                start = max(start, starts[other][k] + seconds[other] + lag)
            counts = {other: k + (other != kind) for other in way.forced[kind]}
            opened = [other - way.opens + way.closes for other in counts if other % 3 == way.opens]
            closed = (k + 1) * len(opened) - form.limit
            if closed > 0:
                ends = sorted(when + seconds[other] for other in opened for when in starts[other][:k])
                start = max(start, ends[closed - 1])
                _count_closed(way, counts, opened, k + 1 - form.limit)
                start = max(start, full[form.rank[kind]].start(counts, closed))
            starts[kind].append(max(start, _after_work(starts, seconds, counts)))
    return starts


def _count_closed(way: _Direction, counts: dict[int, int], opened: list[int], least: int) -> None:
    """Add those closings of each stage that must come even where the other stages have closed all they can."""
    if least > 0:
        for closing in opened:
            for other in way.forced[closing]:
                counts[other] = max(counts.get(other, 0), least)


def _after_work(starts: Ends, seconds: Sequence[float], counts: dict[int, int]) -> float:
    """Return the largest sum of a time and the work that comes after it, of the actions that are counted."""
    items = [(start, seconds[kind]) for kind, count in counts.items() for start in starts[kind][:count]]
    items.sort(reverse=True)
    found = work = 0.0
    for start, time in items:
        work += time
        found = max(found, start + work)
    return found


class _FullStart:
    """What a rank can have done before the first closing, and what a closing takes at least."""

    def __init__(self, form: Form, way: _Direction, rank: int) -> None:
        asap: dict[int, float] = {}
        for kind in way.chain:
            asap[kind] = max([0.0, *(asap[other] + form.seconds[other] + lag for other, lag in way.before[kind])])
        own = [3 * stage for stage in form.own[rank]]
        self.seconds, self.limit = form.seconds, form.limit
        self.opening = [op for op in range(3) if op not in way.closing]
        self.time = min(asap[stage + op] for stage in own for op in way.closing)
        self.most = max(sum(form.seconds[stage + op] for op in self.opening) for stage in own)
        self.least = min(sum(form.seconds[stage + op] for op in way.closing) for stage in own)

    def start(self, counts: dict[int, int], closed: int) -> float:
        """Return the earliest start of what comes after these actions and so many closings."""
        opening = sum(count * self.seconds[kind] for kind, count in counts.items() if kind % 3 in self.opening)
        return self.time + max(0.0, opening - self.limit * self.most) + closed * self.least


def _one_machine(jobs: list[tuple[float, float, float]]) -> float:
    """Return the makespan of one machine that may interrupt its jobs: (head, time, tail)."""
    found = now = 0.0
    waiting: list[tuple[float, float]] = []  # minus the tail, the time that is left
    arrivals = _arrivals(jobs)
    head, time, tail = next(arrivals)
    while waiting or head < NEVER:
        if not waiting:
            now = max(now, head)
        while head <= now:
            heappush(waiting, (-tail, time))
            head, time, tail = next(arrivals)
        behind, left = heappop(waiting)
        if now + left <= head:
            now += left
            found = max(found, now - behind)
        else:
            heappush(waiting, (behind, left - (head - now)))
            now = head
    return found


def _arrivals(jobs: list[tuple[float, float, float]]) -> Iterator[tuple[float, float, float]]:
    yield from sorted(jobs)
    yield NEVER, 0.0, 0.0
