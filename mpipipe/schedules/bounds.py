"""How fast any schedule can be with these stages on these ranks, and this memory.

The backward may be split. Where the schedule has R actions, the bound is for schedules which
recompute the same forwards. Memory is no argument then, since an activation that is recomputed is
not held all the time.

A bound of M n micro-batches holds for M micro-batches in n slices, too: their order within a
sequence can only make a schedule slower. The first argument knows that order. Where slices differ
in time, all are taken to be as short as the shortest, but for the work of a rank.

Two arguments give a bound each, and the largest counts.

    a busy rank     work that cannot begin before the first F has come to this rank, and after
                    whose last action an I still has to travel to stage 0; for every set of a
                    rank's F's, I's, W's and R's
    a round trip    an activation lives from its F until its W at least as long as a micro-batch
                    is away, and no more of them live at once than the limit allows
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

from mpipipe.errors import ArgumentError
from mpipipe.schedules import checks
from mpipipe.schedules.replay import hops
from mpipipe.schedules.schedule import Schedule
from mpipipe.schedules.simulate import EQUAL_COSTS, Costs, first_trained


def lower_bound(
    schedule: Schedule, costs: Costs = EQUAL_COSTS, memory_limit: float | None = None
) -> float:
    """Return a time that no schedule with the same stages and micro-batches can beat.

    It is in the unit of the costs. ArgumentError is raised where a cost does not fit, or no
    schedule keeps the limit.

    Parameters
    ----------
    schedule : Schedule
        Its orders do not count, only placement, micro-batches, which stages have backwards, and
        what is recomputed.
    costs : Costs, optional
        Times of the actions.
    memory_limit : float, optional
        Chunk activations that a rank may hold at once, at least its number of stages with
        backwards, times the slices of a sequence; by default there is no limit. It does not count
        where the schedule recomputes anything.

    Examples
    --------
    >>> from mpipipe import schedules
    >>> schedule = schedules.zero_bubble_h1(4, 8)
    >>> schedules.lower_bound(schedule, memory_limit=4), schedules.simulate(schedule).makespan
    (27.0, 27.0)
    """
    limit = _whole_limit(schedule, memory_limit)
    shortest = min(costs.per_slice(schedule.slices))
    stages = _stages(schedule, costs, shortest, 1)
    # In the last stage a sequence has all of its forwards before its backwards.
    whole = _stages(schedule, costs, shortest, schedule.slices / shortest)
    bounds: list[float] = []
    for rank in range(schedule.ranks):
        own = []
        trained = []
        for stage in schedule.stages_of(rank):
            own.append(whole[stage])
            if stages[stage].is_trained:
                trained.append(stages[stage])
        bounds += _busy(own, schedule.units / shortest)
        if trained:
            bounds += _round_trip(trained, schedule.units, limit)
    return max(bounds)


def _whole_limit(schedule: Schedule, memory_limit: float | None) -> int:
    """Return a limit as a number of activations; refuse one that no schedule keeps."""
    memory_limit = checks.limit(memory_limit)
    on_ranks = Counter(schedule.placement[first_trained(schedule) :])
    stages = max(on_ranks.values(), default=1)
    most = stages * schedule.units
    least = stages * schedule.slices
    if schedule.recomputed:
        least = 1
    if memory_limit is not None and not memory_limit >= least:
        raise ArgumentError(
            "no schedule keeps this memory limit",
            found=f"memory_limit={memory_limit}",
            expected=f"at least {least}",
            remedy="a rank holds the activations of one micro-batch in all of its stages",
        )
    if memory_limit is None or schedule.recomputed:
        return most
    return math.floor(min(memory_limit, most))


class _Stage(NamedTuple):
    """Times of a stage, and how early and how late its actions can be for one micro-batch."""

    is_trained: bool
    forward: float
    input_grad: float
    weight_grad: float
    forward_begins: float  # not earlier than this
    input_begins: float
    forward_follow: float  # how long other actions take that wait for the end of this F
    input_follow: float
    recomputations: float  # time of R's


def _stages(schedule: Schedule, costs: Costs, share: float, slices: float) -> list[_Stage]:
    """Return the stages with the share of the mean time that each slice takes."""
    count = schedule.stages
    first = first_trained(schedule)
    forward = costs.per_stage("forward", count)
    input_grad = costs.per_stage("input_grad", count)
    weight_grad = costs.per_stage("weight_grad", count)
    recompute = costs.per_stage("recompute", count)
    again = Counter(stage for stage, _ in schedule.recomputed)
    is_trained = [False] * first + [True] * (count - first)
    for stage, trained in enumerate(is_trained):
        forward[stage] *= share
        input_grad[stage] *= share * trained
        weight_grad[stage] *= share * trained
        recompute[stage] *= share * again[stage]
    hop = hops(schedule.placement, costs.per_stage("transfer", count))
    forward_begins = [0.0]
    input_follow = [weight_grad[0]]
    for stage in range(1, count):
        forward_begins.append(forward_begins[-1] + forward[stage - 1] + hop[stage])
        travels = 0.0
        if stage > first:
            travels = hop[stage] + input_grad[stage - 1] + input_follow[-1]
        input_follow.append(max(weight_grad[stage], travels))
    input_begins = [forward_begins[-1] + slices * forward[-1]]
    forward_follow = [slices * input_grad[-1] + input_follow[-1]]
    for stage in range(count - 2, -1, -1):
        input_begins.append(input_begins[-1] + input_grad[stage + 1] + hop[stage + 1])
        forward_follow.append(forward_follow[-1] + hop[stage + 1] + forward[stage + 1])
    return list(
        map(
            _Stage,
            is_trained,
            forward,
            input_grad,
            weight_grad,
            forward_begins,
            input_begins[::-1],
            forward_follow[::-1],
            input_follow,
            recompute,
        )
    )


def _busy(own: Sequence[_Stage], microbatches: float) -> Iterator[float]:
    """Yield earliest begin + work + what follows, for actions that begin late and end early enough.

    Valid since all of that work is on one rank, after the earliest of these begins and before the
    latest of its ends.
    """
    actions: list[tuple[float, float, float]] = []
    for stage in own:
        forwards = microbatches * stage.forward
        actions.append((stage.forward_begins, forwards, stage.forward_follow))
        if not stage.is_trained:
            continue
        inputs = microbatches * stage.input_grad
        actions.append((stage.input_begins, inputs, stage.input_follow))
        weights = microbatches * stage.weight_grad
        actions.append((stage.input_begins + stage.input_grad, weights, 0.0))
        forward_ends = stage.forward_begins + stage.forward
        follow = stage.input_grad + stage.input_follow
        actions.append((forward_ends, stage.recomputations, follow))
    begins, _, follows = map(set, zip(*actions))
    for begin, follow in product(begins, follows):
        chosen = []
        for action_begins, work, action_follow in actions:
            if action_begins >= begin and action_follow >= follow:
                chosen.append(work)
        if chosen:
            yield begin + math.fsum(chosen) + follow


def _round_trip(own: Sequence[_Stage], microbatches: int, limit: int) -> Iterator[float]:
    """Yield the time that all activations live over the limit, which bounds how many live at once.

    With one stage each limit-th F waits for the W of a micro-batch that has been away in between.
    """
    # Stages rise: the first one begins the earliest, and the least follows on it.
    begin = own[0].forward_begins
    follow = own[0].input_follow
    trips = []
    weights = []
    for stage in own:
        trips.append(stage.input_begins - stage.forward_begins + stage.input_grad)
        weights.append(stage.weight_grad)
    away = math.fsum(trips)
    yield begin + microbatches * away / limit + follow
    yield begin + microbatches * (away + math.fsum(weights)) / limit
    if len(own) == 1:
        trip = away + weights[0]
        yield begin + (microbatches - 1) // limit * trip + own[0].forward + own[0].forward_follow
