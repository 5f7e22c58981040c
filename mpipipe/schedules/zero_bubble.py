"""Schedules with a split backward: no rank waits for W, which fills the bubble.

In the pictures time runs to the right, each action takes one cell, and dots are idle time. Small
letters are a rank's second chunk. P is `ranks`, V `chunks` and M `microbatches`; a count below 1
raises ArgumentError. `slices` are those of classic.py.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from heapq import heappop, heappush, heapreplace
from itertools import accumulate
from operator import sub
from typing import NamedTuple, TypeAlias

from mpipipe.schedules.action import FORWARD, INPUT_GRAD, WEIGHT_GRAD, Action
from mpipipe.schedules.checks import sizes
from mpipipe.schedules.classic import Line, looped
from mpipipe.schedules.replay import hops
from mpipipe.schedules.schedule import Schedule
from mpipipe.schedules.simulate import EQUAL_COSTS, TIMES, Costs, are_alike, simulate
from mpipipe.schedules.slices import in_slices


#     rank 0  F0 F1 F2 F3 .  .  .  I0 W0 F4 I1 W1 F5 I2 W2 I3 W3 I4 W4 I5 W5
#     rank 1  .  F0 F1 F2 .  .  I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 I4 W3 I5 W4 W5
#     rank 2  .  .  F0 F1 .  I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 I5 W3 W4 W5
#     rank 3  .  .  .  F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 W3 W4 W5
def zero_bubble_h1(ranks: int, microbatches: int, *, slices: int = 1) -> Schedule:
    """Build ZB-H1: 1F1B whose weight gradients fill the bubble, in the memory of 1F1B.

    Rank r runs the W of a micro-batch r micro-batches after its I. Let f, b, w be the times of F,
    I, W, with w at most f and b. The bubble is (P-1)(f+b) - (min(M,P)-1)w, which is (P-1)(f+b-w)
    for M >= P. Every rank holds min(M, P) activations. Source: Qi et al. 2023, arXiv:2401.10241,
    schedule ZB-H1.

    Parameters
    ----------
    ranks, microbatches, slices : int

    Examples
    --------
    >>> from mpipipe import schedules
    >>> print(schedules.zero_bubble_h1(2, 3).to_csv(), end="")
    0F0,0F1,0I0,0W0,0F2,0I1,0W1,0I2,0W2
    1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1W2
    """
    order = partial(split_order, step=1)
    return looped("zero_bubble_h1", ranks, 1, microbatches, order, slices=slices)


#     rank 0  F0 F1 f0 f1 .  i0 w0 F2 i1 w1 F3 I0 W0 f2 I1 W1 f3 i2 w2 i3 w3 I2 W2 I3 W3
#     rank 1  .  F0 F1 f0 i0 f1 i1 w0 F2 I0 w1 F3 I1 W0 f2 i2 W1 f3 i3 w2 I2 w3 I3 W2 W3
def interleaved_zero_bubble(
    ranks: int, chunks: int, microbatches: int, *, slices: int = 1
) -> Schedule:
    """Build interleaved 1F1B with a split backward: ZB-H1 with several chunks per rank.

    Rank r runs each W r I's after its own I. Let f, b, w be the times of F, I, W of a chunk, with w
    at most f and b. The bubble is (P-1)(f+b-w) for M >= P. Source: Qi et al. 2023,
    arXiv:2401.10241, on the chunks of Narayanan et al. 2021, arXiv:2104.04473.

    Parameters
    ----------
    ranks, chunks, microbatches, slices : int
        Every rank holds at most min(MV, (V-1)g + P) chunk activations, where g is the size of the
        first group of micro-batches (see `interleaved_1f1b`).
    """
    order = partial(split_order, step=1)
    return looped("interleaved_zero_bubble", ranks, chunks, microbatches, order, slices=slices)


def split_order(line: Line, step: int) -> list[Action]:
    """Run the first F's, then an F, an I and an earlier W in turn; at the end what is left.

    Rank r runs each W r times `step` I's after its own I.
    """
    forwards = line.in_groups(FORWARD)
    weights = line.in_groups(WEIGHT_GRAD)
    first = line.forwards_ahead(step)
    order = forwards[:first]
    delay = step * line.rank
    for done, action in enumerate(line.in_groups(INPUT_GRAD)):
        order += forwards[first + done : first + done + 1]
        order.append(action)
        if done >= delay:
            order.append(weights[done - delay])
    return order + weights[max(0, len(weights) - delay) :]


# -- Schedules on a V: each rank has two stages, one on the way down and one on the way up ---------
#
#     stage 0  rank 0        stage 2P-1  rank 0        rank 0 has the first and the last stage
#     stage 1  rank 1        stage 2P-2  rank 1
#       ...                    ...
#     stage P-1  rank P-1    stage P  rank P-1         no message at the turn
#
# Down is the stage r of rank r, up is the stage 2P-1-r. In the pictures small letters are the
# stages on the way up, and whole backwards take two cells.


# (rank, ranks, micro-batches) -> its actions, one letter each.
Cells: TypeAlias = Callable[[int, int, int], str]


def v_placement(ranks: int) -> tuple[int, ...]:
    """Place stage l on rank l on the way down, and on rank 2P-1-l on the way up."""
    return (*range(ranks), *reversed(range(ranks)))


#     rank 0  F0 F1 F2 F3 F4 f0 i0 w0 f1 i1 w1 f2 i2 w2 I0 W0 f3 i3 w3 I1 W1 f4 i4 w4 I2 W2 I3 W3 I4
#     W4 .  . rank 1  .  F0 F1 F2 f0 F3 f1 i0 w0 f2 i1 w1 F4 I0 W0 f3 i2 w2 I1 W1 f4 i3 w3 I2 i4 I3
#     W2 I4 w4 W3 W4 . rank 2  .  .  F0 f0 F1 f1 F2 f2 i0 w0 F3 I0 W0 f3 i1 w1 F4 I1 W1 f4 i2 w2 I2
#     i3 I3 i4 I4 W2 w3 W3 w4 W4
def zero_bubble_v(
    ranks: int, microbatches: int, costs: Costs = EQUAL_COSTS, *, slices: int = 1
) -> Schedule:
    """Build ZB-V: no rank waits between its first action and its last, in the memory of 1F1B.

    Where F, I and W of a chunk take the same time f, the makespan is 6Mf + (P-1)f for M >= 2P:
    ranks begin one after the other, and end so. For other costs F's and I's keep an order of
    theirs, and W's are put where ranks would wait. Source: Qi et al. 2024, arXiv:2405.15362,
    schedule V-ZB; first in Qi et al. 2023, arXiv:2401.10241.

    Parameters
    ----------
    ranks, microbatches : int
        A rank holds at most 2P chunk activations, which are P of a whole stage.
    costs : Costs, optional
        Times of the 2P stages.
    slices : int, optional

    Examples
    --------
    >>> from mpipipe import schedules
    >>> schedule = schedules.zero_bubble_v(4, 8)
    >>> schedule.placement
    (0, 1, 2, 3, 3, 2, 1, 0)
    >>> timeline = schedules.simulate(schedule)
    >>> timeline.makespan - 6 * 8, timeline.peak_activations
    (3.0, [8, 8, 8, 8])
    """
    by_hand = _on_a_v("zero_bubble_v", ranks, microbatches, slices, _zero_bubble, 1)
    costs = costs.of_mean_slice()
    if are_alike(costs, by_hand.stages):
        return in_slices(by_hand, slices)
    times = StageTimes(by_hand.placement, by_hand.units, costs, by_hand.stages)
    queues = []
    for order in by_hand.orders:
        tasks = []
        for stage, op, _ in order:
            if op != WEIGHT_GRAD:
                tasks.append(3 * stage + OPS.index(op))
        queues.append([tasks])
    timeline = simulate(by_hand, costs)
    spans = max(end - starts[0] for starts, end in zip(timeline.starts, timeline.ends))
    best = by_hand
    score = (spans, timeline.makespan, sum(timeline.peak_activations))
    for patience in PATIENCES:
        filled = times.fill_idle_with_weight_grads(queues, patience)
        if filled is not None and filled.score < score:
            best = times.schedule(by_hand.name, filled.orders)
            score = filled.score
    return in_slices(best, slices)


#     rank 0  F0 F1 F2 f0 i0 w0 f1 F3 b1-- f2 B0-- b2-- f3 .  B1-- b3-- I2 W2 I3 W3
#     rank 1  .  F0 f0 F1 f1 F2 b0-- f2 B0-- F3 b1-- f3 B1-- b2-- B2-- i3 I3 w3 W3
def dualpipe_v(ranks: int, microbatches: int, *, slices: int = 1) -> Schedule:
    """Build DualPipeV: in the middle a rank has a forward and a backward of its two stages in turn.

    Most backwards are whole. The two of a pair are made to run at the same time on one device; here
    they run one after the other. For M >= 2P the makespan is that of `zero_bubble_v`; a rank holds
    at most 2P + 1 chunk activations. Source: DeepSeek-AI 2025, github.com/deepseek-ai/DualPipe.

    Parameters
    ----------
    ranks, microbatches, slices : int
    """
    return in_slices(_on_a_v("dualpipe_v", ranks, microbatches, slices, _dualpipe, 0), slices)


def _on_a_v(
    name: str, ranks: int, microbatches: int, slices: int, cells: Cells, less: int
) -> Schedule:
    ranks, _, microbatches, slices = sizes(
        ranks=ranks, chunks=2, microbatches=microbatches, slices=slices
    )
    units = microbatches * slices
    # too few units to fill the pipeline: the order of a full one, without those that are missing
    full = max(2 * ranks - less, units)
    orders = []
    for rank in range(ranks):
        actions = _of_rank(cells(rank, ranks, full), ranks, rank)
        orders.append(tuple(filter(lambda action: action.microbatch < units, actions)))
    return Schedule(name, v_placement(ranks), units, orders)


def _zero_bubble(rank: int, ranks: int, full: int) -> str:
    rest = ranks - rank
    filling = "F" * (2 * rest - 1) + "fF" * rank + "fiW" * rest
    steady = "FIWfiW" * (full - (2 * rest - 1) - rank) + "IWfiW" * (rest - 1)
    return filling + steady + "Ii" * rank + "IW" * rest + "W" * rank * 2


def _dualpipe(rank: int, ranks: int, full: int) -> str:
    rest = ranks - rank - 1
    filling = "F" * 2 * rest + "Ff" * (rank + 1) + "iWf" * rest
    steady = "FbfB" * (full - 2 * ranks + rank + 1) + "bfB" * rest
    # The backwards of both stages alternate; from the middle of them on they are split, and their
    # W's come last.
    emptying = ("bB" * (rank + 1))[: rank + 1]
    if rank % 2:
        emptying += "iI" * ((rank + 1) // 2)
    else:
        emptying += "Ii" * (rank // 2) + "I"
    return filling + steady + emptying + "WI" * rest + "W" * (rank + 1)


def _of_rank(cells: str, ranks: int, rank: int) -> Iterator[Action]:
    """Write out an order: a letter is of its chain's next micro-batch, small ones on the way up."""
    count: Counter[str] = Counter()
    owed: deque[Action] = deque()
    for cell in cells:
        op = cell.upper()
        stage = rank
        if cell.islower():
            stage = 2 * ranks - 1 - rank
        if op == WEIGHT_GRAD:
            yield owed.popleft()
            continue
        # Both are backwards.
        chain = cell.replace("b", "i").replace("B", "I")
        action = Action(stage, op, count[chain])
        count[chain] += 1
        yield action
        if op == INPUT_GRAD:
            owed.append(Action(stage, WEIGHT_GRAD, action.microbatch))


# -- Weight gradients where a rank would wait, for costs that are given ----------------------------
#
# An order of F's and I's is kept. Each rank decides when it is free, and knows then what all ranks
# have begun: it runs the next action of its order, or the oldest W where it would wait for long, or
# where its memory is full.
#
# F, I and W of stage s are the tasks 3s, 3s + 1 and 3s + 2. A task takes the micro-batches in their
# order.


NEVER = float("inf")
ROUNDING = 1e-9
# Shares of the time of a W: a rank that would wait for less than that begins no W.
PATIENCES = (0.01, 0.5, 1.0, 2.0)
OPS = (FORWARD, INPUT_GRAD, WEIGHT_GRAD)
# Of each rank some lists of tasks, the most urgent one first.
Queues: TypeAlias = "Sequence[Sequence[Sequence[int]]]"


class Filled(NamedTuple):
    """Tasks of each rank, and what is to be small: time, makespan and memory."""

    score: tuple[float, float, int]
    orders: list[list[int]]


class StageTimes:
    """Stages on ranks, with the times of their tasks.

    seconds : time of each task
    waits_for, lag : the task before it in its micro-batch, -1 without one, and the time of its
        message
    awaited_on : the rank of the F or I that waits for a task, where one does
    limit, kept : activations that a rank may hold, and the share of one that is held from its I
        until its W
    """

    def __init__(
        self,
        placement: tuple[int, ...],
        microbatches: int,
        costs: Costs,
        limit: float,
        kept: float = 1.0,
    ) -> None:
        stages = len(placement)
        self.limit = limit
        self.kept = kept
        self.placement = placement
        self.microbatches = microbatches
        times = [costs.per_stage(name, stages) for name in TIMES[:3]]
        hop = [*hops(placement, costs.per_stage("transfer", stages)), 0.0]
        self.seconds: list[float] = []
        self.waits_for: list[int] = []
        self.lag: list[float] = []
        for stage, seconds in enumerate(zip(*times)):
            forward = 3 * stage
            self.seconds += seconds
            self.waits_for += [max(forward - 3, -1), forward + 4, forward + 1]
            self.lag += [hop[stage], hop[stage + 1], 0.0]
        # In the last stage the I follows its own F.
        self.waits_for[-2] = 3 * stages - 3
        self.awaited_on = {}
        for task, before in enumerate(self.waits_for):
            if task % 3 < 2:
                self.awaited_on[before] = placement[task // 3]

    def schedule(self, name: str, orders: Sequence[Sequence[int]]) -> Schedule:
        """Write tasks out as actions."""
        microbatch = [0] * len(self.seconds)
        written = []
        for order in orders:
            actions = []
            for task in order:
                actions.append(Action(task // 3, OPS[task % 3], microbatch[task]))
                microbatch[task] += 1
            written.append(tuple(actions))
        return Schedule(name, self.placement, self.microbatches, written)

    def fill_idle_with_weight_grads(self, queues: Queues, patience: float) -> Filled | None:
        """Run queues of F's and I's, and W's while a rank waits; None if memory does not suffice.

        A rank goes on with the first of its queues whose next task is ready. One that knows its
        next task to be ready soon runs a W before it only where the wait is at least `patience` of
        the W.
        """
        holds = (1.0, self.kept - 1, -self.kept)  # activations more from the begin of F, I and W
        seconds = self.seconds
        waits_for = self.waits_for
        rests = [list(map(deque, of_rank)) for of_rank in queues]
        left = [sum(map(len, of_rank)) for of_rank in queues]
        orders: list[list[int]] = [[] for _ in queues]
        ends: list[list[float]] = [[] for _ in seconds]
        activations = [0.0] * len(queues)
        owed: list[deque[int]] = [deque() for _ in queues]
        begins = [0.0] * len(queues)
        free = [(0.0, rank) for rank in range(len(queues))]
        # Ranks for which nothing is known to become ready, and since when.
        asleep: dict[int, float] = {}
        while free:
            now, rank = free[0]
            chosen = None
            start = NEVER
            is_full = False
            for rest in rests[rank]:
                if not rest:
                    continue
                task = rest[0]
                if task % 3 == 0 and activations[rank] + 1 > self.limit + ROUNDING:
                    is_full = True
                    continue
                before = waits_for[task]
                number = len(ends[task])
                ready = now
                if before >= 0:
                    if len(ends[before]) <= number:
                        continue
                    ready = max(now, ends[before][number] + self.lag[task])
                if ready < start:
                    chosen = rest
                    start = ready
                    if ready == now:
                        break
            weights = owed[rank]
            # W's delay each I a little, and only the last one makes all ranks before it late for
            # good.
            share = patience
            if left[rank] == 1 and rank != self.placement[0]:
                share = max(1.0, patience)
            if weights and start > now and (is_full or start - now >= share * seconds[weights[0]]):
                task = weights.popleft()
                start = now
            elif chosen is None:
                heappop(free)
                asleep[rank] = now
                continue
            else:
                task = chosen.popleft()
                left[rank] -= 1
                if task % 3 == 1:
                    weights.append(task + 1)
            if not orders[rank]:
                begins[rank] = start
            end = start + seconds[task]
            ends[task].append(end)
            orders[rank].append(task)
            activations[rank] += holds[task % 3]
            heapreplace(free, (end, rank))
            sleeper = self.awaited_on.get(task, -1)
            if sleeper in asleep:
                heappush(free, (max(asleep.pop(sleeper), start), sleeper))
        if any(left):
            return None
        last = []
        peaks = 0
        for order in orders:
            last.append(ends[order[-1]][-1])
            peaks += max(accumulate([1 - task % 3 for task in order]))
        return Filled((max(map(sub, last, begins)), max(last), peaks), orders)
