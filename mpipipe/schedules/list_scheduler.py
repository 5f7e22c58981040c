"""A list scheduler: each rank takes the first action that is ready, and fills its waits with weight gradients.

    queues of a rank       I: 0I0 0I1 0I2 ...     F: 0F0 0F1 0F2 ...        the first one whose head is ready goes on
    weight gradients       of the I's that are done, oldest first            where nothing is ready, or memory is full

Time is that of `simulate`. A rank decides when it is free, and knows then what all ranks have begun. The result is an
order for each rank; the times are forgotten, and other costs may be put on the same orders.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import pairwise

from mpipipe.schedules.action import FORWARD, INPUT_GRAD, WEIGHT_GRAD, Action
from mpipipe.schedules.simulate import Costs

Queue = Sequence[tuple[int, str, int]]  # stage, op, micro-batch: F and I in the order in which they may run
NEVER = float("inf")


class ListScheduler:
    """The state of one run.

    Parameters
    ----------
    placement : sequence of int
        Rank of each stage.
    microbatches : int
        M.
    costs : Costs
        Times of F, I, W and transfers.
    limits : sequence of float
        For each rank the activations that it may hold at once.
    patience : float
        A rank that knows its next action to be ready soon runs a W before it only where the wait is at least this
        share of the W.
    kept : float
        Share of an activation that is held from its I until its W.
    """

    def __init__(
        self,
        placement: Sequence[int],
        microbatches: int,
        costs: Costs,
        *,
        limits: Sequence[float],
        patience: float = 1.0,
        kept: float = 1.0,
    ) -> None:
        stages = len(placement)
        self.placement, self.microbatches = placement, microbatches
        self.limits, self.patience, self.kept = limits, patience, kept
        self.seconds = {
            FORWARD: costs.per_stage("forward", stages),
            INPUT_GRAD: costs.per_stage("input_grad", stages),
            WEIGHT_GRAD: costs.per_stage("weight_grad", stages),
        }
        transfer = costs.per_stage("transfer", stages)
        near = [0] + [int(here == there) for here, there in pairwise(placement)]
        self.hop = [0.0 if same else cost for same, cost in zip(near, transfer)] + [0.0]
        unknown = array("d", [NEVER]) * (stages * microbatches)
        self.done = {FORWARD: unknown, INPUT_GRAD: array("d", unknown)}  # when it ends, once it has begun

    def run(self, queues: Sequence[Sequence[Queue]]) -> tuple[tuple[Action, ...], ...] | None:
        """Return the orders; None where the ranks come to a standstill, since memory is full of what cannot go on.

        Parameters
        ----------
        queues : sequence of sequences of Queue
            For each rank its queues, the most urgent first. Together they have its F's and I's.
        """
        ranks = range(len(queues))
        self.heads = [[0] * len(of_rank) for of_rank in queues]
        self.held = [0.0] * len(queues)
        self.owed: list[list[tuple[int, int]]] = [[] for _ in ranks]  # weight gradients that can run
        self.paid = [0] * len(queues)
        orders: list[list[Action]] = [[] for _ in ranks]
        free = [(0.0, rank) for rank in ranks]
        heapify(free)
        asleep: dict[int, float] = {}  # ranks for which nothing is known to become ready, and since when
        while free:
            now, rank = heappop(free)
            chosen = self._choose(rank, now, queues[rank])
            if chosen is None:
                asleep[rank] = now
                continue
            action, start = chosen
            end = start + self.seconds[action.op][action.stage]
            orders[rank].append(action)
            heappush(free, (end, rank))
            if action.op != WEIGHT_GRAD:
                self.done[action.op][action.stage * self.microbatches + action.microbatch] = end
                for other in self._neighbours(action):
                    if other in asleep:
                        heappush(free, (max(asleep.pop(other), start), other))
        if any(head < len(queue) for rank in ranks for head, queue in zip(self.heads[rank], queues[rank])):
            return None
        return tuple(map(tuple, orders))

    def _choose(self, rank: int, now: float, queues: Sequence[Queue]) -> tuple[Action, float] | None:
        """Return what a rank does next, and when it begins; None where nothing is known."""
        soonest, best, full = NEVER, -1, False
        for number, queue in enumerate(queues):
            head = self.heads[rank][number]
            if head == len(queue):
                continue
            stage, op, microbatch = queue[head]
            if op == FORWARD and self.held[rank] + 1 > self.limits[rank] + 1e-9:
                full = True
                continue
            ready = self._ready(stage, op, microbatch)
            if ready <= now:
                return self._take(rank, number, queue), now
            if ready < soonest:
                soonest, best = ready, number
        if self.paid[rank] < len(self.owed[rank]):
            stage, microbatch = self.owed[rank][self.paid[rank]]
            wait = soonest - now
            if full or wait >= self.patience * self.seconds[WEIGHT_GRAD][stage]:
                self.paid[rank] += 1
                self.held[rank] -= self.kept
                return Action(stage, WEIGHT_GRAD, microbatch), now
        return None if best < 0 else (self._take(rank, best, queues[best]), soonest)

    def _take(self, rank: int, number: int, queue: Queue) -> Action:
        stage, op, microbatch = queue[self.heads[rank][number]]
        self.heads[rank][number] += 1
        if op == FORWARD:
            self.held[rank] += 1
        else:
            self.held[rank] -= 1 - self.kept
            self.owed[rank].append((stage, microbatch))
        return Action(stage, op, microbatch)

    def _ready(self, stage: int, op: str, microbatch: int) -> float:
        """When the input of an action is there, as far as that is known."""
        index, step = stage * self.microbatches + microbatch, self.microbatches
        if op == FORWARD:
            return self.done[FORWARD][index - step] + self.hop[stage] if stage else 0.0
        own = self.done[FORWARD][index]
        if stage == len(self.placement) - 1:
            return own
        return max(own, self.done[INPUT_GRAD][index + step] + self.hop[stage + 1])

    def _neighbours(self, action: Action) -> Sequence[int]:
        """Ranks for which an action that has begun may be news."""
        last, stage = len(self.placement) - 1, action.stage
        if action.op == FORWARD:
            return (self.placement[min(stage + 1, last)],)
        return (self.placement[max(stage - 1, 0)],)
