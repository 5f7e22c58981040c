"""A list scheduler: each rank takes the first action that is ready, and fills its waits with weight gradients.

    queues of a rank       I: I I I ...     F: F F F ...        the first one whose head is ready goes on
    weight gradients       of the I's that are done, oldest first            where nothing is ready, or memory is full

An action is given by its kind (see kinds.py): the k-th of a kind is that of micro-batch k. Time is that of `simulate`.
A rank decides when it is free, and knows then what all ranks have begun. The result is an order for each rank, and how
long it takes; other costs may be put on the same orders.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush, heapreplace
from typing import NamedTuple, TypeAlias

from mpipipe.schedules.kinds import NEVER, Form, Orders
from mpipipe.schedules.schedule import Schedule
from mpipipe.schedules.simulate import Costs, simulate

Queue = Sequence[int]  # F's and I's, by their kinds, in the order in which they may run


class Run(NamedTuple):
    """What comes of a run.

    Attributes
    ----------
    orders : for each rank the kinds of its actions
    starts, ends : for each rank the begin of its first action and the end of its last one
    peaks : for each rank the most activations that are alive at once, from F until W
    """

    orders: Orders
    starts: list[float]
    ends: list[float]
    peaks: list[int]


class ListScheduler:
    """The stages on the ranks, their times and their memory.

    Parameters
    ----------
    form : Form
        Stages, micro-batches and times; its limit is not used.
    limit : float
        Activations that a rank may hold at once.
    patience : float
        A rank that knows its next action to be ready soon runs a W before it only where the wait is at least this
        share of the W.
    kept : float
        Share of an activation that is held from its I until its W.
    prompt : bool
        Whether a W never makes the last I of a rank late: W's delay each I a little, and each rank adds its part. Only
        the last one makes all ranks before it late for good.
    """

    def __init__(
        self, form: Form, *, limit: float, patience: float = 1.0, kept: float = 1.0, prompt: bool = False
    ) -> None:
        self.form, self.limit, self.patience, self.kept, self.prompt = form, limit, patience, kept, prompt

    def run(self, queues: Sequence[Sequence[Queue]]) -> Run | None:
        """Return the orders; None where the ranks come to a standstill, since memory is full of what cannot go on.

        Parameters
        ----------
        queues : sequence of sequences of Queue
            For each rank its queues, the most urgent first. Together they have its F's and I's.
        """
        progress = _Progress(self, queues)
        free = [(0.0, number) for number in range(len(queues))]
        asleep: dict[int, float] = {}  # ranks for which nothing is known to become ready, and since when
        while free:
            now, number = free[0]
            rank = progress.ranks[number]
            place, when, full = progress.first_ready(rank, now)
            if when > now and progress.runs_weight_gradient(rank, when - now, full):
                heapreplace(free, (progress.begin_weight_gradient(rank, now), number))
            elif place < 0:
                heappop(free)
                asleep[number] = now
            else:
                other = progress.begin(rank, place, when)
                heapreplace(free, (rank.end, number))
                if other in asleep:  # it may be news for that rank
                    heappush(free, (max(asleep.pop(other), when), other))
        return progress.result()


class _Rank:
    """A rank in a run: what it has still to do, what it holds, and what it has done.

    Attributes
    ----------
    heads : next kind of each queue, -1 where there is none
    rests : what comes behind it
    left : F's and I's that have not begun
    first : whether it has the first stage
    room : activations that it may hold where an F begins
    held, alive : activations, a part of one between its I and its W; the same as whole ones
    owed : W's whose I has begun, oldest first
    order, start, end, peak : as in Run
    """

    __slots__ = ("alive", "end", "first", "heads", "held", "left", "order", "owed", "peak", "rests", "room", "start")

    def __init__(self, queues: Sequence[Queue], first: bool, limit: float) -> None:
        self.rests = [iter(queue) for queue in queues]
        self.heads = [next(rest, -1) for rest in self.rests]
        self.left = sum(map(len, queues))
        self.first, self.room = first, limit - 1 + 1e-9
        self.held, self.alive, self.peak = 0.0, 0, 0
        self.owed: deque[int] = deque()
        self.order: list[int] = []
        self.start, self.end = NEVER, 0.0


class _Progress:
    """How far all ranks have come in a run."""

    def __init__(self, given: ListScheduler, queues: Sequence[Sequence[Queue]]) -> None:
        form = given.form
        self.seconds, self.lag, self.heard_by, self.rank_of = form.seconds, form.lag, form.heard_by, form.rank
        self.kept, self.patience, self.prompt = given.kept, given.patience, given.prompt
        self.ranks = [_Rank(queue, form.rank[0] == number, given.limit) for number, queue in enumerate(queues)]
        # of each F and I: when the next ones may begin, as far as that is known
        self.coming: list[deque[float]] = [deque() for _ in form.seconds]
        self.coming[0].extend([0.0] * form.microbatches)

    def first_ready(self, rank: _Rank, now: float) -> tuple[int, float, bool]:
        """Find the first queue whose head is ready, or the one that is ready soonest.

        Returns its place, when it is ready, and whether an F had to be left since memory is full.
        """
        best, soonest, full = -1, NEVER, False
        for place, kind in enumerate(rank.heads):
            if kind < 0:
                continue
            if kind % 3 == 0 and rank.held > rank.room:
                full = True
                continue
            coming = self.coming[kind]
            if coming and coming[0] < soonest:
                best, soonest = place, coming[0]
                if soonest <= now:
                    return best, now, full
        return best, soonest, full

    def runs_weight_gradient(self, rank: _Rank, wait: float, full: bool) -> bool:
        """Return whether the rank runs a weight gradient while it would wait."""
        if not rank.owed:
            return False
        share = self.patience
        if self.prompt and rank.left == 1 and not rank.first:
            share = max(1.0, share)
        return full or wait >= share * self.seconds[rank.owed[0]]

    def begin_weight_gradient(self, rank: _Rank, now: float) -> float:
        """Begin the oldest weight gradient that can run, and return when it ends."""
        kind = rank.owed.popleft()
        rank.held -= self.kept
        rank.alive -= 1
        rank.order.append(kind)
        rank.end = now + self.seconds[kind]
        return rank.end

    def begin(self, rank: _Rank, place: int, now: float) -> int:
        """Begin the head of a queue, and return the rank for which that is news."""
        kind = rank.heads[place]
        rank.heads[place] = next(rank.rests[place], -1)
        rank.left -= 1
        rank.order.append(kind)
        self.coming[kind].popleft()
        rank.end = end = now + self.seconds[kind]
        if kind % 3 == 0:
            rank.start = min(rank.start, now)
            rank.held += 1
            rank.alive += 1
            rank.peak = max(rank.peak, rank.alive)
        else:
            rank.held -= 1 - self.kept
            rank.owed.append(kind + 1)
        news = self.heard_by[kind]
        if news < 0:
            return -1
        self.coming[news].append(end + self.lag[news])
        return self.rank_of[news]

    def result(self) -> Run | None:
        """Return what comes of the run; None where something is left."""
        if any(rank.left for rank in self.ranks):
            return None
        starts, ends = [rank.start for rank in self.ranks], [rank.end for rank in self.ranks]
        return Run([rank.order for rank in self.ranks], starts, ends, [rank.peak for rank in self.ranks])


# -- The places of W's in an order of F's and I's: they fill the waits that follow from the costs, if memory allows it


PATIENCES = (0.01, 0.5, 1.0, 2.0)  # shares of a W's time: a rank that would wait for less than that begins no W
Queues: TypeAlias = Sequence[Sequence[Queue]]  # the queues of each rank: see ListScheduler.run

# what is to be small: the longest time from a rank's begin to its end, makespan, memory
Score: TypeAlias = "tuple[float, float, int]"


class Filled(NamedTuple):
    """Orders, and how good they are."""

    score: Score
    orders: Orders


def filled(
    form: Form, queues: Queues, limit: float, patience: float, kept: float = 1.0, *, prompt: bool = False
) -> Filled | None:
    """Return the orders that follow from these queues; None if they cannot end within the memory limit.

    Parameters
    ----------
    form : Form
        Stages, micro-batches and times; its limit is not used.
    queues : Queues
        For each rank its F's and I's: see ListScheduler.run.
    limit : float
        Activations that a rank may hold at once.
    patience, kept, prompt : float, float, bool
        See ListScheduler.
    """
    run = ListScheduler(form, limit=limit, patience=patience, kept=kept, prompt=prompt).run(queues)
    if run is None:
        return None
    spans = max(end - start for start, end in zip(run.starts, run.ends))
    return Filled((spans, max(run.ends), sum(run.peaks)), run.orders)


def score_of(schedule: Schedule, costs: Costs) -> Score:
    """Return the score of a schedule that was not made here."""
    timeline = simulate(schedule, costs)
    spans = max(end - starts[0] for starts, end in zip(timeline.starts, timeline.ends))
    return spans, timeline.makespan, sum(timeline.peak_activations)


def fastest(candidates: Iterable[Filled | None], least: tuple[float, float] = (0.0, 0.0)) -> Filled | None:
    """Return the first candidate with the best score; None if all candidates are None.

    Parameters
    ----------
    least : tuple of two floats
        A span and a makespan that none can beat. After a candidate that is as fast no other one is made, though it
        might hold less.
    """
    best: Filled | None = None
    for each in candidates:
        if each is not None and (best is None or each.score < best.score):
            best = each
            if best.score[0] <= least[0] and best.score[1] <= least[1]:
                break
    return best
