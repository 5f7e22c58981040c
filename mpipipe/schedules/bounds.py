"""How fast any schedule can be: a time that none can beat with these stages on these ranks, and this memory.

The backward may be split. Where the schedule has R actions, the bound is for schedules which recompute the same
forwards. Memory is no argument then, since an activation that is recomputed is not held all the time.

A bound of M n micro-batches holds for M micro-batches in n slices, too: their order within a sequence can only make a
schedule slower. The first argument knows that order. Where slices differ in time, all are taken to be as short as the
shortest, but for the work of a rank.

Four arguments give a bound each, and the largest counts.

    a busy rank        work that cannot begin before the first F has come to this rank, and after whose last action
                       an I still has to travel to stage 0; for every set of a rank's F's, I's, W's and R's
    full memory        before a micro-batch is back for the first time, a rank can only have done what its activations
                       allow; so it is after one has gone for the last time; the rest of its work lies between
    a round trip       an activation lives from its F until its W at least as long as a micro-batch is away; K of them
                       at once
    each action        how early each action can be, and what must follow it: see `earliest`; left out for schedules so
                       large that it takes more than seconds
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

from mpipipe.errors import ArgumentError
from mpipipe.schedules import checks
from mpipipe.schedules.replay import hops
from mpipipe.schedules.schedule import Schedule
from mpipipe.schedules.search.problem import NEVER, Ends, OrderProblem, whole_limit
from mpipipe.schedules.simulate import EQUAL_COSTS, Costs, simulate
from mpipipe.text import counted

ROUNDING = 1e-9  # share of a sum of times: what is less may be the rounding of the sum


def lower_bound(schedule: Schedule, costs: Costs = EQUAL_COSTS, memory_limit: float | None = None) -> float:
    """Return a time that no schedule with the same stages on the same ranks, and as many micro-batches, can beat.

    It is in the unit of the costs. ArgumentError is raised where a cost does not fit, or no schedule keeps the limit.

    Parameters
    ----------
    schedule : Schedule
        Its orders do not count, only placement, micro-batches, which stages have backwards, and what is recomputed.
    costs : Costs, optional
        Times of the actions.
    memory_limit : float, optional
        Chunk activations that a rank may hold at once, at least its number of stages with backwards, times the slices
        of a sequence; by default there is no limit. It does not count where the schedule recomputes anything.

    Examples
    --------
    >>> from mpipipe import schedules
    >>> schedule = schedules.zero_bubble_h1(4, 8)
    >>> schedules.lower_bound(schedule, memory_limit=4), schedules.simulate(schedule).makespan
    (27.0, 27.0)
    """
    placement, microbatches, trained_from = schedule.placement, schedule.units, schedule.trained_from
    if schedule.forwards_only and any(schedule.orders):
        trained_from = schedule.stages
    if not schedule.recomputed:
        return least_time(placement, microbatches, costs, memory_limit, trained_from, slices=schedule.slices)
    memory_limit = checks.limit(memory_limit)
    if memory_limit is not None and not memory_limit > 0:
        raise ArgumentError("no schedule keeps this memory limit", found=f"memory_limit={memory_limit}")
    again = Counter(stage for stage, _ in schedule.recomputed)
    return least_time(placement, microbatches, costs, None, trained_from, again, slices=schedule.slices)


def least_time(
    placement: Sequence[int],
    microbatches: int,
    costs: Costs,
    memory_limit: float | None,
    trained_from: int = 0,
    recomputations: Mapping[int, int] | None = None,
    *,
    slices: int = 1,
) -> float:
    """Return the bound for stages on ranks; stages before `trained_from` have forwards alone.

    `recomputations` gives the number of R's of a stage. Only without a limit of memory do they count. `microbatches`
    are units.
    """
    limit = whole_limit(placement[trained_from:], microbatches, memory_limit, slices)
    shortest = min(costs.per_slice(slices))
    if shortest < 1:
        names = "forward", "input_grad", "weight_grad", "recompute"
        times = {name: [shortest * time for time in costs.per_stage(name, len(placement))] for name in names}
        costs = Costs(**times, transfer=costs.transfer)
    stages = _stages(placement, costs, trained_from, recomputations or {})
    # in the last stage a sequence has all of its forwards before its backwards
    whole = _stages(placement, costs, trained_from, recomputations or {}, slices / shortest)
    bounds: list[float] = []
    for rank in set(placement):
        own = [stage for stage, home in zip(stages, placement) if home == rank]
        bounds += _busy([stage for stage, home in zip(whole, placement) if home == rank], microbatches / shortest)
        trained = [stage for stage in own if stage.is_trained]
        if trained:
            bounds += _round_trip(trained, microbatches, limit)
            bounds += _ramps(trained, microbatches, limit)
    if trained_from == 0:
        problem = OrderProblem(placement, microbatches, costs, memory_limit)
        looks = 3 * max(map(len, problem.own)) * len(problem.seconds) * microbatches**2
        if looks <= AFFORDABLE:
            bounds.append(earliest_bound(problem))
    return max(bounds)


class Gap(NamedTuple):
    """The result of `gap`.

    Attributes
    ----------
    share : float
        (makespan - bound) / bound: 0.4 says that the schedule is at most 40 % slower than the best one.
    makespan, bound : float
        Time of the schedule, and time that no schedule beats.
    """

    share: float
    makespan: float
    bound: float


def gap(schedule: Schedule, costs: Costs = EQUAL_COSTS, memory_limit: float | None = None) -> Gap:
    """Tell how far `schedule` is at most from the best one with the same stages on the same ranks.

    ScheduleError or ArgumentError is raised where it cannot run, a cost does not fit, or it does not keep the limit.

    Parameters
    ----------
    schedule : Schedule
        It is checked first.
    costs : Costs, optional
        Times of the actions; by default one unit for each of F, I and W.
    memory_limit : float, optional
        Chunk activations that a rank may hold at once, here and in the best one; by default there is no limit.
        ``max(simulate(schedule).peak_activations)`` compares with schedules that need no more memory.

    Examples
    --------
    >>> from mpipipe import schedules
    >>> found = schedules.gap(schedules.one_f_one_b(4, 8), memory_limit=4)
    >>> f"{found.share:.1%}", found.makespan, found.bound
    ('22.2%', 33.0, 27.0)
    """
    timeline = simulate(schedule, costs)
    bound = lower_bound(schedule, costs, memory_limit)
    held = max(timeline.peak_activations)
    if memory_limit is not None and held > memory_limit:
        raise ArgumentError(
            "the schedule does not keep the memory limit",
            found=f"{counted(held, 'activation')} on rank {timeline.peak_activations.index(held)}",
            expected=f"at most {memory_limit}",
            remedy=f"memory_limit={held}, or another schedule",
        )
    # rounding of sums must not put a schedule below its bound
    above = max(0.0, timeline.makespan - bound)
    return Gap(above / bound if bound else 0.0, timeline.makespan, bound)


class _Stage(NamedTuple):
    """Times of a stage, and how early and how late its actions can be for one micro-batch."""

    is_trained: bool
    forward: float
    input_grad: float
    weight_grad: float
    forward_begins: float  # not earlier than this
    input_begins: float
    forward_follow: float  # how long other actions take that wait for the end of this F
    input_follow: float
    recomputations: float  # time of R's


def _stages(
    placement: Sequence[int], costs: Costs, trained_from: int, recomputations: Mapping[int, int], slices: float = 1
) -> list[_Stage]:
    count = len(placement)
    trained = [stage >= trained_from for stage in range(count)]
    forward = costs.per_stage("forward", count)
    input_grad, weight_grad = (
        [cost * backward for cost, backward in zip(costs.per_stage(name, count), trained)]
        for name in ("input_grad", "weight_grad")
    )
    hop = hops(placement, costs.per_stage("transfer", count))
    forward_begins, input_follow = [0.0], [weight_grad[0]]
    for stage in range(1, count):
        forward_begins.append(forward_begins[-1] + forward[stage - 1] + hop[stage])
        travels = hop[stage] + input_grad[stage - 1] + input_follow[-1] if trained[stage - 1] else 0.0
        input_follow.append(max(weight_grad[stage], travels))
    input_begins = [forward_begins[-1] + slices * forward[-1]]
    forward_follow = [slices * input_grad[-1] + input_follow[-1]]
    for stage in range(count - 2, -1, -1):
        input_begins.append(input_begins[-1] + input_grad[stage + 1] + hop[stage + 1])
        forward_follow.append(forward_follow[-1] + hop[stage + 1] + forward[stage + 1])
    times = (forward, input_grad, weight_grad, forward_begins, input_begins[::-1], forward_follow[::-1], input_follow)
    again = [recomputations.get(stage, 0) * time for stage, time in enumerate(costs.per_stage("recompute", count))]
    return [_Stage(*row) for row in zip(trained, *times, again)]


def _busy(own: Sequence[_Stage], microbatches: float) -> Iterator[float]:
    """Yield earliest begin + work + what follows, of the actions that begin and are followed no less than some.

    Valid since all of that work is on one rank, after the earliest of these begins and before the latest of its ends.
    """
    trained = [each for each in own if each.is_trained]
    kinds = [(each.forward_begins, microbatches * each.forward, each.forward_follow) for each in own]
    kinds += [(each.input_begins, microbatches * each.input_grad, each.input_follow) for each in trained]
    kinds += [(each.input_begins + each.input_grad, microbatches * each.weight_grad, 0.0) for each in trained]
    for each in trained:
        work = each.recomputations
        kinds.append((each.forward_begins + each.forward, work, each.input_grad + each.input_follow))
    for begin in {kind[0] for kind in kinds}:
        for follow in {kind[2] for kind in kinds}:
            chosen = [work for begins, work, follows in kinds if begins >= begin and follows >= follow]
            if chosen:
                yield begin + math.fsum(chosen) + follow


def _round_trip(own: Sequence[_Stage], microbatches: int, limit: int) -> Iterator[float]:
    """Yield the time that all activations live, over the limit: no more than that many live at any moment.

    With one stage each limit-th F waits for the W of a micro-batch that has been away in between.
    """
    begin = min(each.forward_begins for each in own)
    follow = min(each.input_follow for each in own)
    away = math.fsum(each.input_begins - each.forward_begins + each.input_grad for each in own)
    yield begin + microbatches * away / limit + follow
    yield begin + microbatches * (away + math.fsum(each.weight_grad for each in own)) / limit
    if len(own) == 1:
        (only,) = own
        trip = only.input_begins - only.forward_begins + only.input_grad + only.weight_grad
        yield begin + (microbatches - 1) // limit * trip + only.forward + only.forward_follow


class _Step(NamedTuple):
    """One of the F's and I's of a micro-batch on a rank."""

    begins: float  # not earlier than this
    follow: float  # how long other actions take after it
    before: float  # work on the rank of what comes before it, with W's that may
    after: float  # work of what must come after it
    held: int  # activations of the micro-batch that are alive when it has ended, at least


def _ramps(own: Sequence[_Stage], microbatches: int, limit: int) -> Iterator[float]:
    """Yield earliest begin of a step + the work that must come after it and before another's last end + what follows.

    Before the first action of a step begins, a micro-batch has come to some step before it and holds the activations
    of that one; so all of them have done no more than the most that the limit allows. After the last action of a step
    has ended, those that are alive are the only ones with work left. Where more work than both is left, the begin lies
    before the end, and that work between them.
    """
    steps = _steps(own)
    total = microbatches * math.fsum(each.forward + each.input_grad + each.weight_grad for each in own)
    weights = [each.weight_grad for each in own]
    early = [microbatches * step.before for step in steps]
    late = [microbatches * (step.after + math.fsum(weights)) for step in steps]
    if limit < len(own) * microbatches:
        came = [(before.held, step.before) for before, step in pairwise(steps)]
        owing = [(step.held, step.after) for step in steps[:-1]]
        for number in range(len(steps)):
            early[number] = min(early[number], _most(came[:number], limit))
            late[number] = min(late[number], _most([*owing[number:], (1, max(weights))], limit))
    for begun, done in zip(steps, early):
        for ended, left in zip(steps, late):
            if total - done - left > ROUNDING * total:
                yield begun.begins + total - done - left + ended.follow


def _steps(own: Sequence[_Stage]) -> list[_Step]:
    kinds = [(each.forward_begins, each.forward_follow, each.forward, 0.0, 1) for each in own]
    kinds += [(each.input_begins, each.input_follow, each.input_grad, each.weight_grad, -1) for each in reversed(own)]
    after = math.fsum(each.forward + each.input_grad + each.weight_grad for each in own)
    before, held, steps = 0.0, 0, []
    for begins, follow, work, weight, opened in kinds:
        after, held = after - work - weight, held + opened
        steps.append(_Step(begins, follow, before, after, held))
        before += work + weight
    return steps


def _most(items: Sequence[tuple[int, float]], limit: int) -> float:
    """Return the most work of any number of items (activations, work), with no more activations than the limit."""
    most = [0.0]
    for room in range(1, limit + 1):
        most.append(max([most[-1], *(most[room - size] + work for size, work in items if size <= room)]))
    return most[-1]


# -- How early each action of each micro-batch can be, in any schedule; backwards: how much time follows it at least
#
# Each task takes the micro-batches in their order (see search/problem.py). Then four things hold for the start of
# action k of a task, and the latest one counts.
#
#     chain       what it waits for has ended, and the message has come; so has action k-1 of its task
#     memory      in n stages of the rank (k+1)n activations have been opened by then, at least; all but as many as the
#                 limit are closed, and the earliest so many closings have ended
#     busy rank   for any time t: t + the work of the actions of the rank that come before it and cannot begin before t
#     full start  before the first closing of the rank can begin, no more than the limit is opened: what else must be
#                 opened and closed before action k comes after that time, one after the other
#
# Backwards it is the same problem: W opens an activation and F closes it.


Before = list[tuple[int, float]]  # tasks that come before a task, and the time of their messages
AFFORDABLE = 2_000_000  # looks at an action that a bound may take: about two seconds


def earliest_bound(problem: OrderProblem) -> float:
    """Return a time that no orders of the problem beat, from the earliest begin of each action and what follows it.

    An action that begins no earlier than its head, takes its time, and has its tail after it: of each set of a rank's
    actions the smallest head, all the work and the smallest tail are one after the other. The preemptive schedule that
    always runs the action with the longest tail finds the largest of these sums (Jackson; Carlier 1982).
    """
    heads, tails = _starts(problem, backwards=False), _starts(problem, backwards=True)
    last = problem.microbatches - 1
    longest = 0.0
    for tasks in problem.tasks:
        jobs = [
            (heads[task][k], problem.seconds[task], tails[task][last - k])
            for task in tasks
            for k in range(problem.microbatches)
        ]
        longest = max(longest, _one_machine(jobs))
    return longest


class _Direction:
    """The problem forwards or backwards."""

    def __init__(self, problem: OrderProblem, backwards: bool) -> None:
        self.chain = problem.chain()[::-1] if backwards else problem.chain()  # each task after those it waits for
        self.opens, self.closes = (2, 0) if backwards else (0, 2)  # ops that open and close an activation
        self.closing = (0,) if backwards else (1, 2)  # ops that only come when something can be closed
        self.before: list[Before] = [[] for _ in problem.seconds]
        for task, awaited in enumerate(problem.waits_for):
            if awaited >= 0:
                here, there = (awaited, task) if backwards else (task, awaited)
                self.before[here].append((there, problem.lag[task]))
        everything: dict[int, set[int]] = {}
        for task in self.chain:
            everything[task] = {task}.union(*(everything[other] for other, _ in self.before[task]))
        self.forced = [  # of each task those of its rank that come before it, with itself
            sorted(other for other in everything[task] if problem.rank[other] == problem.rank[task])
            for task in range(len(problem.seconds))
        ]


def _starts(problem: OrderProblem, backwards: bool) -> Ends:
    """Return for each task the earliest starts of its actions."""
    way, seconds = _Direction(problem, backwards), problem.seconds
    starts: Ends = [[] for _ in seconds]
    full = [_FullStart(problem, way, rank) for rank in range(len(problem.own))]
    for k in range(problem.microbatches):
        for task in way.chain:
            start = starts[task][-1] + seconds[task] if k else 0.0
            for other, lag in way.before[task]:
                start = max(start, starts[other][k] + seconds[other] + lag)
            counts = {other: k + (other != task) for other in way.forced[task]}
            opened = [other - way.opens + way.closes for other in counts if other % 3 == way.opens]
            closed = (k + 1) * len(opened) - problem.limit
            if closed > 0:
                ends = sorted(when + seconds[other] for other in opened for when in starts[other][:k])
                start = max(start, ends[closed - 1])
                if (
                    least := k + 1 - problem.limit
                ) > 0:  # must be closed even where other stages have closed all they can
                    for other in {other for closing in opened for other in way.forced[closing]}:
                        counts[other] = max(counts.get(other, 0), least)
                start = max(start, full[problem.rank[task]].start(counts, closed))
            starts[task].append(max(start, _after_work(starts, seconds, counts)))
    return starts


def _after_work(starts: Ends, seconds: Sequence[float], counts: dict[int, int]) -> float:
    """Return the largest sum of a time and the work that comes after it, of the actions that are counted."""
    items = [(start, seconds[task]) for task, count in counts.items() for start in starts[task][:count]]
    items.sort(reverse=True)
    latest = work = 0.0
    for start, time in items:
        work += time
        latest = max(latest, start + work)
    return latest


class _FullStart:
    """What a rank can have done before the first closing, and what a closing takes at least."""

    def __init__(self, problem: OrderProblem, way: _Direction, rank: int) -> None:
        asap: dict[int, float] = {}
        for task in way.chain:
            asap[task] = max([0.0, *(asap[other] + problem.seconds[other] + lag for other, lag in way.before[task])])
        own = [3 * stage for stage in problem.own[rank]]
        self.seconds, self.limit = problem.seconds, problem.limit
        self.opening = [op for op in range(3) if op not in way.closing]
        self.time = min(asap[stage + op] for stage in own for op in way.closing)
        self.most = max(sum(problem.seconds[stage + op] for op in self.opening) for stage in own)
        self.least = min(sum(problem.seconds[stage + op] for op in way.closing) for stage in own)

    def start(self, counts: dict[int, int], closed: int) -> float:
        """Return the earliest start of what comes after these actions and `closed` closings."""
        opening = sum(count * self.seconds[task] for task, count in counts.items() if task % 3 in self.opening)
        return self.time + max(0.0, opening - self.limit * self.most) + closed * self.least


def _one_machine(jobs: list[tuple[float, float, float]]) -> float:
    """Return the makespan of one machine that may interrupt its jobs: (head, time, tail)."""
    makespan = now = 0.0
    waiting: list[tuple[float, float]] = []  # minus the tail, the time that is left
    arrivals = iter([*sorted(jobs), (NEVER, 0.0, 0.0)])
    head, time, tail = next(arrivals)
    while waiting or head < NEVER:
        if not waiting:
            now = max(now, head)
        while head <= now:
            heappush(waiting, (-tail, time))
            head, time, tail = next(arrivals)
        after, left = heappop(waiting)
        if now + left <= head:
            now += left
            makespan = max(makespan, now - after)
        else:
            heappush(waiting, (after, left - (head - now)))
            now = head
    return makespan
