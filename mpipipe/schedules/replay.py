"""Running a schedule on paper: when each action starts, or where the ranks stand still."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Mapping, Sequence

from mpipipe.schedules.action import BACKWARD, FORWARD, INPUT_GRAD, OPS, Action
from mpipipe.schedules.schedule import Schedule

# A packed order has these numbers in place of ops.
NUMBER = {op: number for number, op in enumerate(OPS)}
F, B, _, W, R = NUMBER.values()
OP_WIDTH = 3
OP_BITS = 7


def replay(
    schedule: Schedule,
    durations: Mapping[str, Sequence[float]],
    transfer: Sequence[float],
    shares: Sequence[float] = (1.0,),
) -> tuple[list[array[float]], list[float], tuple[array[float], array[float]]]:
    """Run every rank's order; an action starts when its rank is free and its input is there.

    Return for each rank the start times of the actions that could run, and the time at which it is
    done; and at stage * units + unit the ends of F's, and of B's and I's. Every action is on the
    right rank, once, with F before B or I before W. Sends cost the sender nothing and never block;
    `transfer` is the time of a message, as `Costs.transfer`. An action whose input never comes
    stops its rank for good. `shares` are those of `Timeline`.
    """
    units = schedule.units
    orders = [packed(order, units) for order in schedule.orders]
    # Stage s runs unit u at index s * units + u of these lists.
    of_units = [*shares] * (units // len(shares))
    times = []
    for name in OPS:
        times.append([seconds * share for seconds in durations[name] for share in of_units])
    forward, backward, input_grad, weight_grad, recompute = times
    hop = []
    for seconds in hops(schedule.placement, transfer):
        hop += [seconds] * units
    # -1 where it is not done yet.
    forward_done = array("d", [-1.0]) * len(hop)
    backward_done = array("d", forward_done)
    starts = [array("d") for _ in orders]
    ends = [0.0] * len(orders)
    # The rank that waits for an action: an F by its index, a B or I by ~index.
    sleepers: dict[int, int] = {}
    ready = list(range(len(orders)))
    while ready:
        rank = ready.pop()
        now = ends[rank]
        began = starts[rank]
        order = orders[rank]
        for slot in range(len(began), len(order)):
            code = order[slot]
            op = code & OP_BITS
            index = code >> OP_WIDTH
            start = now
            if op == F:
                # It waits for the stage before, if there is one.
                needed = index - units
                if needed >= 0:
                    sent = forward_done[needed]
                    if sent < 0:
                        sleepers[needed] = rank
                        break
                    sent += hop[index]
                    if sent > now:
                        start = sent
                forward_done[index] = now = start + forward[index]
                if index in sleepers:
                    ready.append(sleepers.pop(index))
            elif op == W:
                now = start + weight_grad[index]
            elif op == R:
                now = start + recompute[index]
            else:
                needed = index + units
                if needed < len(hop):
                    sent = backward_done[needed]
                    if sent < 0:
                        sleepers[~needed] = rank
                        break
                    sent += hop[needed]
                    if sent > now:
                        start = sent
                backward_done[index] = now = start + (backward if op == B else input_grad)[index]
                if ~index in sleepers:
                    ready.append(sleepers.pop(~index))
            began.append(start)
        ends[rank] = now
    return starts, ends, (forward_done, backward_done)


def reached(schedule: Schedule) -> list[int]:
    """Count how many actions of each rank can run: fewer than all if ranks wait for each other."""
    ones = [1.0] * schedule.stages
    starts, _, _ = replay(schedule, dict.fromkeys(OPS, ones), ones)
    return list(map(len, starts))


def packed(order: Iterable[Action], units: int) -> array[int]:
    """Return an order as whole numbers, since millions of Action objects would take 1 GB."""
    return array(
        "q", [(stage * units + unit) << OP_WIDTH | NUMBER[op] for stage, op, unit in order]
    )


def hops(placement: Sequence[int], transfer: Sequence[float]) -> list[float]:
    """Return the time of a message from the stage before, for each stage: 0 within a rank."""
    times = [0.0]
    for (rank, next_rank), time in zip(itertools.pairwise(placement), transfer[1:]):
        if rank == next_rank:
            time = 0.0
        times.append(time)
    return times


# -- Dependencies between actions of different stages; no other file states them -------------------


#     stage    0     1     2
#     F        F --> F --> F
#                          |
#     B, I     B <-- B <-- B      R and W wait for no other stage
def source(stage: int, op: str, stages: int) -> int | None:
    """Return the stage for whose output an action waits."""
    if op == FORWARD and stage > 0:
        return stage - 1
    if op in (BACKWARD, INPUT_GRAD) and stage < stages - 1:
        return stage + 1
    return None
