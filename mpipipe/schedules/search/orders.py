"""Orders by rule: each rank decides when it is free, and knows then what all ranks have begun. Time is `simulate`'s.

queues       I: I I I ...     F: F F F ...        the first queue whose head is ready goes on
priorities   a number for each F, I and W         of the ready actions the one with the lowest number
both         a weight gradient where a rank would wait for long, and where its memory is full
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush, heapreplace
from typing import NamedTuple, TypeAlias

from mpipipe.schedules.schedule import Schedule
from mpipipe.schedules.search.problem import NEVER, Ends, OrderProblem, Orders
from mpipipe.schedules.simulate import Costs, simulate


class ListScheduler:
    """The state of all ranks while their orders are made; `choose` is the rule.

    ends, orders : of each task and of each rank, so far
    starts, held : of each rank, the begin of its first action, and its activations
    """

    holds = (1.0, 0.0, -1.0)  # activations more from the begin of F, I and W

    def __init__(self, problem: OrderProblem) -> None:
        self.problem = problem
        self.ends: Ends = [[] for _ in problem.seconds]
        self.orders: Orders = [[] for _ in problem.own]
        self.starts = [0.0] * len(problem.own)
        self.held = [0.0] * len(problem.own)

    def choose(self, rank: int, now: float) -> tuple[int, float]:
        """Return the next task of a free rank, and when it begins; -1 where nothing is known to become ready."""
        raise NotImplementedError

    def run(self) -> float:
        """Return the makespan; NEVER where memory is full of what cannot go on."""
        problem, ends, orders, held, holds = self.problem, self.ends, self.orders, self.held, self.holds
        seconds, rank_of, awaited_by = problem.seconds, problem.rank, problem.awaited_by
        free = [(0.0, rank) for rank in range(len(orders))]
        asleep: dict[int, float] = {}  # ranks for which nothing is known to become ready, and since when
        makespan, left = 0.0, len(seconds) * problem.microbatches
        while free:
            now, rank = free[0]
            task, start = self.choose(rank, now)
            if task < 0:
                heappop(free)
                asleep[rank] = now
                continue
            end = start + seconds[task]
            if not orders[rank]:
                self.starts[rank] = start
            ends[task].append(end)
            orders[rank].append(task)
            held[rank] += holds[task % 3]
            heapreplace(free, (end, rank))
            if end > makespan:
                makespan = end
            left -= 1
            if asleep and (other := awaited_by[task]) >= 0 and (other := rank_of[other]) in asleep:
                heappush(free, (max(asleep.pop(other), start), other))
        return NEVER if left else makespan


# -- Weight gradients in the waits of an order of F's and I's, if memory allows it -----------------------------------


PATIENCES = (0.01, 0.5, 1.0, 2.0)  # shares of a W's time: a rank that would wait for less than that begins no W
Queue = Sequence[int]  # F's and I's, as tasks, in the order in which they may run
Queues: TypeAlias = Sequence[Sequence[Queue]]  # of each rank, the most urgent first

# what is to be small: the longest time from a rank's begin to its end, makespan, memory
Score: TypeAlias = "tuple[float, float, int]"


class Filled(NamedTuple):
    """Orders, and how good they are."""

    score: Score
    orders: Orders


def fill_waits(
    problem: OrderProblem, queues: Queues, limit: float, patience: float, kept: float = 1.0, *, prompt: bool = False
) -> Filled | None:
    """Return the orders that follow from these queues of F's and I's; None if they cannot end within the memory limit.

    A rank that knows its next action to be ready soon runs a W before it only where the wait is at least `patience` of
    the W. `kept` is the share of an activation that is held from its I until its W. With `prompt` a W never makes the
    last I of a rank late: W's delay each I a little, and only the last one makes all ranks before it late for good.
    """
    run = _InQueues(problem, queues, limit, patience, kept, prompt)
    makespan = run.run()
    if makespan == NEVER:
        return None
    spans = max(run.ends[order[-1]][-1] - start for start, order in zip(run.starts, run.orders))
    return Filled((spans, makespan, sum(map(problem.peak, run.orders))), run.orders)


class _InQueues(ListScheduler):
    """F's and I's in the order of queues.

    heads, rests : next task of each queue of a rank, -1 after the last, and what comes after it
    left : F's and I's of each rank that have not begun
    owed : W's of each rank whose I has begun, oldest first
    """

    def __init__(
        self, problem: OrderProblem, queues: Queues, limit: float, patience: float, kept: float, prompt: bool
    ) -> None:
        super().__init__(problem)
        self.holds = (1.0, kept - 1, -kept)
        self.room, self.patience, self.prompt = limit - 1 + 1e-9, patience, prompt
        self.rests = [[iter(queue) for queue in own] for own in queues]
        self.heads = [[next(rest, -1) for rest in rests] for rests in self.rests]
        self.left = [sum(map(len, own)) for own in queues]
        self.owed: list[deque[int]] = [deque() for _ in queues]

    def choose(self, rank: int, now: float) -> tuple[int, float]:
        ends, waits_for, lag, heads = self.ends, self.problem.waits_for, self.problem.lag, self.heads[rank]
        best, soonest, full = -1, NEVER, False
        for place, task in enumerate(heads):
            if task < 0:
                continue
            if task % 3 == 0 and self.held[rank] > self.room:
                full = True
                continue
            ready, before = 0.0, waits_for[task]
            if before >= 0:
                done, k = ends[before], len(ends[task])
                if len(done) <= k:
                    continue
                ready = done[k] + lag[task]
            if ready < soonest:
                best, soonest = place, ready
                if ready <= now:
                    soonest = now
                    break
        if soonest > now and self._runs_weight_gradient(rank, soonest - now, full):
            return self.owed[rank].popleft(), now
        if best < 0:
            return -1, now
        task = heads[best]
        heads[best] = next(self.rests[rank][best], -1)
        self.left[rank] -= 1
        if task % 3 == 1:
            self.owed[rank].append(task + 1)
        return task, soonest

    def _runs_weight_gradient(self, rank: int, wait: float, full: bool) -> bool:
        """Whether the rank runs a weight gradient while it would wait."""
        owed, share = self.owed[rank], self.patience
        if not owed:
            return False
        if self.prompt and self.left[rank] == 1 and rank != self.problem.rank[0]:
            share = max(1.0, share)
        return full or wait >= share * self.problem.seconds[owed[0]]


def score_of(schedule: Schedule, costs: Costs) -> Score:
    """Return the score of a schedule that was not made here."""
    timeline = simulate(schedule, costs)
    spans = max(end - starts[0] for starts, end in zip(timeline.starts, timeline.ends))
    return spans, timeline.makespan, sum(timeline.peak_activations)


def fastest(candidates: Iterable[Filled | None], least: tuple[float, float] = (0.0, 0.0)) -> Filled | None:
    """Return the first candidate with the best score; None if all candidates are None.

    No further one is made after a candidate as fast as `least`, a span and a makespan that no orders can beat.
    """
    best: Filled | None = None
    for candidate in candidates:
        if candidate is not None and (best is None or candidate.score < best.score):
            best = candidate
            if best.score[0] <= least[0] and best.score[1] <= least[1]:
                break
    return best


# -- Orders from priorities: each rank runs, among its ready actions, the one with the lowest number ------------------


class Priorities(NamedTuple):
    """What orders are made from.

    numbers : of each task one for each micro-batch, the lowest first
    patience : share of a W that a rank waits rather than begin the W
    ahead : how long before its input is there an action is chosen among the others
    reserved : whether a forward leaves an activation for each later stage of its rank; then the run always ends
    """

    numbers: list[list[float]]
    patience: float
    ahead: float
    reserved: bool


def decide(problem: OrderProblem, priorities: Priorities) -> tuple[float, Orders]:
    """Return makespan and orders; the makespan is NEVER where memory is full of what cannot go on."""
    run = _ByPriority(problem, priorities)
    return run.run(), run.orders


class _ByPriority(ListScheduler):
    def __init__(self, problem: OrderProblem, priorities: Priorities) -> None:
        super().__init__(problem)
        self.priorities = priorities
        self.room = [problem.limit] * len(problem.seconds)  # of an F: activations that may be held when it has begun
        self.urgent = [[task for task in tasks if task % 3 != 2] for tasks in problem.tasks]
        self.weights = [[task for task in tasks if task % 3 == 2] for tasks in problem.tasks]
        if priorities.reserved:
            for own in problem.own:
                for later, stage in enumerate(reversed(own)):
                    self.room[3 * stage] = max(1, problem.limit - later)

    def choose(self, rank: int, now: float) -> tuple[int, float]:
        problem, ends = self.problem, self.ends
        numbers, patience, ahead, _ = self.priorities
        held, soonest, next_task, full = self.held[rank], NEVER, -1, False
        best, best_number, best_ready = -1, NEVER, now
        for task in self.urgent[rank]:
            k = len(ends[task])
            if k == problem.microbatches:
                continue
            ready, before = 0.0, problem.waits_for[task]
            if before >= 0:
                if len(ends[before]) <= k:
                    continue
                ready = ends[before][k] + problem.lag[task]
            if task % 3 == 0 and held >= self.room[task]:
                full = True
                continue
            if ready <= now + ahead and numbers[task][k] < best_number:
                best, best_number, best_ready = task, numbers[task][k], ready
            if ready < soonest:
                soonest, next_task = ready, task
        weight, weight_number = -1, NEVER
        for task in self.weights[rank]:
            k = len(ends[task])
            if k < len(ends[task - 1]) and numbers[task][k] < weight_number:
                weight, weight_number = task, numbers[task][k]
        worth = patience * problem.seconds[weight]
        if best >= 0 and (weight < 0 or best_number <= weight_number):
            if best_ready <= now or weight < 0 or best_ready - now < worth:
                return best, max(now, best_ready)
        if weight >= 0 and (best >= 0 or full or soonest - now >= worth):
            return weight, now
        return next_task, max(now, soonest)
