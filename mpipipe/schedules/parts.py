"""What one rank of a large schedule does without knowing the whole: its part of the proof, and what it compares.

rank 0   makes order 0 and proves it |
rank 1   makes order 1 and proves it |  then all compare how their orders are made, and hear of any error
"""

from __future__ import annotations

from hashlib import blake2b

from mpipipe.errors import ScheduleError
from mpipipe.schedules.action import FORWARD, RECOMPUTE, WEIGHT_GRAD
from mpipipe.schedules.needs import source
from mpipipe.schedules.on_demand import Moment, OrdersOnDemand
from mpipipe.schedules.proof import check, check_cells, check_complete, check_placement
from mpipipe.schedules.schedule import Schedule

WHOLE = 1 << 14  # most pairs (stage, micro-batch) of a schedule that every rank can well prove and simulate as a whole


def moments_of(schedule: Schedule) -> Moment | None:
    """Give the moments by which ranks divide the proof of a large schedule; None where each rank proves all of it.

    That is so for small schedules, for those that were searched, and for those that were read: they are whole anyway.
    """
    orders = schedule.orders
    large = schedule.stages * schedule.microbatches > WHOLE
    return orders.moment if large and isinstance(orders, OrdersOnDemand) else None


def check_part(schedule: Schedule, rank: int) -> None:
    """Prove what a rank can of `schedule`; where no rank raises, the whole schedule is proven.

    A rank walks through its own order as `check` does: each action is on its rank, in time, and none is missing.
    Whether backwards may be missing, it sees from the last stage, which has them if any stage has.

    What is left is progress. Every action F, B or I has a moment, a whole number by a formula. A rank proves that
    moments rise along its own order, and that each of its actions has a later moment than the one whose output it waits
    for. It needs no other order for that. Whatever waits for whom, waits along the order of its rank or for an output,
    and one rank has looked at it. So moments rise along every chain of waits, no chain comes back to where it began,
    and the ranks never stand still (see `check`). An R or a W waits for its own rank alone. What comes over a skip was
    made further up the same chain, so it adds no wait.

    The formula need not be trusted: one that is wrong does not rise somewhere, and a rank finds that. But all ranks
    must prove parts of the same schedule, so they compare `digest` before they rely on this.

    Parameters
    ----------
    schedule : Schedule
        The same on every rank.
    rank : int
        This rank.

    Raises
    ------
    ScheduleError
        As `check`; on one rank at least where the schedule is wrong.

    Examples
    --------
    >>> from mpipipe import schedules
    >>> from mpipipe.schedules.parts import check_part
    >>> check_part(schedules.one_f_one_b(ranks=1024, microbatches=4096), rank=7)
    """
    moment = moments_of(schedule)
    if moment is None or schedule.proven:
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
        before, now = now, moment(stage, backward, microbatch)
        needed = source(stage, op, schedule.stages)
        if now <= before or (needed is not None and moment(needed, backward, microbatch) >= now):
            check(schedule)  # names the ranks that wait for each other
            raise ScheduleError(
                f"the moment of {action} does not rise",
                rank=rank,
                stage=stage,
                microbatch=microbatch,
                found=f"{now} after {before}",
                expected="a moment later than those of all that it waits for",
                remedy="give Schedule the orders as a tuple, which each rank proves as a whole",
            )


def trains(schedule: Schedule) -> bool:
    """Whether there are backwards: in a schedule that can run, the last stage has them if any has."""
    last = schedule.stages - 1
    return any(stage == last and op != FORWARD for stage, op, _ in schedule.orders[schedule.placement[last]])


def recomputed_on(schedule: Schedule, rank: int) -> frozenset[tuple[int, int]]:
    """Give every (stage, micro-batch) of a rank whose forward is run again."""
    return frozenset((stage, microbatch) for stage, op, microbatch in schedule.orders[rank] if op == RECOMPUTE)


def digest(schedule: Schedule) -> str:
    """Give a short text that differs where schedules do: of all orders, or of how large ones are made."""
    if moments_of(schedule) is None:
        return f"{schedule.fingerprint:x}"
    text = f"{schedule.placement} {schedule.microbatches} {schedule.trained_from} {schedule.skips} {schedule.orders!r}"
    return blake2b(text.encode(), digest_size=8).hexdigest()
