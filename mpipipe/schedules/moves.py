"""Orders made better by moves: an action of the critical path goes ahead of others of its rank.

The critical path is the chain of actions that makes the schedule as long as it is: each one begins when the one before
it ends, on its rank or by a message. No order is faster unless two of its actions on one rank change places.
"""

from __future__ import annotations

from typing import NamedTuple

from mpipipe.schedules.kinds import Ends, Form, Orders

FAR = 12  # an action goes ahead of so many others at most


class Move(NamedTuple):
    """Take the action at one slot of a rank, and put it at an earlier one."""

    rank: int
    slot: int
    earlier: int


def critical_moves(form: Form, orders: Orders, ends: Ends) -> list[Move]:
    """List moves along one critical path, from its end to its begin."""
    place: list[list[int]] = [[] for _ in form.seconds]  # of each action of a kind its slot
    number: list[list[int]] = []  # of each slot its micro-batch
    for order in orders:
        number.append([])
        for slot, kind in enumerate(order):
            number[-1].append(len(place[kind]))
            place[kind].append(slot)
    rank = max(range(len(orders)), key=lambda each: ends[orders[each][-1]][-1])
    slot, moves = len(orders[rank]) - 1, []
    while True:
        order = orders[rank]
        kind, k = order[slot], number[rank][slot]
        start = ends[kind][k] - form.seconds[kind]
        if slot and ends[order[slot - 1]][number[rank][slot - 1]] >= start - 1e-9 * abs(start):
            moves += _ahead(order, rank, slot)
            slot -= 1
            continue
        before = form.waits_for[kind]
        if before < 0 or (not slot and not start):
            return moves
        rank, slot = form.rank[before], place[before][k]


def _ahead(order: list[int], rank: int, slot: int) -> list[Move]:
    """List the moves of one action: ahead of the one before it, and ahead of all up to one of its own kind."""
    earliest = slot
    while earliest and order[earliest - 1] != order[slot] and slot - earliest < FAR:
        earliest -= 1
    return [Move(rank, slot, earlier) for earlier in sorted({slot - 1, earliest}) if earliest <= earlier < slot]


def moved(form: Form, orders: Orders, move: Move) -> Orders | None:
    """Return the orders after a move; None where it breaks the limit."""
    order = list(orders[move.rank])
    order.insert(move.earlier, order.pop(move.slot))
    if not form.fits(order):
        return None
    return [order if rank == move.rank else other for rank, other in enumerate(orders)]
