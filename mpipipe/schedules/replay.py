"""Running a schedule on paper: when each action starts, or where the ranks stand still."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Mapping, Sequence

from mpipipe.schedules.action import BACKWARD, FORWARD, INPUT_GRAD, OPS, Action

# A packed order has these numbers in place of ops.
NUMBER = {op: number for number, op in enumerate(OPS)}
F, B, _, W, R = NUMBER.values()
OP_WIDTH = 3
OP_BITS = 7


def replay(
    placement: Sequence[int],
    microbatches: int,
    durations: Mapping[str, Sequence[float]],
    transfer: Sequence[float],
    orders: Sequence[array[int]],
    shares: Sequence[float] = (1.0,),
) -> tuple[list[array[float]], list[float], tuple[array[float], array[float]]]:
    """Run every rank's order; an action starts when its rank is free and its input is there.

    Return for each rank the start times of the actions that could run, and the time at which it is
    done; and at stage * M + micro-batch the ends of F's, and of B's and I's. Every action is on the
    right rank, once, with F before B or I before W. Sends cost the sender nothing and never block;
    `transfer` is the time of a message, as `Costs.transfer`. An action whose input never comes
    stops its rank for good. `orders` are packed. `shares` are those of `Timeline`.
    """
    stages = len(placement)
    # A line of the tables below is a stage or, where slices differ in time, a unit of a stage.
    slice_shares = [1.0]
    if set(shares) != {1.0}:
        slice_shares = [*shares] * (microbatches // len(shares))
    copies = len(slice_shares)
    width = microbatches // copies
    times = []
    for name in OPS:
        times.append([time * share for time in durations[name] for share in slice_shares])
    forward, backward, input_grad, weight_grad, recompute = times
    # How far away the index of the awaited action is; 0 if an action waits for none.
    before_forward = _distances(FORWARD, stages, microbatches, copies)
    before_backward = _distances(BACKWARD, stages, microbatches, copies)
    hop: list[float] = []
    for time in hops(placement, transfer):
        hop += [time] * copies
    hop_back = hop[copies:] + [0.0] * copies
    # at index stage * M + microbatch: when the F, and when the B or I, was done; -1 if it was not
    # done yet
    forward_done = array("d", [-1.0]) * (stages * microbatches)
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
            line = index // width
            start = now
            if op == F:
                before = before_forward[line]
                if before:
                    needed = index + before
                    sent = forward_done[needed]
                    if sent < 0:
                        sleepers[needed] = rank
                        break
                    sent += hop[line]
                    if sent > now:
                        start = sent
                forward_done[index] = now = start + forward[line]
                if index in sleepers:
                    ready.append(sleepers.pop(index))
            elif op == W:
                now = start + weight_grad[line]
            elif op == R:
                now = start + recompute[line]
            else:
                before = before_backward[line]
                if before:
                    needed = index + before
                    sent = backward_done[needed]
                    if sent < 0:
                        sleepers[~needed] = rank
                        break
                    sent += hop_back[line]
                    if sent > now:
                        start = sent
                backward_done[index] = now = start + (backward if op == B else input_grad)[line]
                if ~index in sleepers:
                    ready.append(sleepers.pop(~index))
            began.append(start)
        ends[rank] = now
    return starts, ends, (forward_done, backward_done)


def _distances(op: str, stages: int, microbatches: int, copies: int) -> list[int]:
    """Return for each stage how far away the index of the action is that an op waits for."""
    distances = []
    for stage in range(stages):
        distance = 0
        awaited = source(stage, op, stages)
        if awaited is not None:
            distance = (awaited - stage) * microbatches
        distances += [distance] * copies
    return distances


def reached(placement: Sequence[int], microbatches: int, orders: Sequence[array[int]]) -> list[int]:
    """Count how many actions of each rank can run: fewer than all if ranks wait for each other."""
    ones = [1.0] * len(placement)
    starts, _, _ = replay(placement, microbatches, dict.fromkeys(OPS, ones), ones, orders)
    return list(map(len, starts))


def packed(order: Iterable[Action], microbatches: int) -> array[int]:
    """Return an order as whole numbers, since millions of Action objects would take 1 GB."""
    return array(
        "q", [(stage * microbatches + m) << OP_WIDTH | NUMBER[op] for stage, op, m in order]
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
