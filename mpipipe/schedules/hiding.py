"""Recomputations moved ahead, into time in which their rank would wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mpipipe.schedules.action import FORWARD, RECOMPUTE, Action
from mpipipe.schedules.memory import held
from mpipipe.schedules.schedule import Schedule
from mpipipe.schedules.simulate import Costs, Timeline, simulate

SHARES = (1.0, 0.5, 0.01)  # an R is moved into a wait that is at least this share of it
MOST_PASSES = 8  # each of which simulates; few find anything after the second


#     before   F1 ....... F2  R0 B0        an R that costs time, and a wait of its rank before that
#     after    F1 R0 .... F2  B0           its activation is held for longer
def hidden_in_waits(
    schedule: Schedule, costs: Costs, limits: Sequence[float], whole: Sequence[float], kept: Sequence[float]
) -> Schedule:
    """Return the fastest schedule that is found by moving R's ahead into waits; never a slower one than the given.

    Where an R fits into a wait, no action has to start later for it. So moves of that kind alone cannot make the schedule
    slower. Where it does not, the simulation decides.

    Parameters
    ----------
    schedule : Schedule
        With R's.
    costs : Costs
        From which the waits follow.
    limits : sequence of float
        What each rank may hold.
    whole, kept : sequence of float
        Sizes of an activation and of an input of each stage.
    """
    best = simulate(schedule, costs)
    for share in SHARES:
        for _ in range(MOST_PASSES if schedule.recomputed else 0):
            orders = [
                _moved(best, rank, share, list(held(best.schedule, order, whole, kept)), limit, (whole, kept))
                for (rank, order), limit in zip(enumerate(best.schedule.orders), limits)
            ]
            if all(order is None for order in orders):
                break
            changed = tuple(new or old for new, old in zip(orders, best.schedule.orders))
            found = simulate(replace(best.schedule, orders=changed), costs)
            if found.makespan >= best.makespan:
                break
            best = found
    return best.schedule


def _moved(
    timeline: Timeline, rank: int, share: float, memory: list[float], limit: float, sizes: tuple
) -> tuple[Action, ...] | None:
    """Return the order of a rank with R's moved into its waits; None where none can move.

    `memory` is what the rank holds during each of its actions.
    """
    order, starts, durations = timeline.schedule.orders[rank], timeline.starts[rank], timeline.durations
    whole, kept = sizes
    ends = [start + durations[action.op][action.stage] for action, start in zip(order, starts)]
    waits = [start - end for start, end in zip(starts, [0.0, *ends])]
    forwards = {(action.stage, action.microbatch): slot for slot, action in enumerate(order) if action.op == FORWARD}
    # R's that cost time: the wait behind them is shorter than they are
    movable = [
        slot
        for slot, action in enumerate(order)
        if action.op == RECOMPUTE and 0 <= waits[slot + 1] < durations[RECOMPUTE][action.stage]
    ]
    ahead: dict[int, list[Action]] = {}  # slot -> R's that are moved to before it
    gone: set[int] = set()
    next_movable = 0
    for slot, wait in enumerate(waits):
        while next_movable < len(movable) and movable[next_movable] <= slot:
            next_movable += 1
        if wait <= 0:
            continue
        for source in movable[next_movable:]:
            stage, _, microbatch = order[source]
            seconds, more = durations[RECOMPUTE][stage], whole[stage] - kept[stage]
            if source in gone or forwards[stage, microbatch] >= slot:
                continue
            if wait < share * seconds or max(memory[slot:source]) + more > limit:
                break
            wait -= seconds
            ahead.setdefault(slot, []).append(order[source])
            gone.add(source)
            memory[slot:source] = [held + more for held in memory[slot:source]]
    if not gone:
        return None
    return tuple(
        one for slot, action in enumerate(order) for one in (*ahead.get(slot, ()), *(() if slot in gone else (action,)))
    )
