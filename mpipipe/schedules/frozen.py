"""Schedules of models of which a part is frozen: no weight gradient there, and no backward below what is trained."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

from mpipipe.errors import ArgumentError
from mpipipe.schedules.action import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD, Action
from mpipipe.schedules.on_demand import changed
from mpipipe.schedules.schedule import Schedule
from mpipipe.wording import counted


#     stage 0  frozen     F0 F1 F2 .  .  .              nothing below it is trained: no backward
#     stage 1  trained    .  F0 F1 B0 F2 B1 ...         its gradient of the input is not sent
#     stage 2  frozen     .  .  F0 B0 F1 B1 ...         I W becomes B, which has the gradient of the input alone
def with_frozen(schedule: Schedule, frozen: Collection[int]) -> Schedule:
    """Take out of a schedule what frozen stages do not need, and leave the order of all else.

    A frozen stage has nothing to train. Its W actions vanish, and its I actions are backwards in one piece, B, at the
    same place. The frozen stages before the first one that is trained have no backward at all, and no gradient comes to
    them over skips.

    Parameters
    ----------
    schedule : Schedule
        A schedule with backwards.
    frozen : collection of int
        Logical stages without a parameter that is trained.

    Returns
    -------
    Schedule
        It needs no longer than the given one, where `Costs.weight_grad` is 0 for frozen stages: their B has the
        gradient of the input alone, and the simulation counts B as both.

    Raises
    ------
    ArgumentError
        All stages are frozen, or there is no such stage.

    Examples
    --------
    >>> from mpipipe import schedules
    >>> print(schedules.with_frozen(schedules.zero_bubble_h1(3, 1), {0, 2}).to_csv(), end="")
    0F0
    1F0,1I0,1W0
    2F0,2B0
    """
    strange = sorted(stage for stage in frozen if not 0 <= stage < schedule.stages)
    trained = [stage for stage in range(schedule.stages) if stage not in frozen]
    if strange or not trained:
        raise ArgumentError(
            "frozen stages do not fit the schedule",
            found=f"frozen {sorted(frozen)} of {counted(schedule.stages, 'stage')}",
            expected="some of the stages, and not all of them",
            remedy="leave something to train",
        )
    first = trained[0]

    orders = changed(schedule.orders, _left, first, tuple(sorted(frozen)))
    return replace(schedule, orders=orders, trained_from=first)


def _left(first: int, frozen: Collection[int], order: Iterable[Action]) -> Iterator[Action]:
    for action in order:
        stage, op, microbatch = action
        if op == FORWARD or (stage >= first and stage not in frozen):
            yield action
        elif stage >= first and op != WEIGHT_GRAD:
            yield Action(stage, BACKWARD, microbatch) if op == INPUT_GRAD else action
