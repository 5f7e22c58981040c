"""What a search orders, and orders as few numbers: for each rank its tasks, one after the other.

    task 3 * stage + 0 F, + 1 I, + 2 W          the k-th run of a task is that of micro-batch k

Micro-batches are alike, so each task may take them in their order: give the k-th start of each task to micro-batch k.
Every message, every wait for an own action and the number of activations are as good as before: where each b_k comes at
least a time after a_k, the k-th smallest b comes at least that time after the k-th smallest a.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from itertools import accumulate, repeat

from mpipipe.errors import ArgumentError
from mpipipe.schedules import checks
from mpipipe.schedules.action import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD, Action
from mpipipe.schedules.replay import hops
from mpipipe.schedules.schedule import Schedule
from mpipipe.schedules.simulate import Costs

OPS = (FORWARD, INPUT_GRAD, WEIGHT_GRAD)
NEVER = math.inf
Orders = list[list[int]]  # of each rank: tasks
Ends = list[list[float]]  # of each task: when its runs end


class OrderProblem:
    """Stages on ranks, micro-batches, times and memory: all but the orders.

    seconds, rank : of each task
    waits_for, lag : of each task the one of the same micro-batch that comes before it, -1 without one, and how long its
        message takes
    awaited_by : of each task the F or I that waits for it, -1 without one
    own, tasks : of each rank its stages, ascending, and their tasks
    limit : activations that a rank may hold at once; no more than there are
    opened : of each task, activations more that its rank holds after it
    busy : time of the busiest rank for one micro-batch
    """

    def __init__(self, placement: Sequence[int], microbatches: int, costs: Costs, memory_limit: float | None) -> None:
        stages = len(placement)
        self.placement, self.microbatches, self.costs = tuple(placement), microbatches, costs
        self.own = [[s for s in range(stages) if placement[s] == rank] for rank in range(max(placement) + 1)]
        self.tasks = [[3 * stage + op for stage in own for op in range(3)] for own in self.own]
        self.limit = whole_limit(placement, microbatches, memory_limit)
        times = [costs.per_stage(name, stages) for name in ("forward", "input_grad", "weight_grad")]
        self.seconds = [time for stage in zip(*times) for time in stage]
        self.rank = [placement[task // 3] for task in range(3 * stages)]
        hop = hops(placement, costs.per_stage("transfer", stages))
        self.waits_for, self.lag = [-1] * (3 * stages), [0.0] * (3 * stages)
        for stage in range(stages):
            forward, input_grad, weight_grad = range(3 * stage, 3 * stage + 3)
            self.waits_for[forward], self.lag[forward] = (forward - 3 if stage else -1), hop[stage]
            last = stage == stages - 1
            self.waits_for[input_grad] = forward if last else input_grad + 3
            self.lag[input_grad] = 0.0 if last else hop[stage + 1]
            self.waits_for[weight_grad] = input_grad
        self.awaited_by = [-1] * (3 * stages)
        for task, before in enumerate(self.waits_for):
            if before >= 0 and task % 3 != 2:
                self.awaited_by[before] = task
        self.opened = [1, 0, -1] * stages
        self.busy = max(math.fsum(sum(self.seconds[3 * s : 3 * s + 3]) for s in stages) for stages in self.own)

    def chain(self) -> list[int]:
        """List the tasks such that each one comes after the one it waits for."""
        stages = range(len(self.placement))
        return [3 * s for s in stages] + [task for s in reversed(stages) for task in (3 * s + 1, 3 * s + 2)]

    def earliest(self, task: int, starts: Sequence[float]) -> float:
        """Return when a task of a micro-batch can begin, where those before it have these starts."""
        before = self.waits_for[task]
        return starts[before] + self.seconds[before] + self.lag[task] if before >= 0 else 0.0

    def alone(self) -> list[float]:
        """Return the starts of the tasks of one micro-batch that has the ranks for itself."""
        starts = [0.0] * len(self.seconds)
        for task in self.chain():
            starts[task] = self.earliest(task, starts)
        return starts

    def replay(self, orders: Orders) -> tuple[float, Ends]:
        """Return the makespan, NEVER where the ranks stand still, and the ends."""
        waits_for, lag, seconds = self.waits_for, self.lag, self.seconds
        ends: Ends = [[] for _ in seconds]
        slots, clocks = [0] * len(orders), [0.0] * len(orders)
        asleep: dict[int, int] = {}  # the task that a rank waits for -> the rank
        ready = list(range(len(orders)))
        while ready:
            rank = ready.pop()
            order, slot, now = orders[rank], slots[rank], clocks[rank]
            while slot < len(order):
                task = order[slot]
                own, before = ends[task], waits_for[task]
                if before >= 0:
                    done = ends[before]
                    if len(done) <= len(own):
                        asleep[before] = rank
                        break
                    now = max(now, done[len(own)] + lag[task])
                now += seconds[task]
                own.append(now)
                if task in asleep and len(own) > len(ends[self.awaited_by[task]]):
                    ready.append(asleep.pop(task))
                slot += 1
            slots[rank], clocks[rank] = slot, now
        whole = all(slot == len(order) for slot, order in zip(slots, orders))
        return (max(clocks) if whole else NEVER), ends

    def peak(self, order: Sequence[int]) -> int:
        """Return the most activations that a rank holds at once."""
        return max(accumulate(map(self.opened.__getitem__, order)), default=0)

    def fits(self, orders: Orders) -> bool:
        """Whether all ranks keep the limit."""
        return all(self.peak(order) <= self.limit for order in orders)

    def schedule(self, name: str, orders: Orders) -> Schedule:
        """Write the tasks out as actions."""
        every = list(range(self.microbatches))  # large schedules share these numbers
        of_task = [map(Action, repeat(task // 3), repeat(OPS[task % 3]), every) for task in range(len(self.seconds))]
        was_enabled = gc.isenabled()
        gc.disable()  # else Python looks for cycles among millions of new actions again and again: they have none
        try:
            written = tuple(tuple([next(of_task[task]) for task in order]) for order in orders)
        finally:
            if was_enabled:
                gc.enable()
        return Schedule(name, self.placement, self.microbatches, written)


def tasks_of(schedule: Schedule) -> Orders:
    """List the tasks of a schedule's actions; a B is an I and a W."""
    orders = []
    for order in schedule.orders:
        tasks = []
        for stage, op, _ in order:
            tasks += [3 * stage + 1, 3 * stage + 2] if op == BACKWARD else [3 * stage + OPS.index(op)]
        orders.append(tasks)
    return orders


def whole_limit(placement: Sequence[int], microbatches: int, memory_limit: float | None, slices: int = 1) -> int:
    """Return a limit as a number of activations, no more than there are; refuse one that no schedule keeps."""
    stages = max(map(list(placement).count, set(placement)), default=1)
    least, memory_limit = stages * slices, checks.limit(memory_limit)
    if memory_limit is not None and not memory_limit >= least:
        raise ArgumentError(
            "no schedule keeps this memory limit",
            found=f"memory_limit={memory_limit}",
            expected=f"at least {least}",
            remedy="a rank holds the activations of one micro-batch in all of its stages",
        )
    most = stages * microbatches
    return most if memory_limit is None else math.floor(min(memory_limit, most))
