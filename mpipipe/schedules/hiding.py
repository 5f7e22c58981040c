"""Recomputations moved ahead, into time in which their rank would wait."""

from __future__ import annotations

import operator
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace

from mpipipe.schedules.action import FORWARD, RECOMPUTE, Action
from mpipipe.schedules.memory import held
from mpipipe.schedules.replay import replay
from mpipipe.schedules.schedule import Schedule
from mpipipe.schedules.simulate import Costs, action_times

SHARES = (1.0, 0.5, 0.01)  # an R is moved into a wait that is at least this share of its time
MOST_PASSES = 8  # each pass simulates; few passes after the second find anything


#     before   F1 ....... F2  R0 B0        an R that costs time, and a wait of its rank before that
#     after    F1 R0 .... F2  B0           its activation is held for longer
def hidden_in_waits(
    schedule: Schedule, costs: Costs, limits: Sequence[float], whole: Sequence[float], kept: Sequence[float]
) -> tuple[Schedule, float]:
    """Return the fastest schedule that is found by moving R's ahead into waits, and its makespan.

    An R that fits into a wait delays no action, so moving it cannot make the schedule slower. If it does not fit, the
    simulation decides.

    Parameters
    ----------
    schedule : Schedule
        A schedule with R's that can run.
    costs : Costs
        Times of the actions and messages, from which the waits follow.
    limits : sequence of float
        Memory that each rank may hold.
    whole, kept : sequence of float
        Sizes of an activation, and of the input in it, for each stage.
    """
    durations = action_times(costs, schedule.stages)
    transfer = costs.per_stage("transfer", schedule.stages)
    starts, ends = replay(schedule, durations, transfer)
    for share in SHARES:
        for _ in range(MOST_PASSES if schedule.recomputed else 0):
            orders = list(schedule.orders)
            for rank, order in enumerate(orders):
                line = _Line(order, starts[rank], [durations[op][stage] for stage, op, _ in order])
                places = line.places(share)
                if places:
                    memory = list(held(schedule, order, whole, kept))
                    more = {slot: whole[order[slot].stage] - kept[order[slot].stage] for slot in places}
                    orders[rank] = line.moved(share, places, memory, more, limits[rank])
            changed = replace(schedule, orders=tuple(orders))
            if changed.orders == schedule.orders:
                break
            began, ended = replay(changed, durations, transfer)
            if max(ended) >= max(ends):
                break
            schedule, starts, ends = changed, began, ended
    return schedule, max(ends)


class _Line:
    """The actions of one rank on the line of time.

    Parameters
    ----------
    order : of the rank
    starts, seconds : when each action starts, and how long it takes
    """

    def __init__(self, order: Sequence[Action], starts: Sequence[float], seconds: Sequence[float]) -> None:
        self.order, self.seconds = order, seconds
        ends = [0.0, *map(operator.add, starts, seconds)]
        self.waits = list(map(operator.sub, starts, ends))  # before each action

    def places(self, share: float) -> dict[int, int]:
        """Find R's that cost time and might move into an earlier wait: slot of the R -> slot of its forward.

        An R costs no time if a wait at least as long follows it.
        """
        order, waits, seconds = self.order, self.waits, self.seconds
        waiting = [slot for slot, wait in enumerate(waits) if wait > 0]
        forwards: dict[tuple[int, int], int] = {}
        found = {}
        for slot, (stage, op, microbatch) in enumerate(order):
            if op == FORWARD:
                forwards[stage, microbatch] = slot
            elif op == RECOMPUTE and waits[slot + 1] < seconds[slot]:
                begin = forwards[stage, microbatch]
                between = waiting[bisect_right(waiting, begin) : bisect_left(waiting, slot)]
                if any(waits[wait] >= share * seconds[slot] for wait in between):
                    found[slot] = begin
        return found

    def moved(
        self, share: float, places: dict[int, int], memory: list[float], more: dict[int, float], limit: float
    ) -> tuple[Action, ...]:
        """Return the order with R's moved into the waits, the next ones first, as far as memory allows.

        Parameters
        ----------
        share : a wait must be at least this share of the time of an R
        places : slot of each R -> slot of its forward
        memory : memory that the rank holds during each action
        more : slot of each R -> memory that it adds
        limit : memory that the rank may hold
        """
        ahead: dict[int, list[Action]] = {}  # slot -> R's that are moved to before it
        left = dict(places)
        for slot, wait in enumerate(self.waits):
            if wait <= 0:
                continue
            for source, forward in [*left.items()]:
                if not forward < slot < source:
                    continue
                if wait < share * self.seconds[source] or max(memory[slot:source]) + more[source] > limit:
                    break
                wait -= self.seconds[source]
                ahead.setdefault(slot, []).append(self.order[source])
                del left[source]
                memory[slot:source] = [amount + more[source] for amount in memory[slot:source]]
        gone = {slot for slot in places if slot not in left}
        kept = [() if slot in gone else (action,) for slot, action in enumerate(self.order)]
        return tuple(one for slot, own in enumerate(kept) for one in (*ahead.get(slot, ()), *own))
