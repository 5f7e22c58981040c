"""How fast any schedule can be: a time that none can beat with these stages on these ranks, and this memory.

The backward may be split. Where the schedule has R actions, the bound is for schedules which recompute the same
forwards. Memory is no argument then, since an activation that is recomputed is not held all the time.

Four arguments give a bound each, and the largest counts.

    one micro-batch    its F's through all stages, its I's back through all of them, and a last W
    a busy rank        work that cannot begin before the first F has come to this rank, and behind whose last action
                       an I still has to travel to stage 0; for every set of a rank's F's, I's, W's and R's
    full memory        with K activations, N - K of N W's come before a rank's last F, and so before its last I
    a round trip       an activation lives from its F until its W at least as long as a micro-batch is away; K of them
                       at once
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from mpipipe.errors import ArgumentError
from mpipipe.schedules.schedule import Schedule
from mpipipe.schedules.simulate import EQUAL_COSTS, Costs


def lower_bound(schedule: Schedule, costs: Costs = EQUAL_COSTS, memory_limit: float | None = None) -> float:
    """Return a time that no schedule with the same stages on the same ranks, and as many micro-batches, can beat.

    The orders of `schedule` do not count, only its placement, its micro-batches, and which forwards are recomputed.

    Parameters
    ----------
    schedule : Schedule
        Such as the one to judge.
    costs : Costs, optional
        Times of the actions; by default one unit for each of F, I and W.
    memory_limit : float, optional
        Chunk activations that a rank may hold at once, at least 1; by default there is no limit. It does not count
        where the schedule recomputes anything.

    Returns
    -------
    float
        The bound, in the unit of the costs.

    Raises
    ------
    ArgumentError
        A cost does not fit, or the limit is below 1.

    Examples
    --------
    >>> from mpipipe import schedules
    >>> schedule = schedules.zero_bubble_h1(4, 8)
    >>> least = schedules.lower_bound(schedule, memory_limit=4)
    >>> least, schedules.simulate(schedule).makespan
    (27.0, 27.0)
    """
    limit = math.inf if memory_limit is None else memory_limit
    if not limit >= 1:
        raise ArgumentError("no schedule keeps this memory limit", found=f"memory_limit={limit}", expected="at least 1")
    if schedule.recomputed:
        limit = math.inf
    stages = _stages(schedule, costs)
    found = [stages[0].input_begins + stages[0].input_grad + stages[0].weight_grad]
    for rank in set(schedule.placement):
        own = [stage for stage, home in zip(stages, schedule.placement) if home == rank]
        found += _busy(own, schedule.microbatches)
        found += _short_of_memory(own, schedule.microbatches, limit)
    return max(found)


class _Stage(NamedTuple):
    """Times of a stage, and how early and how late its actions can be for one micro-batch.

    Attributes
    ----------
    forward, input_grad, weight_grad : of F, I and W
    forward_begins, input_begins : not earlier than this
    forward_follow, input_follow : how long other actions take that wait for the end of this F, of this I
    recomputations : number of R's
    """

    forward: float
    input_grad: float
    weight_grad: float
    forward_begins: float
    input_begins: float
    forward_follow: float
    input_follow: float
    recomputations: int


def _stages(schedule: Schedule, costs: Costs) -> list[_Stage]:
    placement, count = schedule.placement, schedule.stages
    forward, input_grad = costs.per_stage("forward", count), costs.per_stage("input_grad", count)
    weight_grad, transfer = costs.per_stage("weight_grad", count), costs.per_stage("transfer", count)
    same = (here == there for here, there in pairwise(placement))
    hop = [0.0, *(0.0 if near else cost for near, cost in zip(same, transfer[1:]))]
    forward_begins, input_follow = [0.0], [weight_grad[0]]
    for stage in range(1, count):
        forward_begins.append(forward_begins[-1] + forward[stage - 1] + hop[stage])
        input_follow.append(max(weight_grad[stage], hop[stage] + input_grad[stage - 1] + input_follow[-1]))
    input_begins = [forward_begins[-1] + forward[-1]]
    forward_follow = [input_grad[-1] + input_follow[-1]]
    for stage in range(count - 2, -1, -1):
        input_begins.append(input_begins[-1] + input_grad[stage + 1] + hop[stage + 1])
        forward_follow.append(forward_follow[-1] + hop[stage + 1] + forward[stage + 1])
    again = Counter(stage for stage, _ in schedule.recomputed)
    times = (forward, input_grad, weight_grad, forward_begins, input_begins[::-1], forward_follow[::-1], input_follow)
    return [_Stage(*row) for row in zip(*times, map(again.__getitem__, range(count)))]


def _busy(own: Sequence[_Stage], microbatches: int) -> Iterator[float]:
    """Yield earliest begin + work + what follows, of the actions that begin and are followed no less than some."""
    kinds = [(each.forward_begins, microbatches * each.forward, each.forward_follow) for each in own]
    kinds += [(each.input_begins, microbatches * each.input_grad, each.input_follow) for each in own]
    kinds += [(each.input_begins + each.input_grad, microbatches * each.weight_grad, 0.0) for each in own]
    for each in own:
        work = each.recomputations * each.forward
        kinds.append((each.forward_begins + each.forward, work, each.input_grad + each.input_follow))
    for begin in {kind[0] for kind in kinds}:
        for follow in {kind[2] for kind in kinds}:
            chosen = [work for begins, work, follows in kinds if begins >= begin and follows >= follow]
            if chosen:
                yield begin + math.fsum(chosen) + follow


def _short_of_memory(own: Sequence[_Stage], microbatches: int, limit: float) -> Iterator[float]:
    begin = min(each.forward_begins for each in own)
    follow = min(each.input_follow for each in own)
    weights = sorted(each.weight_grad for each in own for _ in range(microbatches))
    early = weights[: max(0, len(weights) - math.floor(limit))] if limit < math.inf else []
    yield begin + microbatches * math.fsum(each.forward + each.input_grad for each in own) + math.fsum(early) + follow
    away = math.fsum(each.input_begins - each.forward_begins + each.input_grad for each in own)
    yield begin + microbatches * away / limit + follow
    yield begin + microbatches * (away + math.fsum(each.weight_grad for each in own)) / limit
    if len(own) == 1 and limit < math.inf:
        (only,) = own
        rounds = (microbatches - 1) // math.floor(limit)
        trip = only.input_begins - only.forward_begins + only.input_grad + only.weight_grad
        yield begin + rounds * trip + only.forward + only.forward_follow
