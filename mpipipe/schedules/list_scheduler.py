"""A list scheduler: each rank takes the first action that is ready, and fills its waits with weight gradients.

    queues of a rank       I: 0I0 0I1 0I2 ...     F: 0F0 0F1 0F2 ...        the first one whose head is ready goes on
    weight gradients       of the I's that are done, oldest first            where nothing is ready, or memory is full

Time is that of `simulate`. A rank decides when it is free, and knows then what all ranks have begun. The result is an
order for each rank, and how long it takes; other costs may be put on the same orders.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

from mpipipe.schedules.action import FORWARD, WEIGHT_GRAD, Action
from mpipipe.schedules.simulate import Costs

Queue = Sequence[Action]  # F's and I's in the order in which they may run
NEVER = float("inf")


class Run(NamedTuple):
    """What comes of a run.

    Attributes
    ----------
    orders : for each rank its actions
    starts, ends : for each rank the begin of its first action and the end of its last one
    peaks : for each rank the most activations that are alive at once, from F until W
    """

    orders: list[list[Action]]
    starts: list[float]
    ends: list[float]
    peaks: list[int]


class ListScheduler:
    """The stages on the ranks, their times and their memory.

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
    prompt : bool
        Whether a W never makes the last I of a rank late: W's delay each I a little, and each rank adds its part. Only
        the last one makes all ranks before it late for good.
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
        prompt: bool = False,
    ) -> None:
        stages = len(placement)
        self.placement, self.microbatches = placement, microbatches
        self.limits, self.patience, self.kept, self.prompt = limits, patience, kept, prompt
        self.forward = costs.per_stage("forward", stages)
        self.input_grad = costs.per_stage("input_grad", stages)
        self.weight_grad = costs.per_stage("weight_grad", stages)
        transfer = costs.per_stage("transfer", stages)
        near = [0] + [int(here == there) for here, there in pairwise(placement)]
        self.hop = [0.0 if same else cost for same, cost in zip(near, transfer)] + [0.0]

    def run(self, queues: Sequence[Sequence[Queue]]) -> Run | None:
        """Return the orders; None where the ranks come to a standstill, since memory is full of what cannot go on.

        Parameters
        ----------
        queues : sequence of sequences of Queue
            For each rank its queues, the most urgent first. Together they have its F's and I's.
        """
        placement, last, step = self.placement, len(self.placement) - 1, self.microbatches
        forward, input_grad, weight_grad, hop = self.forward, self.input_grad, self.weight_grad, self.hop
        kept, patience, room = self.kept, self.patience, [limit - 1 + 1e-9 for limit in self.limits]
        # when an F or I ends, once it has begun, at stage * M + micro-batch; there is an F before the first stage
        forward_done = array("d", [NEVER]) * ((last + 1) * step)
        input_done = array("d", forward_done)
        count = len(queues)
        heads = [[0] * len(of_rank) for of_rank in queues]
        left = [sum(map(len, of_rank)) for of_rank in queues]
        held, open_now, peaks = [0.0] * count, [0] * count, [0] * count
        owed: list[list[Action]] = [[] for _ in queues]  # I's whose weight gradients can run
        paid, starts, ends = [0] * count, [NEVER] * count, [0.0] * count
        orders: list[list[Action]] = [[] for _ in queues]
        free = [(0.0, rank) for rank in range(count)]
        asleep: dict[int, float] = {}  # ranks for which nothing is known to become ready, and since when
        while free:
            now, rank = heappop(free)
            soonest, best, full = NEVER, -1, False
            for number, queue in enumerate(queues[rank]):
                head = heads[rank][number]
                if head == len(queue):
                    continue
                stage, op, microbatch = queue[head]
                index = stage * step + microbatch
                if op == FORWARD:
                    if held[rank] > room[rank]:
                        full = True
                        continue
                    ready = forward_done[index - step] + hop[stage] if stage else 0.0
                else:
                    ready = forward_done[index]
                    if stage != last:
                        ready = max(ready, input_done[index + step] + hop[stage + 1])
                if ready < soonest:
                    soonest, best = ready, number
                    if ready <= now:
                        soonest = now
                        break
            if soonest > now and paid[rank] < len(owed[rank]):
                stage, _, microbatch = owed[rank][paid[rank]]
                least = patience
                if self.prompt and left[rank] == 1 and placement[0] != rank:
                    least = max(1.0, patience)
                if full or soonest - now >= least * weight_grad[stage]:
                    paid[rank] += 1
                    held[rank] -= kept
                    open_now[rank] -= 1
                    orders[rank].append(Action(stage, WEIGHT_GRAD, microbatch))
                    ends[rank] = now + weight_grad[stage]
                    heappush(free, (ends[rank], rank))
                    continue
            if best < 0:
                asleep[rank] = now
                continue
            action = queues[rank][best][heads[rank][best]]
            heads[rank][best] += 1
            left[rank] -= 1
            stage, op, microbatch = action
            if op == FORWARD:
                starts[rank] = min(starts[rank], soonest)
                end = soonest + forward[stage]
                forward_done[stage * step + microbatch] = end
                held[rank] += 1
                open_now[rank] += 1
                peaks[rank] = max(peaks[rank], open_now[rank])
                other = placement[min(stage + 1, last)]
            else:
                end = soonest + input_grad[stage]
                input_done[stage * step + microbatch] = end
                held[rank] -= 1 - kept
                owed[rank].append(action)
                other = placement[max(stage - 1, 0)]
            orders[rank].append(action)
            ends[rank] = end
            heappush(free, (end, rank))
            if other in asleep:  # it may be news for that rank
                heappush(free, (max(asleep.pop(other), soonest), other))
        return None if any(left) else Run(orders, starts, ends, peaks)
