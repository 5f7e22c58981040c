"""The proof of a large schedule, divided among the ranks: each one makes its own order alone, and proves that.

    rank 0   makes order 0 and proves it |
    rank 1   makes order 1 and proves it |  then all compare how their orders are made, and hear of any error

What a rank must know of a schedule without making the other orders is here, too: `digest`, `trains`, `recomputed_on`.
"""

from __future__ import annotations

from hashlib import blake2b

from mpipipe.errors import ScheduleError
from mpipipe.schedules.action import FORWARD, RECOMPUTE, WEIGHT_GRAD
from mpipipe.schedules.dependencies import source
from mpipipe.schedules.on_demand import LogicalTime, OrdersOnDemand
from mpipipe.schedules.proof import check, check_cells, check_complete, check_placement
from mpipipe.schedules.schedule import Schedule

WHOLE = 1 << 14  # pairs (stage, micro-batch): up to so many, every rank proves and simulates the whole schedule


def logical_time_of(schedule: Schedule) -> LogicalTime | None:
    """Return the logical time by which ranks divide the proof of a large schedule; None if each rank proves all.

    A rank proves all of a small schedule, and of one that was searched or read: it has all orders of such a one anyway.
    """
    orders = schedule.orders
    large = schedule.stages * schedule.microbatches > WHOLE
    return orders.logical_time if large and isinstance(orders, OrdersOnDemand) else None


def check_part(schedule: Schedule, rank: int) -> None:
    """Prove one rank's part of `schedule`. If no rank raises, the whole schedule is proven.

    A rank walks through its own order as `check` does: each action is on its rank, each comes behind the forward that
    it needs, and none is missing. A schedule may have no backwards at all. The rank sees that from the last stage,
    which has them if any stage has.

    What is left is progress. Every F, B and I has a logical time, a whole number by a formula. A rank proves that these
    times rise along its own order, and that each of its actions is later than the action whose output it waits for. It
    needs no other order for that. An action waits for the one before it on its rank, or for an output; one rank has
    looked at each such wait. So logical time rises along every chain of waits, no chain comes back to where it began,
    and the ranks never stand still (see `check`). An R or a W waits for its own rank alone. A skip adds no wait: what
    comes over it was made earlier in the same chain.

    The formula need not be trusted: a wrong one does not rise somewhere, and a rank finds that. But all ranks must
    prove parts of the same schedule. So they compare `digest` before they rely on the proof.

    Parameters
    ----------
    schedule : Schedule
        The same on every rank.
    rank : int
        This rank.

    Raises
    ------
    ScheduleError
        As by `check`, on at least one rank, if the schedule is wrong.

    Examples
    --------
    >>> from mpipipe import schedules
    >>> from mpipipe.schedules.distributed_proof import check_part
    >>> check_part(schedules.one_f_one_b(ranks=1024, microbatches=4096), rank=7)
    """
    logical_time = logical_time_of(schedule)
    if logical_time is None or schedule.proven:
        check(schedule)
        return
    check_placement(schedule)
    order = schedule.orders[rank]
    check_complete(schedule, check_cells(schedule, rank, order), not trains(schedule))
    now = -1
    for action in order:
        stage, op, microbatch = action
        if op in (WEIGHT_GRAD, RECOMPUTE):
            continue
        backward = op != FORWARD
        before, now = now, logical_time(stage, backward, microbatch)
        needed = source(stage, op, schedule.stages)
        if now <= before or (needed is not None and logical_time(needed, backward, microbatch) >= now):
            check(schedule)  # names the ranks that wait for each other
            raise ScheduleError(
                f"the logical time of {action} does not rise",
                rank=rank,
                stage=stage,
                microbatch=microbatch,
                found=f"{now} after {before}",
                expected="a later time than those of all actions that it waits for",
                remedy="give Schedule the orders as a tuple, which each rank proves as a whole",
            )


def trains(schedule: Schedule) -> bool:
    """Whether there are backwards: in a schedule that can run, the last stage has them if any stage has."""
    last = schedule.stages - 1
    return any(stage == last and op != FORWARD for stage, op, _ in schedule.orders[schedule.placement[last]])


def recomputed_on(schedule: Schedule, rank: int) -> frozenset[tuple[int, int]]:
    """Return every (stage, micro-batch) of a rank whose forward is run again."""
    return frozenset((stage, microbatch) for stage, op, microbatch in schedule.orders[rank] if op == RECOMPUTE)


def digest(schedule: Schedule) -> str:
    """Return a short text that differs between schedules. For a large one it is made of how its orders are made."""
    if logical_time_of(schedule) is None:
        return f"{schedule.fingerprint:x}"
    text = f"{schedule.placement} {schedule.microbatches} {schedule.trained_from} {schedule.skips} {schedule.orders!r}"
    return blake2b(text.encode(), digest_size=8).hexdigest()
