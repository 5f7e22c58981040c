"""ZB-2P: as little waiting as a limit of memory allows, for costs that are given.

    rank 0  F0 F1 F2 F3 F4 I0 F5 I1 W0 I2 W1 I3 W2 I4 W3 I5 W4 W5      more F's than 1F1B before the first I
    rank 1  .  F0 F1 F2 I0 F3 I1 F4 I2 F5 I3 W0 I4 W1 I5 W2 W3 W4 W5   W's late: some are left for the end,
    rank 2  .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 F5 I5 W0 W1 W2 W3 W4 W5    where I's travel through all ranks

Each rank begins with some forwards, then takes an I and an F in turn. Their number is a slope times the ranks behind,
or times how long the first micro-batch is away. In 1F1B it is the ranks behind. Several slopes are tried, and the two
orders that ranks find by themselves when they prefer I's, or F's. The fastest is taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import product
from typing import NamedTuple

from mpipipe.errors import ArgumentError
from mpipipe.schedules import given
from mpipipe.schedules.action import FORWARD, INPUT_GRAD
from mpipipe.schedules.classic import actions, alternate
from mpipipe.schedules.filling import PATIENCES, Score, fastest, filled, score
from mpipipe.schedules.schedule import Schedule, at_least_one, looped_placement
from mpipipe.schedules.simulate import EQUAL_COSTS, Costs

SLOPES, FINE = (0.8, 1.0, 1.2, 1.4, 1.6, 1.8, 2.0), 0.1  # and the step to those beside the best of them
MANY = 16  # ranks: for more, choices are tried on so many
FINALISTS = 4  # of the choices that are tried


class Choice(NamedTuple):
    """How the orders of F's and I's are made.

    Attributes
    ----------
    rule : how many forwards come first: "ranks" behind times slope, "time" away times slope, or "I" or "F": whatever
        comes of preferring these
    patience : see ListScheduler
    """

    rule: str
    slope: float
    more: int
    patience: float


H1 = Choice("ranks", 1.0, 0, 1.0)  # its orders of F's and I's


def zero_bubble_2p(
    ranks: int, microbatches: int, costs: Costs = EQUAL_COSTS, memory_limit: float | None = None, kept: float = 1.0
) -> Schedule:
    """Build ZB-2P: a split backward with more forwards ahead, within a limit of memory.

    Where F, I and W take the same time f, the limit is 2P - 1 or more and M >= 2P, no rank waits between its first
    action and its last: the makespan is 3Mf + (P-1)f. With a limit of P it is not slower than `zero_bubble_h1`.
    Source: Qi et al. 2023, arXiv:2401.10241, schedules ZB-H2 and ZB-2p.

    Parameters
    ----------
    ranks, microbatches : int
        P and M, at least 1.
    costs : Costs, optional
        Times of the P stages; by default one unit for each of F, I and W.
    memory_limit : float, optional
        Activations that a rank may hold at once, at least 1; by default 2P.
    kept : float, optional
        Share of an activation that a stage still holds between I and W, 0 to 1, as far as the limit is concerned.

    Returns
    -------
    Schedule
        One stage per rank.

    Raises
    ------
    ArgumentError
        A count or the limit is below 1, `kept` is out of range, or the costs do not fit.

    Examples
    --------
    >>> from mpipipe import schedules
    >>> timeline = schedules.simulate(schedules.zero_bubble_2p(4, 8))
    >>> timeline.makespan - 3 * 8, timeline.peak_activations
    (3.0, [8, 8, 8, 8])
    """
    ranks, microbatches = at_least_one("ranks", ranks), at_least_one("microbatches", microbatches)
    limit = 2 * ranks if memory_limit is None else given.number("memory_limit", memory_limit)
    if not limit >= 1:
        raise ArgumentError("no schedule keeps this memory limit", found=f"memory_limit={limit}", expected="at least 1")
    if not 0 <= given.number("kept", kept) <= 1:
        raise ArgumentError("kept is no share", found=f"kept={kept}", expected="0 to 1")
    small = min(ranks, MANY)
    few = Schedule("zero_bubble_2p", looped_placement(small, 1), min(microbatches, 3 * small), orders=())
    form = Schedule(few.name, looped_placement(ranks, 1), microbatches, orders=())
    average, share = (costs, limit) if small == ranks else (costs.average(ranks), limit * small / ranks)

    def tried(choices: Iterable[Choice]) -> list[tuple[Score, Choice]]:
        found = ((_made(few, choice, average, share, kept), choice) for choice in choices)
        return sorted((score(schedule, average), choice) for schedule, choice in found if schedule is not None)

    rules = [("I", 0.0), ("F", 0.0), *product(("ranks", "time"), SLOPES)]
    coarse = tried(Choice(*rule, 0, patience) for rule in rules for patience in PATIENCES)
    near = {(best.rule, best.slope + step) for _, best in coarse[:2] if best.slope for step in (-FINE, 0, FINE)}
    fine = tried(Choice(*rule, more, patience) for rule in sorted(near) for more in (0, 1) for patience in PATIENCES)
    finalists = dict.fromkeys([choice for _, choice in sorted({*coarse, *fine})[:FINALISTS]] + [H1])
    found = fastest((_made(form, choice, costs, limit, kept) for choice in finalists), costs)
    assert found is not None, f"no order keeps {limit} activations"
    return found


def _made(form: Schedule, choice: Choice, costs: Costs, limit: float, kept: float) -> Schedule | None:
    every = range(form.microbatches)
    forwards = [actions(FORWARD, (rank,), every) for rank in range(form.stages)]
    inputs = [actions(INPUT_GRAD, (rank,), every) for rank in range(form.stages)]
    if choice.rule == "I":
        queues = [[of_i, of_f] for of_i, of_f in zip(inputs, forwards)]
    elif choice.rule == "F":
        queues = [[of_f, of_i] for of_i, of_f in zip(inputs, forwards)]
    else:
        behind = _away(costs, form.stages) if choice.rule == "time" else range(form.stages - 1, -1, -1)
        ahead = [math.ceil(choice.slope * away - 1e-9) + 1 + choice.more for away in behind]
        most = max(1, int(min(limit, form.microbatches)))
        # `alternate` begins its turns with an F: one of those that are ahead
        queues = [[[*alternate(of_f, of_i, min(n, most) - 1)]] for of_f, of_i, n in zip(forwards, inputs, ahead)]
    return filled(form, queues, costs, max(1, limit), choice.patience, kept)


def _away(costs: Costs, stages: int) -> list[float]:
    """How long after its end a forward comes back to each stage as a gradient, in F's and I's of the slowest stage."""
    forward, input_grad = costs.per_stage("forward", stages), costs.per_stage("input_grad", stages)
    transfer = costs.per_stage("transfer", stages)
    slowest = max(map(sum, zip(forward, input_grad))) or 1.0
    away = [0.0]
    for stage in range(stages - 1, 0, -1):
        away.append(away[-1] + (forward[stage] + input_grad[stage] + 2 * transfer[stage]) / slowest)
    return away[::-1]
